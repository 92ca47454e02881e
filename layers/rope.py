"""Rotary position embedding in the half-split layout of Hugging Face checkpoints.

Legend: B batch, T tokens, N heads, H head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserError


@dataclass(frozen=True)
class RopeScaling:
    """The "llama3" frequency scaling of Llama 3.1 and later.

    Wavelengths shorter than `original_max_positions / high_frequency_factor` are kept, those longer
    than `original_max_positions / low_frequency_factor` are stretched by `factor`, and the ones in
    between are blended. Source: Meta's llama-models, `apply_scaling`; transformers' "llama3".

    Attributes:
      factor: how many times longer the long wavelengths become.
      low_frequency_factor: turns in the original context below which a wavelength is long.
      high_frequency_factor: turns in the original context above which a wavelength is short.
      original_max_positions: context length before the scaling, in tokens.

    Raises:
      UserError: the factors do not describe such a scaling.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise UserError(f"rope_scaling.factor={self.factor} must be at least 1")
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise UserError(
                f"rope_scaling.low_frequency_factor={self.low_frequency_factor} must be positive "
                f"and below high_frequency_factor={self.high_frequency_factor}"
            )
        if self.original_max_positions < 1:
            raise UserError(
                f"rope_scaling.original_max_positions={self.original_max_positions} "
                "must be positive"
            )


class RopeTables(NamedTuple):
    """Cosines and sines of every position's angles, float32 [B or 1, T, H/2]."""

    cos: jax.Array
    sin: jax.Array


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Angular frequencies in radians per position, float32 [H/2].

    Computed in float32 as transformers does: at position 100,000 a rounding difference here would
    already show in the logits.

    Raises:
      ValueError: `head_dim` is odd.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd; rotary embedding needs an even head_dim")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / np.power(np.float32(theta), exponents)
    if scaling is None:
        return frequencies
    wavelengths = np.float32(2 * math.pi) / frequencies
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    # 0 where the wavelength is long (stretched), 1 where it is short (kept).
    kept = (scaling.original_max_positions / wavelengths - low) / (high - low)
    kept = np.clip(kept, 0, 1).astype(np.float32)
    return (1 - kept) * frequencies / np.float32(scaling.factor) + kept * frequencies


def rope_tables(positions: jax.Array, frequencies: np.ndarray) -> RopeTables:
    """Tables for integer `positions` [B or 1, T], made once and shared by all layers."""
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return RopeTables(jnp.cos(angles), jnp.sin(angles))


def apply_rope(x: jax.Array, tables: RopeTables) -> jax.Array:
    """Rotates x [B, T, N, H], pairing elements i and i + H/2; float32 inside, x's dtype out."""
    cos, sin = tables.cos[:, :, None, :], tables.sin[:, :, None, :]  # [B, T, 1, H/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
