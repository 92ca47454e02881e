import jax
import numpy as np
import pytest

from fp4zoo.numerics import random_bits as module
from fp4zoo.numerics.random_bits import content_hash, fold, key_words, random_bits

WORDS = key_words(jax.random.key(42))


def uniform(words, shape=(512, 512)) -> np.ndarray:
    """Zero mean, unit variance, from the upper 16 bits."""
    values = (np.asarray(random_bits(words, shape)) >> 16) / 2.0**16 - 0.5
    return values * np.sqrt(12)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In standard deviations of the correlation of independent values."""
    return abs((a * b).mean()) * np.sqrt(a.size)


def test_bits_are_pinned():
    """Another generator changes every run: that needs a line in the change log."""
    np.testing.assert_array_equal(random_bits(WORDS, (4,)), PINNED)


PINNED = [2040128340, 1185223401, 3852832397, 3688808367]


def test_every_byte_is_uniform():
    bits = np.asarray(random_bits(WORDS, (1024, 1024)))
    for shift in (0, 8, 16, 24):
        counts = np.bincount((bits.reshape(-1) >> shift) & 255, minlength=256)
        expected = bits.size / 256
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_squared - 255) < 5 * np.sqrt(2 * 255)


@pytest.mark.parametrize("lag", [1, 2, 15, 16, 17, 511, 512, 513, 8192])
def test_neighbours_are_not_correlated(lag):
    values = uniform(WORDS).reshape(-1)
    assert correlation(values[:-lag], values[lag:]) < 5


def test_keys_salts_and_layers_are_not_correlated():
    streams = [fold(WORDS, salt) for salt in range(4)]
    streams += [key_words(jax.random.fold_in(jax.random.key(0), layer)) for layer in range(4)]
    values = [uniform(stream) for stream in streams]
    for i in range(len(values)):
        for j in range(i):
            assert correlation(values[i], values[j]) < 5
            # Not shifts of one another either.
            assert correlation(values[i].reshape(-1)[1:], values[j].reshape(-1)[:-1]) < 5


def test_neighbouring_seeds_are_not_correlated():
    """Their raw keys differ in one bit of one word."""
    values = [uniform(key_words(jax.random.key(seed))) for seed in (0, 1, 2, 3, 2**32 - 1)]
    for i in range(len(values)):
        for j in range(i):
            assert correlation(values[i], values[j]) < 5


def test_no_index_repeats_when_the_counter_overflows(monkeypatch):
    monkeypatch.setattr(module, "_MAX_COUNT", 256)
    bits = np.asarray(random_bits(WORDS, (8, 16, 64)))
    assert np.unique(bits).size >= bits.size - 1
    values = ((bits >> 16) / 2.0**16 - 0.5) * np.sqrt(12)
    assert correlation(values[:-1], values[1:]) < 5


def test_bits_depend_on_the_index_alone_under_jit_and_vmap():
    eager = random_bits(WORDS, (32, 64))
    np.testing.assert_array_equal(jax.jit(random_bits, static_argnums=1)(WORDS, (32, 64)), eager)
    keys = jax.random.split(jax.random.key(0), 3)
    batched = jax.vmap(lambda key: random_bits(key_words(key), (16,)))(keys)
    np.testing.assert_array_equal(batched[1], random_bits(key_words(keys[1]), (16,)))


def test_content_hash_sees_one_bit_and_no_order():
    x = jax.random.normal(jax.random.key(0), (64, 64))
    assert content_hash(x) == content_hash(x[::-1, ::-1])
    assert content_hash(x) != content_hash(x.at[3, 3].multiply(1 + 2**-23))


def test_key_words_takes_every_kind_of_key():
    np.testing.assert_array_equal(key_words(jax.random.PRNGKey(5)), key_words(jax.random.key(5)))
    assert key_words(jax.random.key(5, impl="rbg")).shape == (2,)
    with pytest.raises(ValueError, match="one JAX PRNG key"):
        key_words(jax.random.split(jax.random.key(0), 3))
