"""`linear` against the plain NumPy reference, and what its users rely on."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from fp4zoo.numerics import (
    GEMM_NAME,
    QUANTIZED_NAME,
    RECIPES,
    Format,
    Operand,
    get_recipe,
    linear,
)
from fp4zoo.numerics.random_bits import content_hash, fold, key_words

from .reference import assert_close, count_e2m1_roundings, gemms, gradient_bits

KEY = jax.random.key(7)
WORDS = key_words(KEY)


@functools.partial(jax.jit, static_argnames=("recipe", "content_seeded"))
def run(recipe, x, w, g, key=KEY, content_seeded=False):
    """(y, dx, dw)."""
    call = functools.partial(
        linear, recipe=get_recipe(recipe), key=key, content_seeded=content_seeded
    )
    y, pullback = jax.vjp(call, x, w)
    return y, *pullback(g.astype(y.dtype))


def operands(tokens=(37,), in_features=48, out_features=(32,), dtype=np.float32):
    """x, w, g whose rows differ in magnitude. NumPy arrays: eager JAX would compile every step."""
    random = np.random.default_rng(0)
    spread = np.exp(random.normal(size=(*tokens, 1)))
    x = random.normal(size=(*tokens, in_features)) * spread
    w = random.normal(size=(in_features, *out_features)) * 0.1
    g = random.normal(size=(*tokens, math.prod(out_features))) * spread
    g = g.reshape(*tokens, *out_features)
    return x.astype(dtype), w.astype(np.float32), g.astype(dtype)


def even_gradient():
    """[64, 64], each 1 x 16 block along either axis with scale 1, all else between -2 and 2.

    So every entry has the same spacing, and the errors of two copies a correlation that is normal.
    """
    g = np.random.default_rng(5).uniform(-2, 2, (64, 64)).astype(np.float32)
    row, column = np.indices(g.shape) % 16
    return np.where(row == column, np.float32(6), g)


def flat(x, last):
    return np.asarray(x, np.float32).reshape(-1, last)


def expected(recipe, x, w, g, words=WORDS, exact=False):
    """The reference on flattened tokens and features."""
    w = flat(w, np.prod(w.shape[1:]))
    x, g = flat(x, w.shape[0]), flat(g, w.shape[1])
    return gemms(get_recipe(recipe), x, w, g, gradient_bits(words, g.shape), exact)


class TestAgainstReference:
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_every_recipe(self, recipe):
        x, w, g = operands()
        for ours, reference in zip(run(recipe, x, w, g), expected(recipe, x, w, g), strict=True):
            assert_close(ours, reference)

    @pytest.mark.parametrize("tokens", [(), (64,), (3, 2, 16), (2, 24)], ids=str)
    def test_every_shape_of_tokens(self, tokens):
        x, w, g = operands(tokens)
        y, dx, dw = run("nvfp4", x, w, g)
        assert (y.shape, dx.shape, dw.shape) == (g.shape, x.shape, w.shape)
        for ours, reference in zip((y, dx, dw), expected("nvfp4", x, w, g), strict=True):
            assert_close(ours, reference)

    @pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-1d-weights"])
    def test_fused_out_features_are_the_flat_kernel(self, recipe):
        x, w, g = operands((2, 32), out_features=(3, 2, 16))
        y, dx, dw = run(recipe, x, w, g)
        assert (y.shape, dw.shape) == (g.shape, w.shape)
        for ours, reference in zip((y, dx, dw), expected(recipe, x, w, g), strict=True):
            assert_close(ours, reference)

    def test_high_precision_forward_keeps_the_backward(self):
        recipe = get_recipe("nvfp4").with_high_precision_forward()
        x, w, g = operands()
        for ours, reference in zip(run(recipe, x, w, g), expected(recipe, x, w, g), strict=True):
            assert_close(ours, reference)

    def test_a_stochastic_weight_and_input_copy(self):
        """The two operands that the forward pass rounds for the backward pass have bits too."""
        nvfp4 = get_recipe("nvfp4")
        stochastic = dataclasses.replace(
            nvfp4,
            name="test",
            dgrad_w=dataclasses.replace(nvfp4.dgrad_w, stochastic=True),
            wgrad_x=dataclasses.replace(nvfp4.wgrad_x, stochastic=True),
        )
        x, w, g = operands((64,))
        nearest, first = run(nvfp4, x, w, g), run(stochastic, x, w, g)
        second = run(stochastic, x, w, g, jax.random.key(8))
        np.testing.assert_array_equal(first[0], nearest[0])
        for i in (1, 2):
            assert jnp.any(first[i] != nearest[i]) and jnp.any(first[i] != second[i])


class TestDtypes:
    def test_bfloat16_activations_have_float32_weight_gradients(self):
        x, w, g = operands(dtype=jnp.bfloat16)
        y, dx, dw = run("nvfp4", x, w, g)
        assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
        reference = expected("nvfp4", x, w, g)
        for ours, exact in zip((y, dx, dw), reference, strict=True):
            np.testing.assert_allclose(np.asarray(ours, np.float64), exact, 2.0**-8, 1e-5)
        assert_close(dw, reference.dw)

    @pytest.mark.parametrize("recipe", ["nvfp4", "fp16"])
    def test_float16_gradients_keep_subnormals(self, recipe):
        x, w, g = operands(dtype=np.float16)
        g = np.sign(g) * np.float16(2.0**-24)  # float16's smallest
        _, _, dw = run(recipe, x, w, g)
        assert_close(dw, expected(recipe, x, w, g).dw)
        assert np.all(dw != 0)

    @pytest.mark.parametrize("recipe", ["nvfp4", "bf16", "fp32"])
    def test_output_dtype(self, recipe):
        """float32 logits of bfloat16 activations, with float32 incoming gradients."""
        x, w, g = operands(dtype=jnp.bfloat16)
        g = g.astype(np.float32) * np.float32(1.001)  # not bfloat16 values

        @jax.jit
        def run_wide(x, w, g):
            call = functools.partial(
                linear, recipe=get_recipe(recipe), key=KEY, output_dtype=jnp.float32
            )
            y, pullback = jax.vjp(call, x, w)
            return y, *pullback(g)

        y, dx, dw = run_wide(x, w, g)
        assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
        reference = expected(recipe, x, w, g)
        assert_close(y, reference.y)
        assert_close(dw, reference.dw)

    def test_float32_is_a_plain_matmul_bit_for_bit(self):
        x, w, g = operands()
        plain = jax.jit(lambda x, w: jnp.dot(x, w))
        y, pullback = jax.vjp(plain, x, w)
        for ours, theirs in zip(run("fp32", x, w, g), (y, *pullback(g)), strict=True):
            np.testing.assert_array_equal(ours, theirs)

    def test_precision_reaches_the_float32_matmul(self):
        x, w, _ = operands()
        call = functools.partial(linear, recipe=get_recipe("fp32"), precision="highest")
        assert "HIGHEST" in str(jax.make_jaxpr(call)(x, w))

    def test_float32_products_ask_for_float32(self):
        """A GPU's own default is TF32."""

        def precisions(**options):
            call = functools.partial(linear, recipe=RECIPES["fp32"], **options)
            jaxpr = jax.make_jaxpr(jax.grad(lambda x, w: jnp.sum(call(x, w)), (0, 1)))
            equations = jaxpr(jnp.ones((4, 16)), jnp.ones((16, 32))).eqns
            return [e.params["precision"] for e in equations if e.primitive.name == "dot_general"]

        highest = (jax.lax.Precision.HIGHEST,) * 2
        assert precisions() == [highest] * len(precisions()) and len(precisions()) >= 2
        assert highest not in precisions(precision=jax.lax.Precision.DEFAULT)


class TestTransforms:
    def test_jit_is_eager_bit_for_bit(self):
        recipe = "nvfp4-no-rht"  # the transform has a test of its own, and is slow when eager
        x, w, g = operands((16,), 16, (16,))
        eager = run.__wrapped__(recipe, jnp.asarray(x), jnp.asarray(w), jnp.asarray(g))
        for a, b in zip(run(recipe, x, w, g), eager, strict=True):
            np.testing.assert_array_equal(a, b)

    def test_vmap_is_a_loop(self):
        """Each member of an ensemble has its own amax and its own bits."""
        x, w, g = (np.stack([a, 30 * a]) for a in operands())
        keys = jax.random.split(KEY, 2)
        batched = jax.jit(jax.vmap(functools.partial(run, "nvfp4")))(x, w, g, keys)
        for i in range(2):
            for a, b in zip(batched, run("nvfp4", x[i], w[i], g[i], keys[i]), strict=True):
                assert_close(a[i], b, 1e-6)

    def test_rows_see_each_other_through_amax_alone(self):
        x, w, g = operands((64,))
        for amax_row in (0, 32):
            x[amax_row, 0] = g[amax_row, 0] = 40
        whole, half = run("nvfp4", x, w, g), run("nvfp4", x[:32], w, g[:32])
        np.testing.assert_array_equal(whole[0][:32], half[0])
        np.testing.assert_array_equal(whole[1][:32], half[1])


class TestStochasticRounding:
    def gradients(self, recipe, g, key, content_seeded=False):
        """dx and dw with x = w = 1: the codes of the two copies of g (without Hadamard)."""
        one = np.eye(64, dtype=np.float32)
        return run(recipe, one, one, g, key, content_seeded)[1:]

    @pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-1d-weights"])
    def test_mean_over_keys_is_the_exact_gradient(self, recipe):
        x, w, g = operands((32,), 32, (32,))
        keys = jax.random.split(jax.random.key(3), 1000)

        @jax.jit
        def moments(keys):
            dx, dw = jax.lax.map(lambda key: run(recipe, x, w, g, key)[1:], keys)
            return [(jnp.mean(a, 0), jnp.std(a, 0)) for a in (dx, dw)]

        exact = expected(recipe, x, w, g, exact=True)
        for (mean, deviation), truth in zip(moments(keys), exact[1:], strict=True):
            assert jnp.all(deviation > 0)
            z = (np.asarray(mean, np.float64) - truth) / (deviation / len(keys) ** 0.5)
            assert np.abs(z).max() < 5 and abs(z.mean()) < 0.15 and 0.9 < z.std() < 1.1

    def test_survives_scan_remat_and_accumulation(self):
        """The mean over keys of a whole network's accumulated gradient."""
        nvfp4 = get_recipe("nvfp4")
        exact = dataclasses.replace(  # the same, but g is not quantised
            nvfp4,
            name="exact-g",
            dgrad_g=Operand(Format.FP32),
            wgrad_g=Operand(Format.FP32, hadamard=True),
        )
        random = np.random.default_rng(0)
        weights = random.normal(size=(3, 32, 32)).astype(np.float32) / np.float32(32**0.5)
        batches = random.normal(size=(2, 48, 32)).astype(np.float32)

        def loss(weights, x, key, recipe):
            @jax.checkpoint
            def layer(x, scanned):
                w, key = scanned
                return jnp.tanh(linear(x, w, recipe=recipe, key=key)), None

            y, _ = jax.lax.scan(layer, x, (weights, jax.random.split(key, 3)))
            return jnp.sum(y**2)

        @functools.partial(jax.jit, static_argnums=1)
        def accumulated(key, recipe):
            def add(total, scanned):
                x, key = scanned
                return total + jax.grad(loss)(weights, x, key, recipe), None

            zero = jnp.zeros_like(weights)
            return jax.lax.scan(add, zero, (batches, jax.random.split(key, 2)))[0]

        truth = accumulated(KEY, exact)
        keys = jax.random.split(jax.random.key(2), 400)
        samples = jax.lax.map(lambda key: accumulated(key, nvfp4), keys)

        def errors(gradient):  # of each layer
            norm = jnp.linalg.norm(truth.reshape(3, -1), axis=1)
            return jnp.linalg.norm((gradient - truth).reshape(3, -1), axis=1) / norm

        # 400 samples leave a twentieth of the noise when no bits are shared; the rest is the
        # clipping of block maxima whose scale was rounded down.
        assert jnp.all(errors(jnp.mean(samples, 0)) < errors(samples[0]) / 6)
        assert jnp.all(errors(samples[0]) > 0.05)

    def test_layers_steps_and_copies_draw_different_bits(self):
        g = even_gradient()

        @jax.jit
        def codes(step):
            """dx and dw of three layers of a scan that all receive the same g."""
            one = jnp.eye(64)

            def loss(weights, x):
                def layer(x, scanned):
                    w, key = scanned
                    return x, linear(x, w, recipe=RECIPES["nvfp4-no-rht"], key=key)

                keys = jax.random.split(jax.random.fold_in(KEY, step), 3)
                return jnp.sum(jax.lax.scan(layer, x, (weights, keys))[1] * g)

            return jax.grad(loss)(jnp.stack([one] * 3), one)

        def noise(step):
            return list(np.asarray(codes(step) - g).reshape(3, -1))

        one_layer = self.gradients("nvfp4-no-rht", g, KEY)
        streams = [*noise(0), *noise(1), *(np.asarray(a - g).reshape(-1) for a in one_layer)]
        correlations = np.corrcoef(streams) - np.eye(len(streams))
        assert np.abs(correlations).max() < 5.5 / 64  # 5 deviations
        np.testing.assert_array_equal(noise(0), noise(0))

    def test_content_seeded_bits_follow_the_gradient(self):
        g = even_gradient()
        other = g.copy()
        other[0, 0] += 1e-3
        for key in (KEY, None):
            first = self.gradients("nvfp4-no-rht", g, key, True)
            again = self.gradients("nvfp4-no-rht", g, key, True)
            np.testing.assert_array_equal(first, again)
            second = self.gradients("nvfp4-no-rht", other, key, True)
            for a, b in zip(first, second, strict=True):
                noise = np.corrcoef(np.ravel(a - g)[1:], np.ravel(b - other)[1:])[0, 1]
                assert abs(noise) < 5.5 / 64
        words = fold(WORDS, content_hash(g))
        reference = expected("nvfp4-no-rht", np.eye(64), np.eye(64), g, words)
        for ours, exact in zip(
            self.gradients("nvfp4-no-rht", g, KEY, True), reference[1:], strict=True
        ):
            assert_close(ours, exact)

    def test_a_recipe_without_it_needs_no_key(self):
        x, w, g = operands()
        first = run("nvfp4-no-sr", x, w, g, None)
        for a, b in zip(first, run("nvfp4-no-sr", x, w, g), strict=True):
            np.testing.assert_array_equal(a, b)


class TestQuantisesOnce:
    """Each operand is rounded once, whatever is recomputed."""

    def count(self, function, *arguments):
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
        live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        return count_e2m1_roundings(live)

    def call(self, recipe):
        return functools.partial(linear, recipe=get_recipe(recipe), key=KEY)

    def gradient(self, function):
        return jax.grad(lambda x, w: jnp.sum(function(x, w) ** 2), (0, 1))

    @pytest.mark.parametrize(
        ("recipe", "forward", "both"),
        [("nvfp4", 2, 5), ("nvfp4-no-rht", 2, 5), ("nvfp4-1d-weights", 2, 6), ("bf16", 0, 0)],
    )
    def test_without_remat(self, recipe, forward, both):
        x, w, _ = operands()
        assert self.count(self.call(recipe), x, w) == forward
        assert self.count(self.gradient(self.call(recipe)), x, w) == both

    def test_with_named_residuals_kept(self):
        x, w, _ = operands((32,), 48, (48,))

        def layers(x, w):  # a layer whose output another one needs
            y = self.call("nvfp4")(jnp.tanh(x), w)
            return self.call("nvfp4")(jnp.tanh(y), w)

        keep = jax.checkpoint_policies.save_only_these_names(QUANTIZED_NAME, GEMM_NAME)
        kept = jax.checkpoint(layers, policy=keep)
        assert self.count(self.gradient(layers), x, w) == 10
        assert self.count(self.gradient(kept), x, w) == 10
        assert self.count(self.gradient(jax.checkpoint(layers)), x, w) > 10


class TestEdgeCases:
    @pytest.mark.parametrize("which", [0, 1, 2], ids=["x", "w", "g"])
    def test_a_zero_operand_gives_zeros(self, which):
        arguments = list(operands())
        arguments[which] = np.zeros_like(arguments[which])
        depends = [(0, 1), (0, 2), (1, 2)]  # of y, dx, dw: whose product has x, w, g
        results = dict(zip([(0, 1), (1, 2), (0, 2)], run("nvfp4", *arguments), strict=True))
        for pair in depends:
            assert jnp.all(jnp.isfinite(results[pair]))
            assert jnp.any(results[pair] != 0) == (which not in pair)

    @pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
    @pytest.mark.parametrize("which", [0, 1, 2], ids=["x", "w", "g"])
    @pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
    def test_non_finite_is_never_hidden(self, recipe, which, bad):
        arguments = list(operands())
        arguments[which][3, 5] = bad
        results = dict(zip([(0, 1), (1, 2), (0, 2)], run(recipe, *arguments), strict=True))
        for pair, result in results.items():
            assert bool(jnp.all(jnp.isfinite(result))) == (which not in pair)

    @pytest.mark.parametrize("which", [0, 1, 2], ids=["x", "w", "g"])
    def test_one_huge_entry(self, which):
        arguments = list(operands())
        arguments[which][3, 5] = 1e30
        results = run("nvfp4", *arguments)
        for ours, reference in zip(results, expected("nvfp4", *arguments), strict=True):
            assert_close(ours, reference)

    def test_overflow_in_the_hadamard_transform_shows(self):
        x, w, g = operands()
        x[:16, 0] = 3e38
        _, _, dw = run("nvfp4", x, w, g)
        assert not jnp.all(jnp.isfinite(dw))

    @pytest.mark.parametrize("exponent", [-40, -15, 1, 15, 24, 60])
    def test_loss_scaling_by_a_power_of_two_changes_nothing(self, exponent):
        x, w, g = operands()
        plain, scaled = run("nvfp4", x, w, g), run("nvfp4", x, w, g * 2.0**exponent)
        for a, b in zip(plain[1:], scaled[1:], strict=True):
            np.testing.assert_array_equal(a, np.asarray(b) / np.float32(2.0**exponent))

    @pytest.mark.parametrize("recipe", ["nvfp4", "fp32"])
    @pytest.mark.parametrize("tokens", [(0,), (2, 0)])
    def test_no_tokens(self, recipe, tokens):
        x, w, g = operands(tokens)
        y, dx, dw = run(recipe, x, w, g)
        assert (y.shape, dx.shape) == (g.shape, x.shape)
        np.testing.assert_array_equal(dw, jnp.zeros_like(w))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear(jnp.ones((4, 32)), jnp.ones((16, 32)), recipe=RECIPES["bf16"]), "equal"),
        (lambda: linear(jnp.ones((4, 16)), jnp.ones(16), recipe=RECIPES["bf16"]), r"\(16,\)"),
        (lambda: linear(jnp.ones(()), jnp.ones((16, 16)), recipe=RECIPES["bf16"]), "needs x"),
        (
            lambda: linear(jnp.ones((4, 16), int), jnp.ones((16, 16)), recipe=RECIPES["fp32"]),
            "float x, got int32: cast",
        ),
        (
            lambda: linear(jnp.ones((4, 16)), jnp.ones((16, 16)), recipe=RECIPES["nvfp4"]),
            "pass key=",
        ),
        (
            lambda: linear(jnp.ones((4, 20)), jnp.ones((20, 16)), recipe=RECIPES["nvfp4"], key=KEY),
            "got 20 features in and 16 out",
        ),
        (
            lambda: linear(
                jnp.ones((4, 16)), jnp.ones((16, 16, 8)), recipe=RECIPES["nvfp4"], key=KEY
            ),
            "16 features in and 8 out",
        ),
        (
            lambda: linear(
                jnp.ones((4, 16)),
                jnp.ones((16, 16)),
                recipe=RECIPES["nvfp4"],
                key=jax.random.split(KEY, 2),
            ),
            "one JAX PRNG key",
        ),
    ],
)
def test_errors_name_value_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()
