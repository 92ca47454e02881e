import jax.numpy as jnp
import numpy as np
import pytest

from fp4zoo.layers.rope import RopeScaling, apply_rope, rope_frequencies, rope_tables

LLAMA_3_1 = RopeScaling(8.0, 1.0, 4.0, 8192)


def llama3_frequencies(head_dim, theta, scaling):
    """The published rule, one frequency at a time in float64."""
    frequencies = []
    for i in range(0, head_dim, 2):
        frequency = theta ** (-i / head_dim)
        wavelength = 2 * np.pi / frequency
        original = scaling.original_max_positions
        if wavelength > original / scaling.low_frequency_factor:
            frequency /= scaling.factor
        elif wavelength > original / scaling.high_frequency_factor:
            smooth = (original / wavelength - scaling.low_frequency_factor) / (
                scaling.high_frequency_factor - scaling.low_frequency_factor
            )
            frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        frequencies.append(frequency)
    return np.array(frequencies)


def test_plain_frequencies():
    np.testing.assert_allclose(rope_frequencies(8, 10_000.0), [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_llama3_frequencies_keep_blend_and_stretch():
    expected = llama3_frequencies(128, 500_000.0, LLAMA_3_1)
    scaled = rope_frequencies(128, 500_000.0, LLAMA_3_1)
    np.testing.assert_allclose(scaled, expected, rtol=2e-6)
    ratios = scaled / rope_frequencies(128, 500_000.0)
    assert ratios[0] == 1
    np.testing.assert_allclose(ratios[-1], 1 / 8, rtol=1e-6)
    assert np.any((ratios > 0.13) & (ratios < 0.99))


@pytest.mark.parametrize("scaling", [None, LLAMA_3_1])
def test_rotation_is_that_of_complex_numbers(scaling):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 3, 8)).astype(np.float32)
    positions = rng.integers(0, 4000, size=(2, 5)).astype(np.int32)
    frequencies = rope_frequencies(8, 10_000.0, scaling)
    rotated = apply_rope(jnp.asarray(x), rope_tables(jnp.asarray(positions), frequencies))

    angles = positions[:, :, None, None] * frequencies.astype(np.float64)
    complex_x = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    expected = np.concatenate([complex_x.real, complex_x.imag], axis=-1)
    # Angles up to 4000 in float32 are off by 2e-4.
    np.testing.assert_allclose(rotated, expected, atol=1e-3)


def test_scores_depend_on_distance_only():
    rng = np.random.default_rng(1)
    query, key = jnp.asarray(rng.normal(size=(2, 1, 1, 1, 16)), jnp.float32)
    frequencies = rope_frequencies(16, 10_000.0)

    def score(query_position, key_position):
        q = apply_rope(query, rope_tables(jnp.array([[query_position]]), frequencies))
        k = apply_rope(key, rope_tables(jnp.array([[key_position]]), frequencies))
        return float(jnp.sum(q * k))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(8, 3), abs=1e-2)


def test_dtype_is_kept():
    tables = rope_tables(jnp.arange(4)[None], rope_frequencies(8, 10_000.0))
    assert apply_rope(jnp.ones((1, 4, 2, 8), jnp.bfloat16), tables).dtype == jnp.bfloat16
    assert tables.cos.dtype == jnp.float32


def test_errors_state_value_and_remedy():
    with pytest.raises(ValueError, match="head_dim=7 is odd"):
        rope_frequencies(7, 10_000.0)
    with pytest.raises(ValueError, match="rope_scaling.factor=0.5 must be at least 1"):
        RopeScaling(0.5, 1.0, 4.0, 8192)
    with pytest.raises(ValueError, match="low_frequency_factor=4.0 must be positive and below"):
        RopeScaling(8.0, 4.0, 1.0, 8192)
    with pytest.raises(ValueError, match="original_max_positions=0 must be positive"):
        RopeScaling(8.0, 1.0, 4.0, 0)
