import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp4zoo.layers.norm import RMSNorm


def test_known_values():
    norm = RMSNorm(4, epsilon=0.5, rngs=nnx.Rngs(0))
    norm.scale[...] = jnp.array([1.0, 2.0, 3.0, 4.0])
    # mean square 3.5, so the divisor is sqrt(3.5 + 0.5) = 2.
    y = norm(jnp.array([1.0, -2.0, 3.0, 0.0]))
    np.testing.assert_allclose(y, [0.5, -2.0, 4.5, 0.0], rtol=1e-6)


def test_gradient_matches_flax():
    x = jax.random.normal(jax.random.key(0), (3, 32))
    weights = jax.random.normal(jax.random.key(1), (3, 32))
    ours = RMSNorm(32, epsilon=1e-5, rngs=nnx.Rngs(0))
    theirs = nnx.RMSNorm(32, epsilon=1e-5, rngs=nnx.Rngs(0))

    def gradients(norm):
        return jax.grad(
            lambda scale, x: jnp.sum(weights * nnx.merge(nnx.graphdef(norm), scale)(x)), (0, 1)
        )(nnx.state(norm), x)

    for mine, reference in zip(
        jax.tree.leaves(gradients(ours)), jax.tree.leaves(gradients(theirs)), strict=True
    ):
        np.testing.assert_allclose(mine, reference, atol=1e-5)


def test_computed_in_float32_returned_in_the_input_dtype():
    # Summed in bfloat16, the squares of 300 values near 16 would be off by percents.
    x = jax.random.uniform(jax.random.key(0), (300,), minval=15, maxval=17).astype(jnp.bfloat16)
    y = RMSNorm(300, rngs=nnx.Rngs(0))(x)
    assert y.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64)
    exact /= np.sqrt(np.mean(exact**2) + 1e-6)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8)


def test_backward_stores_the_input_only():
    norm = RMSNorm(64, rngs=nnx.Rngs(0))
    x = jnp.ones((16, 64), jnp.bfloat16)
    _, pullback = jax.vjp(lambda x: norm(x), x)
    large = [leaf for leaf in jax.tree.leaves(pullback) if jnp.size(leaf) >= x.size]
    assert [leaf.dtype for leaf in large] == [jnp.bfloat16]
