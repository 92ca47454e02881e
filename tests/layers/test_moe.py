"""NVFP4MoE against a mixture that computes every expert for every token.

Legend: M tokens, K choices a token, E experts, D embed_dim, F mlp_dim.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4zoo.layers import NVFP4MoE
from fp4zoo.layers.dispatch import capacity_rows
from fp4zoo.numerics import get_recipe, linear

D, F, E, K = 32, 48, 4, 2


def make(recipe="fp32", experts_per_token=K, **options):
    return NVFP4MoE(D, F, E, experts_per_token, recipe=recipe, rngs=nnx.Rngs(0), **options)


def tokens(shape=(37,), seed=0):
    return np.random.default_rng(seed).normal(size=(*shape, D)).astype(np.float32)


def routed(experts, seed=0):
    """x whose first E features alone say the expert: `route` makes a layer's router read them."""
    x = tokens((len(experts),), seed)
    x[:, :E] = 10 * np.eye(E)[experts]
    return x


def route(layer):
    layer.router[...] = jnp.eye(D, E) + jnp.zeros((D, E))
    return layer


@nnx.jit
def apply(layer, x, token_mask=None):
    return layer(x, token_mask=token_mask)


@nnx.jit
def gradients(layer, x, rounding_key=None, token_mask=None):
    """(loss, of the layer's parameters, of x); every output and both losses take part."""

    def loss(layer, x):
        y, auxiliary = layer(x, rounding_key=rounding_key, token_mask=token_mask)
        return jnp.sum(y**2) + auxiliary.load_balance_loss + 0.1 * auxiliary.router_z_loss

    return nnx.value_and_grad(loss, argnums=(0, 1))(layer, x)


@functools.partial(jax.jit, static_argnums=(2, 3))
def naive(parameters, x, experts_per_token, capacity=None):
    """The loss of `gradients`, y and how many choices were dropped, one dense product an expert."""

    def loss(parameters, x):
        logits = jnp.dot(x, parameters["router"], precision="highest")
        probabilities = jax.nn.softmax(logits)
        top, chosen = jax.lax.top_k(probabilities, experts_per_token)
        onehot = jax.nn.one_hot(chosen, E)  # [M, K, E]
        weights = jnp.einsum("mke,mk->me", onehot, top / top.sum(-1, keepdims=True))
        if capacity is not None:  # of an expert's choices, in the order of the tokens
            place = jnp.cumsum(onehot.sum(1), axis=0)  # [M, E], from 1
            weights = jnp.where(place <= capacity, weights, 0)
        hidden = jnp.einsum("md,edgf->megf", x, parameters["gate_up"], precision="highest")
        hidden = jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1]
        y = jnp.einsum("mef,efd,me->md", hidden, parameters["down"], weights, precision="highest")
        share = onehot.sum((0, 1)) / (x.shape[0] * experts_per_token)
        balance = E * jnp.sum(share * probabilities.mean(0))
        z = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
        dropped = jnp.sum(onehot.sum(1) > 0) - jnp.sum(weights > 0)
        return jnp.sum(y**2) + balance + 0.1 * z, (y, dropped)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)


def parameters_of(layer):
    return {name: getattr(layer, name)[...] for name in ("router", "gate_up", "down")}


def assert_equals_naive(layer, x, capacity=None):
    flat = x.reshape(-1, D)
    reference = naive(parameters_of(layer), flat, layer.experts_per_token, capacity)
    (loss, (y, dropped)), (d_parameters, dx) = reference
    ours, auxiliary = apply(layer, x)
    our_loss, (our_gradients, our_dx) = gradients(layer, x)

    def close(actual, expected):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(np.reshape(actual, expected.shape), expected, 0, 2e-6 * scale)

    close(ours, np.asarray(y))
    close(our_loss, np.asarray(loss))
    close(our_dx, np.asarray(dx))
    for name, expected in d_parameters.items():
        close(our_gradients[name][...], np.asarray(expected))
    choices = flat.shape[0] * layer.experts_per_token
    assert auxiliary.dropped_fraction == pytest.approx(float(dropped) / choices)
    return auxiliary


class TestAgainstNaive:
    @pytest.mark.parametrize("shape", [(37,), (1,), (2, 3, 8)], ids=str)
    def test_dropless(self, shape):
        auxiliary = assert_equals_naive(make(), tokens(shape))
        assert auxiliary.dropped_fraction == 0

    def test_dropless_with_every_token_at_one_expert(self):
        layer = route(make(experts_per_token=1))
        auxiliary = assert_equals_naive(layer, routed([2] * 37))
        assert auxiliary.tokens_per_expert.tolist() == [0, 0, 37, 0]
        assert auxiliary.dropped_fraction == 0

    def test_capacity_drops_an_experts_last_choices(self):
        """64 tokens, 16 places each: experts 0 and 3 get 30 and 18."""
        experts = np.random.default_rng(0).permutation([0] * 30 + [1] * 10 + [2] * 6 + [3] * 18)
        layer = route(make(experts_per_token=1, capacity_factor=1.0))
        x = routed(experts)
        auxiliary = assert_equals_naive(layer, x, capacity_rows(64, E, 1.0))
        assert auxiliary.dropped_fraction == 16 / 64
        assert auxiliary.tokens_per_expert.tolist() == [30, 10, 6, 18]
        kept = np.zeros(64, bool)
        for expert in range(E):
            kept[np.flatnonzero(experts == expert)[:16]] = True
        y, _ = apply(layer, x)
        np.testing.assert_array_equal(np.any(np.asarray(y) != 0, axis=-1), kept)

    def test_ample_capacity_is_dropless(self):
        layer, x = make(capacity_factor=float(E)), tokens()
        assert_equals_naive(layer, x)
        np.testing.assert_allclose(apply(layer, x)[0], apply(make(), x)[0], atol=1e-6)


class TestAuxiliary:
    def test_literal_numbers(self):
        """Three tokens with probabilities (3/4, 1/4), one with (1/4, 3/4)."""
        layer = NVFP4MoE(16, 16, 2, 1, recipe="fp32", rngs=nnx.Rngs(0))
        layer.router[...] = jnp.zeros((16, 2)).at[0, 0].set(np.log(3)).at[1, 1].set(np.log(3))
        _, auxiliary = apply(layer, np.eye(16, dtype=np.float32)[[0, 0, 1, 0]])
        # 2 (3/4 * (3 * 3/4 + 1/4) / 4 + 1/4 * (3 * 1/4 + 3/4) / 4)
        assert auxiliary.load_balance_loss == pytest.approx(1.125)
        assert auxiliary.router_z_loss == pytest.approx(np.log(4) ** 2)
        assert auxiliary.tokens_per_expert.tolist() == [3, 1]
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(auxiliary))

    def test_an_even_spread_gives_one(self):
        _, auxiliary = apply(route(make(experts_per_token=1)), routed([0, 1, 2, 3] * 4))
        assert auxiliary.load_balance_loss == pytest.approx(1.0)

    @pytest.mark.parametrize("capacity_factor", [None, 0.5])
    def test_masked_tokens_are_nowhere(self, capacity_factor):
        """As if they had not been there; capacity excepted, which the shape decides."""
        x = tokens((4, 12))
        mask = np.random.default_rng(1).random((4, 12)) < 0.6
        layer = make("bf16", capacity_factor=capacity_factor)
        y, auxiliary = apply(layer, x, mask)
        assert not np.any(np.asarray(y)[~mask])
        assert auxiliary.tokens_per_expert.sum() == K * mask.sum()
        _, (_, dx) = gradients(layer, x, None, mask)
        assert not np.any(np.asarray(dx)[~mask]) and np.all(np.any(np.asarray(dx)[mask] != 0, -1))
        if capacity_factor is None:
            alone, alone_auxiliary = apply(layer, x[mask])
            np.testing.assert_allclose(np.asarray(y)[mask], alone, atol=1e-6)
            for a, b in zip(*map(jax.tree.leaves, (auxiliary, alone_auxiliary)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)
        else:
            assert auxiliary.dropped_fraction > 0


class TestNVFP4:
    def test_an_expert_is_two_linear_layers_of_its_own_tokens(self):
        layer = route(make("nvfp4", experts_per_token=1))
        experts = np.random.default_rng(0).choice(E, 50, p=[0.6, 0.3, 0.1, 0])
        x = routed(experts)
        y, _ = apply(layer, x)
        recipe = get_recipe("nvfp4-no-sr")  # the same forward

        @jax.jit
        def expert_alone(x, gate_up, down):
            hidden = linear(x, gate_up, recipe=recipe)
            return linear(jax.nn.silu(hidden[:, 0]) * hidden[:, 1], down, recipe=recipe)

        for e in (0, 1, 2):
            mine = experts == e
            alone = expert_alone(x[mine], layer.gate_up[e], layer.down[e])
            np.testing.assert_allclose(np.asarray(y)[mine], alone, rtol=0, atol=1e-6)

    def test_experts_do_not_see_each_others_tokens(self):
        layer = route(make("nvfp4", experts_per_token=1))
        experts = np.arange(40) % 3
        x = routed(experts)
        changed = np.where(experts[:, None] == 1, x * np.float32(1e4), x)
        changed[:, :E] = x[:, :E]
        key = jax.random.key(0)
        (y, _), (y_changed, _) = apply(layer, x), apply(layer, changed)
        _, (_, dx) = gradients(layer, x, key)
        _, (_, dx_changed) = gradients(layer, changed, key)
        others = experts != 1
        np.testing.assert_array_equal(y[others], y_changed[others])
        np.testing.assert_array_equal(dx[others], dx_changed[others])
        assert np.all(np.any(np.asarray(y != y_changed)[~others], axis=-1))

    def test_the_key_decides_the_gradients(self):
        layer, x = make("nvfp4", rounding="explicit"), tokens()
        one, same, other = (gradients(layer, x, jax.random.key(seed))[1] for seed in (0, 0, 1))
        for name in ("gate_up", "down"):
            np.testing.assert_array_equal(one[0][name][...], same[0][name][...])
            assert np.any(one[0][name][...] != other[0][name][...])
        assert np.any(one[1] != other[1])

    def test_bfloat16_activations(self):
        layer = make("nvfp4", dtype=jnp.bfloat16)
        y, auxiliary = apply(layer, tokens())
        _, (d_layer, dx) = gradients(layer, tokens())
        assert (y.dtype, dx.dtype, auxiliary.router_z_loss.dtype) == (
            jnp.bfloat16,
            jnp.float32,
            jnp.float32,
        )
        assert {leaf.dtype for leaf in jax.tree.leaves(d_layer)} == {jnp.dtype(jnp.float32)}

    @pytest.mark.parametrize("bad", [np.inf, np.nan])
    def test_non_finite_tokens_show(self, bad):
        x = tokens()
        x[3, 5] = bad
        y, _ = apply(make("nvfp4"), x)
        assert not np.any(np.isfinite(y[3]))

    def test_ensemble_remat_and_scan(self):
        """Three stacked layers: an ensemble by vmap is a loop, and so is a scan with remat."""

        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def create(rngs):
            return NVFP4MoE(D, F, E, K, recipe="nvfp4", rngs=rngs)

        layers, x = create(nnx.Rngs(0)), tokens()
        graph, state = nnx.split(layers)
        singles = [nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], state)) for i in range(3)]
        ensemble = nnx.jit(nnx.vmap(lambda layer, x: layer(x)[0], in_axes=(0, None)))(layers, x)
        for y, single in zip(ensemble, singles, strict=True):
            np.testing.assert_allclose(y, apply(single, x)[0], atol=1e-6)
        np.testing.assert_array_equal(layers.rounding.count[...], [1, 1, 1])

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def forward(x, layer):
            return x + layer(x)[0]

        loss = nnx.jit(nnx.value_and_grad(lambda layers, x: jnp.sum(forward(x, layers) ** 2)))
        value, gradient = loss(layers, x)
        by_hand = x
        for single in singles:
            by_hand = by_hand + apply(single, by_hand)[0]
        assert value == pytest.approx(float(jnp.sum(by_hand**2)), rel=1e-3)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
        np.testing.assert_array_equal(layers.rounding.count[...], [2, 2, 2])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((32, 48, 4, 5), {}, "experts_per_token=5 must lie between 1 and num_experts=4"),
        ((32, 48, 4, 0), {}, "experts_per_token=0"),
        ((32, 48, 4, 2), {"capacity_factor": 0.0}, "capacity_factor=0.0 must be positive"),
        ((32, 48, 4, 2), {"capacity_factor": float("nan")}, "capacity_factor=nan"),
        ((40, 48, 4, 2), {"name": "moe"}, "moe: embed_dim=40 is not a multiple of 16.*use 48"),
        ((32, 50, 4, 2), {}, "mlp_dim=50"),
        ((32, 48, 4, 2), {"rounding": "none"}, "rounding='none'"),
    ],
)
def test_errors_name_layer_value_and_remedy(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        NVFP4MoE(*arguments, rngs=nnx.Rngs(0), **options)


def test_unsupported_dimensions_run_in_bf16_when_asked(caplog):
    layer = NVFP4MoE(40, 48, 4, 2, on_unsupported="bf16", rngs=nnx.Rngs(0), name="moe")
    assert layer.recipe.name == "bf16" and layer.rounding is None
    assert "moe: embed_dim=40" in caplog.text
