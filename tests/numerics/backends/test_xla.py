"""Backend `xla` computes what the emulation computes: equal codes, scales and amax, equal products.

On a CPU its packed operands are dequantised, which is exact: the products differ by the order of
float32 summation at most.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from fp4zoo.numerics import GEMM_NAME, QUANTIZED_NAME, get_recipe, grouped_linear, linear
from fp4zoo.numerics.backends import emulated, xla
from fp4zoo.numerics.backends.packed import Packed
from fp4zoo.numerics.backends.placement import Order
from fp4zoo.numerics.platform import compiling_for
from fp4zoo.numerics.random_bits import key_words

from ..reference import count_e2m1_roundings, count_primitive

KEY = jax.random.key(7)
WORDS = key_words(KEY)


@functools.partial(jax.jit, static_argnames=("function", "recipe", "backend"))
def run(function, recipe, backend, x, w, g):
    """(y, dx, dw)."""
    call = functools.partial(function, recipe=get_recipe(recipe), key=KEY, backend=backend)
    y, pullback = jax.vjp(call, x, w)
    return y, *pullback(g.astype(y.dtype))


def operands(rows, in_features, out_features, experts=(), dtype=np.float32):
    random = np.random.default_rng(0)
    x = random.normal(size=(*rows, in_features)) * np.exp(random.normal(size=(*rows, 1)))
    w = random.normal(size=(*experts, in_features, *out_features)) * 0.1
    g = random.normal(size=(*rows, *out_features))
    return x.astype(dtype), w.astype(np.float32), g.astype(dtype)


def assert_equal_products(function, recipe, x, w, g):
    ours = run(function, recipe, "xla", x, w, g)
    for a, b in zip(ours, run(function, recipe, "emulated", x, w, g), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())
        assert np.abs(b).max() > 0


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-no-rht", "nvfp4-no-sr", "nvfp4-1d-weights"])
def test_a_dense_layer(recipe):
    assert_equal_products(linear, recipe, *operands((2, 48), 64, (2, 32)))


@pytest.mark.parametrize("rows", [(37,), (3, 2, 16), (2, 24)], ids=str)
def test_every_number_of_tokens(rows):
    assert_equal_products(linear, "nvfp4", *operands(rows, 64, (32,), dtype=jnp.bfloat16))


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-1d-weights"])
def test_experts_are_one_batched_product(recipe):
    x, w, g = operands((4, 48), 64, (2, 32), experts=(4,))
    x[1] = g[1] = 0  # an expert without tokens
    x[2] *= 1e4  # its own amax
    assert_equal_products(grouped_linear, recipe, x, w, g)
    assert not np.any(run(grouped_linear, recipe, "xla", x, w, g)[2][1])


def test_the_forward_finish_keeps_the_backward_in_fp4():
    recipe = get_recipe("nvfp4").with_high_precision_forward()
    x, w, g = operands((64,), 64, (32,))

    def both(backend):
        call = functools.partial(linear, recipe=recipe, key=KEY, backend=backend)
        y, pullback = jax.vjp(call, x, w)
        return y, *pullback(g)

    both = jax.jit(both, static_argnums=0)
    for a, b in zip(both("xla"), both("emulated"), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


def unpacked(operand: Packed, axis: int) -> np.ndarray:
    """q * s of a [1, R, C] operand as the emulation holds it, blocks along `axis` or both."""
    scales = np.asarray(operand.scales, np.float32)
    for i in (1, 2):
        scales = np.repeat(scales, operand.codes.shape[i] // scales.shape[i], axis=i)
    return (np.asarray(operand.codes, np.float32) * scales)[0]


def test_codes_scales_and_amax_are_the_emulations_bit_for_bit():
    recipe = get_recipe("nvfp4")
    x, w, g = operands((48,), 64, (96,))
    sides = {
        "fprop_x": (x, (-1, -2), -1, False),
        "fprop_w": (w, (-2, -1), -2, False),
        "dgrad_g": (g, (-1, -2), -1, False),
        "wgrad_x": (x, (-2, -1), -2, True),
        "wgrad_g": (g, (-2, -1), -2, True),
    }
    for name, (array, axes, axis, swap) in sides.items():
        spec = getattr(recipe, name)

        @jax.jit
        def both(array, spec=spec, axes=axes, axis=axis, swap=swap):
            packed = xla.pack(spec, array[None], axis, Order(), WORDS, swap=swap)
            return packed, emulated.prepare(spec, array, axes, WORDS)

        packed, reference = both(array)
        assert packed.codes.dtype == jnp.float4_e2m1fn and packed.scales.dtype == jnp.float8_e4m3fn
        values = np.asarray(reference.values, np.float32)
        values = values.T if swap else values
        ours = unpacked(packed, axis)
        np.testing.assert_array_equal(ours[:, : values.shape[1]], values, err_msg=name)
        assert not ours[:, values.shape[1] :].any()  # tokens up to a multiple of 32
        np.testing.assert_array_equal(packed.scale.reshape(()), reference.scale.reshape(()))


@pytest.mark.parametrize("order", [Order((2, 3)), Order(None, True), Order((2, 3), True)], ids=str)
def test_an_order_of_tokens_and_features_does_not_change_the_products(order):
    """What a mesh makes of it: two parts of the batch, three of the sequence, split features."""
    recipe = get_recipe("nvfp4")
    x, w, g = (a[None] for a in operands((4, 96), 64, (2, 32)))

    @jax.jit
    def products(x, w, g):
        place = xla.Placement(order)
        y, residuals = xla.forward_groups(recipe, x, w, WORDS, place)
        return y, *xla.backward_groups(recipe, residuals, g, WORDS, (2, 32), place)

    for a, b in zip(products(x, w, g), run_groups(recipe, x, w, g), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


@functools.partial(jax.jit, static_argnums=0)
def run_groups(recipe, x, w, g):
    place = xla.Placement()
    y, residuals = xla.forward_groups(recipe, x, w, WORDS, place)
    return y, *xla.backward_groups(recipe, residuals, g, WORDS, (2, 32), place)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax.nn.scaled_matmul has no CPU path")
def test_the_cpus_product_is_scaled_matmuls(monkeypatch):
    x, w, g = operands((48,), 64, (32,))
    ours = run(linear, "nvfp4", "xla", x, w, g)
    monkeypatch.setattr(xla, "on_cpu", lambda: False)
    theirs = jax.jit(functools.partial(run.__wrapped__, linear, "nvfp4", "xla"))(x, w, g)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


class TestWhatTheGpuGets:
    """The program for a GPU, before XLA: which products there are, and how often is quantised."""

    def text(self, function, *arguments):
        with compiling_for("gpu"):
            traced = jax.jit(function).trace(*arguments)
            return traced.jaxpr, traced.lower(lowering_platforms=("cuda",)).as_text()

    def gradient(self, call, policy=None):
        def two_layers(x, w):
            y = call(jnp.tanh(x), w)
            return call(jnp.tanh(y), w)

        if policy is not None:
            two_layers = jax.checkpoint(two_layers, policy=policy)
        return jax.grad(lambda x, w: jnp.sum(two_layers(x, w) ** 2), (0, 1))

    @pytest.mark.parametrize(
        ("policy", "products", "roundings"),
        [
            (None, 6, 10),
            (jax.checkpoint_policies.save_only_these_names(QUANTIZED_NAME, GEMM_NAME), 6, 10),
            (jax.checkpoint_policies.nothing_saveable, 7, 13),
        ],
        ids=["none", "save_quantized", "full"],
    )
    @pytest.mark.parametrize("grouped", [False, True], ids=["dense", "experts"])
    def test_every_product_is_scaled_and_operands_are_quantised_once(
        self, grouped, policy, products, roundings
    ):
        """Two layers of three products and five operands. Full recomputation multiplies the first
        layer's forward product again, and rounds its three operands of the forward pass and two of
        the second layer's."""
        function = grouped_linear if grouped else linear
        call = functools.partial(function, recipe=get_recipe("nvfp4"), key=KEY, backend="xla")
        rows, experts = ((4, 32), (4,)) if grouped else ((64,), ())
        x, w, _ = operands(rows, 64, (64,), experts)
        jaxpr, text = self.text(self.gradient(call, policy), x, w)
        assert "__op$block_scaled_dot" in text and "dot_general" not in text
        live, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * 2)
        assert count_primitive(live, "scaled_matmul_wrapper") == products
        assert count_e2m1_roundings(live) == roundings


def test_tiles_are_refused_with_the_remedy():
    x, w, _ = operands((4, 16), 64, (32,), experts=(2,))
    with pytest.raises(ValueError, match="capacity_factor"):
        grouped_linear(
            x, w, jnp.zeros(4, jnp.int32), recipe=get_recipe("nvfp4"), key=KEY, backend="xla"
        )


@pytest.mark.parametrize("which", [0, 1, 2], ids=["x", "w", "g"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_shows(which, value):
    arguments = list(operands((48,), 64, (32,)))
    arguments[which][3, 5] = value
    finite = [bool(np.isfinite(a).all()) for a in run(linear, "nvfp4", "xla", *arguments)]
    assert finite == [which == 2, which == 0, which == 1]
