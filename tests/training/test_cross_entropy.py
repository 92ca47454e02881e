import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp4zoo.training.cross_entropy import token_losses


def test_value_and_gradient_are_optax_s():
    keys = jax.random.split(jax.random.key(0), 3)
    logits = 5 * jax.random.normal(keys[0], (2, 6, 11))
    targets = jax.random.randint(keys[1], (2, 6), 0, 11)
    weights = jax.random.uniform(keys[2], (2, 6))

    def ours(logits):
        return jnp.sum(weights * token_losses(logits, targets))

    def theirs(logits):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(weights * losses)

    value, gradient = jax.value_and_grad(ours)(logits)
    expected_value, expected_gradient = jax.value_and_grad(theirs)(logits)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)


def test_large_logits_do_not_overflow():
    logits = jnp.asarray([[[1e4, -1e4, 0.0]]])
    losses, pull = jax.vjp(lambda x: token_losses(x, jnp.asarray([[1]])), logits)
    np.testing.assert_allclose(losses, [[2e4]])
    np.testing.assert_allclose(pull(jnp.ones((1, 1)))[0], [[[1.0, -1.0, 0.0]]])


def test_the_backward_pass_has_no_scatter():
    def loss(logits):
        return jnp.sum(token_losses(logits, jnp.zeros((2, 4), jnp.int32)))

    assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss))(jnp.zeros((2, 4, 8))))
