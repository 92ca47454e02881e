"""Documents, the count of what became of them, and the hash that splits them."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import UserError


class Document:
    """One text with its name, or one fine-tuning record.

    Attributes:
      name: file and line or row, for messages.
      text: the text; of a record, all its texts together.
      record: None, or {"prompt": str, "completion": str}, or {"messages": [...], ...}.
      content: the UTF-8 form of the text.
      digest: 16 bytes of the hash of the text or record.
    """

    __slots__ = ("content", "digest", "name", "record", "text")

    def __init__(self, name: str, text: str, record: dict[str, Any] | None = None):
        """Raises UnicodeEncodeError when `text` has no UTF-8 form (a lone surrogate)."""
        self.name = name
        self.text = text
        self.record = record
        self.content = text.encode()
        hashed = self.content
        if record is not None:
            hashed = json.dumps(record, sort_keys=True).encode()
        self.digest = hashlib.blake2b(hashed, digest_size=16).digest()

    @property
    def split_hash(self) -> int:
        """64 bits of the content's hash; below the split's threshold means validation."""
        return int.from_bytes(self.digest[:8], "big")

    @property
    def sample_hash(self) -> int:
        """64 other bits of it, which choose the tokenizer's training sample."""
        return int.from_bytes(self.digest[8:], "big")

    @property
    def likeness_hash(self) -> int:
        """64 bits of the hash of the text with every run of whitespace as one space."""
        words = b" ".join(self.content.split())
        return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big")


def lone_surrogate(text: str) -> bool:
    """Whether `text` holds half a surrogate pair, so that it has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


@dataclass(frozen=True)
class BadRecord:
    """A place in a file that is no document: the reason in a few words, and where and what."""

    reason: str
    name: str
    detail: str


@dataclass
class ReadReport:
    """What one pass over a source met. `read` is always `kept` + the sum of `dropped`.

    Attributes:
      read: documents met, bad ones included.
      kept: documents handed on.
      dropped: count by reason ("empty", "generated", "not UTF-8", ...).
      examples: the name of the first document dropped for each reason.
    """

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def drop(self, reason: str, name: str) -> None:
        """Counts a document that is not handed on."""
        self.read += 1
        self.dropped[reason] += 1
        self.examples.setdefault(reason, name)

    def take_back(self, reason: str, name: str) -> None:
        """Counts a document that was handed on as dropped after all."""
        self.read -= 1
        self.kept -= 1
        self.drop(reason, name)

    def add(self, other: "ReadReport") -> None:
        """Adds what a later part of the same source met."""
        self.read += other.read
        self.kept += other.kept
        self.dropped.update(other.dropped)
        for reason, name in other.examples.items():
            self.examples.setdefault(reason, name)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, for the manifest."""
        return {
            "read": self.read,
            "kept": self.kept,
            "dropped": dict(self.dropped),
            "first_dropped": self.examples,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ReadReport":
        """The report that `as_dict` wrote."""
        dropped = Counter(values["dropped"])
        return cls(values["read"], values["kept"], dropped, dict(values["first_dropped"]))


@dataclass(frozen=True)
class Unit:
    """A run of a source's documents that can be read by itself.

    Attributes:
      file: number of the file in the source.
      begin: where it begins in the file: a byte, a row or a record, by the file's kind.
      end: where it ends; None: at the end of the file.
      line: number of the first line, for text and JSONL.
      num_bytes: about how many bytes it has on disk.
    """

    file: int
    begin: int
    end: int | None
    line: int
    num_bytes: int


class Source(Protocol):
    """Text documents in a fixed order.

    Attributes:
      description: for messages: the path, or what the embedded corpus is.
      total_bytes: size on disk, for progress and sampling.
    """

    description: str
    total_bytes: int

    def fingerprint(self) -> str:
        """Changes whenever the documents may have changed; cheap (no file is read)."""
        ...

    def units(self, unit_bytes: int) -> list[Unit]:
        """Parts of about `unit_bytes`, in order, which together are all documents."""
        ...

    def read(self, unit: Unit, report: ReadReport) -> Iterator[Document]:
        """Yields every usable document of the unit and counts all others in `report`."""
        ...

    def documents(self, report: ReadReport) -> Iterator[Document]:
        """Yields every usable document and counts all others in `report`."""
        ...


def kept_documents(documents: Iterator[Document], report: ReadReport) -> Iterator[Document]:
    """The documents that are not empty, with reading and keeping counted."""
    for document in documents:
        if not document.text:
            report.drop("empty", document.name)
            continue
        report.read += 1
        report.kept += 1
        yield document


def all_kept(source: Source, report: ReadReport | None = None) -> Iterator[Document]:
    """`kept_documents` of a whole source."""
    report = ReadReport() if report is None else report
    return kept_documents(source.documents(report), report)


def split_threshold(source: Source, validation_fraction: float) -> int:
    """The bound on `Document.split_hash` below which a document is validation text.

    It is `validation_fraction` of the hash range. A corpus with so few documents that none falls
    below gives up its document of the lowest hash instead.

    Raises:
      UserError: no usable document, or only one distinct one, so that nothing is left to train on.
    """
    threshold = round(validation_fraction * 2**64)
    lowest: list[int] = []  # the two lowest hashes
    highest = -1
    for document in all_kept(source):
        if threshold == 0:
            return threshold
        lowest = sorted({*lowest, document.split_hash})[:2]
        highest = max(highest, document.split_hash)
        if lowest[0] < threshold <= highest:
            return threshold
    if not lowest:
        raise UserError(f"{source.description} holds no text: set data.path to a file with text")
    if len(lowest) < 2:
        raise UserError(
            f"{source.description} holds one distinct document, too few for a validation split: "
            "add documents or set data.validation_fraction=0"
        )
    return lowest[1] if lowest[0] >= threshold else highest
