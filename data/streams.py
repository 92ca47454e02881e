"""Token streams: a split's tokens in files that are mapped into memory, one shard or many.

<split>.tokens        ids, little-endian uint16 or uint32
<split>.starts.npy    int64 [documents + 1], where each document begins
<split>.hashes.npy    uint64 [documents, 2], hashes of its content and of it without whitespace
<split>.names         one document's name, as JSON, a line
<split>.mask          uint8 a token, 1 where it is trained on; only of fine-tuning records
<split>.first.npy     int32 [documents], each one's first token, only where none is put before
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError

SPLITS = ("train", "validation")
_END_BYTES = 4096


class Joined:
    """Arrays laid end to end without copying them; slices and numbers give ordinary arrays."""

    def __init__(self, parts: list[np.ndarray]):
        """`parts` are arrays of one dimension and one dtype."""
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self.dtype = parts[0].dtype

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            index = int(index) + (len(self) if index < 0 else 0)
            return self[index : index + 1][0]
        begin, end, step = index.indices(len(self))
        assert step == 1, index
        part = int(np.searchsorted(self._ends, begin, "right"))
        pieces = []
        while begin < end:
            offset = int(self._ends[part]) - len(self._parts[part])
            pieces.append(self._parts[part][begin - offset : end - offset])
            begin += len(pieces[-1])
            part += 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.zeros(0, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate(self._parts).astype(dtype or self.dtype, copy=False)


def joined(parts: list[Any]) -> Any:
    """One array that is `parts` end to end; the part itself when there is one."""
    return parts[0] if len(parts) == 1 else Joined(parts)


@dataclass(frozen=True)
class TokenStream:
    """One split's tokens: every document's, each followed by the end-of-document token if any.

    Attributes:
      tokens: [N] memory-mapped uint16 or uint32 ids, an array or `Joined`.
      starts: int64 [D + 1]: document d is tokens[starts[d] : starts[d + 1]].
      start_id, pad_id: what a document begins with when it is packed, and what fills rows.
      mask: uint8 [N], 1 where the token is trained on; None: everywhere.
      first: int32 [D], what each document begins with instead of `start_id`; None: `start_id`.
      vocab_size: ids are below it; None: not checked.
      origin: where the tokens lie, for messages.
    """

    tokens: Any
    starts: np.ndarray
    start_id: int
    pad_id: int
    mask: Any = None
    first: np.ndarray | None = None
    vocab_size: int | None = None
    origin: str = "the stream"

    def check(self, ids: np.ndarray) -> None:
        """Raises UserError if one of `ids`, which are some of the tokens, is in no vocabulary."""
        if self.vocab_size is not None and ids.size and int(ids.max()) >= self.vocab_size:
            raise UserError(
                f"{self.origin} holds the token {int(ids.max())}, but the tokenizer has "
                f"{self.vocab_size}: the files are damaged, remove them and make them again"
            )


def open_stream(
    directory: Path,
    split: str,
    shards: list[dict[str, Any]],
    dtype: np.dtype,
    *,
    start_id: int,
    pad_id: int,
    vocab_size: int | None = None,
) -> TokenStream:
    """The stream of a split in the shards of a folder.

    Args:
      directory: the folder.
      split: "train" or "validation".
      shards: of the manifest: each one's `directory`, and counts by split.
      dtype: of the tokens.
      start_id, pad_id, vocab_size: as in `TokenStream`.

    Raises:
      UserError: documents begin where they cannot.
    """
    present = [shard for shard in shards if shard[split]["tokens"]]
    folders = [directory / shard["directory"] for shard in present]
    if not folders:  # an empty file cannot be mapped
        return TokenStream(np.zeros(0, dtype), np.zeros(1, np.int64), start_id, pad_id)
    starts, total = [np.zeros(1, np.int64)], 0
    for folder in folders:
        part = np.load(folder / f"{split}.starts.npy")
        size = (folder / f"{split}.tokens").stat().st_size
        if part[-1] * dtype.itemsize != size or (np.diff(part) <= 0).any():
            raise UserError(
                f"{folder}/{split}.starts.npy is damaged: remove {directory} and make it again"
            )
        starts.append(part[1:] + total)
        total += int(part[-1])
    mask = first = None
    if (folders[0] / f"{split}.mask").is_file():
        mask = joined([_mapped(folder / f"{split}.mask", np.dtype(np.uint8)) for folder in folders])
    if (folders[0] / f"{split}.first.npy").is_file():
        first = np.concatenate([np.load(folder / f"{split}.first.npy") for folder in folders])
    tokens = joined([_mapped(folder / f"{split}.tokens", dtype) for folder in folders])
    return TokenStream(
        tokens, np.concatenate(starts), start_id, pad_id, mask, first, vocab_size, str(directory)
    )


def fingerprints(directory: Path) -> dict[str, list[Any]]:
    """Size and a hash of both ends of every file of a shard: enough to see that one was cut,
    exchanged or overwritten, without reading what may be terabytes."""
    found = {}
    for file in sorted(path for path in directory.iterdir() if path.is_file()):
        size = file.stat().st_size
        with file.open("rb") as opened:
            ends = opened.read(_END_BYTES)
            opened.seek(max(0, size - _END_BYTES))
            ends += opened.read(_END_BYTES)
        found[file.name] = [size, hashlib.blake2b(ends, digest_size=8).hexdigest()]
    return found


def is_whole(directory: Path, shards: list[dict[str, Any]]) -> bool:
    """Whether the files of all shards are there as they were written."""
    try:
        return all(
            shard["files"].items() <= fingerprints(directory / shard["directory"]).items()
            for shard in shards
        )
    except OSError:
        return False


def join_streams(streams: list[TokenStream]) -> TokenStream:
    """Streams of one tokenizer end to end."""
    streams = [stream for stream in streams if len(stream.tokens)] or streams[:1]
    if len(streams) == 1:
        return streams[0]
    offsets = np.cumsum([0] + [len(stream.tokens) for stream in streams])
    starts = [
        stream.starts[:-1] + offset for stream, offset in zip(streams, offsets[:-1], strict=True)
    ]
    mask = first = None
    if any(stream.mask is not None for stream in streams):
        masks = [
            np.broadcast_to(np.uint8(1), len(stream.tokens)) if stream.mask is None else stream.mask
            for stream in streams
        ]
        mask = Joined(masks)
    if streams[0].first is not None:
        first = np.concatenate([stream.first for stream in streams])  # type: ignore[misc]
    return TokenStream(
        Joined([stream.tokens for stream in streams]),
        np.concatenate([*starts, offsets[-1:]]),
        streams[0].start_id,
        streams[0].pad_id,
        mask,
        first,
        streams[0].vocab_size,
        " or ".join(dict.fromkeys(stream.origin for stream in streams)),
    )


def _mapped(file: Path, dtype: np.dtype) -> np.ndarray:
    # A plain array over the mapped memory: slicing a np.memmap costs five times as much.
    return np.memmap(file, dtype, "r").view(np.ndarray)
