"""Reading text and JSONL files, plain or compressed, whole or from a checkpoint on."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from .documents import BadRecord, Document
from .extras import needs
from .records import document_from_record

JSONL_SUFFIXES = (".jsonl", ".ndjson")
COMPRESSED_SUFFIXES = (".gz", ".zst")
LARGEST_LINE = 64 << 20  # of JSONL; a text's line is cut
_BLOCK = 1 << 20
_LARGEST_WINDOW = 1 << 31  # what `zstd --long=31` writes; it is allocated when a file asks for it


def is_jsonl(file: Path) -> bool:
    """Whether the name says JSONL, compressed or not."""
    return _without_compression(file).suffix.lower() in JSONL_SUFFIXES


def is_compressed(file: Path) -> bool:
    """Whether the file can only be read from its beginning."""
    return file.suffix.lower() in COMPRESSED_SUFFIXES


def open_text(file: Path) -> io.BufferedReader:
    """The file's uncompressed bytes.

    Raises:
      OSError, EOFError, zlib.error: here or on reading, see `damage_errors`.
      UserError: zstandard is not installed.
    """
    if file.suffix.lower() == ".gz":
        return io.BufferedReader(cast(Any, gzip.open(file, "rb")), _BLOCK)
    if file.suffix.lower() == ".zst":
        return io.BufferedReader(cast(Any, _ZstandardStream(file)), _BLOCK)
    return open(file, "rb")


def damage_errors() -> tuple[type[Exception], ...]:
    """What reading a damaged compressed file raises."""
    return (EOFError, zlib.error, gzip.BadGzipFile)


class _ZstandardStream(io.RawIOBase):
    """A .zst file, read frame after frame; unlike the library's reader it notices a cut."""

    def __init__(self, file: Path):
        self._library = needs("zstandard", file)
        self._file: IO[bytes] = open(file, "rb")
        self._decompressor: Any = None
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            pending = self._decompressor.unused_data if self._ended() else b""
            data = pending or self._file.read(1 << 17)
            if not data:
                if self._decompressor is not None and not self._decompressor.eof:
                    raise EOFError("it ends before its end-of-stream marker")
                return 0
            if self._decompressor is None or self._decompressor.eof:
                self._decompressor = self._library.ZstdDecompressor(
                    max_window_size=_LARGEST_WINDOW
                ).decompressobj()
            try:
                self._output = memoryview(self._decompressor.decompress(data))
            except self._library.ZstdError as error:
                raise EOFError(str(error)) from error
        number = min(len(buffer), len(self._output))
        buffer[:number] = self._output[:number]
        self._output = self._output[number:]
        return number

    def _ended(self) -> bool:
        return self._decompressor is not None and self._decompressor.eof

    def close(self) -> None:
        self._file.close()
        super().close()


def read_text(
    file: Path, stream: io.BufferedReader, piece: int, *, begin: int, end: int | None, line: int
) -> Iterator[Document | BadRecord]:
    """The file from `begin` to `end` in pieces of about `piece` bytes that end at line ends.

    A piece's name is file:first_line. `begin` and `end` are borders of pieces; the stream stands at
    `begin`.
    """
    offset = begin
    while end is None or offset < end:
        content = _read_piece(stream, piece)
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


def read_jsonl(
    file: Path,
    stream: io.BufferedReader,
    record_format: str,
    field: str,
    *,
    begin: int,
    end: int | None,
    line: int,
) -> Iterator[Document | BadRecord]:
    """One record a line, named file:line. Blank lines are no records."""
    offset = begin
    while end is None or offset < end:
        content = stream.readline(LARGEST_LINE)
        if not content:
            return
        offset += len(content)
        name = f"{file}:{line}"
        line += 1
        if len(content) == LARGEST_LINE and not content.endswith(b"\n"):
            while content and not content.endswith(b"\n"):
                content = stream.readline(_BLOCK)
                offset += len(content)
            yield BadRecord("too long", name, f"the line is longer than {LARGEST_LINE >> 20} MiB")
        elif content.strip():
            yield _parse(content, name, record_format, field)


def _parse(line: bytes, name: str, record_format: str, field: str) -> Document | BadRecord:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return BadRecord("not UTF-8", name, f"byte {error.start} of the line is not UTF-8 text")
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        return BadRecord("not JSON", name, f"the line is not JSON ({error})")
    return document_from_record(record, name, record_format, field)


def text_checkpoints(stream: io.BufferedReader, piece: int, every: int) -> list[tuple[int, int]]:
    """(offset, line) of a border of pieces about every `every` bytes; the first is (0, 1)."""
    checkpoints, offset, line = [(0, 1)], 0, 1
    while content := _read_piece(stream, piece):
        if offset - checkpoints[-1][0] >= every:
            checkpoints.append((offset, line))
        offset += len(content)
        line += content.count(b"\n")
    return checkpoints


def line_checkpoints(stream: io.BufferedReader, every: int) -> list[tuple[int, int]]:
    """(offset, line) of the beginning of a line about every `every` bytes; the first is (0, 1)."""
    checkpoints, offset, line = [(0, 1)], 0, 1
    while content := stream.read(_BLOCK):
        if offset + len(content) - checkpoints[-1][0] >= every:
            while content and not content.endswith(b"\n"):  # to the end of a line
                offset += len(content)
                line += content.count(b"\n")
                content = stream.readline(_BLOCK)
            offset += len(content)
            line += content.count(b"\n")
            if stream.peek(1):
                checkpoints.append((offset, line))
        else:
            offset += len(content)
            line += content.count(b"\n")
    return checkpoints


def _read_piece(stream: io.BufferedReader, piece: int) -> bytes:
    content = stream.read(piece)
    return content + _rest_of_line(stream, piece) if len(content) == piece else content


def _rest_of_line(stream: io.BufferedReader, limit: int) -> bytes:
    """Up to the end of the line, or of the character when the line is longer than `limit`."""
    rest = stream.readline(limit)
    if rest and not rest.endswith(b"\n"):
        for _ in range(3):  # a UTF-8 character has at most three continuation bytes
            following = stream.peek(1)[:1]
            if not following or following[0] & 0xC0 != 0x80:
                break
            rest += stream.read(1)
    return rest


def _without_compression(file: Path) -> Path:
    return file.with_suffix("") if file.suffix.lower() in COMPRESSED_SUFFIXES else file
