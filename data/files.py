"""Files, directories and glob patterns as a source of documents."""

import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError
from . import columnar, text_files
from .cache import cache_directory, discard, hash_of, publish
from .documents import BadRecord, Document, ReadReport, Unit

# One text file alone becomes about 64 documents, so that a validation split and shuffling work;
# a file among many is one document, however long, up to a size that memory bears.
_PIECES_OF_ONE_FILE = 64
_SMALLEST_PIECE = 4 * 1024
_LARGEST_PIECE = 256 * 1024
_LARGEST_DOCUMENT = 16 * 1024 * 1024
_ROW_SUFFIXES = (
    *columnar.PARQUET_SUFFIXES,
    *columnar.ARROW_SUFFIXES,
    *columnar.ARRAY_RECORD_SUFFIXES,
)
_PREPARED_SUFFIX = ".tokens"  # of what prepare.py writes, which is no text
# What `datasets` writes beside its Arrow files.
_DATASET_STATE = "state.json"
_DATASET_SPLITS = "dataset_dict.json"


class FileSource:
    """Documents from the files that a path or glob pattern names, in the order of their names.

    A `.jsonl` or `.ndjson` file holds one record a line; a `.parquet` or `.arrow` file one a row,
    an `.array_record` file one a record; any other file is text. Text and JSONL may be compressed
    (`.gz`, `.zst`). Text is taken as it is: no newline is translated.
    """

    def __init__(
        self,
        path: str,
        *,
        field: str = "text",
        record_format: str = "text",
        on_bad_record: str = "error",
        cache_dir: str | None = None,
    ):
        """Lists the files.

        Raises:
          UserError: nothing there, or not readable.
        """
        self.description = path
        self._field, self._format = field, record_format
        self._skip = on_bad_record == "skip"
        self._cache_dir = cache_dir
        self._files = _list_files(path)
        for file in self._files:
            if file.suffix == _PREPARED_SUFFIX:
                raise UserError(
                    f"{file} belongs to a prepared folder: name that folder, whole, as data.path, "
                    "or in data.sources beside others"
                )
        if field != "text" and not any(map(_has_keys, self._files)):
            raise UserError(
                f"data.field={field}, but {path} is plain text, which has no keys: leave it out, "
                "or give it to the source that it is for"
            )
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
        how = {"field": self._field, "format": self._format, "skip": self._skip}
        return hash_of(kind="files", files=files, **how)

    def units(self, unit_bytes: int) -> list[Unit]:
        """Parts of about `unit_bytes`; compressed files are not divided.

        Where uncompressed text may be cut is found by going through the file once; that index is
        kept in the cache directory under the file's name, size and modification time.
        """
        units = []
        for number, file in enumerate(self._files):
            size = self._status[number].st_size
            try:
                borders = self._borders(number, unit_bytes)
            except OSError as error:
                raise _unreadable(file, error) from error
            for index, (begin, line) in enumerate(borders):
                end = borders[index + 1][0] if index + 1 < len(borders) else None
                units.append(Unit(number, begin, end, line, size // len(borders)))
        return units

    def documents(self, report: ReadReport) -> Iterator[Document]:
        """Yields the documents; a bad record is an error or is counted, as configured.

        Raises:
          UserError: one line with file, line or byte, and remedy.
        """
        for number, status in enumerate(self._status):
            yield from self.read(Unit(number, 0, None, 1, status.st_size), report)

    def read(self, unit: Unit, report: ReadReport) -> Iterator[Document]:
        """Yields the documents of one of `units`; otherwise as `documents`."""
        file, last = self._files[unit.file], ""
        try:
            for item in self._items(file, unit):
                last = f" behind {item.name}"
                if isinstance(item, Document):
                    yield item
                elif self._skip:
                    report.drop(item.reason, item.name)
                else:
                    raise UserError(
                        f"{item.name}: {item.detail}: correct it or set data.on_bad_record=skip"
                    )
        except text_files.damage_errors() as error:
            kind = "gzip" if file.suffix.lower() == ".gz" else "Zstandard"
            raise UserError(
                f"{file} is a damaged {kind} file{last} ({error}): restore or remove it"
            ) from error
        except OSError as error:
            raise _unreadable(file, error) from error

    def _items(self, file: Path, unit: Unit) -> Iterator[Document | BadRecord]:
        part = {"begin": unit.begin, "end": unit.end}
        if file.suffix.lower() in _ROW_SUFFIXES:
            yield from columnar.read_rows(file, self._format, self._field, **part)
            return
        jsonl = text_files.is_jsonl(file)
        if not jsonl and self._format != "text":
            raise UserError(
                f"{file} is read as text, which cannot hold data.format={self._format} records: "
                "name JSONL, Parquet, Arrow or ArrayRecord files"
            )
        with text_files.open_text(file) as stream:
            if unit.begin:
                stream.seek(unit.begin)
            part["line"] = unit.line
            if jsonl:
                yield from text_files.read_jsonl(file, stream, self._format, self._field, **part)
            else:
                yield from text_files.read_text(file, stream, self._piece(unit.file), **part)

    def _piece(self, number: int) -> int:
        if len(self._files) > 1:
            return _LARGEST_DOCUMENT
        size = self._status[number].st_size
        return min(max(size // _PIECES_OF_ONE_FILE, _SMALLEST_PIECE), _LARGEST_PIECE)

    def _borders(self, number: int, unit_bytes: int) -> list[tuple[int, int]]:
        """(begin, first line) of the units of a file."""
        file, status = self._files[number], self._status[number]
        if status.st_size <= unit_bytes or text_files.is_compressed(file):
            return [(0, 1)]
        if file.suffix.lower() in _ROW_SUFFIXES:
            borders, size = [(0, 1)], 0
            for row, num_bytes in columnar.count_rows_of(file):
                if size >= unit_bytes:
                    borders.append((row, 1))
                    size = 0
                size += num_bytes
            return borders
        piece = self._piece(number)
        key = hash_of(
            kind="borders 2",
            file=(str(file.resolve()), status.st_size, status.st_mtime_ns),
            pieces=0 if text_files.is_jsonl(file) else piece,
            unit_bytes=unit_bytes,
        )
        entry = cache_directory(self._cache_dir) / "indexes" / key
        index = entry / "borders.json"
        known = _read_borders(index)
        if known is None:
            discard(entry)
            with text_files.open_text(file) as stream:
                if text_files.is_jsonl(file):
                    borders = text_files.line_checkpoints(stream, unit_bytes)
                else:
                    borders = text_files.text_checkpoints(stream, piece, unit_bytes)
            with publish(entry) as directory:
                content = {"borders": borders, "check": hash_of(borders=borders)}
                (directory / index.name).write_text(json.dumps(content) + "\n")
            known = borders
        return known


def _has_keys(file: Path) -> bool:
    """Whether the file's documents are records with keys or columns."""
    return file.suffix.lower() in _ROW_SUFFIXES or text_files.is_jsonl(file)


def _read_borders(index: Path) -> list[tuple[int, int]] | None:
    """What an index file holds; None when there is none or it is damaged."""
    try:
        content = json.loads(index.read_text())
        borders = [(int(begin), int(line)) for begin, line in content["borders"]]
        return borders if content["check"] == hash_of(borders=borders) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _list_files(path: str) -> list[Path]:
    """The regular files of a directory (hidden ones apart), of a pattern, or the one file."""
    root = Path(path).expanduser()
    if root.is_dir():
        if (root / _DATASET_SPLITS).is_file():
            root = _training_split(root)
        if (root / _DATASET_STATE).is_file():
            return _dataset_files(root)
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
    if not root.is_file():
        raise UserError(f"data.path={path} is no regular file (a device or a pipe): name a file")
    return [root]


def _training_split(root: Path) -> Path:
    """The folder of the split "train" of a saved DatasetDict."""
    try:
        splits = list(map(str, json.loads((root / _DATASET_SPLITS).read_text())["splits"]))
        splits[0]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{root / _DATASET_SPLITS} is not what `datasets` writes ({error}): save it again"
        ) from error
    if "train" not in splits:
        raise UserError(
            f"{root} is a dataset with the splits {', '.join(splits)} but no train: "
            f"name one of them, data.path={root / splits[0]}"
        )
    return root / "train"


def _dataset_files(root: Path) -> list[Path]:
    """The Arrow files of a saved Dataset, in its order."""
    try:
        state = json.loads((root / _DATASET_STATE).read_text())
        files = [root / entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{root / _DATASET_STATE} is not what `datasets` writes ({error}): save it again"
        ) from error
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing from the saved dataset: save it again")
    return files


def _raise_unreadable(error: OSError) -> None:
    raise _unreadable(error.filename, error) from error


def _unreadable(file: str | Path, error: OSError) -> UserError:
    return UserError(
        f"cannot read {file} ({error.strerror or error}): correct data.path or the permissions"
    )
