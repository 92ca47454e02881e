"""Cross-entropy of next-token prediction in float32, with the backward pass in one fused sweep.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.custom_vjp
def token_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log p(target) in nats: logits float32 [B, T, V], targets int32 [B, T] -> float32 [B, T].

    The gradient is softmax - onehot, written as one elementwise expression: the transpose of a
    gather would be a scatter into a second [B, T, V] array.
    """
    return _forward(logits, targets)[0]


def _forward(logits, targets):
    normaliser = jax.nn.logsumexp(logits, axis=-1)  # [B, T]
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return normaliser - chosen, (logits, normaliser, targets)


def _backward(residuals, cotangent):
    logits, normaliser, targets = residuals
    probabilities = jnp.exp(logits - normaliser[..., None])
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_target = is_target == targets[..., None]
    return cotangent[..., None] * (probabilities - is_target), None


token_losses.defvjp(_forward, _backward)
