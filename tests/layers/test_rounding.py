"""The rounding stream: fresh bits at every call, under NNX transforms and plain JAX ones alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4zoo.layers import NVFP4Dense
from fp4zoo.layers.rounding import RoundingStream
from fp4zoo.numerics import RECIPES

X = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)


def loss(layer, x):
    return jnp.sum(layer(x) ** 2)


@pytest.fixture
def layer():
    return NVFP4Dense(32, 32, use_bias=False, rngs=nnx.Rngs(0))


def count(layer):
    return np.asarray(layer.rounding.count[...]).tolist()


def differ(a, b):
    return bool(np.any(np.asarray(a) != np.asarray(b)))


class TestUnderNNXTransforms:
    def test_every_step_advances_and_draws_new_bits(self, layer):
        step = nnx.jit(lambda layer, x: nnx.grad(loss, argnums=(0, 1))(layer, x))
        (first_w, first_x), (second_w, second_x) = step(layer, X), step(layer, X)
        assert differ(first_x, second_x) and differ(first_w.kernel[...], second_w.kernel[...])
        assert count(layer) == 2

    def test_remat_counts_a_call_once(self, layer):
        def rematerialised(layer, x):
            return jnp.sum(nnx.remat(lambda layer, x: layer(x))(layer, x) ** 2)

        gradient = nnx.jit(nnx.grad(rematerialised))(layer, X)
        assert count(layer) == 1
        other = nnx.jit(nnx.grad(loss))(NVFP4Dense(32, 32, use_bias=False, rngs=nnx.Rngs(0)), X)
        np.testing.assert_array_equal(gradient.kernel[...], other.kernel[...])

    def test_stacked_layers_draw_their_own(self):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def create(rngs):
            return NVFP4Dense(32, 32, use_bias=False, rngs=rngs)

        stacked = create(nnx.Rngs(0))
        # The same weight in each layer, and the same x and g: only the bits can differ.
        stacked.kernel[...] = jnp.broadcast_to(stacked.kernel[0], stacked.kernel.shape)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def forward(x, layer):
            return x, layer(x)

        @nnx.jit
        def gradient(stacked, x):
            return nnx.grad(lambda stacked, x: jnp.sum(forward(x, stacked)[1] ** 2))(stacked, x)

        first, second = gradient(stacked, X).kernel[...], gradient(stacked, X).kernel[...]
        all_of_them = np.asarray([*first, *second])
        for i in range(6):
            for j in range(i):
                assert differ(all_of_them[i], all_of_them[j])
        assert count(stacked) == [2, 2, 2]

    def test_a_checkpointed_stream_goes_on_where_it_was(self, layer):
        step = nnx.jit(nnx.grad(loss))
        step(layer, X)
        graph, state = nnx.split(layer)
        restored = nnx.merge(graph, jax.tree.map(jnp.copy, state))
        np.testing.assert_array_equal(step(restored, X).kernel[...], step(layer, X).kernel[...])


class TestUnderPlainTransforms:
    """A layer closed over cannot advance: the gradient's own bits tell calls apart."""

    def test_nothing_raises_and_nothing_leaks(self, layer):
        def twice(x):
            return jax.lax.scan(lambda x, _: (layer(x), None), x, length=2)[0]

        jax.jit(jax.vmap(lambda x: layer(x)))(X)
        jax.jit(jax.grad(lambda x: jnp.sum(twice(x))))(X)
        assert count(layer) == 0

    def test_two_gradients_draw_two_sets_of_bits(self, layer):
        layer.kernel[...] = jnp.eye(32)

        @jax.jit
        def noise(g):  # of dx = SR(g), the weight being one
            return jax.vjp(lambda x: layer(x), jnp.asarray(X))[1](g)[0] - g

        g = np.random.default_rng(5).uniform(-2, 2, (32, 32)).astype(np.float32)
        g[:, ::16] = 6  # scale 1 for every block: the same spacing everywhere
        other = g.copy()
        other[0, 1] += 1e-3
        np.testing.assert_array_equal(noise(g), noise(g))
        correlation = np.corrcoef(np.ravel(noise(g)), np.ravel(noise(other)))[0, 1]
        assert abs(correlation) < 5.5 / 32

    def test_a_loop_that_does_not_carry_the_count_draws_new_bits(self, layer):
        """Pure steps on split parameters, as in other people's loops: accumulation by scan."""
        graph, parameters, rest = nnx.split(layer, nnx.Param, ...)

        @jax.jit
        def gradients(parameters, scales):
            def body(_, scale):  # gradients that differ by a little
                def scaled(parameters):
                    return scale * loss(nnx.merge(graph, parameters, rest), X)

                return None, jax.grad(scaled)(parameters)["kernel"][...] / scale

            return jax.lax.scan(body, None, scales)[1]

        first, second = gradients(parameters, jnp.asarray([1.0, 1.001]))
        assert np.abs(first - second).max() > 0.02 * np.abs(first).max()


class TestKeys:
    def test_every_layer_has_its_own(self):
        rngs = nnx.Rngs(0)
        layers = [NVFP4Dense(16, 16, rngs=rngs) for _ in range(3)]
        layers.append(NVFP4Dense(16, 16, rngs=nnx.Rngs(1)))
        keys = {tuple(jax.random.key_data(layer.rounding.key[...]).tolist()) for layer in layers}
        assert len(keys) == 4

    def test_the_callers_own_stream_is_used(self):
        def key(**streams):
            layer = NVFP4Dense(16, 16, rngs=nnx.Rngs(**streams))
            return jax.random.key_data(layer.rounding.key[...]).tolist()

        assert key(params=0, stochastic_rounding=1) == key(params=5, stochastic_rounding=1)
        assert key(params=0, stochastic_rounding=1) != key(params=0, stochastic_rounding=2)
        assert key(params=0) != key(params=1)

    def test_a_key_given_by_the_caller_replaces_the_stream(self, layer):
        def gradient(layer, x, key):
            return nnx.grad(lambda x: jnp.sum(layer(x, rounding_key=key) ** 2))(x)

        step = nnx.jit(gradient)
        one, same, other = (step(layer, X, jax.random.key(seed)) for seed in (0, 0, 1))
        np.testing.assert_array_equal(one, same)
        assert differ(one, other) and count(layer) == 0

    @pytest.mark.parametrize(
        ("rounding", "recipe", "exists"),
        [
            ("stream", "nvfp4", True),
            ("explicit", "nvfp4", False),
            ("stream", "nvfp4-no-sr", False),
            ("stream", "bf16", False),
        ],
    )
    def test_only_a_layer_that_needs_one_has_one(self, rounding, recipe, exists):
        stream = RoundingStream.create(rounding, RECIPES[recipe], nnx.Rngs(0))
        assert (stream is not None) == exists

    def test_an_unknown_choice_is_named(self):
        with pytest.raises(ValueError, match='rounding=\'always\': use "stream" or "explicit"'):
            RoundingStream.create("always", RECIPES["nvfp4"], nnx.Rngs(0))
