"""Random bits for stochastic rounding: a counter-based hash, one 32-bit word an element.

Threefry bits cost more than all the quantising on a CPU (measured: 60 % of a small model's step
against 5 % for this hash). The word of an element is a function of the key and of the element's
index in the whole array, so it does not depend on how the array is sharded. The mixer is
`lowbias32` (C. Wellons, hash-prospector, public domain): two multiplications, every input bit flips
every output bit with probability 1/2 +- 0.2 %. Not for cryptography.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_MAX_COUNT = 2**32  # indices that one counter word tells apart
_GOLDEN = np.uint32(0x9E3779B9)  # 2^32 / golden ratio, odd: multiples of it are equidistributed


def mix(word: jax.Array) -> jax.Array:
    """A bijection of uint32 that spreads every input bit over the word."""
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * np.uint32(0x846CA68B)
    return word ^ (word >> 16)


def key_words(key: jax.Array) -> jax.Array:
    """uint32 [2] from a JAX PRNG key, typed (`jax.random.key`) or raw (`jax.random.PRNGKey`)."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    if data.ndim != 1 or data.dtype != jnp.uint32:
        raise ValueError(
            f"key must be one JAX PRNG key, got {key.dtype}{list(key.shape)}: use "
            "jax.random.key(seed), and jax.random.split with vmap for several"
        )
    if data.shape[0] == 4:  # rbg keys
        data = data[:2] ^ fold(data[2:], 0)
    return fold(data, 0)  # neighbouring seeds differ in one bit of one word: spread it over both


def fold(words: jax.Array, salt: int | jax.Array) -> jax.Array:
    """New uint32 [2] key words from `words` and a salt (operand number, content hash)."""
    salted = jnp.asarray(salt).astype(jnp.uint32) * _GOLDEN + np.uint32(1)
    first = mix(words[0] ^ mix(words[1] + salted))
    return jnp.stack([first, mix(words[1] ^ (first + salted))])


def content_hash(x: jax.Array) -> jax.Array:
    """uint32 that depends on every bit of float `x`, the same for any order of summation."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.sum(bits, dtype=jnp.uint32)


class Place(NamedTuple):
    """Which rows of which whole array [..., row, *features] a part of it holds."""

    rows: jax.Array  # uint32: the number of each row in the whole
    first_feature: jax.Array | int  # where the part's last axis begins in the whole's
    num_features: int  # length of the whole's last axis


def random_bits(words: jax.Array, shape: tuple[int, ...], place: Place | None = None) -> jax.Array:
    """uint32 of `shape`: hash of (words, index of the element). words: uint32 [2].

    place: of this part in a whole array, whose rows lie in any order; an element's bits are the
    same in every part that holds it.
    """
    if place is not None:
        return _bits_of_rows(words, shape, place)
    first, second = words[0], words[1]
    low = high = jnp.zeros(shape, jnp.uint32)
    stride = 1
    overflow = False
    for axis in reversed(range(len(shape))):
        if not overflow and stride * shape[axis] > _MAX_COUNT:
            overflow, stride = True, 1  # further axes are counted apart, so that no index repeats
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
        low, high = (low, high + index) if overflow else (low + index, high)
        stride *= shape[axis]
    if overflow:
        first = first ^ mix(high)
    return _hash(low, first, second)


def _bits_of_rows(words: jax.Array, shape: tuple[int, ...], place: Place) -> jax.Array:
    """Every row has two key words of its own, and its elements are counted by their features."""
    features = len(shape) - place.rows.ndim
    spread = place.rows.reshape(*place.rows.shape, *[1] * features)
    first = words[0] ^ mix(spread)
    second = words[1] ^ mix(spread + _GOLDEN)
    low = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    low = low + jnp.asarray(place.first_feature).astype(jnp.uint32)
    stride = place.num_features
    for axis in reversed(range(place.rows.ndim, len(shape) - 1)):
        low = low + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
        stride *= shape[axis]
    return _hash(low, first, second)


def _hash(low: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    # `mix` with the second key word inside: two keys' sequences are not shifts of each other.
    word = low ^ first
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D) + second
    word = (word ^ (word >> 15)) * np.uint32(0x846CA68B)
    return word ^ (word >> 16)
