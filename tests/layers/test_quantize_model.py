"""quantize_model on other people's models."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fp4zoo.layers import NVFP4Dense, quantize_model
from fp4zoo.numerics import RECIPES

X = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)


def linear(rngs, in_features=16, out_features=16, **options):
    return nnx.Linear(in_features, out_features, rngs=rngs, **options)


class Helper(nnx.Pytree):
    """Not a Module, and still part of the graph."""

    def __init__(self, rngs):
        self.linear = linear(rngs)


class Zoo(nnx.Module):
    """Every container that a model may keep its layers in."""

    def __init__(self, rngs):
        self.blocks = nnx.List([linear(rngs), linear(rngs)])
        self.mlp = nnx.Sequential(linear(rngs), jax.nn.relu, linear(rngs))
        self.heads = nnx.Dict(first=linear(rngs))
        self.plain_list = nnx.data([linear(rngs)])
        self.plain_tuple = nnx.data((linear(rngs), {"deep": linear(rngs)}))
        self.helper = Helper(rngs)
        self.shared = self.heads["first"]
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.parent = nnx.data({"itself": self.mlp})


NAMES = {
    "blocks.0",
    "blocks.1",
    "mlp.layers.0",
    "mlp.layers.2",
    "heads.first",
    "plain_list.0",
    "plain_tuple.0",
    "plain_tuple.1.deep",
    "helper.linear",
}


def layers_of(model, kind):
    return {
        ".".join(map(str, path)): node for path, node in nnx.iter_graph(model) if type(node) is kind
    }


class Chain(nnx.Module):
    """Computes something."""

    def __init__(self, rngs):
        self.inner = nnx.Sequential(linear(rngs, 16, 32), nnx.gelu, linear(rngs, 32, 16))
        self.head = linear(rngs, 16, 5)

    def __call__(self, x):
        return self.head(x + self.inner(x))


class TestSwap:
    def test_reaches_every_container_in_place(self):
        model = Zoo(nnx.Rngs(0))
        before = layers_of(model, nnx.Linear)
        assert set(before) == NAMES
        assert quantize_model(model) is model
        after = layers_of(model, NVFP4Dense)
        assert set(after) == NAMES and not layers_of(model, nnx.Linear)
        for name, layer in after.items():
            assert layer.kernel is before[name].kernel and layer.bias is before[name].bias
            assert layer.name == name and layer.recipe is RECIPES["nvfp4"]
        assert model.shared is model.heads["first"]
        assert model.parent["itself"] is model.mlp

    def test_a_model_that_is_one_linear(self):
        single = linear(nnx.Rngs(0))
        quantized = quantize_model(single, "bf16")
        assert type(quantized) is NVFP4Dense and quantized.kernel is single.kernel

    @pytest.mark.parametrize(
        ("include", "exclude", "chosen"),
        [
            (r"mlp\..*", None, {"mlp.layers.0", "mlp.layers.2"}),
            (r"blocks\.\d", r".*1", {"blocks.0"}),
            (r".*", r".*\..*", set()),
            ("blocks", None, set()),  # the whole name has to match
        ],
    )
    def test_include_and_exclude(self, include, exclude, chosen):
        model = Zoo(nnx.Rngs(0))
        if chosen:
            quantize_model(model, include=include, exclude=exclude)
        else:
            with pytest.raises(ValueError, match="linear layers are.*mlp.layers.2"):
                quantize_model(model, include=include, exclude=exclude)
        assert set(layers_of(model, NVFP4Dense)) == chosen
        assert set(layers_of(model, nnx.Linear)) == NAMES - chosen

    def test_options_of_the_linear_are_kept(self):
        options = {"dtype": jnp.bfloat16, "use_bias": False, "param_dtype": jnp.float16}
        layer = quantize_model(linear(nnx.Rngs(0), precision="highest", **options))
        assert (layer.dtype, layer.bias, layer.param_dtype) == (jnp.bfloat16, None, jnp.float16)
        assert (layer.in_features, layer.out_features, layer.precision) == (16, (16,), "highest")

    def test_float32_computes_the_same(self):
        run = nnx.jit(lambda model, x: model(x))
        expected = run(Chain(nnx.Rngs(0)), X)
        np.testing.assert_array_equal(run(quantize_model(Chain(nnx.Rngs(0)), "fp32"), X), expected)

    def test_streams_of_layers_and_seeds_differ(self):
        def keys(**options):
            model = quantize_model(Chain(nnx.Rngs(0)), exclude="head", **options)
            return [
                tuple(jax.random.key_data(layer.rounding.key[...]).tolist())
                for layer in layers_of(model, NVFP4Dense).values()
            ]

        assert keys() == keys(rngs=nnx.Rngs(0))
        assert len({*keys(), *keys(rngs=nnx.Rngs(1))}) == 4

    def test_layers_stacked_by_vmap(self):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def create(rngs):
            return Chain(rngs)

        stacked = quantize_model(create(nnx.Rngs(0)), include="inner.*")
        layer = stacked.inner.layers[0]
        assert layer.kernel.shape == (3, 16, 32) and layer.rounding.count.shape == (3,)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, block):
            return x + block.inner(x)

        gradient = nnx.jit(nnx.grad(lambda stacked, x: jnp.sum(forward(x, stacked) ** 2)))
        first = gradient(stacked, X)["inner"]["layers"][0]["kernel"][...]
        second = gradient(stacked, X)["inner"]["layers"][0]["kernel"][...]
        assert np.all(np.any(first != second, axis=(1, 2)))
        assert layer.rounding.count[...].tolist() == [2, 2, 2]


class TestTraining:
    def test_an_optimizer_made_before_keeps_working(self):
        model = Chain(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        quantize_model(model, exclude="head")
        targets = np.sin(X[:, :5] * 2)

        @nnx.jit
        def step(model, optimizer, x, targets):
            def loss(model):
                return jnp.mean((model(x) - targets) ** 2)

            value, gradients = nnx.value_and_grad(loss)(model)
            optimizer.update(model, gradients)
            return value

        losses = [float(step(model, optimizer, X, targets)) for _ in range(40)]
        assert losses[-1] < 0.3 * losses[0]
        assert model.inner.layers[0].rounding.count[...] == 40


class Pair(tuple):
    """A container whose entries nobody can replace."""


jax.tree_util.register_pytree_node(Pair, lambda pair: (tuple(pair), None), lambda _, c: Pair(c))


class TestRefusals:
    def test_dimensions_that_blocks_do_not_divide(self, caplog):
        with pytest.raises(ValueError, match="head: out_features=5 .*use 16"):
            quantize_model(Chain(nnx.Rngs(0)))
        model = quantize_model(Chain(nnx.Rngs(0)), on_unsupported="bf16")
        assert model.head.recipe.name == "bf16" and model.head.rounding is None
        assert model.inner.layers[0].recipe.name == "nvfp4"
        assert "head: out_features=5" in caplog.text

    def test_a_refused_model_is_left_as_it_was(self):
        model = Chain(nnx.Rngs(0))
        with pytest.raises(ValueError, match="head"):
            quantize_model(model)
        assert not layers_of(model, NVFP4Dense)

    @pytest.mark.parametrize(
        "option",
        [
            {"dot_general": lambda *a, **k: jax.lax.dot_general(*a, **k)},
            {"promote_dtype": lambda arrays, **k: arrays},
            {"preferred_element_type": jnp.float32},
        ],
        ids=lambda option: next(iter(option)),
    )
    def test_a_linear_with_its_own_matmul(self, option):
        model = nnx.Sequential(linear(nnx.Rngs(0)), linear(nnx.Rngs(0), **option))
        with pytest.raises(ValueError, match=rf"layers.1: .*own {next(iter(option))}"):
            quantize_model(model)

    def test_a_container_that_cannot_be_changed(self):
        class Model(nnx.Module):
            def __init__(self):
                self.pair = nnx.data(Pair([linear(nnx.Rngs(0))]))

        with pytest.raises(ValueError, match="cannot swap pair.0"):
            quantize_model(Model())

    def test_subclasses_and_models_without_linears(self):
        lora = nnx.LoRALinear(16, 16, lora_rank=2, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="linear layers are none"):
            quantize_model(nnx.List([lora]))

    def test_an_unknown_recipe(self):
        with pytest.raises(ValueError, match="did you mean 'nvfp4'"):
            quantize_model(Chain(nnx.Rngs(0)), "nvpf4")

    def test_what_is_no_module_or_no_pattern(self):
        with pytest.raises(TypeError, match="needs an nnx.Module, got int"):
            quantize_model(3)
        with pytest.raises(ValueError, match=r"include='\(' is no regular expression"):
            quantize_model(Chain(nnx.Rngs(0)), include="(")
        with pytest.raises(ValueError, match=r"exclude='\*' is no regular expression"):
            quantize_model(Chain(nnx.Rngs(0)), exclude="*")
