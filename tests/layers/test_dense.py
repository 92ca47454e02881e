"""NVFP4Dense as a drop-in for nnx.Linear, and what models built of it compute."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.interpreters import partial_eval

from fp4zoo import models
from fp4zoo.layers import NVFP4Dense
from fp4zoo.numerics import RECIPES, get_recipe, linear

from ..numerics.reference import count_e2m1_roundings

X = np.random.default_rng(0).normal(size=(37, 32)).astype(np.float32)
KEY = jax.random.key(3)


class TestDropIn:
    def test_takes_the_arguments_of_linear(self):
        theirs = inspect.signature(nnx.Linear.__init__).parameters
        ours = inspect.signature(NVFP4Dense.__init__).parameters
        replaces_the_matmul = {"dot_general", "promote_dtype", "preferred_element_type"}
        assert set(theirs) - set(ours) == replaces_the_matmul
        for name in set(theirs) & set(ours):
            assert theirs[name].kind == ours[name].kind
            if name not in ("kernel_init", "bias_init"):  # closures, compared by what they give
                assert theirs[name].default == ours[name].default

    @pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
    @pytest.mark.parametrize("streams", [{"default": 0}, {"params": 5}], ids=str)
    def test_a_seed_gives_the_parameters_of_linear_in_every_recipe(self, streams, recipe):
        """A whole model's: rounding draws nothing from the parameters' stream."""

        def parameters(layer, **options):
            rngs = nnx.Rngs(**streams)
            init = {"bias_init": nnx.initializers.normal(1.0)}
            layers = [layer(32, 48, **init, **options, rngs=rngs) for _ in range(3)]
            return nnx.to_flat_state(nnx.state(nnx.List(layers), nnx.Param))

        ours, theirs = parameters(NVFP4Dense, recipe=recipe), parameters(nnx.Linear)
        assert [path for path, _ in ours] == [path for path, _ in theirs]
        for (_, a), (_, b) in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a[...], b[...])

    def test_float32_is_linear_bit_for_bit(self):
        ours = NVFP4Dense(32, 48, recipe="fp32", rngs=nnx.Rngs(0))
        theirs = nnx.Linear(32, 48, rngs=nnx.Rngs(0))

        @nnx.jit
        def run(layer, x):
            def loss(layer, x):
                return jnp.sum(layer(x) ** 3)

            return layer(x), nnx.grad(loss, argnums=(0, 1))(layer, x)

        for a, b in zip(*(jax.tree.leaves(run(m, X)) for m in (ours, theirs)), strict=True):
            np.testing.assert_array_equal(a, b)

    def test_is_linear_of_its_recipe_plus_bias(self):
        layer = NVFP4Dense(
            32, 48, bias_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(0), rounding="explicit"
        )

        @nnx.jit
        def run(layer, x):
            def loss(layer, x):
                return jnp.sum(layer(x, rounding_key=KEY) ** 2)

            return layer(x), nnx.grad(loss, argnums=(0, 1))(layer, x)

        @jax.jit
        def by_hand(kernel, bias, x):
            def call(kernel, bias, x):
                return linear(x, kernel, recipe=RECIPES["nvfp4"], key=KEY) + bias

            y, pullback = jax.vjp(call, kernel, bias, x)
            return y, pullback(2 * y)

        y, (d_layer, dx) = run(layer, X)
        expected_y, expected = by_hand(layer.kernel[...], layer.bias[...], X)
        np.testing.assert_array_equal(y, expected_y)
        ours = d_layer.kernel[...], d_layer.bias[...], dx
        for a, b in zip(ours, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)

    def test_dtypes(self):
        half = NVFP4Dense(32, 48, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        follows = NVFP4Dense(32, 48, rngs=nnx.Rngs(0))
        run = nnx.jit(lambda layer, x: layer(x))
        y = run(half, X)
        assert y.dtype == jnp.bfloat16 and half.kernel[...].dtype == jnp.float32
        assert run(follows, X).dtype == jnp.float32
        np.testing.assert_array_equal(run(follows, X.astype(jnp.bfloat16)), y)
        small = NVFP4Dense(32, 48, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        assert (small.kernel[...].dtype, small.bias[...].dtype) == (jnp.bfloat16,) * 2

    def test_several_out_features_are_one_flat_layer(self):
        fused = NVFP4Dense(32, (3, 2, 16), rngs=nnx.Rngs(0))
        flat = NVFP4Dense(32, 96, rngs=nnx.Rngs(0))
        assert fused.kernel.shape == (32, 3, 2, 16) and fused.bias.shape == (3, 2, 16)
        run = nnx.jit(lambda layer, x: layer(x))
        np.testing.assert_array_equal(run(fused, X).reshape(37, 96), run(flat, X))

    def test_metadata_and_no_bias(self):
        layer = NVFP4Dense(
            32, 48, use_bias=False, kernel_metadata={"axes": ("in", "out")}, rngs=nnx.Rngs(0)
        )
        assert layer.bias is None and layer.kernel.axes == ("in", "out")
        assert set(nnx.state(layer, nnx.Param)) == {"kernel"}

    def test_explicit_rounding_needs_no_key_forward(self):
        """Nor backward: the gradient's own bits decide, as without a stream there is no other."""
        layer = NVFP4Dense(32, 48, rounding="explicit", rngs=nnx.Rngs(0))
        assert not jax.tree.leaves(nnx.state(layer, nnx.RngState))
        gradient = nnx.jit(nnx.grad(lambda x, layer: jnp.sum(layer(x) ** 2)))
        np.testing.assert_array_equal(gradient(X, layer), gradient(X, layer))


class TestUnsupportedDimensions:
    @pytest.mark.parametrize(
        ("in_features", "out_features", "message"),
        [
            (20, 32, "mlp.up: in_features=20 is not a multiple of 16.*'nvfp4'.*use 32"),
            (32, 40, "mlp.up: out_features=40.*use 48"),
            (32, (40, 8), "mlp.up: out_features=8 .*use 16"),
        ],
    )
    def test_raise_and_name_layer_and_remedy(self, in_features, out_features, message):
        with pytest.raises(ValueError, match=message):
            NVFP4Dense(in_features, out_features, name="mlp.up", rngs=nnx.Rngs(0))

    def test_run_in_bf16_with_a_line_in_the_log(self, caplog):
        layer = NVFP4Dense(20, 32, name="up", on_unsupported="bf16", rngs=nnx.Rngs(0))
        assert layer.recipe is get_recipe("bf16") and layer.rounding is None
        assert "up: in_features=20" in caplog.text and "runs in bf16" in caplog.text

    def test_do_not_matter_in_high_precision(self, caplog):
        assert NVFP4Dense(20, 33, recipe="bf16", rngs=nnx.Rngs(0)).recipe.name == "bf16"
        assert not caplog.text

    @pytest.mark.parametrize(
        ("in_features", "out_features", "message"),
        [
            (-16, 32, "up: in_features=-16 must be a positive integer"),
            (32, (16, 0), "up: out_features=0 must be a positive integer"),
            (16.0, 32, "up: in_features=16.0 must"),
            (32, True, "up: out_features=True must"),
            ("16", 32, "up: in_features='16' must"),
        ],
    )
    def test_that_are_no_sizes(self, in_features, out_features, message):
        with pytest.raises(ValueError, match=message):
            NVFP4Dense(in_features, out_features, name="up", recipe="fp32", rngs=nnx.Rngs(0))

    def test_an_unknown_choice_is_named(self):
        with pytest.raises(ValueError, match="on_unsupported='fp8'"):
            NVFP4Dense(32, 32, on_unsupported="fp8", rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="did you mean 'nvfp4'"):
            NVFP4Dense(32, 32, recipe="nvfp", rngs=nnx.Rngs(0))


class TestModelsQuantiseOnce:
    """A block has four linears (the mixture two, and two of experts) of five roundings each."""

    def count(self, architecture, remat):
        moe = models.MoEConfig(num_experts=2, experts_per_token=1)
        config = models.ModelConfig(
            architecture=architecture,
            vocab_size=64,
            num_layers=2,
            embed_dim=32,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            mlp_dim=32,
            max_positions=32,
            moe=moe if architecture == "mixtral" else None,
        )
        model = nnx.eval_shape(
            lambda: models.create(
                config,
                rules=models.PrecisionRules(first_blocks=0, last_blocks=0),
                remat=remat,
                rngs=nnx.Rngs(0),
            )
        )
        graph, parameters = nnx.split(model)

        def loss(parameters, tokens, key):
            model = nnx.merge(graph, parameters)
            return jnp.sum(model.head(model.hidden(tokens, rounding_key=key)[0]) ** 2)

        tokens = jax.ShapeDtypeStruct((1, 32), jnp.int32)
        jaxpr = jax.make_jaxpr(jax.grad(loss))(parameters, tokens, KEY).jaxpr
        live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        return count_e2m1_roundings(live)

    @pytest.mark.parametrize("architecture", ["llama", "mixtral"])
    def test_whatever_remat_recomputes(self, architecture):
        assert self.count(architecture, "none") == 20
        assert self.count(architecture, "save_quantized") == 20
        assert self.count(architecture, "full") > 20
