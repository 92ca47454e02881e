"""Writing token files: documents in, one shard's files of both splits out (see streams.py)."""

import contextlib
import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .documents import BadRecord, Document, ReadReport, Source, Unit, kept_documents
from .encoding import DocumentEncoder, Encoded
from .streams import SPLITS, fingerprints

_BATCH_BYTES = 4_000_000


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class _SplitWriter:
    """Appends documents to one split's files."""

    def __init__(
        self,
        directory: Path,
        split: str,
        dtype: np.dtype,
        encoder: DocumentEncoder,
        stack: contextlib.ExitStack,
    ):
        """Opens the files; `stack` closes them."""
        self._directory, self._split, self._dtype = directory, split, dtype
        self._tokens = stack.enter_context(open(directory / f"{split}.tokens", "wb"))
        self._names = stack.enter_context(open(directory / f"{split}.names", "wb"))
        self._mask = None
        if encoder.masks:
            self._mask = stack.enter_context(open(directory / f"{split}.mask", "wb"))
        self._first = array("i") if encoder.keeps_first else None
        self._starts = array("q", [0])
        self._hashes = array("Q")
        self._num_bytes = self._num_trained = 0

    def append(self, document: Document, encoded: Encoded) -> None:
        self._tokens.write(encoded.ids.astype(self._dtype).tobytes())
        if self._mask is not None:
            assert encoded.mask is not None
            self._mask.write(encoded.mask.tobytes())
            self._num_trained += int(encoded.mask.sum())
        if self._first is not None:
            assert encoded.first is not None
            self._first.append(encoded.first)
        self._names.write(json.dumps(document.name).encode() + b"\n")
        self._starts.append(self._starts[-1] + len(encoded.ids))
        self._hashes.extend((document.split_hash, document.likeness_hash))
        self._num_bytes += len(document.content)

    def finish(self) -> dict[str, int]:
        """Writes what is an array for all documents, and returns the counts."""
        self._save("starts", np.array(self._starts, np.int64))
        self._save("hashes", np.array(self._hashes, np.uint64).reshape(-1, 2))
        if self._first is not None:
            self._save("first", np.array(self._first, np.int32))
        return {
            "documents": len(self._starts) - 1,
            "tokens": self._starts[-1],
            "trained_tokens": self._starts[-1] if self._mask is None else self._num_trained,
            "bytes": self._num_bytes,
        }

    def _save(self, what: str, values: np.ndarray) -> None:
        np.save(self._directory / f"{self._split}.{what}.npy", values)


def write_shard(
    directory: Path,
    source: Source,
    units: list[Unit],
    encoder: DocumentEncoder,
    *,
    vocab_size: int,
    threshold: int,
    skip_bad: bool,
    num_threads: int,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Encodes the documents of `units` into the files of a shard.

    Args:
      directory: an existing empty folder.
      source, units: what to read.
      encoder: makes tokens of it.
      vocab_size: decides the dtype of the ids.
      threshold: see `split_threshold`.
      skip_bad: whether a document that cannot be encoded is counted as dropped; else it is an
        error.
      num_threads: threads that encode.
      advance: is told the bytes of each document that is done.

    Returns:
      JSON-able: the report of what was read, each split's counts, and the files' `fingerprints`.

    Raises:
      UserError: the source cannot be read, or a record is bad and `skip_bad` is False.
    """
    dtype = token_dtype(vocab_size)
    report = ReadReport()
    read = (document for unit in units for document in source.read(unit, report))
    with contextlib.ExitStack() as stack:
        writers = [_SplitWriter(directory, split, dtype, encoder, stack) for split in SPLITS]
        for batch in _batches(kept_documents(read, report)):
            results = encoder.encode(batch, num_threads=num_threads)
            for document, encoded in zip(batch, results, strict=True):
                if isinstance(encoded, BadRecord):
                    if not skip_bad:
                        raise UserError(
                            f"{encoded.name}: {encoded.detail}: "
                            "correct it or set data.on_bad_record=skip"
                        )
                    report.take_back(encoded.reason, encoded.name)
                    continue
                writers[document.split_hash < threshold].append(document, encoded)
                advance(len(document.content))
    counts = {split: writer.finish() for split, writer in zip(SPLITS, writers, strict=True)}
    return {"read": report.as_dict(), "files": fingerprints(directory), **counts}


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in lists of about `_BATCH_BYTES`: work for every thread, memory for a few."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.content)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
