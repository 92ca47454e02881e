"""Dispatch against its definition, on routings that hypothesis draws."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4zoo.layers.dispatch import (
    capacity_rows,
    dropless_rows_per_tile,
    from_experts,
    plan_dispatch,
    to_experts,
)

# G, M, K, E, and parts: few to compile
SHAPES = [(1, 1, 1, 4, 1), (1, 37, 2, 5, 1), (3, 100, 1, 2, 2), (4, 20, 2, 6, 3)]
plan = jax.jit(plan_dispatch, static_argnums=(1, 2), static_argnames=("group_rows", "num_parts"))


@st.composite
def routings(draw):
    """(experts [G, M, K] with values up to E, which means dropped; E; parts); skewed ones too."""
    groups, tokens, choices, num_experts, parts = draw(st.sampled_from(SHAPES))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weights = random.dirichlet(np.full(num_experts + 1, draw(st.sampled_from([0.05, 1.0, 100.0]))))
    experts = random.choice(num_experts + 1, size=(groups, tokens, choices), p=weights)
    return experts.astype(np.int32), num_experts, parts


def kept_choices(experts, num_experts, limit):
    """{(expert, group): the flat choices that are kept, in order}."""
    size = experts[0].size
    return {
        (e, g): np.flatnonzero(group.reshape(-1) == e)[:limit] + g * size
        for e in range(num_experts)
        for g, group in enumerate(experts)
    }


@settings(max_examples=60, deadline=None)
@given(routings(), st.sampled_from([(None, 1), (None, 16), (0.6, 1)]))
def test_a_choice_has_one_row_and_a_row_one_choice(routing, mode):
    (experts, num_experts, parts), (capacity_factor, group_rows) = routing, mode
    dispatch = plan(experts, num_experts, capacity_factor, group_rows=group_rows, num_parts=parts)
    row_of_choice = np.asarray(dispatch.row_of_choice).reshape(-1)
    choice_of_row = np.asarray(dispatch.choice_of_row)
    num_rows, rows = dispatch.num_rows, dispatch.rows_per_tile
    assert rows % 16 == 0 and num_rows % rows == 0

    expected = np.full(num_rows, experts.size)
    if capacity_factor is None:
        kept = kept_choices(experts, num_experts, None)
        tile_expert = np.asarray(dispatch.tile_expert).reshape(parts, -1)
        here = num_experts // parts
        for part, tiles in enumerate(tile_expert):
            assert np.all(np.diff(tiles) >= 0) and np.all(tiles <= here)
            tile = part * tiles.size
            for expert in range(part * here, (part + 1) * here):
                row = tile * rows
                for group in range(len(experts)):  # from a multiple of group_rows each
                    choices = kept[expert, group]
                    expected[row : row + choices.size] = choices
                    row += choices.size + -choices.size % group_rows
                tile += np.sum(tiles == expert - part * here)
                assert row <= tile * rows < row + rows  # as many tiles as it needs
    else:
        assert dispatch.tile_expert is None
        assert rows == capacity_rows(experts[0].size, num_experts, capacity_factor)
        kept = kept_choices(experts, num_experts, rows)
        for index, choices in enumerate(kept.values()):
            expected[index * rows : index * rows + choices.size] = choices
    np.testing.assert_array_equal(choice_of_row, expected)
    used = choice_of_row < experts.size
    assert np.all(row_of_choice[choice_of_row[used]] == np.flatnonzero(used))
    assert np.sum(dispatch.is_kept) == sum(choices.size for choices in kept.values())
    assert np.all(row_of_choice <= num_rows)


@functools.partial(jax.jit, static_argnums=(3, 4))
def transport(x, weights, experts, num_experts, capacity_factor):
    """(rows, the way back of rows, and the gradients of both)."""
    dispatch = plan_dispatch(experts, num_experts, capacity_factor, group_rows=16)
    rows, to_pullback = jax.vjp(lambda x: to_experts(x, dispatch), x)
    y, from_pullback = jax.vjp(lambda r, w: from_experts(r, w, dispatch), rows**2, weights)
    return dispatch, rows, to_pullback(rows**3), y, from_pullback(x)


@settings(max_examples=25, deadline=None)
@given(routings(), st.sampled_from([None, 0.6]))
def test_rows_and_gradients_are_those_of_a_permutation_matrix(routing, capacity_factor):
    experts, num_experts, _ = routing
    choices = experts.shape[-1]
    tokens = experts.size // choices
    random = np.random.default_rng(0)
    x = random.normal(size=(tokens, 4)).astype(np.float32)
    weights = random.normal(size=(tokens, choices)).astype(np.float32)
    dispatch, rows, (dx,), y, (d_rows, d_weights) = transport(
        x, weights, experts, num_experts, capacity_factor
    )
    # One-hot: [M, K, R], all zero where a choice was dropped.
    place = np.asarray(dispatch.row_of_choice)[..., None] == np.arange(dispatch.num_rows)
    place = place.astype(np.float64)
    flat = np.asarray(rows).reshape(-1, 4)
    np.testing.assert_array_equal(flat, np.einsum("mkr,md->rd", place, x))
    squares, cubes = flat**2, flat**3

    def close(actual, expected):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)

    close(dx, np.einsum("mkr,rd->md", place, cubes))
    close(y, np.einsum("mkr,mk,rd->md", place, weights, squares))
    close(d_weights, np.einsum("mkr,md,rd->mk", place, x, squares))
    close(np.asarray(d_rows).reshape(-1, 4), np.einsum("mkr,mk,md->rd", place, weights, x))


def test_bfloat16_rows_are_summed_in_float32():
    """Eight choices of 1 + 2^-7 weighted 1/8: a bfloat16 sum would round on the way."""
    experts = np.tile(np.arange(8, dtype=np.int32), (1, 3, 1))
    x = jnp.full((3, 4), 1 + 2.0**-7, jnp.bfloat16)
    weights = np.full((3, 8), 1 / 8, np.float32)
    _, rows, (dx,), y, _ = transport(x, weights, experts, 8, None)
    assert (rows.dtype, dx.dtype, y.dtype) == (jnp.bfloat16,) * 3
    np.testing.assert_array_equal(y, (rows**2)[0, 0])


@pytest.mark.parametrize(
    ("num_choices", "num_experts", "rows"),
    [(1, 8, 16), (2048, 8, 64), (4096, 8, 128), (10**6, 8, 256)],
)
def test_tiles_are_an_eighth_of_a_share(num_choices, num_experts, rows):
    assert dropless_rows_per_tile(num_choices, num_experts) == rows


@pytest.mark.parametrize(("factor", "rows"), [(1.0, 32), (1.01, 48), (0.001, 16), (8.0, 256)])
def test_capacity_is_rounded_up_to_16(factor, rows):
    assert capacity_rows(256, 8, factor) == rows
    assert rows >= math.ceil(factor * 32)
