"""The three GEMMs of a linear layer on FP4 tensor cores, through `jax.nn.scaled_matmul`.

Operands are rounded as the emulation rounds them and packed: E2M1 codes (two a byte on a GPU) with
one E4M3 scale for 16 of them. Compiled for a GPU with FP4 tensor cores, each product is one
`__cudnn$blockScaledDot`; on a CPU operands are dequantised and multiplied, which is good for
comparing and for nothing else. (amax_l / 2688)(amax_r / 2688) is multiplied to the product.

Everything has a leading axis of groups: experts, or one group for a dense layer. Each group is a
GEMM of its own with its own amax.

Legend: E groups, M tokens, K in features, N out features; x [E, M, K], kernel [E, K, N],
g [E, M, N].
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..formats import BLOCK, Format
from ..partitioning import STORAGE_AXES, constrain, dividing_axes, mesh_axis_sizes
from ..platform import matmul_operand, on_cpu
from ..quantize import expand_blocks, global_scale
from ..random_bits import fold
from ..recipe import Operand, Recipe
from . import emulated
from .operands import (
    DGRAD_SALT,
    DGRAD_WEIGHT_SALT,
    WGRAD_INPUT_SALT,
    WGRAD_SALT,
    LogicalAxes,
    Signature,
    expert_amax,
    pad_rows,
    round_nvfp4,
    save,
    transform,
)

# Rows of packed codes start at multiples of 16 bytes, as tensor cores load them.
ALIGNMENT = 32


class Packed(NamedTuple):
    """One side of a GEMM, as the tensor cores read it or, with `scale` None, unquantised."""

    codes: jax.Array  # float4_e2m1fn [E, R, C]; or a high-precision float
    scales: jax.Array | None  # float8_e4m3fn, one a block
    scale: jax.Array | None  # float32 [E, 1, 1], amax / 2688


class Residuals(NamedTuple):
    """What the backward pass keeps of the forward pass."""

    wgrad_x: Packed  # [E, K, M]
    dgrad_w: Packed  # [E, K, N]


def pack(
    spec: Operand,
    x: jax.Array,
    axis: int,
    words: jax.Array | None = None,
    *,
    block_major: bool = False,
    swap: bool = False,
) -> Packed:
    """Round x [E, R, *C] along its rows (`axis` -2) or its last axis (-1); give it as [E, R, C].

    swap: as [E, C, R], rows padded to `ALIGNMENT`. block_major: see `merge_features`.
    """
    rows = 1 - x.ndim
    axes = {-1: (-1, rows), -2: (rows, -1)}[axis]
    x = transform(spec, x, axes[0])
    if spec.format is not Format.NVFP4:
        values = merge_features(matmul_operand(x.astype(spec.format.dtype)), block_major)
        return Packed(jnp.swapaxes(values, -1, -2) if swap else values, None, None)
    values, scales, amax, blocked = round_nvfp4(spec, x, axes, words, expert_amax)
    # Values are moved before the cast: XLA writes what it has just rounded where it belongs,
    # instead of moving half bytes afterwards.
    values = merge_features(values, block_major)
    scales = merge_features(scales, block_major, per_block=-1 in blocked)
    if swap:
        values = pad_rows(jnp.swapaxes(values, -1, -2), -1, ALIGNMENT)
        scales = pad_rows(jnp.swapaxes(scales, -1, -2), -1, ALIGNMENT // BLOCK)
    codes, scales = values.astype(jnp.float4_e2m1fn), scales.astype(jnp.float8_e4m3fn)
    return Packed(codes, scales, global_scale(amax).reshape(-1, 1, 1))


def merge_features(x: jax.Array, block_major: bool, *, per_block: bool = False) -> jax.Array:
    """[E, R, *A, F] -> [E, R, N]; per_block: F has one entry for 16 features.

    block_major: in the order [F/16, *A, 16] instead of [*A, F], so that where a mesh splits F it
    splits N as well. Blocks stay whole, and a product does not depend on the order.
    """
    if block_major and x.ndim > 3:
        if not per_block:
            x = x.reshape(*x.shape[:-1], -1, BLOCK)
        x = jnp.moveaxis(x, -1 if per_block else -2, 2)
    return x.reshape(*x.shape[:2], -1)


def split_features(x: jax.Array, shape: tuple[int, ...], block_major: bool) -> jax.Array:
    """[E, R, N] -> [E, R, *A, F], what `merge_features` has merged."""
    if block_major and len(shape) > 1:
        x = x.reshape(*x.shape[:2], shape[-1] // BLOCK, *shape[:-1], BLOCK)
        x = jnp.moveaxis(x, 2, -2)
    return x.reshape(*x.shape[:2], *shape)


def transpose(operand: Packed) -> Packed:
    """[E, R, C] -> [E, C, R]."""
    scales = None if operand.scales is None else jnp.swapaxes(operand.scales, -1, -2)
    return Packed(jnp.swapaxes(operand.codes, -1, -2), scales, operand.scale)


def multiply(left: Packed, right: Packed) -> jax.Array:
    """left [E, M, K] times the transpose of right [E, N, K]: float32 [E, M, N]."""
    if left.scales is None or right.scales is None:
        assert left.scales is None and right.scales is None, "one side FP4, the other not"
        return _dot(left.codes, right.codes)
    assert left.scale is not None and right.scale is not None
    scales = _row_scales(left.codes, left.scales), _row_scales(right.codes, right.scales)
    if on_cpu():  # jax.nn.scaled_matmul does the same there, from JAX 0.12 on
        product = _dot(_dequantize(left.codes, scales[0]), _dequantize(right.codes, scales[1]))
    else:
        product = jax.nn.scaled_matmul(
            left.codes, right.codes, *scales, preferred_element_type=jnp.float32
        )
    return product * left.scale * right.scale


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        operands = emulated.GemmOperand(a, None), emulated.GemmOperand(b, None)
        return emulated.product(*operands, ((-1,), (-1,)))

    return jax.vmap(dot)(left, right)


def _dequantize(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """codes * scales in float32, which is exact."""
    scales = scales.astype(jnp.float32)
    return codes.astype(jnp.float32) * expand_blocks(scales, scales, (-1,))


def _row_scales(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Scales [E, R, K/16] for codes [E, R, K]; those of 2D blocks repeated over 16 rows."""
    if scales.shape[-2] == codes.shape[-2]:
        return scales
    return expand_blocks(scales, scales, (-2,))


def fprop_groups(
    recipe: Recipe, x: jax.Array, kernel: jax.Array, kernel_axes: LogicalAxes
) -> tuple[jax.Array, Packed]:
    """y float32 [E, M, *N] of x [E, M, K] and kernel [E, K, *N], and the weight as rounded."""
    layout = _layout(kernel_axes, kernel.shape[2:])
    fprop_x = pack(recipe.fprop_x, x, -1)
    fprop_w = pack(recipe.fprop_w, kernel, -2, block_major=layout.block_major)
    fprop_w = _place(fprop_w, layout.stored)
    if recipe.quantizes_weight_once:
        fprop_w = save(fprop_w, recipe.fprop_w)
    y = multiply(fprop_x, transpose(_place(fprop_w, layout.gathered)))
    return split_features(y, kernel.shape[2:], layout.block_major), fprop_w


def forward_groups(
    recipe: Recipe,
    x: jax.Array,
    kernel: jax.Array,
    words: jax.Array,
    kernel_axes: LogicalAxes,
) -> tuple[jax.Array, Residuals]:
    """fprop, and what the backward GEMMs need. words: uint32 [2], the call's rounding key."""
    y, dgrad_w = fprop_groups(recipe, x, kernel, kernel_axes)
    if not recipe.quantizes_weight_once:
        layout = _layout(kernel_axes, kernel.shape[2:])
        weight_words = fold(words, DGRAD_WEIGHT_SALT)
        dgrad_w = pack(recipe.dgrad_w, kernel, -1, weight_words, block_major=layout.block_major)
        dgrad_w = save(_place(dgrad_w, layout.stored), recipe.dgrad_w)
    wgrad_x = pack(recipe.wgrad_x, pad_rows(x, 1), -2, fold(words, WGRAD_INPUT_SALT), swap=True)
    return y, Residuals(save(wgrad_x, recipe.wgrad_x), dgrad_w)


def backward_groups(
    recipe: Recipe,
    residuals: Residuals,
    g: jax.Array,
    words: jax.Array,
    kernel_axes: LogicalAxes,
) -> tuple[jax.Array, jax.Array]:
    """(dx [E, M, K], dw [E, K, *N]), float32, of g [E, M, *N]."""
    wgrad_x, dgrad_w = residuals
    layout = _layout(kernel_axes, g.shape[2:])
    block_major = layout.block_major
    dgrad_g = pack(recipe.dgrad_g, g, -1, fold(words, DGRAD_SALT), block_major=block_major)
    dx = multiply(dgrad_g, _place(dgrad_w, layout.gathered))
    words = fold(words, WGRAD_SALT)
    g = pad_rows(g, 1)
    wgrad_g = pack(recipe.wgrad_g, g, -2, words, block_major=block_major, swap=True)
    if layout.splits_features:
        # JAX's partitioning adds up partial products where the right operand's rows are whole.
        dw = jnp.swapaxes(multiply(wgrad_g, wgrad_x), -1, -2)
    else:
        dw = multiply(wgrad_x, wgrad_g)
    return dx, split_features(dw, g.shape[2:], block_major)


class _Layout(NamedTuple):
    """Where a merged kernel [E, K, N] lies on the mesh: logical axes of its dimensions."""

    stored: LogicalAxes  # like the master weights
    gathered: LogicalAxes  # as a GEMM needs it: only split as the activations are
    block_major: bool  # see `merge_features`
    splits_features: bool  # whether N of the gathered kernel is split


def _layout(kernel_axes: LogicalAxes, features: tuple[int, ...]) -> _Layout:
    if kernel_axes is None:
        return _Layout(None, None, False, False)
    sizes = mesh_axis_sizes()
    groups, rows, first, last = kernel_axes[0], kernel_axes[1], kernel_axes[2], kernel_axes[-1]
    block_major = len(features) > 1 and bool(dividing_axes(last, features[-1] // BLOCK, sizes))
    stored = (groups, rows, last if block_major else first)
    gathered = tuple(None if axis in STORAGE_AXES else axis for axis in stored)
    splits = bool(gathered[2] and dividing_axes(gathered[2], math.prod(features), sizes))
    return _Layout(stored, gathered, block_major, splits)


def _place(weight: Packed, axes: LogicalAxes) -> Packed:
    """Tell XLA where a weight lies, so that it is codes and scales that are gathered."""
    if axes is None:
        return weight
    scales = None if weight.scales is None else constrain(weight.scales, *axes)
    return Packed(constrain(weight.codes, *axes), scales, weight.scale)


def fprop(
    recipe: Recipe, x: jax.Array, kernel: jax.Array, kernel_axes: LogicalAxes = None
) -> jax.Array:
    """y = x w in float32. x: [..., K], kernel: [K, *N] -> [..., *N]."""
    y, _ = fprop_groups(recipe, _one_group(x, 1), kernel[None], _grouped_axes(kernel_axes))
    return y.reshape(*x.shape[:-1], *kernel.shape[1:])


def forward(
    recipe: Recipe,
    x: jax.Array,
    kernel: jax.Array,
    words: jax.Array,
    kernel_axes: LogicalAxes = None,
) -> tuple[jax.Array, Residuals]:
    """fprop, and what the backward GEMMs need. words: uint32 [2], the call's rounding key."""
    axes = _grouped_axes(kernel_axes)
    y, residuals = forward_groups(recipe, _one_group(x, 1), kernel[None], words, axes)
    return y.reshape(*x.shape[:-1], *kernel.shape[1:]), residuals


def backward(
    recipe: Recipe,
    residuals: Residuals,
    g: jax.Array,
    words: jax.Array,
    signature: Signature,
    kernel_axes: LogicalAxes = None,
) -> tuple[jax.Array, jax.Array]:
    """(dx, dw) like x and the kernel. g: [..., *N]; dw accumulates in float32."""
    x, kernel = signature.x, signature.kernel
    g = _one_group(g, len(kernel.shape) - 1)
    dx, dw = backward_groups(recipe, residuals, g, words, _grouped_axes(kernel_axes))
    return dx.reshape(x.shape).astype(x.dtype), dw[0].astype(kernel.dtype)


def _one_group(x: jax.Array, num_features: int) -> jax.Array:
    """[..., *C] -> [1, M, *C], C the last `num_features` axes."""
    tokens = math.prod(x.shape[: x.ndim - num_features])
    return x.reshape(1, tokens, *x.shape[x.ndim - num_features :])


def _grouped_axes(kernel_axes: LogicalAxes) -> LogicalAxes:
    return None if kernel_axes is None else (None, *kernel_axes)
