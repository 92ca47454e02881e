"""Token embedding and output head: always high precision, never FP4.

Legend: B batch, T tokens, V vocabulary, D embedding dimension.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ..numerics import get_recipe, linear
from ..numerics.partitioning import constrain

_RECIPES = {
    recipe.fprop_x.format.dtype.name: recipe for recipe in map(get_recipe, ("fp32", "bf16", "fp16"))
}
_default_init = jax.nn.initializers.normal(0.02)


def _logits(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., D] times a head matrix [D, V]: operands in x's dtype; logits and dw float32."""
    recipe = _RECIPES[x.dtype.name]
    return linear(x, kernel, recipe=recipe, output_dtype=jnp.float32)


class Embedding(nnx.Module):
    """A table of float32 vectors `embedding` [V, D], looked up by token and usable as a tied head.

    A token outside 0 … V-1 gives NaN rather than some other token's vector.
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        *,
        dtype: DTypeLike = jnp.float32,
        embedding_init: jax.nn.initializers.Initializer = _default_init,
        rngs: nnx.Rngs,
    ):
        self.vocab_size = vocab_size
        self.embed_dim = embed_dim
        self.dtype = jnp.dtype(dtype)
        self.embedding = nnx.Param(
            embedding_init(rngs.params(), (vocab_size, embed_dim), jnp.float32)
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens int32 [B, T] -> vectors [B, T, D] in `dtype`."""
        table = constrain(self.embedding[...], "vocabulary", "embed")
        vectors = jnp.take(table, tokens, axis=0, mode="fill").astype(self.dtype)
        if vectors.ndim != 3:
            return vectors
        # A table is larger than the vectors of a batch: devices look up their part of every vector
        # for the tokens of others, instead of gathering the table and adding up its gradient.
        return constrain(vectors, "lookup_batch", "sequence", "embed")

    def attend(self, x: jax.Array) -> jax.Array:
        """The tied output head: x [..., D] -> logits float32 [..., V]."""
        return _logits(x, self.embedding[...].T)


class OutputHead(nnx.Module):
    """An untied output head, `kernel` float32 [D, V]."""

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        *,
        kernel_init: jax.nn.initializers.Initializer = _default_init,
        rngs: nnx.Rngs,
    ):
        self.embed_dim = embed_dim
        self.vocab_size = vocab_size
        self.kernel = nnx.Param(kernel_init(rngs.params(), (embed_dim, vocab_size), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] -> logits float32 [..., V]."""
        return _logits(x, self.kernel[...])
