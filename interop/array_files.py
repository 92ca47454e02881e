"""Arrays in files: read into memory, or copied from file to file with a check on the way."""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..errors import UserError

Check = Callable[[np.ndarray], None] | None
# All pages at once where the system can: one by one they cost more than reading them.
_MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
_BLOCK_BYTES = 2**19  # stays in the cache between reading, the check and the write
_thread = threading.local()


@dataclass(frozen=True)
class StoredArray:
    """Where an array lies: file, first byte, dtype and shape; row-major, without gaps."""

    path: Path
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """The array, mapped into memory and never written to."""
        if self.nbytes == 0:
            return np.empty(self.shape, self.dtype)
        start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        length = self.offset - start + self.nbytes
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), length, _MAP_FLAGS, mmap.PROT_READ, offset=start)
        flat = np.frombuffer(mapped, np.uint8, self.nbytes, self.offset - start)
        return flat.view(self.dtype).reshape(self.shape)

    def reshape(self, shape: tuple[int, ...]) -> StoredArray:
        """The same bytes in another shape."""
        assert math.prod(shape) == math.prod(self.shape), (self.shape, shape)
        return replace(self, shape=shape)

    def __getitem__(self, rows: slice) -> StoredArray:
        """Some rows, as of an array."""
        start, stop, step = rows.indices(self.shape[0])
        assert step == 1
        width = math.prod(self.shape[1:]) * self.dtype.itemsize
        shape = (max(0, stop - start), *self.shape[1:])
        return replace(self, offset=self.offset + start * width, shape=shape)

    def blocks(self) -> Iterator[np.ndarray]:
        """The array in flat parts, read one at a time: a part is valid until the next is asked for.

        Reading, unlike mapping, keeps threads out of each other's way: to map and unmap, all of
        them wait for one lock and for each other's processors.

        Raises:
          UserError: the file has become shorter.
        """
        if not hasattr(_thread, "buffer"):
            _thread.buffer = np.empty(_BLOCK_BYTES, np.uint8)
        end, offset = self.offset + self.nbytes, self.offset
        with self.path.open("rb", buffering=0) as file:
            while offset < end:
                block = _thread.buffer[: min(_BLOCK_BYTES, end - offset)]
                data = block.data
                while data:
                    count = os.preadv(file.fileno(), [data], offset)
                    if count == 0:
                        raise UserError(f"{self.path} ends at byte {offset}: something changes it")
                    data, offset = data[count:], offset + count
                yield block.view(self.dtype)


def write_array(
    descriptor: int, array: np.ndarray | StoredArray, offset: int = 0, *, check: Check = None
) -> None:
    """Writes an array's bytes at `offset` of an open file, in row-major order.

    check: is called with every block, a flat array, right before it is written, so that the data
      comes from memory once; what it raises ends the write.
    """
    for block in array.blocks() if isinstance(array, StoredArray) else _blocks(array):
        if check is not None:
            check(block)
        data = block.view(np.uint8).data
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    flat = np.ascontiguousarray(array).reshape(-1)
    count = _BLOCK_BYTES // flat.itemsize
    return (flat[start : start + count] for start in range(0, flat.size, count))
