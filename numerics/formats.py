"""Number formats: E2M1 and E4M3 rounding by arithmetic, the dtypes of high precision.

Rounding by arithmetic, not by a cast to float4/float8 and back: XLA may fold such a round trip to
nothing under jit (`xla_allow_excess_precision`), and on a CPU the casts are several times slower.
For |v| in [e, 2e), e a power of two, adding and subtracting m = 1.5 * 2^k * e leaves v rounded
(nearest, ties to even) to a multiple of the last bit of m: k = 22 keeps one mantissa bit (E2M1),
k = 20 keeps three (E4M3).
Below the smallest normal number e stays constant, which gives the subnormals.
"""

import enum

import jax
import jax.numpy as jnp
import numpy as np

E2M1_MAX = 6.0
E2M1_MIN_NORMAL = 1.0
E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
NVFP4_MAX = E2M1_MAX * E4M3_MAX  # 2688: the largest q * s
BLOCK = 16  # elements that share one E4M3 scale
FLOAT32_MAX = float(np.finfo(np.float32).max)

_EXPONENT_MASK = np.int32(0x7F800000)
_ABS_MASK = np.int32(0x7FFFFFFF)


class Format(enum.Enum):
    """How the values of one GEMM operand are represented."""

    NVFP4 = "nvfp4"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of a high-precision format; NVFP4's is that of its codes."""
        return _DTYPES[self]


_DTYPES = {
    Format.NVFP4: jnp.dtype(jnp.float4_e2m1fn),
    Format.BF16: jnp.dtype(jnp.bfloat16),
    Format.FP16: jnp.dtype(jnp.float16),
    Format.FP32: jnp.dtype(jnp.float32),
}


def magnitude_bits(x: jax.Array) -> jax.Array:
    """|x| as int32 bits, in the order of the values: NaN > Inf > every finite number. x: float32.

    An integer maximum over these is a maximum that keeps NaN, associative in any order, and several
    times faster than a float one where XLA:CPU cannot vectorise NaN semantics.
    """
    return jax.lax.bitcast_convert_type(x, jnp.int32) & _ABS_MASK


def from_bits(bits: jax.Array) -> jax.Array:
    """int32 bits -> float32."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _binade(x: jax.Array, min_normal: float) -> jax.Array:
    """2^floor(log2 |x|), at least `min_normal`; NaN and Inf give Inf. x: float32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & _EXPONENT_MASK
    return jnp.maximum(from_bits(bits), jnp.float32(min_normal))


def round_e2m1(y: jax.Array) -> jax.Array:
    """Nearest E2M1 value, ties to even, of float32 `y`, |y| <= 6. NaN stays NaN; -0 becomes +0."""
    m = _binade(y, E2M1_MIN_NORMAL) * jnp.float32(1.5 * 2**22)
    return (y + m) - m


def round_e2m1_stochastic(y: jax.Array, bits: jax.Array) -> jax.Array:
    """One of the two E2M1 neighbours of float32 `y`, |y| <= 6; the expectation is y.

    bits: uint32, y's shape; the upper 16 decide, so the probability is right to 2^-17. A `y` that
    is an E2M1 value is returned as it is whatever the bits.
    """
    binade = _binade(y, E2M1_MIN_NORMAL)
    uniform = (bits >> 16).astype(jnp.int32).astype(jnp.float32)
    # (k + 1/2) / 2^16 - 1/2: symmetric, never +-1/2, and every sum below is exact or far from a
    # tie.
    dither = uniform * jnp.float32(2.0**-16) - jnp.float32(0.5 - 2.0**-17)
    m = binade * jnp.float32(1.5 * 2**22)
    return ((y + binade * (dither * jnp.float32(0.5))) + m) - m


def round_e4m3(v: jax.Array) -> jax.Array:
    """Nearest E4M3 value, ties to even, of float32 `v` in [0, 448]. NaN stays NaN."""
    m = _binade(v, E4M3_MIN_NORMAL) * jnp.float32(1.5 * 2**20)
    return (v + m) - m
