"""A short text from the model, to see what it has learnt. `generate.py` is for more.

Legend: W window, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..errors import UserError
from .state import Parameters

_ROUND = 16  # windows are multiples of the quantisation block


def sample_tokens(
    graphdef: nnx.GraphDef,
    parameters: Parameters,
    prompt: list[int],
    *,
    num_tokens: int,
    seed: int,
    vocab_size: int,
    max_positions: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    stop_token: int | None = None,
) -> list[int]:
    """Continues `prompt` by up to `num_tokens` tokens and returns those.

    One compiled loop over a window of fixed size; each token costs a forward pass over the window.

    vocab_size: tokens from this one on are never drawn (a model's vocabulary may be padded).
    temperature: 0 takes the likeliest token.
    top_p: draws from the smallest set of tokens whose probability is at least this.
    stop_token: ends the text and is not part of it.

    Raises:
      UserError: if prompt and continuation do not fit into max_positions.
    """
    length = len(prompt) + num_tokens
    if not prompt:
        raise ValueError("the prompt is empty: give at least the tokenizer's start token")
    if length > max_positions:
        raise UserError(
            f"sample_tokens={num_tokens} after a prompt of {len(prompt)} exceeds "
            f"model.max_positions={max_positions}: sample fewer"
        )
    window = min(length + -length % _ROUND, max_positions)
    tokens = jnp.zeros((1, window), jnp.int32).at[0, : len(prompt)].set(jnp.asarray(prompt))

    @jax.jit
    def generate(parameters: Parameters, tokens: jax.Array, key: jax.Array) -> jax.Array:
        model: Any = nnx.merge(graphdef, parameters)

        def extend(position: jax.Array, tokens: jax.Array) -> jax.Array:
            segment_ids = (jnp.arange(window) < position).astype(jnp.int32)[None]
            hidden, _ = model.hidden(tokens, segment_ids)
            logits = model.head(jax.lax.dynamic_index_in_dim(hidden[0], position - 1))[0]
            logits = jnp.where(jnp.arange(logits.shape[0]) < vocab_size, logits, -jnp.inf)
            step_key = jax.random.fold_in(key, position)
            token = choose_token(step_key, logits, temperature=temperature, top_p=top_p)
            return tokens.at[0, position].set(token)

        return jax.lax.fori_loop(len(prompt), length, extend, tokens)

    generated = generate(parameters, tokens, jax.random.key(seed))[0, len(prompt) : length].tolist()
    if stop_token in generated:
        generated = generated[: generated.index(stop_token)]
    return generated


def choose_token(
    key: jax.Array, logits: jax.Array, *, temperature: float, top_p: float
) -> jax.Array:
    """Draws one token: logits float32 [V] -> int32 scalar. See `sample_tokens` for the settings."""
    if temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    order = jnp.argsort(-logits)  # likeliest first
    ordered = logits[order] / temperature
    probabilities = jax.nn.softmax(ordered)
    before = jnp.cumsum(probabilities) - probabilities  # of all likelier tokens; 0 for the first
    kept = jnp.where(before < top_p, ordered, -jnp.inf)
    return order[jax.random.categorical(key, kept)].astype(jnp.int32)
