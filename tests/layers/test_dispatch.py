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

SHAPES = [(1, 1, 4), (37, 2, 5), (300, 1, 2)]  # M, K, E: few to compile
plan = jax.jit(plan_dispatch, static_argnums=(1, 2))


@st.composite
def routings(draw):
    """experts [M, K] with values up to E, which means dropped; skewed ones among them."""
    shape = draw(st.sampled_from(SHAPES))
    tokens, choices, num_experts = shape
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weights = random.dirichlet(np.full(num_experts + 1, draw(st.sampled_from([0.05, 1.0, 100.0]))))
    experts = random.choice(num_experts + 1, size=(tokens, choices), p=weights)
    return experts.astype(np.int32), num_experts


def kept_choices(experts, num_experts, limit):
    """The flat choices that each expert keeps, in order."""
    flat = experts.reshape(-1)
    return [np.flatnonzero(flat == e)[:limit] for e in range(num_experts)]


@settings(max_examples=60, deadline=None)
@given(routings(), st.sampled_from([None, 0.6]))
def test_a_choice_has_one_row_and_a_row_one_choice(routing, capacity_factor):
    experts, num_experts = routing
    dispatch = plan(experts, num_experts, capacity_factor)
    row_of_choice = np.asarray(dispatch.row_of_choice).reshape(-1)
    choice_of_row = np.asarray(dispatch.choice_of_row)
    tile_expert = np.asarray(dispatch.tile_expert)
    num_rows, rows = dispatch.num_rows, dispatch.rows_per_tile
    assert rows % 16 == 0 and num_rows == rows * tile_expert.size
    assert np.all(np.diff(tile_expert) >= 0) and tile_expert.max() < num_experts

    limit = None
    if capacity_factor is not None:
        limit = capacity_rows(experts.size, num_experts, capacity_factor)
        assert tile_expert.tolist() == list(range(num_experts)) and rows == limit
    kept = kept_choices(experts, num_experts, limit)
    expected = np.full(num_rows, experts.size)
    for expert, choices in enumerate(kept):
        if choices.size:  # contiguous from the expert's first tile on
            first = int(np.argmax(tile_expert == expert)) * rows
            expected[first : first + choices.size] = choices
    np.testing.assert_array_equal(choice_of_row, expected)
    used = choice_of_row < experts.size
    assert np.all(row_of_choice[choice_of_row[used]] == np.flatnonzero(used))
    assert np.sum(row_of_choice < num_rows) == sum(choices.size for choices in kept)
    assert np.all(row_of_choice <= num_rows)
    used_tiles = used.reshape(-1, rows).any(axis=1)
    assert not used_tiles[int(dispatch.num_tiles) :].any()
    if capacity_factor is None:
        assert used_tiles[: int(dispatch.num_tiles)].all()


@functools.partial(jax.jit, static_argnums=(3, 4))
def transport(x, weights, experts, num_experts, capacity_factor):
    """(rows, the way back of rows, and the gradients of both)."""
    dispatch = plan_dispatch(experts, num_experts, capacity_factor)
    rows, to_pullback = jax.vjp(lambda x: to_experts(x, dispatch), x)
    y, from_pullback = jax.vjp(lambda r, w: from_experts(r, w, dispatch), rows**2, weights)
    return dispatch, rows, to_pullback(rows**3), y, from_pullback(x)


@settings(max_examples=25, deadline=None)
@given(routings(), st.sampled_from([None, 0.6]))
def test_rows_and_gradients_are_those_of_a_permutation_matrix(routing, capacity_factor):
    experts, num_experts = routing
    tokens, choices = experts.shape
    random = np.random.default_rng(0)
    x = random.normal(size=(tokens, 4)).astype(np.float32)
    weights = random.normal(size=experts.shape).astype(np.float32)
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
    experts = np.tile(np.arange(8, dtype=np.int32), (3, 1))
    x = jnp.full((3, 4), 1 + 2.0**-7, jnp.bfloat16)
    weights = np.full((3, 8), 1 / 8, np.float32)
    _, rows, (dx,), y, _ = transport(x, weights, experts, 8, None)
    assert (rows.dtype, dx.dtype, y.dtype) == (jnp.bfloat16,) * 3
    np.testing.assert_array_equal(y, (rows**2)[0, 0, 0])


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
