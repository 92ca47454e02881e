"""The three GEMMs of a layer of experts, emulated: rows in tiles, each tile of one expert.

Every expert is a GEMM of its own: its rows, its weight and its gradient have their own amax, and
blocks and the Hadamard transform stay inside a tile, so no expert's numbers depend on another's.
Rows without a token are zero, which is exact.

Shapes: x [tiles, rows, K], kernel [experts, K, *N], tiles.expert int32 [tiles]; or, without it,
x [experts, rows, K].

Inside `jax.shard_map` rows, experts and features are a device's part of them (`Tiles.shard`): the
codes are those of the whole, and what comes back are this part's y, or its addend where in_features
is split, and this part's addends of dx and dw. A kernel that is stored in parts is rounded in parts
and gathered after that, in both passes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..platform import row_major
from ..random_bits import fold
from ..recipe import Operand, Recipe
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


def row_amax(tiles: Tiles, num_experts: int) -> Callable[[jax.Array], jax.Array]:
    """amax of each tile's expert, over all of that expert's rows."""

    def amax(block_bits: jax.Array) -> jax.Array:
        per_tile = expert_amax(block_bits)
        if tiles.expert is None:
            return tiles.shard.whole_amax(per_tile)
        # Empty tiles are one more expert, whose amax is 0.
        per_expert = jax.ops.segment_max(per_tile, tiles.expert, num_experts + 1)
        return tiles.shard.whole_amax(jnp.maximum(per_expert, 0))[tiles.expert]

    return amax


def weight_amax(tiles: Tiles) -> Callable[[jax.Array], jax.Array]:
    """amax of each expert's kernel."""
    return lambda block_bits: tiles.shard.whole_amax(expert_amax(block_bits))


def fprop(
    recipe: Recipe, x: jax.Array, kernel: jax.Array, tiles: Tiles, kernel_axes: LogicalAxes = None
) -> jax.Array:
    """y [tiles, rows, *N] in x's dtype (an addend in float32), 0 in tiles without tokens."""
    del kernel_axes
    return _fprop(recipe, x, kernel, tiles)[0]


def _fprop(
    recipe: Recipe, x: jax.Array, kernel: jax.Array, tiles: Tiles
) -> tuple[jax.Array, GemmOperand]:
    """y, and this device's part of the weights as they were rounded."""
    fprop_w = prepare(recipe.fprop_w, kernel, (1 - kernel.ndim, -1), amax=weight_amax(tiles))
    fprop_x = prepare(recipe.fprop_x, x, (-1, -2), amax=row_amax(tiles, kernel.shape[0]))
    whole_w = _whole(fprop_w, recipe.fprop_w, tiles)
    # Addends are rounded after they are added.
    dtype = x.dtype if tiles.shard.in_features is None else jnp.float32
    return _products(fprop_x, whole_w, ((-1,), (0,)), tiles, dtype), fprop_w


def _whole(weights: GemmOperand, spec: Operand, tiles: Tiles) -> GemmOperand:
    return weights._replace(values=tiles.shard.whole_kernel(weights.values, spec))


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
        weight_words = fold(words, DGRAD_WEIGHT_SALT)
        dgrad_w = prepare(recipe.dgrad_w, kernel, axes, weight_words, weight_amax(tiles))
    amax = row_amax(tiles, kernel.shape[0])
    place = tiles.place(x.shape[-1], tiles.shard.in_features)
    wgrad_x = prepare(recipe.wgrad_x, x, (-2, -1), fold(words, WGRAD_INPUT_SALT), amax, place)
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
    wgrad_x, dgrad_w = jax.tree.map(row_major, residuals)
    dgrad_w = _whole(dgrad_w, recipe.dgrad_w, tiles)
    amax = row_amax(tiles, dgrad_w.values.shape[0])
    place = tiles.place(g.shape[-1], tiles.shard.out_features)
    out_axes = tuple(range(2 - dgrad_w.values.ndim, 0))  # N in g and in a kernel
    token_axis = -1 - len(out_axes)
    dgrad_g = prepare(recipe.dgrad_g, g, (-1, token_axis), fold(words, DGRAD_SALT), amax, place)
    dx = _products(dgrad_g, dgrad_w, (out_axes, out_axes), tiles, signature.x.dtype)
    wgrad_g = prepare(recipe.wgrad_g, g, (token_axis, -1), fold(words, WGRAD_SALT), amax, place)
    if tiles.expert is None:
        dw = _group_products(wgrad_x, wgrad_g, ((0,), (0,)))
    else:
        dw = _sum_of_tiles(wgrad_x, wgrad_g, tiles.expert, dgrad_w.values.shape)
    return dx, tiles.shard.part_of_kernel(dw).astype(signature.kernel.dtype)


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
    if tiles.expert is None:
        return _group_products(rows, weights, axes).astype(dtype)
    spared = {axis % (weights.values.ndim - 1) for axis in axes[1]}
    out_shape = [n for axis, n in enumerate(weights.values.shape[1:]) if axis not in spared]

    def multiply(expert: jax.Array, mine: _Mine, out: jax.Array) -> jax.Array:
        weight = _at(weights, expert)  # once, not for every tile: it is copied

        def one(tile: jax.Array, out: jax.Array) -> jax.Array:
            left = _at(rows, tile)
            value = _scaled(product(left, weight, axes), left, weight).astype(dtype)
            return jax.lax.dynamic_update_index_in_dim(out, value, tile, 0)

        return mine(one, out)

    out = jnp.zeros((*rows.values.shape[:2], *out_shape), dtype)
    return _for_each_expert(tiles.expert, weights.values.shape[0], multiply, out)


# Runs body(tile, carry) over the tiles of one expert, from a start.
_Mine = Callable[[Callable[[jax.Array, jax.Array], jax.Array], jax.Array], jax.Array]


def _for_each_expert(
    tile_expert: jax.Array,
    num_experts: int,
    body: Callable[[jax.Array, _Mine, jax.Array], jax.Array],
    start: jax.Array,
) -> jax.Array:
    """body(expert, its tiles, carry) one after the other; tiles without tokens cost nothing."""
    order = jnp.argsort(tile_expert, stable=True)
    last = jnp.cumsum(jnp.bincount(tile_expert, length=num_experts))  # exclusive

    def visit(expert: jax.Array, carry: jax.Array) -> jax.Array:
        first = jnp.where(expert == 0, 0, last[expert - 1])

        def mine(one: Callable[[jax.Array, jax.Array], jax.Array], carry: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(first, last[expert], lambda i, c: one(order[i], c), carry)

        return body(expert, mine, carry)

    return jax.lax.fori_loop(0, num_experts, visit, start)


def _group_products(
    left: GemmOperand, right: GemmOperand, axes: tuple[tuple[int, ...], tuple[int, ...]]
) -> jax.Array:
    """All groups' products as one batched product, float32."""
    return jax.vmap(lambda a, b: _scaled(product(a, b, axes), a, b))(left, right)


def _sum_of_tiles(
    left: GemmOperand,
    right: GemmOperand,
    tile_expert: jax.Array,
    shape: tuple[int, ...],
) -> jax.Array:
    """The weight gradient float32 of this shape: each expert's sum over its tiles."""

    def accumulate(tile: jax.Array, total: jax.Array) -> jax.Array:
        a, b = _at(left, tile), _at(right, tile)
        return total + _scaled(product(a, b, ((0,), (0,))), a, b)

    def add_up(expert: jax.Array, mine: _Mine, dw: jax.Array) -> jax.Array:
        total = mine(accumulate, jnp.zeros(shape[1:], jnp.float32))
        return jax.lax.dynamic_update_index_in_dim(dw, total, expert, 0)

    return _for_each_expert(tile_expert, shape[0], add_up, jnp.zeros(shape, jnp.float32))
