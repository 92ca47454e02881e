import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4zoo.numerics import random_hadamard
from fp4zoo.numerics.hadamard import MATRIX


def test_matrix_is_orthogonal_with_entries_of_a_quarter():
    np.testing.assert_array_equal(MATRIX @ MATRIX.T, np.eye(16, dtype=np.float32))
    np.testing.assert_array_equal(np.abs(MATRIX), np.full((16, 16), 0.25, np.float32))
    np.testing.assert_array_equal(
        MATRIX[:, 0] * 4, [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    )


hadamard = jax.jit(random_hadamard, static_argnames="axis")


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_any_axis_is_the_last_axis_of_the_transpose(dtype):
    x = normal(16, 32, 16).astype(dtype)
    for axis in (0, 1, 2, -1):
        along_last = hadamard(np.moveaxis(x, axis, -1))
        assert along_last.dtype == dtype
        np.testing.assert_array_equal(np.moveaxis(hadamard(x, axis), axis, -1), along_last)


def test_eager_is_jit():
    x = normal(16)
    np.testing.assert_array_equal(random_hadamard(jnp.asarray(x)), hadamard(x))


def test_cancels_in_a_product():
    x, g = normal(2, 64, 32)
    transformed = np.asarray(hadamard(x, 0)).T @ np.asarray(hadamard(g, 0))
    np.testing.assert_allclose(transformed, x.T @ g, atol=1e-4)


def test_spreads_an_outlier():
    x = np.zeros(16, np.float32)
    x[5] = 1
    np.testing.assert_array_equal(np.abs(hadamard(x)), np.full(16, 0.25))


def test_works_under_vmap():
    x = normal(3, 4, 32)
    np.testing.assert_array_equal(jax.jit(jax.vmap(random_hadamard))(x), hadamard(x))


def test_names_the_axis_that_does_not_fit():
    with pytest.raises(ValueError, match="axis 1, got 20"):
        random_hadamard(jnp.zeros((16, 20)))
