"""NVFP4MoE against a mixture that computes every expert for every token.

Legend: M tokens, K choices a token, E experts, D embed_dim, F mlp_dim.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4zoo.layers import NVFP4MoE, moe
from fp4zoo.layers.dispatch import capacity_rows
from fp4zoo.numerics import get_recipe, linear

D, F, E, K = 32, 48, 4, 2
KEY = jax.random.key(0)


def numpy_init(key, shape, dtype):
    """Nothing to compile."""
    values = np.random.default_rng(len(shape)).normal(size=shape) / shape[-2] ** 0.5
    return jnp.asarray(values, dtype)


INITS = dict.fromkeys(("router_init", "gate_up_init", "down_init"), numpy_init)


def make(recipe="fp32", experts_per_token=K, rngs=None, **options):
    rngs = rngs or nnx.Rngs(0)
    return NVFP4MoE(D, F, E, experts_per_token, recipe=recipe, **INITS, **options, rngs=rngs)


def tokens(shape=(40,)):
    return np.random.default_rng(0).normal(size=(*shape, D)).astype(np.float32)


def routed(experts):
    """x whose first E features alone say the expert: `route` makes a layer's router read them."""
    x = tokens((len(experts),))
    x[:, :E] = 10 * np.eye(E)[experts]
    return x


def route(layer):
    layer.router[...] = jnp.asarray(np.eye(D, E, dtype=np.float32))
    return layer


@nnx.jit
def run(layer, x, key=None, token_mask=None):
    """(y, auxiliary, loss, its gradients of layer and x); y and both losses take part in it."""

    def loss(layer, x):
        y, auxiliary = layer(x, rounding_key=key, token_mask=token_mask)
        total = jnp.sum(y.astype(jnp.float32) ** 2)
        total += auxiliary.load_balance_loss + 0.1 * auxiliary.router_z_loss
        return total, (y, auxiliary)

    (value, (y, auxiliary)), gradients = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        layer, x
    )
    return y, auxiliary, value, *gradients


@functools.partial(jax.jit, static_argnums=(2, 3))
def naive(parameters, x, experts_per_token, capacity=None):
    """The loss of `run`, y and how many choices were dropped, one dense product an expert."""

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
    reference = naive(parameters_of(layer), x, layer.experts_per_token, capacity)
    (expected_loss, (expected_y, dropped)), (expected_layer, expected_dx) = reference
    y, auxiliary, loss, d_layer, dx = run(layer, x)

    def close(actual, expected):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(actual, expected, 0, 2e-6 * scale)

    close(y, np.asarray(expected_y))
    close(loss, np.asarray(expected_loss))
    close(dx, np.asarray(expected_dx))
    for name, expected in expected_layer.items():
        close(d_layer[name][...], np.asarray(expected))
    choices = x.shape[0] * layer.experts_per_token
    assert auxiliary.dropped_fraction == pytest.approx(float(dropped) / choices)
    return auxiliary


class TestAgainstNaive:
    @pytest.mark.parametrize("count", [40, 1])
    def test_dropless(self, count):
        assert assert_equals_naive(make(), tokens((count,))).dropped_fraction == 0

    def test_dropless_with_every_token_at_one_expert(self):
        layer = route(make(experts_per_token=1))
        auxiliary = assert_equals_naive(layer, routed([2] * 40))
        assert auxiliary.tokens_per_expert.tolist() == [0, 0, 40, 0]
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
        np.testing.assert_array_equal(np.any(np.asarray(run(layer, x)[0]) != 0, axis=-1), kept)

    def test_ample_capacity_is_dropless(self):
        assert_equals_naive(make(capacity_factor=float(E)), tokens())


class TestAuxiliary:
    def test_literal_numbers(self):
        """Thirty tokens with probabilities (3/4, 1/12, ...), ten with the 3/4 elsewhere."""
        layer = route(make(experts_per_token=1))
        layer.router[...] *= np.log(9)
        x = np.zeros((40, D), np.float32)
        x[:30, 0] = x[30:, 1] = 1
        _, auxiliary, *_ = run(layer, x)
        # Shares (3/4, 1/4), mean probabilities (3/4 * 3/4 + 1/4 * 1/12, 3/4 * 1/12 + 1/4 * 3/4).
        assert auxiliary.load_balance_loss == pytest.approx(4 * (0.75 * 7 / 12 + 0.25 * 0.25))
        assert auxiliary.router_z_loss == pytest.approx(np.log(12) ** 2)
        assert auxiliary.tokens_per_expert.tolist() == [30, 10, 0, 0]
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(auxiliary))

    def test_an_even_spread_gives_one(self):
        _, auxiliary, *_ = run(route(make(experts_per_token=1)), routed([0, 1, 2, 3] * 10))
        assert auxiliary.load_balance_loss == pytest.approx(1.0)

    @pytest.mark.parametrize("capacity_factor", [None, 0.2])
    def test_masked_tokens_are_nowhere(self, capacity_factor):
        """As if they had not been there; capacity excepted, which the shape decides."""
        x = tokens((1, 80))
        mask = np.random.default_rng(1).permutation([True] * 40 + [False] * 40).reshape(1, 80)
        layer = make(capacity_factor=capacity_factor)
        y, auxiliary, _, _, dx = run(layer, x, None, mask)
        assert not np.any(np.asarray(y)[~mask]) and not np.any(np.asarray(dx)[~mask])
        assert auxiliary.tokens_per_expert.sum() == K * 40
        if capacity_factor is None:
            alone, alone_auxiliary, _, _, alone_dx = run(layer, x[mask])
            np.testing.assert_allclose(np.asarray(y)[mask], alone, atol=1e-5)
            np.testing.assert_allclose(np.asarray(dx)[mask], alone_dx, atol=1e-5)
            for a, b in zip(*map(jax.tree.leaves, (auxiliary, alone_auxiliary)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)
        else:
            assert auxiliary.dropped_fraction > 0


class TestNVFP4:
    def test_an_expert_is_two_linear_layers_of_its_own_tokens(self):
        layer = route(make("nvfp4", experts_per_token=1))
        experts = np.random.default_rng(0).permutation([0] * 17 + [1] * 6 + [2] * 17)
        x = routed(experts)
        y, *_ = run(layer, x, KEY)
        recipe = get_recipe("nvfp4-no-sr")  # the same forward

        @jax.jit
        def expert_alone(x, gate_up, down):
            hidden = linear(x, gate_up, recipe=recipe)
            return linear(jax.nn.silu(hidden[:, 0]) * hidden[:, 1], down, recipe=recipe)

        for e in (0, 2):
            mine = experts == e
            alone = expert_alone(x[mine], layer.gate_up[e], layer.down[e])
            np.testing.assert_allclose(np.asarray(y)[mine], alone, rtol=0, atol=1e-6)

    def test_experts_do_not_see_each_others_tokens(self):
        layer = route(make("nvfp4", experts_per_token=1))
        experts = np.arange(40) % 3
        x = routed(experts)
        changed = np.where(experts[:, None] == 1, x * np.float32(1e4), x)
        changed[:, :E] = x[:, :E]
        y, _, _, d_layer, dx = run(layer, x, KEY)
        y_changed, _, _, d_changed, dx_changed = run(layer, changed, KEY)
        others = experts != 1
        np.testing.assert_array_equal(y[others], y_changed[others])
        np.testing.assert_array_equal(dx[others], dx_changed[others])
        for name in ("gate_up", "down"):
            np.testing.assert_array_equal(d_layer[name][0], d_changed[name][0])
            assert np.any(d_layer[name][1] != d_changed[name][1])
        assert np.all(np.any(np.asarray(y != y_changed)[~others], axis=-1))

    def test_the_key_decides_the_gradients(self):
        layer, x = make("nvfp4"), tokens()
        one, same, other = (run(layer, x, jax.random.key(seed)) for seed in (0, 0, 1))
        for name in ("gate_up", "down"):
            np.testing.assert_array_equal(one[3][name][...], same[3][name][...])
            assert np.any(one[3][name][...] != other[3][name][...])
        assert np.any(one[4] != other[4])
        np.testing.assert_array_equal(one[0], other[0])

    def test_the_two_products_draw_from_two_keys(self, monkeypatch):
        layer, keys = make("nvfp4"), []

        def recorded(x, kernel, *_, key, **__):
            keys.append(jax.random.key_data(key))
            return jnp.zeros((*x.shape[:2], *kernel.shape[2:]))

        @jax.jit
        def keys_of_two_calls(x):
            layer(x, rounding_key=KEY)
            layer(x)
            return jnp.stack(keys)

        monkeypatch.setattr(moe, "grouped_linear", recorded)
        assert len(np.unique(keys_of_two_calls(tokens()), axis=0)) == 4

    def test_bfloat16_activations_have_float32_gradients(self):
        graph, state = nnx.split(make("nvfp4", dtype=jnp.bfloat16))
        shapes = jax.eval_shape(lambda state, x: run(nnx.merge(graph, state), x), state, tokens())
        y, *others = shapes
        assert y.dtype == jnp.bfloat16
        assert {leaf.dtype for leaf in jax.tree.leaves(others)} == {jnp.dtype(jnp.float32)}

    @pytest.mark.parametrize("bad", [np.inf, np.nan])
    def test_non_finite_tokens_show(self, bad):
        x = tokens()
        x[3, 5] = bad
        y, _, loss, d_layer, _ = run(make("nvfp4"), x, KEY)
        assert not np.any(np.isfinite(y[3])) and not np.isfinite(loss)
        for name in ("router", "gate_up", "down"):
            assert not np.all(np.isfinite(d_layer[name][...]))

    def test_ensemble_is_a_loop(self):
        """Three stacked layers with their own routings, amax and keys."""
        layers, x, keys = stacked(), tokens(), jax.random.split(KEY, 3)
        graph, state = nnx.split(layers)
        batched = nnx.jit(nnx.vmap(run, in_axes=(0, None, 0, None)))(layers, x, keys)
        for i in range(3):
            member = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))
            expected = run(member, x, keys[i])
            for a, b in zip(*map(jax.tree.leaves, (batched, expected)), strict=True):
                np.testing.assert_allclose(a[i], b, atol=1e-5 * np.abs(b).max())

    def test_scan_with_remat_trains(self):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def forward(x, layer):
            return x + layer(x)[0]

        layers = stacked()
        gradient = nnx.jit(nnx.grad(lambda layers, x: jnp.sum(forward(x, layers) ** 2)))
        first, second = gradient(layers, tokens()), gradient(layers, tokens())
        assert layers.rounding.count[...].tolist() == [2, 2, 2]
        for name in ("gate_up", "down"):
            noise = np.abs(first[name][...] - second[name][...]).reshape(3, -1).max(1)
            size = np.abs(first[name][...]).reshape(3, -1).max(1)
            assert np.all(noise > 0) and np.all(noise < size)


def stacked():
    """Three layers in one, with different weights."""
    layers = nnx.jit(nnx.vmap(lambda key: make("nvfp4", rngs=nnx.Rngs(key))))(
        jax.random.split(KEY, 3)
    )
    for name in ("router", "gate_up", "down"):
        variable = getattr(layers, name)
        variable[...] *= np.array([1, -1, 0.5]).reshape(3, *[1] * (variable.ndim - 1))
    return layers


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
        NVFP4MoE(*arguments, rngs=nnx.Rngs(0), **INITS, **options)


def test_unsupported_dimensions_run_in_bf16_when_asked(caplog):
    options = {"on_unsupported": "bf16", "name": "moe"}
    layer = NVFP4MoE(40, 48, 4, 2, rngs=nnx.Rngs(0), **INITS, **options)
    assert layer.recipe.name == "bf16" and layer.rounding is None
    assert "moe: embed_dim=40" in caplog.text
