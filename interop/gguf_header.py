"""Whether a GGUF file's header keeps within the file: the `gguf` package takes it at its word.

A header is magic, version, number of tensors, number of fields, the fields (name, type, value) and
the tensors' descriptions (name, axes, type, offset); see llama.cpp's docs/gguf.md.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of each type
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 2**24  # in an array; vocabularies have 2^18


def check_header(path: Path) -> None:
    """Raises ValueError, one line, when the header is longer than the file or has absurd counts."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        _Header(file, os.fstat(file.fileno()).st_size).check()


class _Header:
    def __init__(self, file: BinaryIO, size: int):
        self.file, self.size = file, size
        version = file.read(4)
        self.order = "<" if version[:2] != b"\0\0" else ">"
        self.position = 8

    def check(self) -> None:
        tensors, fields = self.number("Q"), self.number("Q")
        for _ in range(fields):
            self.skip(self.number("Q"))
            self.value(self.number("I"))
        for _ in range(tensors):
            self.skip(self.number("Q"))
            axes = [self.number("Q") for _ in range(self.count(self.number("I")))]
            if 0 in axes:
                raise ValueError("a tensor of it is empty")
            self.number("I")
            self.number("Q")

    def value(self, kind: int) -> None:
        if kind == _STRING:
            self.skip(self.number("Q"))
        elif kind == _ARRAY:
            entry, count = self.number("I"), self.count(self.number("Q"))
            if entry in _SIZES:
                self.skip(count * _SIZES[entry])
            elif entry == _STRING:
                for _ in range(count):
                    self.skip(self.number("Q"))
            else:
                raise ValueError(f"an array of it has entries of type {entry}")
        elif kind in _SIZES:
            self.skip(_SIZES[kind])
        else:
            raise ValueError(f"a field of it has type {kind}")

    def number(self, form: str) -> int:
        size = struct.calcsize(form)
        data = self.file.read(size)
        if len(data) < size:
            raise ValueError("it ends within its header")
        self.position += size
        return struct.unpack(self.order + form, data)[0]

    def count(self, number: int) -> int:
        if number > _MOST_ENTRIES:
            raise ValueError(f"it claims {number} entries in one place")
        return number

    def skip(self, size: int) -> None:
        self.position += size
        if self.position > self.size:
            raise ValueError("it ends within its header")
        self.file.seek(size, os.SEEK_CUR)
