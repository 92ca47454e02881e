"""Decoding with a key/value cache: the decoder run over new tokens only.

Legend: B batch, T new tokens, S cache slots, D embedding dimension, K key/value heads, H head
dimension, V vocabulary, L layers of a segment.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from ..layers.attention import dot_product_attention
from ..layers.rope import rope_frequencies, rope_tables
from .decoder import Decoder


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far.

    length: int32 scalar, tokens in the cache. keys, values: per segment, [L, B, S, K, H].
    """

    length: jax.Array
    keys: dict[str, jax.Array]
    values: dict[str, jax.Array]


def make_cache(model: Decoder, *, batch_size: int, size: int) -> Cache:
    """An empty cache for `size` tokens, in the model's activation dtype."""
    config = model.config
    heads = (config.num_kv_heads, config.resolved_head_dim)

    def zeros() -> dict[str, jax.Array]:
        return {
            segment.name: jnp.zeros(
                (segment.stop - segment.start, batch_size, size, *heads), model.embedding.dtype
            )
            for segment in model.segments
        }

    return Cache(jnp.int32(0), zeros(), zeros())


def extend(model: Decoder, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Runs the model over tokens that follow those in the cache.

    tokens: int32 [B, T]; the cache has room for T more. Call it under jit, with the cache donated.

    Returns:
      logits float32 [B, V] of the token after the last one, and the longer cache.
    """
    config = model.config
    frequencies = rope_frequencies(config.resolved_head_dim, config.rope_theta, config.rope_scaling)
    positions = cache.length + jnp.arange(tokens.shape[1])
    rope = rope_tables(positions[None], frequencies)
    x = model.embedding(tokens)  # [B, T, D]
    keys, values = {}, {}
    for segment in model.segments:
        graph, parameters = nnx.split(model.blocks[segment.name])

        def body(x, layer, graph=graph):
            parameters, key_cache, value_cache = layer
            extended = []

            def attend(query, key, value, pattern):
                start = (0, cache.length, 0, 0)
                keys = jax.lax.dynamic_update_slice(key_cache, key, start)
                values = jax.lax.dynamic_update_slice(value_cache, value, start)
                extended.append((keys, values))
                pattern = dataclasses.replace(pattern, query_offset=cache.length)
                return dot_product_attention(query, keys, values, pattern)

            block = nnx.merge(graph, parameters)
            x, _ = block(x, rope=rope, segment_ids=None, rounding_keys=None, attend=attend)
            return x, extended.pop()

        layers = (parameters, cache.keys[segment.name], cache.values[segment.name])
        x, (keys[segment.name], values[segment.name]) = jax.lax.scan(body, x, layers)
    logits = model.head(model.final_norm(x[:, -1]))
    return logits, Cache(cache.length + tokens.shape[1], keys, values)
