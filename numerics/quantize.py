"""NVFP4 block quantisation: x ~ q * s * (amax / 2688).

q is E2M1, s one E4M3 a block, amax one FP32 a tensor. The arithmetic is Transformer Engine's
(NVFP4BlockScaling, reference_nvfp4.py), in FP32, in its order of multiplications: the order decides
ties. A block is 16 consecutive elements along the contracted axis (1D) or 16 x 16 elements (2D,
weights).
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from .formats import (
    BLOCK,
    E2M1_MAX,
    E4M3_MAX,
    FLOAT32_MAX,
    NVFP4_MAX,
    from_bits,
    magnitude_bits,
    round_e2m1,
    round_e2m1_stochastic,
    round_e4m3,
)
from .random_bits import key_words, random_bits

Rounding = Literal["nearest", "stochastic"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """An NVFP4 tensor. x ~ codes * scales * (amax / 2688), the scale repeated over its block."""

    codes: jax.Array  # float4_e2m1fn, the tensor's shape
    scales: jax.Array  # float8_e4m3fn, [..., K/16] for 1D blocks, [..., M/16, K/16] for 2D
    amax: jax.Array  # float32 scalar, max |x|

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def dequantize(self, dtype: jnp.dtype = jnp.float32) -> jax.Array:
        """The tensor's values, computed in float32 and rounded once to `dtype`."""
        scales = self.scales.astype(jnp.float32)
        for axis in range(-self.codes.ndim, 0):
            if scales.shape[axis] != self.codes.shape[axis]:
                scales = jnp.repeat(scales, BLOCK, axis=axis)
        values = self.codes.astype(jnp.float32) * scales
        return (values * global_scale(self.amax)).astype(dtype)


def global_scale(amax: jax.Array) -> jax.Array:
    """amax / 2688, the factor that codes * scales lack. float32."""
    # The barrier keeps XLA from turning the division into a product with 1/2688, which is one ulp
    # off.
    return amax / jax.lax.optimization_barrier(jnp.full_like(amax, NVFP4_MAX))


def quantize(
    x: jax.Array,
    *,
    block: tuple[int, int] = (1, BLOCK),
    rounding: Rounding = "nearest",
    key: jax.Array | None = None,
) -> QuantizedTensor:
    """Quantise a tensor to NVFP4.

    x: float16/bfloat16/float32 [..., K], blocks along the last axis (`block=(1, 16)`) or over the
    last two (`block=(16, 16)`), whose lengths are multiples of 16. `rounding="stochastic"` needs
    `key`, a JAX PRNG key. The scales are rounded to nearest always. Not differentiable: it returns
    codes.

    Raises ValueError for a wrong shape, dtype, block, rounding or a missing key.
    """
    axes = _block_axes(block)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"quantize needs a float array, got {x.dtype}: cast it first")
    if x.ndim < len(axes) or any(x.shape[axis] % BLOCK for axis in axes):
        raise ValueError(
            f"quantize with block={block} needs multiples of {BLOCK} along the blocked axes, got "
            f"shape {x.shape}: pad with zeros"
        )
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f'rounding={rounding!r}: use "nearest" or "stochastic"')
    if rounding == "stochastic" and key is None:
        raise ValueError('rounding="stochastic" needs key=, e.g. jax.random.key(0)')
    bits = None
    if rounding == "stochastic" and key is not None:
        bits = random_bits(key_words(key), x.shape)
    scaled, scales, amax = scale_to_blocks(x, axes, tensor_amax)
    values = round_scaled(scaled, bits)
    # Rounding by arithmetic loses the sign of a zero: a negative number's code keeps it (-0 is no
    # such number).
    values = jnp.where(scaled < 0, -jnp.abs(values), values)
    return QuantizedTensor(values.astype(jnp.float4_e2m1fn), scales.astype(jnp.float8_e4m3fn), amax)


def tensor_amax(block_bits: jax.Array) -> jax.Array:
    """One amax for the whole tensor: int32 bits, scalar."""
    return jnp.max(block_bits, initial=0)  # no tokens: 0


def scale_to_blocks(
    x: jax.Array, axes: tuple[int, ...], amax: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(x in the E2M1 range, not yet rounded; the blocks' E4M3 scales; the amax), all float32.

    axes: of the blocks, negative, ascending. amax: from the blocks' amax bits to the amax bits of
    the tensor, or of each group, broadcast against them.
    """
    x = x.astype(jnp.float32)
    block_bits = block_amax_bits(x, axes)
    amax_value = from_bits(amax(block_bits))
    scales, multiplier = block_scales(from_bits(block_bits), amax_value)
    return scale_blocks(x, multiplier, axes), scales, amax_value


def round_scaled(scaled: jax.Array, bits: jax.Array | None) -> jax.Array:
    """E2M1 values, float32: nearest, or with uint32 `bits` of the same shape, stochastic."""
    return round_e2m1(scaled) if bits is None else round_e2m1_stochastic(scaled, bits)


def _block_axes(block: tuple[int, int]) -> tuple[int, ...]:
    if tuple(block) == (1, BLOCK):
        return (-1,)
    if tuple(block) == (BLOCK, BLOCK):
        return (-2, -1)
    raise ValueError(f"block={block}: NVFP4 has (1, {BLOCK}) and ({BLOCK}, {BLOCK})")


def block_amax_bits(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """max |x| of every block as int32 bits.

    x: float32; each of `axes` (negative, ascending) shrinks by 16.
    """
    bits = magnitude_bits(x)
    for axis in axes:
        position = axis % bits.ndim
        shape = bits.shape
        if axis == -1:
            # In two steps, eight lanes first: XLA:CPU vectorises that; one reduction of 16
            # neighbours, not.
            bits = jnp.max(bits.reshape(*shape[:-1], shape[-1] // BLOCK, 2, BLOCK // 2), axis=-2)
            bits = jnp.max(jax.lax.optimization_barrier(bits), axis=-1)
        else:
            split = (*shape[:position], shape[position] // BLOCK, BLOCK, *shape[position + 1 :])
            bits = jnp.max(bits.reshape(split), axis=position + 1)
        # Blocks' maxima are used twice (tensor amax, scales): computed once, not fused into both
        # users.
        bits = jax.lax.optimization_barrier(bits)
    return bits


def block_scales(block_amax: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The E4M3 scale s of every block and the factor r that takes x to the E2M1 range.

    block_amax: float32, one a block; amax: float32, broadcast against it. Returns two float32
    arrays. A non-finite amax gives an Inf or NaN in amax / 2688, so it cannot hide in the product.
    """
    encode = jnp.minimum(jnp.float32(NVFP4_MAX) / amax, jnp.float32(FLOAT32_MAX))
    encode = jnp.where((amax == 0) | (encode == 0), jnp.float32(1), encode)
    decode = jnp.float32(1) / encode
    scale = jnp.minimum(block_amax * (encode * jnp.float32(1 / E2M1_MAX)), jnp.float32(E4M3_MAX))
    scale = round_e4m3(scale)
    multiplier = jnp.minimum(jnp.float32(1) / (scale * decode), jnp.float32(FLOAT32_MAX))
    # One value a block: without the barrier XLA:CPU computes it again for each of the 16 elements.
    return jax.lax.optimization_barrier((scale, multiplier))


def scale_blocks(x: jax.Array, multiplier: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """x * r clipped to the E2M1 range, float32: what is rounded. NaN stays NaN."""
    return jnp.clip(x * expand_blocks(multiplier, x, axes), -E2M1_MAX, E2M1_MAX)


def expand_blocks(per_block: jax.Array, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Repeat one value a block over x's shape, along `axes` (negative). Leading axes broadcast."""
    for axis in axes:
        position = axis % x.ndim
        shape = per_block.shape
        repeated = (*shape[: position + 1], BLOCK, *shape[position + 1 :])
        per_block = jnp.broadcast_to(jnp.expand_dims(per_block, position + 1), repeated)
        per_block = per_block.reshape(
            *shape[:position], shape[position] * BLOCK, *shape[position + 1 :]
        )
    return per_block
