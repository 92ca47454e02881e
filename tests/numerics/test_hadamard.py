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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_any_axis_is_the_last_axis_of_the_transpose(axis, dtype):
    x = jax.random.normal(jax.random.key(0), (32, 48, 16), dtype)
    along_last = random_hadamard(jnp.moveaxis(x, axis, -1))
    np.testing.assert_array_equal(jnp.moveaxis(random_hadamard(x, axis), axis, -1), along_last)
    assert along_last.dtype == dtype


def test_cancels_in_a_product():
    x, g = jax.random.normal(jax.random.key(0), (2, 64, 32))
    transformed = random_hadamard(x, 0).T @ random_hadamard(g, 0)
    np.testing.assert_allclose(transformed, x.T @ g, atol=1e-4)


def test_spreads_an_outlier():
    x = jnp.zeros(16).at[5].set(1.0)
    np.testing.assert_array_equal(jnp.abs(random_hadamard(x)), jnp.full(16, 0.25))


def test_works_under_vmap():
    x = jax.random.normal(jax.random.key(0), (3, 4, 32))
    np.testing.assert_array_equal(jax.vmap(random_hadamard)(x), random_hadamard(x))


def test_names_the_axis_that_does_not_fit():
    with pytest.raises(ValueError, match="axis 1, got 20"):
        random_hadamard(jnp.zeros((16, 20)))
