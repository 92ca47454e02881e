"""safetensors files, read and written a tensor at a time.

A file is an 8-byte little-endian header length, a JSON header with each tensor's dtype, shape and
byte range, and the bytes without gaps (https://github.com/huggingface/safetensors). Reading maps a
tensor into memory, so nothing but the pages that are looked at is ever held; writing needs all
names and shapes beforehand and then takes the tensors in any order. The `safetensors` package's
numpy side knows neither bfloat16 nor writing piece by piece.
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from ..errors import UserError
from .array_files import Check, StoredArray, write_array
from .config_reader import parse_object

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # bytes, as in the reference implementation


def read_header(path: Path) -> dict[str, StoredArray]:
    """The tensors of a file by name.

    Raises:
      UserError: the file is not a whole safetensors file; one line that says what is wrong.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise _broken(path, f"it has {size} bytes, too few for a header")
        (length,) = struct.unpack("<Q", start)
        if length > min(size - 8, _HEADER_LIMIT):
            raise _broken(path, f"its header claims {length} bytes, the file has {size}")
        text = file.read(length)
    try:
        header = parse_object(text)
    except ValueError as error:
        raise _broken(path, f"its header is not JSON ({error})") from error
    header.pop("__metadata__", None)
    entries: dict[str, StoredArray] = {}
    ranges = []
    for name, value in header.items():
        try:
            begin, end = value["data_offsets"]
            dtype, shape = DTYPES.get(value["dtype"]), tuple(value["shape"])
            sane = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (KeyError, TypeError, ValueError) as error:
            raise _broken(path, f"its header describes {name!r} wrongly") from error
        if dtype is None:
            raise UserError(f"{path}: tensor {name!r} has dtype {value['dtype']}, not one we read")
        entry = StoredArray(path, 8 + length + begin, dtype, shape)
        if not sane or end - begin != entry.nbytes:
            raise _broken(
                path, f"{name!r} is {shape} of {value['dtype']} but has {end - begin} bytes"
            )
        entries[name] = entry
        ranges.append((begin, end))
    position = 0
    for begin, end in sorted(ranges):
        if begin != position:
            raise _broken(path, f"its tensors leave a gap or overlap at byte {position}")
        position = end
    if 8 + length + position != size:
        what = "truncated" if size < 8 + length + position else "too long"
        raise _broken(path, f"it is {what}: {size} bytes, its header says {8 + length + position}")
    return entries


def _broken(path: Path, what: str) -> UserError:
    return UserError(f"{path} is not a whole safetensors file, {what}: download it again")


class SafetensorsWriter:
    """One file of tensors whose names, dtypes and shapes are known; fill it in any order.

    Use as a context manager; leaving it normally checks that every tensor was written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, tuple[int, int]] = {}
        position = 0
        # The widest dtypes first, then by name: as the reference writer, so that all are aligned.
        order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
        for name in order:
            dtype, shape = tensors[name]
            nbytes = math.prod(shape) * dtype.itemsize
            end = position + nbytes
            header[name] = {
                "dtype": NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [position, end],
            }
            self._places[name] = (position, nbytes)
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._missing = {name: nbytes for name, (_, nbytes) in self._places.items()}
        self._lock = threading.Lock()
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._file.flush()
        self.nbytes = self._start + position

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *details: object) -> None:
        self._file.close()
        unwritten = [name for name, nbytes in self._missing.items() if nbytes]
        assert exception_type is not None or not unwritten, unwritten[:3]

    def write(
        self, name: str, array: np.ndarray | StoredArray, *, first: int = 0, check: Check = None
    ) -> None:
        """Writes a tensor, or those of its rows that begin at element `first`. Thread-safe.

        The caller has checked dtype and shape. check: as of `write_array`.
        """
        place, nbytes = self._places[name]
        begin = first * array.dtype.itemsize
        assert begin + array.nbytes <= nbytes, name
        write_array(self._file.fileno(), array, self._start + place + begin, check=check)
        with self._lock:
            self._missing[name] -= array.nbytes
