import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp4zoo.numerics.formats import magnitude_bits, round_e2m1, round_e2m1_stochastic, round_e4m3

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def with_neighbours(values: np.ndarray) -> np.ndarray:
    values = values.astype(np.float32)
    return np.concatenate(
        [
            values,
            np.nextafter(values, np.float32(-np.inf)),
            np.nextafter(values, np.float32(np.inf)),
        ]
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_e2m1_is_the_cast_on_every_bf16_and_every_tie(compiled):
    every_bf16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    ties = with_neighbours((E2M1_VALUES[1:] + E2M1_VALUES[:-1]) / 2)
    values = np.concatenate([every_bf16[np.abs(every_bf16) <= 6], ties, -ties])
    expected = values.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    function = jax.jit(round_e2m1) if compiled else round_e2m1
    np.testing.assert_array_equal(np.asarray(function(jnp.asarray(values))), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_e4m3_is_the_cast_on_every_value_and_every_tie(compiled):
    finite = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = with_neighbours(np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]))
    values = values[(values >= 0) & (values <= 448)]
    expected = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    function = jax.jit(round_e4m3) if compiled else round_e4m3
    np.testing.assert_array_equal(np.asarray(function(jnp.asarray(values))), expected)


def test_nan_survives_rounding():
    nan = jnp.float32(jnp.nan)
    assert jnp.isnan(round_e2m1(nan)) and jnp.isnan(round_e4m3(nan))
    assert jnp.isnan(round_e2m1_stochastic(nan, jnp.uint32(7)))


def test_magnitude_bits_order_nan_above_infinity():
    values = jnp.asarray([0.0, -1e-30, 2.0, -np.inf, np.nan], jnp.float32)
    bits = np.asarray(magnitude_bits(values))
    assert (np.diff(bits) > 0).all()


ALL_BITS = jnp.arange(2**16, dtype=jnp.uint32) << 16


@pytest.mark.parametrize("value", [*E2M1_VALUES, -0.5, -6.0])
def test_stochastic_rounding_keeps_e2m1_values(value):
    rounded = jax.jit(round_e2m1_stochastic)(jnp.full(2**16, value, jnp.float32), ALL_BITS)
    np.testing.assert_array_equal(np.asarray(rounded), np.float32(value))


@pytest.mark.parametrize(
    "value", [0.01, 0.25, 0.3, 0.75, 0.999, 1.2, 1.75, 1.99, 2.5, 3.3, 4.01, 5.0, 5.9, -0.1, -3.7]
)
def test_stochastic_rounding_is_unbiased_over_all_bits(value):
    rounded = np.asarray(
        jax.jit(round_e2m1_stochastic)(jnp.full(2**16, value, jnp.float32), ALL_BITS), np.float64
    )
    below = np.sign(value) * E2M1_VALUES[E2M1_VALUES <= abs(value)].max()
    above = np.sign(value) * E2M1_VALUES[E2M1_VALUES >= abs(value)].min()
    assert set(np.unique(rounded)) == {below, above}
    assert abs(rounded.mean() - np.float32(value)) <= abs(above - below) * 2.0**-16
