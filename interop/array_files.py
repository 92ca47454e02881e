"""Writing arrays into files, and the check that goes with it."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

Check = Callable[[np.ndarray], None] | None
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
