"""A pseudo-random permutation of range(n), computed place by place and never stored.

A Feistel network over pairs (i // columns, i % columns) in a nearly square grid: each half-round
adds a keyed hash of one half to the other, which is invertible, so that the whole is a permutation
(Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). The grid has up to sqrt(n) cells
more than n; what lands on one of them is sent through again, which ends inside and stays a
permutation. (Grain's index_shuffle takes 15 ms for one place of two and 0.3 ms for one of 275.)
"""

import functools
import hashlib
import math

import numpy as np

_HALF_ROUNDS = 8
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFT = np.uint64(32)


def permute(places: np.ndarray, number: int, seed: int, epoch: int) -> np.ndarray:
    """Where the permutation of (seed, epoch) sends `places`, integers in [0, number).

    Args:
      places: int64 [N].
      number: size of the permuted range, at least 1.
      seed, epoch: any integers; every pair is a permutation of its own.

    Returns:
      int64 [N], all in [0, number).
    """
    columns = math.isqrt(number - 1) + 1
    rows = -(-number // columns)
    values = places.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        values[outside] = _encipher(values[outside], rows, columns, _keys(seed, epoch))
        outside = outside[values[outside] >= number]
    return values.astype(np.int64)


def _encipher(values: np.ndarray, rows: int, columns: int, keys: np.ndarray) -> np.ndarray:
    high, low = np.divmod(values, np.uint64(columns))
    for key_high, key_low in keys.reshape(-1, 2):
        high = (high + _hash(low ^ key_high)) % np.uint64(rows)
        low = (low + _hash(high ^ key_low)) % np.uint64(columns)
    return high * np.uint64(columns) + low


def _hash(values: np.ndarray) -> np.ndarray:
    """32 well-mixed bits of each value (the multipliers of splitmix64; products wrap)."""
    values = values * _MULTIPLIERS[0]
    values = (values ^ (values >> _SHIFT)) * _MULTIPLIERS[1]
    return values >> _SHIFT


@functools.lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"row order {seed} {epoch}".encode(), digest_size=8 * _HALF_ROUNDS)
    return np.frombuffer(digest.digest(), "<u8").astype(np.uint64)
