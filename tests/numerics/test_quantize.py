import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4zoo.numerics import quantize, random_hadamard

from .golden import as_array, code_bits, load, scale_bits, unpack

quantize_compiled = jax.jit(quantize, static_argnames=("block", "rounding"))
# t06, t15 and t16 (all zero, Inf, NaN) only record what the reference does; ours is tested below.
TARGETS = ["t01", "t02", "t04", "t07", "t08", "t10", "t12", "t13", "t14"]
VECTORS = load("te_quantize.npz")
TRAINING = load("te_training.npz")


def assert_equals_golden(quantized, vectors, name):
    np.testing.assert_array_equal(code_bits(quantized.codes), unpack(vectors[f"{name}_codes"]))
    np.testing.assert_array_equal(scale_bits(quantized.scales), vectors[f"{name}_scales"])
    assert quantized.amax == vectors[f"{name}_amax"]


@pytest.mark.parametrize("function", [quantize, quantize_compiled], ids=["eager", "jit"])
class TestAgainstTransformerEngine:
    @pytest.mark.parametrize("name", TARGETS)
    def test_one_dimensional(self, function, name):
        assert_equals_golden(function(as_array(VECTORS[f"{name}_x"])), VECTORS, name)

    @pytest.mark.parametrize("dtype", ["f32", "bf16"])
    def test_rows_and_columns(self, function, dtype):
        x = as_array(TRAINING[f"{dtype}_x"])
        assert_equals_golden(function(x), TRAINING, f"{dtype}_x1d_row")
        assert_equals_golden(function(x.T), TRAINING, f"{dtype}_x1d_col")

    @pytest.mark.parametrize("dtype", ["f32", "bf16"])
    @pytest.mark.parametrize("layout", ["row", "col"])
    def test_two_dimensional(self, function, dtype, layout):
        w = as_array(TRAINING[f"{dtype}_w"])
        quantized = function(w if layout == "row" else w.T, block=(16, 16))
        assert quantized.scales.shape == (
            quantized.codes.shape[0] // 16,
            quantized.codes.shape[1] // 16,
        )
        scales = jnp.repeat(quantized.scales, 16, axis=0)
        name = f"{dtype}_w2d_{layout}"
        np.testing.assert_array_equal(code_bits(quantized.codes), unpack(TRAINING[f"{name}_codes"]))
        np.testing.assert_array_equal(scale_bits(scales), TRAINING[f"{name}_scales"])
        assert quantized.amax == TRAINING[f"{name}_amax"]

    @pytest.mark.parametrize("dtype", ["f32", "bf16"])
    def test_hadamard(self, function, dtype):
        x = as_array(TRAINING[f"{dtype}_x"])
        assert_equals_golden(function(random_hadamard(x.T)), TRAINING, f"{dtype}_x_rht_col")
        assert_equals_golden(function(random_hadamard(x, axis=0).T), TRAINING, f"{dtype}_x_rht_col")
        assert_equals_golden(function(x), TRAINING, f"{dtype}_x_rht_row")

    @pytest.mark.parametrize("dtype", ["f32", "bf16"])
    def test_dequantized_and_multiplied(self, function, dtype):
        x = function(as_array(TRAINING[f"{dtype}_x"])).dequantize(jnp.float32)
        w = function(as_array(TRAINING[f"{dtype}_w"]), block=(16, 16)).dequantize(jnp.float32)
        np.testing.assert_array_equal(x, TRAINING[f"{dtype}_x1d_row_deq"])
        np.testing.assert_array_equal(w, TRAINING[f"{dtype}_w2d_row_deq"])
        np.testing.assert_allclose(x @ w.T, TRAINING[f"{dtype}_qgemm"], atol=1e-6)


@pytest.mark.parametrize("function", [quantize, quantize_compiled], ids=["eager", "jit"])
class TestEdgeCases:
    def test_zero_tensor_and_zero_block(self, function):
        zero = function(jnp.zeros((4, 64)))
        assert zero.amax == 0 and not jnp.any(zero.dequantize())
        half = function(jnp.ones((2, 32)).at[:, 16:].set(0.0))
        assert not jnp.any(half.dequantize()[:, 16:]) and jnp.all(half.dequantize()[:, :16] == 1)

    @pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
    def test_non_finite_input_shows_in_amax_and_values(self, function, bad):
        quantized = function(jnp.ones((4, 64)).at[1, 2].set(bad))
        assert not jnp.isfinite(quantized.amax)
        assert not jnp.any(jnp.isfinite(quantized.dequantize()[1, 2]))

    def test_one_huge_entry_flushes_the_other_blocks(self, function):
        x = jnp.ones((2, 32)).at[0, 0].set(1e30)
        values = function(x).dequantize()
        assert values[0, 0] == pytest.approx(1e30, rel=1e-6) and jnp.all(jnp.isfinite(values))
        assert not jnp.any(values[:, 16:])

    def test_block_below_2_to_minus_19_of_amax_flushes(self, function):
        x = jnp.concatenate([jnp.full((1, 16), 1.0), jnp.full((1, 16), 2.0**-20)], axis=1)
        assert not jnp.any(function(x).dequantize()[:, 16:])

    def test_empty(self, function):
        assert function(jnp.zeros((0, 32))).scales.shape == (0, 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-90, 90), st.sampled_from([(1, 16), (16, 16)]))
def test_a_power_of_two_goes_through_bit_for_bit(seed, exponent, block):
    """Loss scaling by powers of two changes nothing but amax, nearest and stochastic alike."""
    x = jax.random.normal(jax.random.key(seed), (32, 32))
    scale = jnp.float32(2.0**exponent)
    for rounding in ("nearest", "stochastic"):
        plain = quantize_compiled(x, block=block, rounding=rounding, key=jax.random.key(1))
        scaled = quantize_compiled(x * scale, block=block, rounding=rounding, key=jax.random.key(1))
        np.testing.assert_array_equal(code_bits(scaled.codes), code_bits(plain.codes))
        np.testing.assert_array_equal(scale_bits(scaled.scales), scale_bits(plain.scales))
        np.testing.assert_array_equal(scaled.dequantize() / scale, plain.dequantize())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 4.0))
def test_quantizing_twice_is_quantizing_once_and_the_error_is_bounded(seed, spread):
    x = jnp.exp(spread * jax.random.normal(jax.random.key(seed), (8, 64)))
    once = quantize_compiled(x).dequantize()
    block_amax = jnp.repeat(jnp.max(jnp.abs(x).reshape(8, 4, 16), -1), 16, axis=1)
    # Half of the widest E2M1 gap (2 of 6) plus E4M3's rounding of the scale; the absolute term is
    # its subnormals.
    assert jnp.all(jnp.abs(once - x) <= block_amax * (1 / 6 + 1 / 16) + jnp.max(x) * 2.0**-18)


class TestStochastic:
    def test_is_unbiased(self):
        x = jax.random.normal(jax.random.key(0), (64, 64))
        keys = jax.random.split(jax.random.key(1), 2000)
        quantized = jax.jit(lambda key: quantize(x, rounding="stochastic", key=key).dequantize())
        total = jax.lax.fori_loop(
            0, len(keys), lambda i, t: t + quantized(keys[i]), jnp.zeros_like(x)
        )
        unit = jnp.repeat(quantize(x).scales.astype(jnp.float32), 16, -1) * quantize(x).amax / 2688
        inside = jnp.abs(x) < 6 * unit  # a block's maximum can be clipped: its scale was rounded
        deviation = unit / np.sqrt(len(keys))  # of the mean, in the widest gap
        z = (total / len(keys) - x) / deviation
        assert jnp.max(jnp.abs(jnp.where(inside, z, 0))) < 5
        assert abs(jnp.mean(jnp.where(inside, z, 0))) < 0.05

    def test_same_key_same_codes_other_key_other_codes(self):
        x = jax.random.normal(jax.random.key(0), (64, 64))
        one, same, other = (
            code_bits(quantize(x, rounding="stochastic", key=jax.random.key(seed)).codes)
            for seed in (1, 1, 2)
        )
        np.testing.assert_array_equal(one, same)
        assert (one != other).mean() > 0.1

    def test_jit_equals_eager(self):
        x = jax.random.normal(jax.random.key(0), (64, 64), jnp.bfloat16)
        for block in ((1, 16), (16, 16)):
            eager = quantize(x, block=block, rounding="stochastic", key=jax.random.key(3))
            compiled = quantize_compiled(
                x, block=block, rounding="stochastic", key=jax.random.key(3)
            )
            np.testing.assert_array_equal(code_bits(eager.codes), code_bits(compiled.codes))


def test_vmap_is_a_loop():
    x = (
        jax.random.normal(jax.random.key(0), (3, 32, 32))
        * jnp.asarray([1.0, 10.0, 0.1])[:, None, None]
    )
    keys = jax.random.split(jax.random.key(1), 3)
    batched = jax.vmap(lambda x, key: quantize(x, rounding="stochastic", key=key))(x, keys)
    for i in range(3):
        single = quantize(x[i], rounding="stochastic", key=keys[i])
        np.testing.assert_array_equal(code_bits(batched.codes[i]), code_bits(single.codes))
        np.testing.assert_array_equal(batched.amax[i], single.amax)


def test_two_dimensional_blocks_do_not_see_the_transpose():
    w = jax.random.normal(jax.random.key(0), (48, 64))
    np.testing.assert_array_equal(
        quantize(w, block=(16, 16)).dequantize().T, quantize(w.T, block=(16, 16)).dequantize()
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(jnp.zeros((4, 20))), "multiples of 16"),
        (lambda: quantize(jnp.zeros((20, 32)), block=(16, 16)), "multiples of 16"),
        (lambda: quantize(jnp.zeros(32), block=(16, 16)), "multiples of 16"),
        (lambda: quantize(jnp.zeros((16, 32), jnp.int32)), "int32"),
        (lambda: quantize(jnp.zeros((16, 32)), block=(1, 32)), r"block=\(1, 32\)"),
        (lambda: quantize(jnp.zeros((16, 32)), rounding="up"), "rounding='up'"),
        (lambda: quantize(jnp.zeros((16, 32)), rounding="stochastic"), "needs key="),
    ],
)
def test_errors_name_the_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()
