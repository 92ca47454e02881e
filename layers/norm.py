"""Root-mean-square normalisation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """y = x / sqrt(mean(x²) + epsilon) · scale over the last axis (arXiv 1910.07467).

    Computed in float32 whatever x's dtype, returned in x's dtype. `scale` is float32 [num_features]
    and starts at one.
    """

    def __init__(self, num_features: int, *, epsilon: float = 1e-6, rngs: nnx.Rngs):
        del rngs  # Accepted so that the call reads like nnx.RMSNorm's; the scale is not random.
        self.num_features = num_features
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(num_features, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., num_features] -> the same shape and dtype."""
        return _normalise(x, self.scale[...], self.epsilon)


# Differentiation would store three float32 arrays of x's size; with the checkpoint it stores x.
@functools.partial(jax.checkpoint, static_argnums=2, prevent_cse=False)
def _normalise(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * inverse * scale).astype(x.dtype)
