import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp4zoo.layers.embedding import Embedding, OutputHead


def test_lookup_and_tied_logits():
    embedding = Embedding(5, 3, rngs=nnx.Rngs(0))
    table = jnp.arange(15, dtype=jnp.float32).reshape(5, 3)
    embedding.embedding[...] = table
    np.testing.assert_array_equal(
        embedding(jnp.array([[4, 0]])), [[[12.0, 13.0, 14.0], [0.0, 1.0, 2.0]]]
    )
    np.testing.assert_array_equal(
        embedding.attend(jnp.array([1.0, 0.0, -1.0])), [-2.0, -2.0, -2.0, -2.0, -2.0]
    )


def test_untied_head():
    head = OutputHead(3, 4, rngs=nnx.Rngs(0))
    x = jnp.array([[1.0, 2.0, 3.0]])
    np.testing.assert_allclose(head(x), x @ head.kernel[...], rtol=1e-6)


def test_initial_values_are_normal_with_deviation_0_02():
    table = Embedding(1000, 64, rngs=nnx.Rngs(0)).embedding[...]
    assert abs(float(jnp.std(table)) - 0.02) < 2e-4
    assert abs(float(jnp.mean(table))) < 2e-4


def test_unknown_token_is_loud():
    embedding = Embedding(5, 3, rngs=nnx.Rngs(0))
    assert bool(jnp.all(jnp.isnan(embedding(jnp.array([5])))))
    assert bool(jnp.all(jnp.isfinite(embedding(jnp.array([4])))))


def test_logits_are_float32_accumulated_in_float32():
    embedding = Embedding(2, 4096, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    embedding.embedding[...] = jnp.ones((2, 4096))
    assert embedding(jnp.array([0])).dtype == jnp.bfloat16
    # 4096 + 1/8 · 4096 cannot be reached by adding 1.125 in bfloat16.
    logits = embedding.attend(jnp.full((4096,), 1.125, jnp.bfloat16))
    assert logits.dtype == jnp.float32
    np.testing.assert_array_equal(logits, [4608.0, 4608.0])


def test_gradient_reaches_used_rows_only():
    embedding = Embedding(6, 2, rngs=nnx.Rngs(0))
    graph, state = nnx.split(embedding)
    gradient = jax.grad(lambda state: nnx.merge(graph, state)(jnp.array([1, 1, 4])).sum())(state)
    np.testing.assert_array_equal(gradient["embedding"][...][:, 0], [0.0, 2.0, 0.0, 0.0, 1.0, 0.0])
