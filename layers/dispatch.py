"""Moving tokens to their experts and back: which token stands in which row.

An expert's rows are a multiple of 16 that no other expert shares. For FP4 those of one group of
tokens (a sequence) are one too: quantisation blocks and the Hadamard transform of the weight
gradient, which run along the rows, then mix neither experts nor groups, and do not depend on how
groups are spread over devices. Both directions are gathers, forward and backward: a scatter-add is
serial on a CPU and unordered on a GPU.

Everything here is about one device's tokens. Its rows are laid out in parts, one for every device
that experts are divided over (one without a mesh): `expert_parallel.py` sends each its part.

Legend: G groups, M tokens a group, K choices a token, E experts, P parts, R rows, D features.
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
    """A permutation of choices (token, k), counted g * M * K + m * K + k, into rows.

    Row R (one past the end) and choice G * M * K stand for "none".
    """

    row_of_choice: jax.Array  # int32 [G * M, K]: where each token's choice went; R: dropped
    choice_of_row: jax.Array  # int32 [R]: the choice that stands in a row
    # int32 [P * tiles]: a tile's expert, counted within its part, E / P for a tile without tokens;
    # None with a capacity, where rows are [E, R / E].
    tile_expert: jax.Array | None
    rows_per_tile: int = dataclasses.field(metadata={"static": True})

    @property
    def num_rows(self) -> int:
        return self.choice_of_row.shape[0]

    @property
    def is_kept(self) -> jax.Array:
        """bool [G * M, K]."""
        return self.row_of_choice < self.num_rows


def dropless_rows_per_tile(num_choices: int, num_experts: int) -> int:
    """Rows a tile: about a quarter of an expert's share, 16 to 256: padding costs an eighth."""
    share = num_choices / num_experts / 4
    return int(min(256, max(BLOCK, 2 ** round(math.log2(max(share, 1))))))


def capacity_rows(num_choices: int, num_experts: int, capacity_factor: float) -> int:
    """Rows an expert has for a group in capacity mode, a multiple of 16."""
    rows = math.ceil(capacity_factor * num_choices / num_experts)
    return max(BLOCK, rows + -rows % BLOCK)


def plan_dispatch(
    experts: jax.Array,
    num_experts: int,
    capacity_factor: float | None,
    *,
    group_rows: int = 1,
    num_parts: int = 1,
) -> Dispatch:
    """Where each choice goes.

    experts: int32 [G, M, K], the value E for a choice that is to be dropped.
    capacity_factor None: dropless, every choice gets a row, and the rows that an expert has of one
    group are a multiple of group_rows. Otherwise an expert takes of each group its first
    capacity_factor * M * K / E choices (rounded up to 16), in the order of the tokens, and drops
    the rest.
    num_parts: divides E; experts part * E / P and on are in part `part`.
    """
    num_groups, num_tokens, choices = experts.shape
    num_choices = experts.size
    flat = experts.reshape(-1)
    groups = jnp.repeat(jnp.arange(num_groups, dtype=jnp.int32), num_tokens * choices)
    counts = jnp.bincount(flat * num_groups + groups, length=num_experts * num_groups)
    counts = counts.astype(jnp.int32)  # [E * G]
    order = jnp.argsort(flat, stable=True)  # choices: expert by expert, group by group
    expert, group = flat[order], groups[order]
    # A dropped choice's expert is E; where its group begins does not matter.
    pair = jnp.minimum(expert * num_groups + group, counts.size - 1)
    rank = jnp.arange(num_choices, dtype=jnp.int32) - _before(counts)[pair]
    if capacity_factor is None:
        num_rows, rows_per_tile, first_row, tile_expert = _dropless_rows(
            counts.reshape(num_experts, num_groups), num_choices, group_rows, num_parts
        )
        row, fits = first_row.reshape(-1)[pair] + rank, True
    else:
        rows_per_tile = capacity_rows(num_tokens * choices, num_experts, capacity_factor)
        num_rows, tile_expert = rows_per_tile * counts.size, None
        row, fits = pair * rows_per_tile + rank, rank < rows_per_tile
    row = jnp.where((expert < num_experts) & fits, row, num_rows)
    row_of_choice = jnp.zeros(num_choices, jnp.int32).at[order].set(row, unique_indices=True)
    choice_of_row = (
        jnp.full(num_rows, num_choices, jnp.int32).at[row].set(order.astype(jnp.int32), mode="drop")
    )
    return Dispatch(row_of_choice.reshape(-1, choices), choice_of_row, tile_expert, rows_per_tile)


def _dropless_rows(
    counts: jax.Array, num_choices: int, group_rows: int, num_parts: int
) -> tuple[int, int, jax.Array, jax.Array]:
    """(rows, rows a tile, first row int32 [E, G] of each expert's groups, tile_expert).

    Tiles are as many as any routing needs: in every part, all choices at its experts.
    """
    num_experts, num_groups = counts.shape
    part_experts = num_experts // num_parts
    rows_per_tile = dropless_rows_per_tile(num_choices, num_experts)
    padding = (group_rows - 1) * min(part_experts * num_groups, num_choices)
    used_experts = min(part_experts, num_choices)
    # What an expert has is a multiple of group_rows, so its last tile is short of one at most.
    most_rows = num_choices + padding + used_experts * (rows_per_tile - group_rows)
    part_tiles = most_rows // rows_per_tile
    padded = counts + -counts % group_rows  # [E, G]
    tiles = -(-jnp.sum(padded, axis=1) // rows_per_tile).reshape(num_parts, part_experts)
    last_tile = jnp.cumsum(tiles, axis=1)  # [P, E / P], exclusive
    first_tile = last_tile - tiles + part_tiles * jnp.arange(num_parts)[:, None]
    within = jnp.cumsum(padded, axis=1) - padded
    first_row = first_tile.reshape(-1, 1) * rows_per_tile + within
    # The expert whose tiles have not ended yet; after the last one's E / P: no tokens.
    tile = jnp.arange(part_tiles)
    tile_expert = jnp.sum(tile[None, :, None] >= last_tile[:, None, :], axis=-1, dtype=jnp.int32)
    num_rows = num_parts * part_tiles * rows_per_tile
    return num_rows, rows_per_tile, first_row.astype(jnp.int32), tile_expert.reshape(-1)


def _before(counts: jax.Array) -> jax.Array:
    return jnp.cumsum(counts) - counts


def to_experts(x: jax.Array, dispatch: Dispatch) -> jax.Array:
    """x [G * M, D] -> [R, D]; rows without a token are 0."""
    return _gather_rows(x, dispatch.row_of_choice, dispatch.choice_of_row)


def row_ids(token_ids: jax.Array, dispatch: Dispatch) -> jax.Array:
    """A number for each row's choice from its token's (uint32 [G * M]): uint32 [R]."""
    choices = dispatch.row_of_choice.shape[1]
    token, k = dispatch.choice_of_row // choices, dispatch.choice_of_row % choices
    return _take(token_ids, token) * np.uint32(choices) + k.astype(jnp.uint32)


def from_experts(rows: jax.Array, weights: jax.Array, dispatch: Dispatch) -> jax.Array:
    """The weighted sum of each token's choices, in rows' dtype.

    rows: [R, D], weights: [G * M, K] -> [G * M, D].
    """
    return _combine(rows, weights, dispatch.row_of_choice, dispatch.choice_of_row)


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
