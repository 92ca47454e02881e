import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4zoo.numerics import quantize, random_hadamard

from .golden import as_array, code_bits, load, scale_bits, unpack

quantize_compiled = jax.jit(quantize, static_argnames=("block", "rounding"))
hadamard = jax.jit(random_hadamard, static_argnames="axis")
# t06, t15 and t16 (all zero, Inf, NaN) only record what the reference does; ours is tested below.
TARGETS = ["t01", "t02", "t04", "t07", "t08", "t10", "t12", "t13", "t14"]
VECTORS = load("te_quantize.npz")
TRAINING = load("te_training.npz")


def assert_equals_golden(quantized, vectors, name):
    np.testing.assert_array_equal(code_bits(quantized.codes), unpack(vectors[f"{name}_codes"]))
    np.testing.assert_array_equal(scale_bits(quantized.scales), vectors[f"{name}_scales"])
    assert quantized.amax == vectors[f"{name}_amax"]


class TestAgainstTransformerEngine:
    @pytest.mark.parametrize("name", TARGETS)
    def test_one_dimensional(self, name):
        assert_equals_golden(quantize_compiled(as_array(VECTORS[f"{name}_x"])), VECTORS, name)

    def test_eager(self):
        assert_equals_golden(quantize(as_array(VECTORS["t02_x"])), VECTORS, "t02")

    @pytest.mark.parametrize("dtype", ["f32", "bf16"])
    def test_rows_and_columns(self, dtype):
        x = as_array(TRAINING[f"{dtype}_x"])
        assert_equals_golden(quantize_compiled(x), TRAINING, f"{dtype}_x1d_row")
        assert_equals_golden(quantize_compiled(x.T), TRAINING, f"{dtype}_x1d_col")

    @pytest.mark.parametrize("dtype", ["f32", "bf16"])
    @pytest.mark.parametrize("layout", ["row", "col"])
    def test_two_dimensional(self, dtype, layout):
        w = as_array(TRAINING[f"{dtype}_w"])
        quantized = quantize_compiled(w if layout == "row" else w.T, block=(16, 16))
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
    def test_hadamard(self, dtype):
        x = as_array(TRAINING[f"{dtype}_x"])
        assert_equals_golden(quantize_compiled(hadamard(x.T)), TRAINING, f"{dtype}_x_rht_col")
        along_first = hadamard(x, axis=0).T
        assert_equals_golden(quantize_compiled(along_first), TRAINING, f"{dtype}_x_rht_col")
        assert_equals_golden(quantize_compiled(x), TRAINING, f"{dtype}_x_rht_row")

    @pytest.mark.parametrize("dtype", ["f32", "bf16"])
    def test_dequantized_and_multiplied(self, dtype):
        x, w = as_array(TRAINING[f"{dtype}_x"]), as_array(TRAINING[f"{dtype}_w"])
        x = quantize_compiled(x).dequantize(jnp.float32)
        w = quantize_compiled(w, block=(16, 16)).dequantize(jnp.float32)
        np.testing.assert_array_equal(x, TRAINING[f"{dtype}_x1d_row_deq"])
        np.testing.assert_array_equal(w, TRAINING[f"{dtype}_w2d_row_deq"])
        np.testing.assert_allclose(x @ w.T, TRAINING[f"{dtype}_qgemm"], atol=1e-6)


@jax.jit
def dequantized(x):
    return quantize(x.astype(jnp.float32)).dequantize()


class TestEdgeCases:
    def test_zero_tensor_and_zero_block(self):
        zero = dequantized(np.zeros((4, 64)))
        assert not np.any(zero)
        half = np.ones((4, 64))
        half[:, 16:32] = 0
        np.testing.assert_array_equal(dequantized(half), half)

    @pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
    def test_non_finite_input_shows_in_amax_and_values(self, bad):
        x = np.ones((4, 64), np.float32)
        x[1, 2] = bad
        assert not np.isfinite(quantize_compiled(x).amax)
        assert not np.isfinite(dequantized(x)[1, 2])

    def test_one_huge_entry_flushes_the_other_blocks(self):
        x = np.ones((4, 64))
        x[0, 0] = 1e30
        values = dequantized(x)
        assert values[0, 0] == pytest.approx(1e30, rel=1e-6) and np.all(np.isfinite(values))
        assert not np.any(values[:, 16:])

    def test_block_below_2_to_minus_19_of_amax_flushes(self):
        x = np.ones((4, 64))
        x[:, 16:] = 2.0**-20
        assert not np.any(dequantized(x)[:, 16:])
        x[:, 16:] = 2.0**-18
        assert np.all(dequantized(x) > 0)

    def test_empty(self):
        empty = quantize_compiled(np.zeros((0, 32), np.float32))
        assert empty.scales.shape == (0, 2) and empty.amax == 0


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
        x = normal(64, 64)
        one, same, other = (code_bits(stochastic(x, jax.random.key(k)).codes) for k in (1, 1, 2))
        np.testing.assert_array_equal(one, same)
        assert (one != other).mean() > 0.1

    def test_jit_equals_eager(self):
        x = jnp.asarray(normal(16, 16), jnp.bfloat16)
        for block in ((1, 16), (16, 16)):
            options = {"block": block, "rounding": "stochastic", "key": jax.random.key(3)}
            eager, compiled = quantize(x, **options), quantize_compiled(x, **options)
            np.testing.assert_array_equal(code_bits(eager.codes), code_bits(compiled.codes))
            np.testing.assert_array_equal(scale_bits(eager.scales), scale_bits(compiled.scales))


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def stochastic(x, key):
    return quantize_compiled(x, rounding="stochastic", key=key)


def test_vmap_is_a_loop():
    x = normal(3, 64, 64) * np.array([1, 10, 0.1], np.float32)[:, None, None]
    keys = jax.random.split(jax.random.key(1), 3)
    batched = jax.jit(jax.vmap(stochastic))(x, keys)
    for i in range(3):
        single = stochastic(x[i], keys[i])
        np.testing.assert_array_equal(code_bits(batched.codes[i]), code_bits(single.codes))
        np.testing.assert_array_equal(batched.amax[i], single.amax)


def test_two_dimensional_blocks_do_not_see_the_transpose():
    w = normal(48, 64)
    straight, transposed = (quantize_compiled(a, block=(16, 16)) for a in (w, w.T))
    np.testing.assert_array_equal(code_bits(straight.codes).T, code_bits(transposed.codes))
    np.testing.assert_array_equal(scale_bits(straight.scales).T, scale_bits(transposed.scales))


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
