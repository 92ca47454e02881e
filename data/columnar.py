"""Reading Parquet, Arrow and ArrayRecord files: rows and records that can be reached by number."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from .documents import BadRecord, Document
from .extras import needs
from .records import document_from_record, record_keys

PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow",)
ARRAY_RECORD_SUFFIXES = (".array_record", ".arrayrecord")
LARGEST_VALUE = 64 << 20
_ROWS = 1024
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow IPC stream
_RECORDS = 256


def count_rows_of(file: Path) -> list[tuple[int, int]]:
    """(first row, bytes on disk) of the parts of the file that can be read by themselves.

    Raises:
      UserError: the file is damaged or its library is not installed.
    """
    size = file.stat().st_size
    if file.suffix.lower() in ARRAY_RECORD_SUFFIXES:
        number = _open_array_record(file).num_records()
        return [(first, size * _RECORDS // number) for first in range(0, number, _RECORDS)]
    if file.suffix.lower() in PARQUET_SUFFIXES:
        parquet = _open_parquet(file)
        parts, row = [], 0
        for number in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(number)
            parts.append((row, group.total_byte_size))
            row += group.num_rows
        return parts
    parts, row = [], 0
    for batch in _arrow_batches(file):
        parts.append((row, batch.nbytes))
        row += batch.num_rows
    return parts


def read_rows(
    file: Path, record_format: str, field: str, *, begin: int, end: int | None
) -> Iterator[Document | BadRecord]:
    """One document per row or record from number `begin` to before `end`, named file:row (from 1).

    Raises:
      UserError: the file is damaged, has no such column, or its library is not installed.
    """
    if file.suffix.lower() in ARRAY_RECORD_SUFFIXES:
        yield from _read_array_record(file, record_format, field, begin, end)
        return
    row, keys = 0, record_keys(record_format, field)
    if file.suffix.lower() in PARQUET_SUFFIXES:
        batches = _parquet_batches(file, keys, begin, end)
        row = begin
    else:
        batches = _arrow_batches(file)
    for batch in _without_damage(file, batches):
        _check_columns(file, batch.schema.names, keys)
        skipped = min(max(0, begin - row), batch.num_rows)
        row += skipped
        wanted = (
            batch.num_rows - skipped if end is None else min(batch.num_rows - skipped, end - row)
        )
        for part in range(0, wanted, _ROWS):
            rows = batch.slice(skipped + part, min(_ROWS, wanted - part))
            columns = [_values(rows.column(key)) for key in keys]
            for values in zip(*columns, strict=True):
                row += 1
                name = f"{file}:{row}"
                yield _document(dict(zip(keys, values, strict=True)), name, record_format, field)
        if end is not None and row >= end:
            return


def _document(
    record: dict[str, Any], name: str, record_format: str, field: str
) -> Document | BadRecord:
    for key, value in record.items():
        if isinstance(value, UnicodeDecodeError):
            return BadRecord("not UTF-8", name, f"byte {value.start} of {key!r} is not UTF-8")
        if isinstance(value, Exception):
            return BadRecord("unreadable", name, f"{key!r} cannot be read ({value})")
        if isinstance(value, bytes):
            if len(value) > LARGEST_VALUE:
                return BadRecord(
                    "too long", name, f"{key!r} is longer than {LARGEST_VALUE >> 20} MiB"
                )
            try:
                record[key] = value.decode()
            except UnicodeDecodeError as error:
                return BadRecord("not UTF-8", name, f"byte {error.start} of {key!r} is not UTF-8")
        elif isinstance(value, str) and len(value) > LARGEST_VALUE:
            return BadRecord("too long", name, f"{key!r} is longer than {LARGEST_VALUE >> 20} MiB")
    return document_from_record(record, name, record_format, field)


def _values(column: Any) -> list[Any]:
    """The column's values; an error where Python cannot hold one."""
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):  # text that is not UTF-8, a day after the year 9999
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        return error


def _check_columns(file: Path, names: list[str], keys: tuple[str, ...]) -> None:
    for key in keys:
        if key not in names:
            raise UserError(
                f"{file} has no column {key!r} (it has "
                f"{', '.join(map(repr, names[:12])) or 'none'}): "
                "set data.field (in data.sources: field), or data.format, to what it has"
            )
        if names.count(key) > 1:
            raise UserError(
                f"{file} has {names.count(key)} columns {key!r}: rename all but one, or set "
                "data.field to another"
            )


def _without_damage(file: Path, batches: Iterator[Any]) -> Iterator[Any]:
    arrow = needs("pyarrow", file)
    try:
        yield from batches
    except (arrow.ArrowInvalid, arrow.ArrowKeyError) as error:
        raise _damaged(file, error) from error
    except OSError as error:
        if error.filename is not None or error.errno is not None:
            raise
        raise _damaged(file, error) from error  # Arrow's own: a page that cannot be decoded


def _damaged(file: Path, error: Exception) -> UserError:
    kind = (
        "ArrayRecord"
        if file.suffix.lower() in ARRAY_RECORD_SUFFIXES
        else file.suffix[1:].capitalize()
    )
    said = " ".join(str(error).split())
    return UserError(f"{file} is a damaged {kind} file ({said}): restore or remove it")


def _open_parquet(file: Path) -> Any:
    arrow = needs("pyarrow", file)
    try:
        return needs("pyarrow.parquet", file).ParquetFile(file, page_checksum_verification=True)
    except (arrow.ArrowInvalid, arrow.ArrowKeyError) as error:
        raise _damaged(file, error) from error


def _parquet_batches(
    file: Path, keys: tuple[str, ...], begin: int, end: int | None
) -> Iterator[Any]:
    """Batches of the row groups from row `begin`, which begins one, to before row `end`."""
    parquet = _open_parquet(file)
    _check_columns(file, parquet.schema_arrow.names, keys)
    groups, row = [], 0
    for number in range(parquet.num_row_groups):
        if row >= begin and (end is None or row < end):
            groups.append(number)
        row += parquet.metadata.row_group(number).num_rows
    if groups:
        yield from parquet.iter_batches(_ROWS, row_groups=groups, columns=list(keys))


def _arrow_batches(file: Path) -> Iterator[Any]:
    """The record batches of an Arrow stream (what `datasets` writes) or an Arrow file."""
    arrow = needs("pyarrow", file)
    with arrow.memory_map(str(file)) as mapped:
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        try:
            if is_file:
                reader = arrow.ipc.open_file(mapped)
                for number in range(reader.num_record_batches):
                    yield _validated(reader.get_batch(number))
            else:
                _check_end(file)
                with arrow.ipc.open_stream(mapped) as reader:
                    yield from map(_validated, reader)
        except (arrow.ArrowException, SystemError) as error:
            raise _damaged(file, error) from error


def _validated(batch: Any) -> Any:
    """The batch, its offsets looked at first: damaged ones would read beyond the memory."""
    batch.validate(full=True)
    return batch


def _check_end(file: Path) -> None:
    """Raises UserError unless the stream ends with its marker: one that was cut between two
    batches reads like a shorter one."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - len(_END_OF_STREAM)))
        if stream.read() != _END_OF_STREAM:
            raise _damaged(file, ValueError("its end is missing"))


def _open_array_record(file: Path) -> Any:
    module = needs("array_record.python.array_record_module", file)
    reader = module.ArrayRecordReader(str(file))
    if not reader.ok():
        try:
            reader.read([0])
        except RuntimeError as error:
            raise _damaged(file, error) from error
    return reader


def _read_array_record(
    file: Path, record_format: str, field: str, begin: int, end: int | None
) -> Iterator[Document | BadRecord]:
    """Records of JSON objects when the first one begins with a brace, else of UTF-8 text."""
    reader = _open_array_record(file)
    try:
        number = reader.num_records()
        last = number if end is None else min(end, number)
        if begin >= last:
            return
        is_json = record_format != "text" or bytes(reader.read([0])[0])[:1] == b"{"
        if not is_json and field != "text":
            raise UserError(
                f"data.field={field}, but {file} holds plain text (its first record is no JSON "
                "object): leave it out, or give it to the source that it is for"
            )
        for first in range(begin, last, _RECORDS):
            records = reader.read(first, min(first + _RECORDS, last))
            for row, content in enumerate(records, first + 1):
                name = f"{file}:{row}"
                if is_json:
                    yield _parse(bytes(content), name, record_format, field)
                else:
                    yield _document({field: bytes(content)}, name, "text", field)
    except RuntimeError as error:
        raise _damaged(file, error) from error
    finally:
        reader.close()


def _parse(content: bytes, name: str, record_format: str, field: str) -> Document | BadRecord:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        return BadRecord("not JSON", name, f"the record is not JSON ({error})")
    return document_from_record(record, name, record_format, field)
