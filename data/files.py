"""Text and JSONL files, directories and glob patterns as a source of documents."""

import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import UserError
from .cache import hash_of
from .documents import Document, ReadReport

JSONL_SUFFIXES = (".jsonl", ".ndjson")
# One text file alone becomes about 64 documents, so that a validation split and shuffling work;
# a file among many is one document, however long, up to a size that memory bears.
_PIECES_OF_ONE_FILE = 64
_SMALLEST_PIECE = 4 * 1024
_LARGEST_PIECE = 256 * 1024
_LARGEST_DOCUMENT = 16 * 1024 * 1024


@dataclass(frozen=True)
class BadRecord:
    """A place in a file that is no document: the reason in a few words, and where and what."""

    reason: str
    name: str
    detail: str


class FileSource:
    """Documents from the files that a path or glob pattern names, in the order of their names.

    A `.jsonl` or `.ndjson` file holds one document a line under the key `field`; any other file is
    text. Both may be gzip-compressed (`.gz`). Text is taken as it is: no newline is translated.
    """

    def __init__(self, path: str, *, field: str = "text", on_bad_record: str = "error"):
        """Lists the files.

        Raises:
          UserError: nothing there, or not readable.
        """
        self.description = path
        self._field = field
        self._skip = on_bad_record == "skip"
        self._files = _list_files(path)
        try:
            self._status = [file.stat() for file in self._files]
        except OSError as error:
            raise _unreadable(error.filename or path, error) from error
        self.total_bytes = sum(status.st_size for status in self._status)

    def fingerprint(self) -> str:
        """Covers names, sizes and modification times, and how the files are read."""
        files = [
            (str(file.resolve()), status.st_size, status.st_mtime_ns)
            for file, status in zip(self._files, self._status, strict=True)
        ]
        return hash_of(kind="files", files=files, field=self._field, skip=self._skip)

    def documents(self, report: ReadReport) -> Iterator[Document]:
        """Yields the documents; a bad record is an error or is counted, as configured.

        Raises:
          UserError: one line with file, line or byte, and remedy.
        """
        for file, status in zip(self._files, self._status, strict=True):
            try:
                with _open(file) as stream:
                    for item in self._read(file, stream, status.st_size):
                        if isinstance(item, Document):
                            yield item
                        elif self._skip:
                            report.drop(item.reason, item.name)
                        else:
                            raise UserError(
                                f"{item.name}: {item.detail}: "
                                "correct it or set data.on_bad_record=skip"
                            )
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise UserError(
                    f"{file} is a damaged gzip file ({error}): restore or remove it"
                ) from error
            except OSError as error:
                raise _unreadable(file, error) from error

    def _read(self, file: Path, stream: BinaryIO, size: int) -> Iterator[Document | BadRecord]:
        if _is_jsonl(file):
            return _read_jsonl(file, stream, self._field)
        piece = _LARGEST_DOCUMENT
        if len(self._files) == 1:
            piece = min(max(size // _PIECES_OF_ONE_FILE, _SMALLEST_PIECE), _LARGEST_PIECE)
        return _read_text(file, stream, piece)


def _list_files(path: str) -> list[Path]:
    """The regular files of a directory (hidden ones apart), of a pattern, or the one file."""
    root = Path(path).expanduser()
    if root.is_dir():
        files = []
        for directory, directories, names in os.walk(root, onerror=_raise_unreadable):
            directories[:] = [name for name in directories if not name.startswith(".")]
            files += [Path(directory, name) for name in names if not name.startswith(".")]
        files = [file for file in files if file.is_file()]
        if not files:
            raise UserError(f"data.path={path} is a directory without files: name another")
        return sorted(files)
    if glob.has_magic(path) and not root.exists():
        files = sorted(Path(name) for name in glob.glob(str(root), recursive=True))
        files = [file for file in files if file.is_file()]
        if not files:
            raise UserError(f"data.path={path} matches no file: correct the pattern")
        return files
    if not root.exists():
        raise UserError(f"data.path={path} does not exist: name a file, a directory or a pattern")
    return [root]


def _raise_unreadable(error: OSError) -> None:
    raise _unreadable(error.filename, error) from error


def _unreadable(file: str | Path, error: OSError) -> UserError:
    return UserError(
        f"cannot read {file} ({error.strerror or error}): correct data.path or the permissions"
    )


def _is_jsonl(file: Path) -> bool:
    return Path(file.name.removesuffix(".gz")).suffix in JSONL_SUFFIXES


def _open(file: Path) -> BinaryIO:
    if file.suffix == ".gz":
        return io.BufferedReader(gzip.open(file, "rb"))  # type: ignore[arg-type]
    return open(file, "rb")


def _read_text(file: Path, stream: BinaryIO, piece: int) -> Iterator[Document | BadRecord]:
    """The file in pieces of about `piece` bytes that end at line ends, named file:first_line."""
    line, offset = 1, 0
    while True:
        content = stream.read(piece)
        if len(content) == piece:
            content += _rest_of_line(stream, piece)
        if not content and offset:
            return
        name = str(file) if line == 1 else f"{file}:{line}"
        try:
            yield Document(name, content.decode())
        except UnicodeDecodeError as error:
            yield BadRecord("not UTF-8", name, f"byte {offset + error.start} is not UTF-8 text")
        if not content:
            return
        line += content.count(b"\n")
        offset += len(content)


def _rest_of_line(stream: BinaryIO, limit: int) -> bytes:
    """Up to the end of the line, or of the character when the line is longer than `limit`."""
    rest = stream.readline(limit)
    if rest and not rest.endswith(b"\n"):
        for _ in range(3):  # a UTF-8 character has at most three continuation bytes
            following = stream.read(1)
            if not following:
                break
            if following[0] & 0xC0 != 0x80:
                stream.seek(-1, io.SEEK_CUR)
                break
            rest += following
    return rest


def _read_jsonl(file: Path, stream: BinaryIO, field: str) -> Iterator[Document | BadRecord]:
    """One document a line, named file:line. Blank lines are no records."""
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        name = f"{file}:{number}"
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            yield BadRecord("not UTF-8", name, f"byte {error.start} of the line is not UTF-8 text")
            continue
        except (json.JSONDecodeError, RecursionError) as error:
            yield BadRecord("not JSON", name, f"the line is not JSON ({error})")
            continue
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(map(repr, list(record)[:8])) if isinstance(record, dict) else "no"
            detail = f"no text under {field!r} (it has {keys}; data.field names the key)"
            yield BadRecord("no text field", name, detail)
            continue
        try:
            yield Document(name, text)
        except UnicodeEncodeError:
            yield BadRecord("not UTF-8", name, f"{field!r} holds half a surrogate pair")
