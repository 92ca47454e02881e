"""The three GEMMs of a layer of experts, emulated: rows in tiles, each tile of one expert.

Every expert is a GEMM of its own: its rows, its weight and its gradient have their own amax, and
blocks and the Hadamard transform stay inside a tile, so no expert's numbers depend on another's.
Rows without a token are zero, which is exact.

Shapes: x [tiles, rows, K], kernel [experts, K, *N], tile_expert int32 [tiles], ascending; or,
without tiles, x [experts, rows, K].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..random_bits import fold
from ..recipe import Recipe
from .emulated import GemmOperand, Residuals, prepare, product, rescale
from .operands import (
    DGRAD_SALT,
    DGRAD_WEIGHT_SALT,
    WGRAD_INPUT_SALT,
    WGRAD_SALT,
    LogicalAxes,
    Signature,
    Tiles,
    expert_amax,
    save,
)


def tile_amax(tiles: Tiles, num_experts: int) -> Callable[[jax.Array], jax.Array]:
    """amax of each tile's expert, over all of that expert's tiles."""
    if tiles is None:
        return expert_amax
    tile_expert, _ = tiles

    def amax(block_bits: jax.Array) -> jax.Array:
        per_tile = expert_amax(block_bits)
        per_expert = jax.ops.segment_max(
            per_tile, tile_expert, num_experts, indices_are_sorted=True
        )
        return per_expert[tile_expert]

    return amax


def fprop(
    recipe: Recipe, x: jax.Array, kernel: jax.Array, tiles: Tiles, kernel_axes: LogicalAxes = None
) -> jax.Array:
    """y [tiles, rows, *N] in x's dtype, 0 in tiles without tokens."""
    del kernel_axes
    return _fprop(recipe, x, kernel, tiles)[0]


def _fprop(
    recipe: Recipe, x: jax.Array, kernel: jax.Array, tiles: Tiles
) -> tuple[jax.Array, GemmOperand]:
    """y, and the weights as they were rounded."""
    fprop_w = prepare(recipe.fprop_w, kernel, (1 - kernel.ndim, -1), amax=expert_amax)
    fprop_x = prepare(recipe.fprop_x, x, (-1, -2), amax=tile_amax(tiles, kernel.shape[0]))
    return _products(fprop_x, fprop_w, ((-1,), (0,)), tiles, x.dtype), fprop_w


def forward(
    recipe: Recipe,
    x: jax.Array,
    kernel: jax.Array,
    tiles: Tiles,
    words: jax.Array,
    kernel_axes: LogicalAxes = None,
) -> tuple[jax.Array, Residuals]:
    """fprop, and what the backward GEMMs need. words: uint32 [2], the call's rounding key."""
    del kernel_axes
    y, fprop_w = _fprop(recipe, x, kernel, tiles)
    if recipe.quantizes_weight_once:
        dgrad_w = fprop_w
    else:
        axes = (-1, 1 - kernel.ndim)
        dgrad_w = prepare(recipe.dgrad_w, kernel, axes, fold(words, DGRAD_WEIGHT_SALT), expert_amax)
    amax = tile_amax(tiles, kernel.shape[0])
    wgrad_x = prepare(recipe.wgrad_x, x, (-2, -1), fold(words, WGRAD_INPUT_SALT), amax)
    return y, Residuals(save(wgrad_x, recipe.wgrad_x), save(dgrad_w, recipe.dgrad_w))


def backward(
    recipe: Recipe,
    residuals: Residuals,
    g: jax.Array,
    tiles: Tiles,
    words: jax.Array,
    signature: Signature,
    kernel_axes: LogicalAxes = None,
) -> tuple[jax.Array, jax.Array]:
    """(dx, dw) like x [tiles, rows, K] and the kernel [experts, K, *N].

    dw accumulates in float32; that of an unused expert is 0.
    """
    del kernel_axes
    wgrad_x, dgrad_w = residuals
    amax = tile_amax(tiles, dgrad_w.values.shape[0])
    out_axes = tuple(range(2 - dgrad_w.values.ndim, 0))  # N in g and in a kernel
    token_axis = -1 - len(out_axes)
    dgrad_g = prepare(recipe.dgrad_g, g, (-1, token_axis), fold(words, DGRAD_SALT), amax)
    dx = _products(dgrad_g, dgrad_w, (out_axes, out_axes), tiles, signature.x.dtype)
    wgrad_g = prepare(recipe.wgrad_g, g, (token_axis, -1), fold(words, WGRAD_SALT), amax)
    if tiles is None:
        dw = _group_products(wgrad_x, wgrad_g, ((0,), (0,)))
    else:
        dw = _sum_of_tiles(wgrad_x, wgrad_g, tiles, signature.kernel.shape)
    return dx, dw.astype(signature.kernel.dtype)


def _at(operand: GemmOperand, index: jax.Array) -> GemmOperand:
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), operand
    )


def _scaled(value: jax.Array, left: GemmOperand, right: GemmOperand) -> jax.Array:
    for side in (left, right):
        if side.scale is not None:
            value = rescale(value, side.scale.reshape(()))
    return value


def _products(
    rows: GemmOperand,
    weights: GemmOperand,
    axes: tuple[tuple[int, ...], tuple[int, ...]],
    tiles: Tiles,
    dtype: jnp.dtype,
) -> jax.Array:
    """Each tile's, or group's, rows times its expert's weight."""
    if tiles is None:
        return _group_products(rows, weights, axes).astype(dtype)
    tile_expert, num_tiles = tiles
    spared = {axis % (weights.values.ndim - 1) for axis in axes[1]}
    out_shape = [n for axis, n in enumerate(weights.values.shape[1:]) if axis not in spared]

    # Each tile that holds a token, one after the other.
    def multiply(tile: jax.Array, out: jax.Array) -> jax.Array:
        left, right = _at(rows, tile), _at(weights, tile_expert[tile])
        value = _scaled(product(left, right, axes), left, right).astype(dtype)
        return jax.lax.dynamic_update_index_in_dim(out, value, tile, 0)

    out = jnp.zeros((*rows.values.shape[:2], *out_shape), dtype)
    return jax.lax.fori_loop(0, num_tiles, multiply, out)


def _group_products(
    left: GemmOperand, right: GemmOperand, axes: tuple[tuple[int, ...], tuple[int, ...]]
) -> jax.Array:
    """All groups' products as one batched product, float32."""
    return jax.vmap(lambda a, b: _scaled(product(a, b, axes), a, b))(left, right)


def _sum_of_tiles(
    left: GemmOperand,
    right: GemmOperand,
    tiles: tuple[jax.Array, jax.Array],
    shape: tuple[int, ...],
) -> jax.Array:
    """The weight gradient float32 of this shape: each expert's sum over its tiles."""
    tile_expert, num_tiles = tiles

    def accumulate(tile: jax.Array, dw: jax.Array) -> jax.Array:
        a, b = _at(left, tile), _at(right, tile)
        return dw.at[tile_expert[tile]].add(_scaled(product(a, b, ((0,), (0,))), a, b))

    return jax.lax.fori_loop(0, num_tiles, accumulate, jnp.zeros(shape, jnp.float32))
