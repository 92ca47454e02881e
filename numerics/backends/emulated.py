"""The three GEMMs of a linear layer, emulated: quantise, then an ordinary matmul on q * s.

q * s has at most 6 significant bits and lies in [2^-10, 2688], so it is exact in bfloat16: on an
accelerator the matmul runs on exact bfloat16 operands with float32 accumulation, on a CPU in
float32, which is faster there. The product is multiplied by (amax_l / 2688)(amax_r / 2688) at the
end.

Shapes: x [..., T, K], kernel [K, *N], g [..., T, *N]; T tokens, K in features, N out features.
No operand is ever transposed: blocks run along the contracted axis wherever that axis lies.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..formats import BLOCK, Format
from ..partitioning import STORAGE_AXES, constrain
from ..platform import matmul_operand, on_cpu, row_major
from ..quantize import expand_blocks, global_scale, tensor_amax
from ..random_bits import Place, fold
from ..recipe import Operand, Recipe
from .operands import (
    DGRAD_SALT,
    DGRAD_WEIGHT_SALT,
    WGRAD_INPUT_SALT,
    WGRAD_SALT,
    LogicalAxes,
    Signature,
    pad_rows,
    round_nvfp4,
    save,
    transform,
)


class GemmOperand(NamedTuple):
    """One side of a GEMM: the product is computed on `values` and multiplied by `scale`."""

    values: jax.Array  # q * s, or the rounded values of a high-precision format
    scale: jax.Array | None  # float32, amax / 2688, broadcast against the product; None means 1


class Residuals(NamedTuple):
    """What the backward pass keeps of the forward pass."""

    wgrad_x: GemmOperand
    dgrad_w: GemmOperand


def prepare(
    spec: Operand,
    x: jax.Array,
    axes: tuple[int, int],
    words: jax.Array | None = None,
    amax: Callable[[jax.Array], jax.Array] = tensor_amax,
    place: Place | None = None,
) -> GemmOperand:
    """Round `x` as `spec` says; the arguments are those of `round_nvfp4`."""
    x = transform(spec, x, axes[0])
    if spec.format is not Format.NVFP4:
        return GemmOperand(matmul_operand(x.astype(spec.format.dtype)), None)
    values, scales, amax_value, blocked = round_nvfp4(spec, x, axes, words, amax, place)
    values = values * expand_blocks(scales, x, blocked)
    return GemmOperand(
        values.astype(jnp.float32 if on_cpu() else jnp.bfloat16), global_scale(amax_value)
    )


def contract(
    left: GemmOperand, right: GemmOperand, axes: tuple[tuple[int, ...], tuple[int, ...]]
) -> jax.Array:
    """The product over `axes` of left and right with their scales, float32."""
    return rescale(rescale(product(left, right, axes), left.scale), right.scale)


def product(
    left: GemmOperand, right: GemmOperand, axes: tuple[tuple[int, ...], tuple[int, ...]]
) -> jax.Array:
    """The product over `axes` of the values alone, accumulated in float32."""
    a, b = left.values, right.values
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    left_axes, right_axes = (
        tuple(axis % side.ndim for axis in part) for part, side in zip(axes, (a, b), strict=True)
    )
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = ((left_axes, right_axes), ((), ()))
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def rescale(product: jax.Array, scale: jax.Array | None) -> jax.Array:
    return product if scale is None else product * scale


def token_axes(x: jax.Array) -> jax.Array:
    """x [..., K] with its tokens where blocks of 16 can run along the last token axis.

    [..., T, K] stays as it is when T is a multiple of 16 (so that a sharded batch stays sharded);
    otherwise the token axes become one.
    """
    if x.ndim >= 2 and x.shape[-2] % BLOCK == 0:
        return x
    return x.reshape(-1, x.shape[-1])


def gather_tokens(x: jax.Array, features: LogicalAxes) -> jax.Array:
    """[B, T, *features] as a product needs it on a mesh: what tensor splits are its features.

    Between the blocks that axis splits the sequence (numerics/partitioning.py).
    """
    if features is None or x.ndim != 2 + len(features):
        return x
    whole = (None if axis in STORAGE_AXES else axis for axis in features)
    return constrain(x, "batch", "sequence", *whole)


def fprop(
    recipe: Recipe, x: jax.Array, kernel: jax.Array, kernel_axes: LogicalAxes = None
) -> jax.Array:
    """y = x w in float32. x: [..., K], kernel: [K, *N] -> [..., *N]."""
    x = gather_tokens(x, kernel_axes and kernel_axes[:1])
    return _fprop(recipe, x, kernel)[0]


def _fprop(recipe: Recipe, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, GemmOperand]:
    """y, and the weight as it was rounded."""
    fprop_w = prepare(recipe.fprop_w, kernel, (-kernel.ndim, -1))
    fprop_x = prepare(recipe.fprop_x, token_axes(x), (-1, -2))
    y = contract(fprop_x, fprop_w, ((-1,), (0,)))
    return y.reshape(*x.shape[:-1], *kernel.shape[1:]), fprop_w


def forward(
    recipe: Recipe,
    x: jax.Array,
    kernel: jax.Array,
    words: jax.Array,
    kernel_axes: LogicalAxes = None,
) -> tuple[jax.Array, Residuals]:
    """fprop, and what the backward GEMMs need. words: uint32 [2], the call's rounding key."""
    x = gather_tokens(x, kernel_axes and kernel_axes[:1])
    y, fprop_w = _fprop(recipe, x, kernel)
    if recipe.quantizes_weight_once:
        dgrad_w = fprop_w
    else:
        dgrad_w = prepare(
            recipe.dgrad_w, kernel, (-1, -kernel.ndim), fold(words, DGRAD_WEIGHT_SALT)
        )
    tokens = pad_rows(token_axes(x), -2)
    wgrad_x = prepare(recipe.wgrad_x, tokens, (-2, -1), fold(words, WGRAD_INPUT_SALT))
    # Where XLA moves it instead, it moves the sixteen terms of its transform one by one.
    wgrad_x = wgrad_x._replace(
        values=gather_tokens(wgrad_x.values, kernel_axes and kernel_axes[:1])
    )
    return y, Residuals(save(wgrad_x, recipe.wgrad_x), save(dgrad_w, recipe.dgrad_w))


def backward(
    recipe: Recipe,
    residuals: Residuals,
    g: jax.Array,
    words: jax.Array,
    signature: Signature,
    kernel_axes: LogicalAxes = None,
) -> tuple[jax.Array, jax.Array]:
    """(dx, dw) like x and the kernel. g: [..., *N]; dw accumulates in float32."""
    g = gather_tokens(g, kernel_axes and kernel_axes[1:])
    wgrad_x, dgrad_w = jax.tree.map(row_major, residuals)
    out_axes = tuple(range(1 - dgrad_w.values.ndim, 0))  # N in g and in the kernel
    leading = g.shape[: g.ndim - len(out_axes)]
    out_shape = g.shape[g.ndim - len(out_axes) :]
    if not (leading and leading[-1] % BLOCK == 0):
        g = g.reshape(math.prod(leading), *out_shape)
    dgrad_g = prepare(recipe.dgrad_g, g, (-1, -1 - len(out_axes)), fold(words, DGRAD_SALT))
    dx = contract(dgrad_g, dgrad_w, (out_axes, out_axes))
    token_axis = -1 - len(out_axes)
    padded = pad_rows(g, token_axis)
    wgrad_g = prepare(recipe.wgrad_g, padded, (token_axis, -1), fold(words, WGRAD_SALT))
    wgrad_g = wgrad_g._replace(
        values=gather_tokens(wgrad_g.values, kernel_axes and kernel_axes[1:])
    )
    tokens = tuple(range(wgrad_x.values.ndim - 1))
    dw = contract(wgrad_x, wgrad_g, (tokens, tokens))
    x, kernel = signature.x, signature.kernel
    return dx.reshape(x.shape).astype(x.dtype), dw.astype(kernel.dtype)
