"""The three GEMMs of a linear layer on FP4 tensor cores, through `jax.nn.scaled_matmul`.

Operands are rounded as the emulation rounds them and packed: E2M1 codes (two a byte on a GPU) with
one E4M3 scale for 16 of them. Compiled for a GPU with FP4 tensor cores, each product is one
`__cudnn$blockScaledDot`; on a CPU operands are dequantised and multiplied, which is good for
comparing and for nothing else. (amax_l / 2688)(amax_r / 2688) is multiplied to the product.

Everything has a leading axis of groups: experts, or one group for a dense layer. Each group is a
GEMM of its own with its own amax.

Legend: E groups, M tokens, K in features, N out features; x [E, M, K], kernel [E, K, N],
g [E, M, N]. Tokens and features may be several axes: they become one after the rounding.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..formats import BLOCK, Format
from ..platform import matmul_operand, on_cpu, row_major
from ..quantize import expand_blocks, global_scale
from ..random_bits import Place, fold
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
from .packed import ALIGNMENT, Packed
from .placement import Order, Placement


class Residuals(NamedTuple):
    """What the backward pass keeps of the forward pass."""

    wgrad_x: Packed  # [E, K, M]
    dgrad_w: Packed  # [E, K, N]


def pack(
    spec: Operand,
    x: jax.Array,
    axis: int,
    order: Order,
    words: jax.Array | None = None,
    *,
    num_features: int = 1,
    rows_at: Place | None = None,
    swap: bool = False,
) -> Packed:
    """Round x [E, *rows, *C] along its last axis of rows (`axis` -2) or of all (-1).

    rows_at: what stochastic rounding knows the rows by.

    Returns [E, R, C] in the order of `order`; with swap [E, C, R], rows padded to `ALIGNMENT`.
    """
    rows = -1 - num_features
    axes = {-1: (-1, rows), -2: (rows, -1)}[axis]
    x = transform(spec, x, axes[0])

    def arrange(x: jax.Array, blocked: tuple[int, ...], alignment: int) -> jax.Array:
        x = order.merge(x, num_features, rows in blocked, -1 in blocked)
        return pad_rows(jnp.swapaxes(x, -1, -2), -1, alignment) if swap else x

    if spec.format is not Format.NVFP4:
        values = matmul_operand(x.astype(spec.format.dtype))
        return Packed(arrange(values, (), 1), None, None)
    values, scales, amax, blocked = round_nvfp4(spec, x, axes, words, expert_amax, rows_at)
    # Values are arranged before the cast: XLA writes what it has just rounded where it belongs,
    # instead of moving half bytes afterwards.
    return Packed(
        arrange(values, (), ALIGNMENT).astype(jnp.float4_e2m1fn),
        arrange(scales, blocked, ALIGNMENT // BLOCK).astype(jnp.float8_e4m3fn),
        global_scale(amax).reshape(-1, 1, 1),
    )


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
    recipe: Recipe, x: jax.Array, kernel: jax.Array, place: Placement
) -> tuple[jax.Array, Packed]:
    """y float32 [E, *tokens, *N] of x [E, *tokens, K] and kernel [E, K, *N]; the rounded weight."""
    features = kernel.shape[2:]
    fprop_x = place.input(pack(recipe.fprop_x, x, -1, place.order))
    fprop_w = pack(recipe.fprop_w, kernel, -2, place.order, num_features=len(features))
    fprop_w = place.stored(fprop_w)
    if recipe.quantizes_weight_once:
        fprop_w = save(fprop_w, recipe.fprop_w)
    y = place.product(
        multiply,
        fprop_x,
        transpose(place.gathered(fprop_w)),
        (place.rows, place.outside),
        place.inside,
        (x.shape[1:-1], features),
    )
    return y, fprop_w


def forward_groups(
    recipe: Recipe,
    x: jax.Array,
    kernel: jax.Array,
    words: jax.Array,
    place: Placement,
    rows_at: Place | None = None,
) -> tuple[jax.Array, Residuals]:
    """fprop, and what the backward GEMMs need. words: uint32 [2], the call's rounding key."""
    y, dgrad_w = fprop_groups(recipe, x, kernel, place)
    if not recipe.quantizes_weight_once:
        dgrad_w = pack(
            recipe.dgrad_w,
            kernel,
            -1,
            place.order,
            fold(words, DGRAD_WEIGHT_SALT),
            num_features=kernel.ndim - 2,
        )
        dgrad_w = save(place.stored(dgrad_w), recipe.dgrad_w)
    words = fold(words, WGRAD_INPUT_SALT)
    x = pad_rows(x, -2)
    wgrad_x = pack(recipe.wgrad_x, x, -2, place.order, words, rows_at=rows_at, swap=True)
    return y, Residuals(save(place.input(wgrad_x, swapped=True), recipe.wgrad_x), dgrad_w)


def backward_groups(
    recipe: Recipe,
    residuals: Residuals,
    g: jax.Array,
    words: jax.Array,
    features: tuple[int, ...],
    place: Placement,
    rows_at: Place | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(dx [E, *tokens, K], dw [E, K, *N]), float32, of g [E, *tokens, *N]."""
    wgrad_x, dgrad_w = jax.tree.map(row_major, residuals)
    dgrad_w = place.stored(dgrad_w)  # or XLA would keep it as it is needed here: gathered
    num_features = len(features)
    tokens = g.shape[1 : g.ndim - num_features]
    dgrad_g = pack(
        recipe.dgrad_g,
        g,
        -1,
        place.order,
        fold(words, DGRAD_SALT),
        num_features=num_features,
        rows_at=rows_at,
    )
    dx = place.product(
        multiply,
        place.gradient(dgrad_g),
        place.gathered(dgrad_w),
        (place.rows, place.inside),
        place.outside,
        (tokens, dgrad_w.codes.shape[1:2]),
    )
    wgrad_g = pack(
        recipe.wgrad_g,
        pad_rows(g, -1 - num_features),
        -2,
        place.order,
        fold(words, WGRAD_SALT),
        num_features=num_features,
        rows_at=rows_at,
        swap=True,
    )
    wgrad_g = place.gradient(wgrad_g, swapped=True)
    dw = place.product(
        multiply,
        wgrad_x,
        wgrad_g,
        (place.inside, place.outside),
        place.rows,
        (wgrad_x.codes.shape[1:2], features),
    )
    return dx, dw


def fprop(
    recipe: Recipe, x: jax.Array, kernel: jax.Array, kernel_axes: LogicalAxes = None
) -> jax.Array:
    """y = x w in float32. x: [..., K], kernel: [K, *N] -> [..., *N]."""
    grouped = _one_group(x, 1)
    place = Placement.of(kernel_axes, grouped.shape[1:-1], (1, *kernel.shape))
    y, _ = fprop_groups(recipe, grouped, kernel[None], place)
    return y.reshape(*x.shape[:-1], *kernel.shape[1:])


def forward(
    recipe: Recipe,
    x: jax.Array,
    kernel: jax.Array,
    words: jax.Array,
    kernel_axes: LogicalAxes = None,
) -> tuple[jax.Array, Residuals]:
    """fprop, and what the backward GEMMs need. words: uint32 [2], the call's rounding key."""
    grouped = _one_group(x, 1)
    place = Placement.of(kernel_axes, grouped.shape[1:-1], (1, *kernel.shape))
    y, residuals = forward_groups(recipe, grouped, kernel[None], words, place)
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
    features = kernel.shape[1:]
    g = _one_group(g, len(features))
    rows = g.shape[1 : g.ndim - len(features)]
    place = Placement.of(kernel_axes, rows, (1, *kernel.shape))
    dx, dw = backward_groups(recipe, residuals, g, words, features, place)
    return dx.reshape(x.shape).astype(x.dtype), dw[0].astype(kernel.dtype)


def _one_group(x: jax.Array, num_features: int) -> jax.Array:
    """[..., T, *C] -> [1, ..., T, *C], tokens as one axis where 16 does not divide T."""
    tokens = x.shape[: x.ndim - num_features]
    if not tokens or tokens[-1] % BLOCK:
        x = x.reshape(math.prod(tokens), *x.shape[x.ndim - num_features :])
    return x[None]
