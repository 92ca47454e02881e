"""The three GEMMs of a layer of experts, emulated: rows in tiles, each tile of one expert.

Every expert is a GEMM of its own: its rows, its weight and its gradient have their own amax, and
blocks and the Hadamard transform stay inside a tile, so no expert's numbers depend on another's.
Rows without a token are zero, which is exact.

Shapes: x [tiles, rows, K], kernel [experts, K, *N], tile_expert int32 [tiles], ascending.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..random_bits import fold
from ..recipe import Recipe
from .emulated import GemmOperand, Residuals, prepare, product, rescale
from .operands import (
    DGRAD_SALT,
    DGRAD_WEIGHT_SALT,
    GEMM_NAME,
    WGRAD_INPUT_SALT,
    WGRAD_SALT,
    expert_amax,
    save,
)


def tile_amax(tile_expert: jax.Array, num_experts: int) -> Callable[[jax.Array], jax.Array]:
    """amax of each tile's expert, over all of that expert's tiles."""

    def amax(block_bits: jax.Array) -> jax.Array:
        per_tile = expert_amax(block_bits)
        per_expert = jax.ops.segment_max(
            per_tile, tile_expert, num_experts, indices_are_sorted=True
        )
        return per_expert[tile_expert]

    return amax


def fprop(
    recipe: Recipe, x: jax.Array, kernel: jax.Array, tile_expert: jax.Array, num_tiles: jax.Array
) -> tuple[jax.Array, GemmOperand]:
    """y [tiles, rows, *N] in x's dtype, 0 from `num_tiles` on, and the weights as rounded."""
    fprop_w = prepare(recipe.fprop_w, kernel, (1 - kernel.ndim, -1), amax=expert_amax)
    fprop_x = prepare(recipe.fprop_x, x, (-1, -2), amax=tile_amax(tile_expert, kernel.shape[0]))
    y = _tile_products(fprop_x, fprop_w, ((-1,), (0,)), tile_expert, num_tiles, x.dtype)
    return y, fprop_w


def forward(
    recipe: Recipe,
    x: jax.Array,
    kernel: jax.Array,
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    words: jax.Array,
) -> tuple[jax.Array, Residuals]:
    """fprop, and what the backward GEMMs need. words: uint32 [2], the call's rounding key."""
    y, fprop_w = fprop(recipe, x, kernel, tile_expert, num_tiles)
    if recipe.quantizes_weight_once:
        dgrad_w = fprop_w
    else:
        axes = (-1, 1 - kernel.ndim)
        dgrad_w = prepare(recipe.dgrad_w, kernel, axes, fold(words, DGRAD_WEIGHT_SALT), expert_amax)
    amax = tile_amax(tile_expert, kernel.shape[0])
    wgrad_x = prepare(recipe.wgrad_x, x, (-2, -1), fold(words, WGRAD_INPUT_SALT), amax)
    residuals = Residuals(save(wgrad_x, recipe.wgrad_x), save(dgrad_w, recipe.dgrad_w))
    return checkpoint_name(y, GEMM_NAME), residuals


def backward(
    recipe: Recipe,
    residuals: Residuals,
    g: jax.Array,
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    words: jax.Array,
    dtypes: tuple[jnp.dtype, jnp.dtype],
) -> tuple[jax.Array, jax.Array]:
    """(dx [tiles, rows, K], dw [experts, K, *N]) in `dtypes`.

    dw accumulates in float32; that of an unused expert is 0.
    """
    wgrad_x, dgrad_w = residuals
    num_experts = dgrad_w.values.shape[0]
    amax = tile_amax(tile_expert, num_experts)
    out_axes = tuple(range(2 - dgrad_w.values.ndim, 0))  # N in g and in a kernel
    token_axis = -1 - len(out_axes)
    dgrad_g = prepare(recipe.dgrad_g, g, (-1, token_axis), fold(words, DGRAD_SALT), amax)
    dx = _tile_products(dgrad_g, dgrad_w, (out_axes, out_axes), tile_expert, num_tiles, dtypes[0])
    wgrad_g = prepare(recipe.wgrad_g, g, (token_axis, -1), fold(words, WGRAD_SALT), amax)

    def accumulate(tile: jax.Array, dw: jax.Array) -> jax.Array:
        left, right = _at(wgrad_x, tile), _at(wgrad_g, tile)
        expert = tile_expert[tile]
        update = _scaled(product(left, right, ((0,), (0,))), left, right)
        return dw.at[expert].add(update)

    dw = jnp.zeros((num_experts, wgrad_x.values.shape[-1], *g.shape[2:]), jnp.float32)
    dw = jax.lax.fori_loop(0, num_tiles, accumulate, dw)
    return dx, dw.astype(dtypes[1])


def _at(operand: GemmOperand, index: jax.Array) -> GemmOperand:
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), operand
    )


def _scaled(value: jax.Array, left: GemmOperand, right: GemmOperand) -> jax.Array:
    for side in (left, right):
        if side.scale is not None:
            value = rescale(value, side.scale.reshape(()))
    return value


def _tile_products(
    tiles: GemmOperand,
    weights: GemmOperand,
    axes: tuple[tuple[int, ...], tuple[int, ...]],
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    dtype: jnp.dtype,
) -> jax.Array:
    """Each tile that holds a token times its expert's weight, one after the other."""
    spared = {axis % (weights.values.ndim - 1) for axis in axes[1]}
    out_shape = [n for axis, n in enumerate(weights.values.shape[1:]) if axis not in spared]

    def multiply(tile: jax.Array, out: jax.Array) -> jax.Array:
        left, right = _at(tiles, tile), _at(weights, tile_expert[tile])
        value = _scaled(product(left, right, axes), left, right).astype(dtype)
        return jax.lax.dynamic_update_index_in_dim(out, value, tile, 0)

    out = jnp.zeros((*tiles.values.shape[:2], *out_shape), dtype)
    return jax.lax.fori_loop(0, num_tiles, multiply, out)
