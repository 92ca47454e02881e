"""Arrays in files: mapped into memory, and written with a check that goes with it."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

Check = Callable[[np.ndarray], None] | None
# All pages at once where the system can: one by one they cost more than reading them.
_MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
_BLOCK_BYTES = 2**19  # stays in the cache between the check and the write


def write_array(
    descriptor: int, array: np.ndarray, offset: int = 0, *, check: Check = None
) -> None:
    """Writes an array's bytes at `offset` of an open file, in row-major order.

    check: is called with every block, a flat array, right before it is written, so that the data
      comes from memory once; what it raises ends the write.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    count = _BLOCK_BYTES // flat.itemsize
    for start in range(0, flat.size, count):
        block = flat[start : start + count]
        if check is not None:
            check(block)
        data = block.view(np.uint8).data
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written


def map_array(path: Path, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """An array that begins at byte `offset` of a file, mapped into memory and never written to."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return np.empty(shape, dtype)
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        mapped = mmap.mmap(
            file.fileno(), offset - start + nbytes, _MAP_FLAGS, mmap.PROT_READ, offset=start
        )
    flat = np.frombuffer(mapped, np.uint8, nbytes, offset - start)
    return flat.view(dtype).reshape(shape)
