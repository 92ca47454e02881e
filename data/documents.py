"""Documents, the count of what became of them, and the hash that splits them."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import UserError


class Document:
    """One text with its name; `content` is its UTF-8 form and `digest` 16 bytes of its hash."""

    __slots__ = ("content", "digest", "name", "text")

    def __init__(self, name: str, text: str):
        """Raises UnicodeEncodeError when `text` has no UTF-8 form (a lone surrogate)."""
        self.name = name
        self.text = text
        self.content = text.encode()
        self.digest = hashlib.blake2b(self.content, digest_size=16).digest()

    @property
    def split_hash(self) -> int:
        """64 bits of the content's hash; below the split's threshold means validation."""
        return int.from_bytes(self.digest[:8], "big")

    @property
    def sample_hash(self) -> int:
        """64 other bits of it, which choose the tokenizer's training sample."""
        return int.from_bytes(self.digest[8:], "big")


@dataclass
class ReadReport:
    """What one pass over a source met. `read` is always `kept` + the sum of `dropped`.

    Attributes:
      read: documents met, bad ones included.
      kept: documents handed on.
      duplicates: kept documents whose content was met before. They have one hash, so they are on
        one side of the validation split.
      dropped: count by reason ("empty", "generated", "not UTF-8", ...).
      examples: the name of the first document dropped for each reason.
    """

    read: int = 0
    kept: int = 0
    duplicates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def drop(self, reason: str, name: str) -> None:
        """Counts a document that is not handed on."""
        self.read += 1
        self.dropped[reason] += 1
        self.examples.setdefault(reason, name)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, for the manifest."""
        return {
            "read": self.read,
            "kept": self.kept,
            "duplicates": self.duplicates,
            "dropped": dict(self.dropped),
            "first_dropped": self.examples,
        }


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

    def documents(self, report: ReadReport) -> Iterator[Document]:
        """Yields every usable document and counts all others in `report`."""
        ...


def kept_documents(source: Source, report: ReadReport) -> Iterator[Document]:
    """The documents of `source` that are not empty, with reading and keeping counted."""
    seen: set[bytes] = set()
    for document in source.documents(report):
        if not document.text:
            report.drop("empty", document.name)
            continue
        report.read += 1
        report.kept += 1
        report.duplicates += document.digest in seen
        seen.add(document.digest)
        yield document


def split_threshold(source: Source, validation_fraction: float) -> int:
    """The bound on `Document.split_hash` below which a document is validation text.

    It is `validation_fraction` of the hash range. A corpus with so few documents that none falls
    below gives up its document of the lowest hash instead.

    Raises:
      UserError: no usable document, or only one distinct one, so that nothing is left to train on.
    """
    threshold = round(validation_fraction * 2**64)
    hashes: set[int] = set()
    for document in kept_documents(source, ReadReport()):
        hashes.add(document.split_hash)
        if len(hashes) > 1 and (threshold == 0 or min(hashes) < threshold <= max(hashes)):
            return threshold
    if not hashes:
        raise UserError(f"{source.description} holds no text: set data.path to a file with text")
    if threshold == 0:
        return threshold
    if len(hashes) < 2:
        raise UserError(
            f"{source.description} holds one distinct document, too few for a validation split: "
            "add documents or set data.validation_fraction=0"
        )
    return sorted(hashes)[1] if min(hashes) >= threshold else max(hashes)
