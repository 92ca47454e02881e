"""The emulation computes the same on an accelerator, where operands stay in 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4zoo.numerics import get_recipe, linear, platform
from fp4zoo.numerics.backends import emulated
from fp4zoo.numerics.platform import COMPILER_OPTIONS


def outputs_and_gradients(recipe: str) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    x, g = jax.random.normal(keys[0], (64, 128)), jax.random.normal(keys[1], (64, 64))
    kernel = 0.1 * jax.random.normal(keys[2], (128, 64))

    @jax.jit
    def run(x, kernel, g):
        def layer(x, kernel):
            return linear(x, kernel, recipe=get_recipe(recipe), key=jax.random.key(1))

        y, pull_back = jax.vjp(layer, x, kernel)
        return y, *pull_back(g)

    return run(x, kernel, g)


@pytest.mark.parametrize("recipe", ["nvfp4", "bf16", "fp16"])
def test_sixteen_bit_operands_give_the_same_products(recipe, monkeypatch):
    on_cpu = outputs_and_gradients(recipe)
    for module in (platform, emulated):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    on_accelerator = outputs_and_gradients(recipe)
    for a, b in zip(on_cpu, on_accelerator, strict=True):
        assert jnp.max(jnp.abs(a - b)) <= 1e-6 * jnp.max(jnp.abs(a))


def test_matmul_operands_are_float32_on_a_cpu_alone(monkeypatch):
    x = jnp.ones(4, jnp.bfloat16)
    assert platform.matmul_operand(x).dtype == jnp.float32
    monkeypatch.setattr(platform, "on_cpu", lambda: False)
    assert platform.matmul_operand(x).dtype == jnp.bfloat16


def test_a_program_for_a_gpu_is_not_the_one_traced_for_the_cpu():
    @jax.jit
    def cast(x):
        return platform.matmul_operand(x)

    x = jnp.ones(4, jnp.bfloat16)
    assert cast.eval_shape(x).dtype == jnp.float32
    with platform.compiling_for("gpu"):
        assert not platform.on_cpu()
        assert cast.eval_shape(x).dtype == jnp.bfloat16
    assert platform.on_cpu()
    assert cast.eval_shape(x).dtype == jnp.float32


def test_a_layout_is_asked_for_on_gpus_alone():
    x = jnp.ones((4, 2))

    def layouts(function):
        equations = jax.make_jaxpr(function)(x).eqns
        return [e.params["layout"].major_to_minor for e in equations if "layout" in e.params]

    with platform.compiling_for("cpu"):
        assert platform.row_major(x) is x
    with platform.compiling_for("gpu"):
        assert layouts(platform.row_major) == [(0, 1)]
        assert layouts(jax.grad(lambda x: jnp.sum(platform.row_major(x)))) == [(0, 1)] * 2


def test_every_rounding_to_bfloat16_stays_in_a_compiled_program():
    """Without the options the product is added unrounded."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.bfloat16)
    compiled = jax.jit(lambda x: x + x * x, compiler_options=COMPILER_OPTIONS)
    np.testing.assert_array_equal(compiled(x), x + x * x)
