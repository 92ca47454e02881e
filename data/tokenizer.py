"""What a tokenizer is here, the byte tokenizer, and loading one by its name or path."""

import abc
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from ..errors import UserError

SENTENCEPIECE_FILE = "tokenizer.model"
HUGGING_FACE_FILE = "tokenizer.json"
BYTES_FILE = "tokenizer.bytes"

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# What tokenizers are known to change: outer and repeated spaces, other whitespace, characters with
# a compatibility form, combining accents, characters outside the vocabulary.
PROBE = " a  \t\n\n b\N{FULLWIDTH LATIN CAPITAL LETTER A}e\N{COMBINING ACUTE ACCENT}\N{SNOWMAN}\r "


class Tokenizer(abc.ABC):
    """Text to token ids and back.

    `encode` never adds a document's beginning or end: the pipeline does (see packing.py), and never
    turns text that spells a special token ("</s>") into that token.

    Attributes:
      name: for messages and manifests.
      vocab_size: ids are in [0, vocab_size).
      bos_id: id of the beginning of a document, or None.
      eos_id: id of the end of a document.
      pad_id: id that fills rows; equal to eos_id for a tokenizer without one of its own.
      fingerprint: a hash of everything that determines the ids.
      special_tokens: id by spelling of the tokens that no text is encoded to; what a chat template
        may write.
      chat_template: the Jinja template that came with the tokenizer, or None.
      lossless: decode(encode(text)) == text and the byte lengths are exact, as far as a probe of
        spaces, newlines and compatibility characters tells.
    """

    name: str
    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int
    fingerprint: str
    special_tokens: Mapping[str, int] = MappingProxyType({})
    chat_template: str | None = None
    lossless: bool

    @property
    def start_id(self) -> int:
        """What a document begins with: `bos_id`, or `eos_id` when there is none."""
        return self.eos_id if self.bos_id is None else self.bos_id

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> list[np.ndarray]:
        """The ids of each text, equal to `encode`'s, as integer arrays; in parallel."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text. Special tokens give nothing; ids beyond the vocabulary, as a model with a
        padded vocabulary may sample them, give U+FFFD each."""
        text, run = "", []
        for token in map(int, ids):
            if token < self.vocab_size:
                run.append(token)
            else:
                text += self._decode(run) + REPLACEMENT
                run = []
        return text + self._decode(run)

    @abc.abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """The text of ids that are all in the vocabulary."""

    @abc.abstractmethod
    def token_byte_lengths(self) -> np.ndarray:
        """int32 [vocab_size]: UTF-8 bytes that each token stands for; 0 for special tokens.

        Summed over the ids of a text it is the text's length in UTF-8, exactly, for a lossless
        tokenizer. So bits per byte = nats summed over targets / (ln 2 x bytes summed over targets).
        """

    def fallback_tokens(self) -> np.ndarray:
        """bool [vocab_size]: the unknown token, and those of single bytes that spell out what the
        vocabulary lacks. None here."""
        return np.zeros(self.vocab_size, bool)

    @abc.abstractmethod
    def save(self, directory: str | Path) -> Path:
        """Writes a file from which `load_tokenizer_file(directory)` makes the same tokenizer."""

    def keeps(self, text: str) -> bool:
        """Whether `text` comes back from its ids, and their byte lengths add up to its own."""
        ids = self.encode(text)
        num_bytes = int(self.token_byte_lengths()[ids].sum())
        return self.decode(ids) == text and num_bytes == len(text.encode())


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, then the beginning, the end and the padding: 259 ids."""

    def __init__(self) -> None:
        self.name = "bytes"
        self.vocab_size = 259
        self.bos_id, self.eos_id, self.pad_id = 256, 257, 258
        self.fingerprint = "bytes-1"
        self.lossless = True

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> list[np.ndarray]:
        """uint8 arrays; one thread, because this is a copy."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        """The text; bytes that are not UTF-8 give U+FFFD."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def token_byte_lengths(self) -> np.ndarray:
        """int32 [259]: 1 for each byte, 0 for the three special tokens."""
        lengths = np.ones(self.vocab_size, np.int32)
        lengths[256:] = 0
        return lengths

    def save(self, directory: str | Path) -> Path:
        """Writes a one-line marker file."""
        path = Path(directory, BYTES_FILE)
        path.write_text(json.dumps({"type": "bytes", "version": 1}) + "\n")
        return path


def check_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, remedy: str = "choose another data.tokenizer"
) -> None:
    """Raises UserError when the tokenizer has ids that a model of `vocab_size` does not have."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens but the model only "
            f"{vocab_size}: set model.vocab_size={tokenizer.vocab_size} or more, or {remedy}"
        )


def content_fingerprint(content: bytes) -> str:
    """A hash of a tokenizer file's bytes."""
    return hashlib.blake2b(content, digest_size=12).hexdigest()
