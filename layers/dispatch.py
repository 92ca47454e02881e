"""Moving tokens to their experts and back: which token stands in which row of which tile.

Rows of one expert are contiguous, in tiles of a multiple of 16 rows, so that quantisation blocks
and the Hadamard transform never mix experts. Both directions are gathers, forward and backward: a
scatter-add is serial on a CPU and unordered on a GPU.

Legend: M tokens, K choices a token, E experts, R rows = tiles * rows a tile, D features.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from ..numerics.formats import BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatch:
    """A permutation of tokens into rows. Row R (one past the end) and token M stand for "none"."""

    row_of_choice: jax.Array  # int32 [M, K]: where each token's choice went; R: dropped
    choice_of_row: jax.Array  # int32 [R]: the choice m * K + k that stands in a row; M * K: none
    tile_expert: jax.Array  # int32 [tiles], ascending
    num_tiles: jax.Array  # int32 scalar: tiles from here on are empty
    rows_per_tile: int = dataclasses.field(metadata={"static": True})

    @property
    def num_rows(self) -> int:
        return self.choice_of_row.shape[0]


def dropless_rows_per_tile(num_choices: int, num_experts: int) -> int:
    """Rows a tile: about a quarter of an expert's share, 16 to 256: padding costs an eighth."""
    share = num_choices / num_experts / 4
    return int(min(256, max(BLOCK, 2 ** round(math.log2(max(share, 1))))))


def capacity_rows(num_choices: int, num_experts: int, capacity_factor: float) -> int:
    """Rows an expert has in capacity mode, a multiple of 16."""
    rows = math.ceil(capacity_factor * num_choices / num_experts)
    return max(BLOCK, rows + -rows % BLOCK)


def plan_dispatch(experts: jax.Array, num_experts: int, capacity_factor: float | None) -> Dispatch:
    """Where each choice goes.

    experts: int32 [M, K], the value E for a choice that is to be dropped.
    capacity_factor None: dropless, every choice gets a row. Otherwise an expert takes its first
    capacity_factor * M * K / E choices (rounded up to 16), in the order of the tokens, and drops
    the rest.
    """
    num_choices = experts.size
    flat = experts.reshape(-1)
    counts = jnp.bincount(flat, length=num_experts).astype(jnp.int32)  # [E]
    order = jnp.argsort(flat, stable=True)  # choices, expert by expert
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts)])  # [E + 1]
    rank_in_order = jnp.arange(num_choices, dtype=jnp.int32) - first[flat[order]]
    if capacity_factor is None:
        rows = dropless_rows_per_tile(num_choices, num_experts)
        max_tiles = num_choices // rows + min(num_experts, num_choices)
        tiles = -(-counts // rows)  # [E]
        first_tile = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles)])
        num_tiles = first_tile[-1]
        tile_expert = jnp.searchsorted(
            first_tile[1:], jnp.arange(max_tiles, dtype=jnp.int32), side="right"
        )
        tile_expert = jnp.minimum(tile_expert, num_experts - 1).astype(jnp.int32)
        limit = jnp.iinfo(jnp.int32).max
    else:
        rows = limit = capacity_rows(num_choices, num_experts, capacity_factor)
        max_tiles = num_experts
        first_tile = jnp.arange(num_experts + 1, dtype=jnp.int32)
        num_tiles = jnp.int32(num_experts)
        tile_expert = jnp.arange(num_experts, dtype=jnp.int32)
    num_rows = max_tiles * rows
    sorted_experts = flat[order]
    row = first_tile[sorted_experts] * rows + rank_in_order
    row = jnp.where((sorted_experts < num_experts) & (rank_in_order < limit), row, num_rows)
    row_of_choice = jnp.zeros(num_choices, jnp.int32).at[order].set(row, unique_indices=True)
    choice_of_row = (
        jnp.full(num_rows, num_choices, jnp.int32).at[row].set(order.astype(jnp.int32), mode="drop")
    )
    return Dispatch(
        row_of_choice.reshape(experts.shape), choice_of_row, tile_expert, num_tiles, rows
    )


def to_experts(x: jax.Array, dispatch: Dispatch) -> jax.Array:
    """x [M, D] -> [tiles, rows, D]; rows without a token are 0."""
    rows = _gather_rows(x, dispatch.row_of_choice, dispatch.choice_of_row)
    return rows.reshape(-1, dispatch.rows_per_tile, x.shape[-1])


def from_experts(rows: jax.Array, weights: jax.Array, dispatch: Dispatch) -> jax.Array:
    """The weighted sum of each token's choices, in rows' dtype.

    rows: [tiles, rows, D], weights: [M, K] -> [M, D].
    """
    flat = rows.reshape(-1, rows.shape[-1])
    return _combine(flat, weights, dispatch.row_of_choice, dispatch.choice_of_row)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [N, ...] at index, 0 where the index is N or more."""
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _gather_rows(x: jax.Array, row_of_choice: jax.Array, choice_of_row: jax.Array) -> jax.Array:
    return _take(x, choice_of_row // row_of_choice.shape[1])


def _gather_rows_forward(x, row_of_choice, choice_of_row):
    return _gather_rows(x, row_of_choice, choice_of_row), (row_of_choice, choice_of_row)


def _gather_rows_backward(saved, g):
    row_of_choice, choice_of_row = saved
    dx = sum(
        _take(g, row_of_choice[:, k]).astype(jnp.float32) for k in range(row_of_choice.shape[1])
    )
    return jnp.asarray(dx).astype(g.dtype), _no_gradient(row_of_choice), _no_gradient(choice_of_row)


_gather_rows.defvjp(_gather_rows_forward, _gather_rows_backward)


@jax.custom_vjp
def _combine(
    rows: jax.Array, weights: jax.Array, row_of_choice: jax.Array, choice_of_row: jax.Array
) -> jax.Array:
    parts = (
        weights[:, k, None] * _take(rows, row_of_choice[:, k]) for k in range(weights.shape[1])
    )
    return jnp.asarray(sum(parts)).astype(rows.dtype)


def _combine_forward(rows, weights, row_of_choice, choice_of_row):
    return _combine(rows, weights, row_of_choice, choice_of_row), (
        rows,
        weights,
        row_of_choice,
        choice_of_row,
    )


def _combine_backward(saved, g):
    rows, weights, row_of_choice, choice_of_row = saved
    row_weights = _take(weights.reshape(-1), choice_of_row)
    d_rows = (row_weights[:, None] * _take(g, choice_of_row // weights.shape[1])).astype(rows.dtype)
    products = [
        jnp.sum(_take(rows, row_of_choice[:, k]).astype(jnp.float32) * g, axis=-1)
        for k in range(weights.shape[1])
    ]
    d_weights = jnp.stack(products, axis=1).astype(weights.dtype)
    return d_rows, d_weights, _no_gradient(row_of_choice), _no_gradient(choice_of_row)


_combine.defvjp(_combine_forward, _combine_backward)


def _no_gradient(index: jax.Array) -> np.ndarray:
    return np.zeros(index.shape, jax.dtypes.float0)
