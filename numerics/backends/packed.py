"""A quantised operand as tensor cores read it."""

from typing import NamedTuple

import jax

# Rows of packed codes start at multiples of 16 bytes, as tensor cores load them.
ALIGNMENT = 32


class Packed(NamedTuple):
    """One side of a GEMM, as the tensor cores read it or, with `scale` None, unquantised."""

    codes: jax.Array  # float4_e2m1fn [E, R, C]; or a high-precision float
    scales: jax.Array | None  # float8_e4m3fn, one a block
    scale: jax.Array | None  # float32 [E, 1, 1], amax / 2688
