"""Ranges of activations, measured by running a model over text.

Legend: B batch, T tokens, D embedding dimension, E experts, F feed-forward dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..layers.attention import AttentionFunction, dot_product_attention
from ..layers.moe import NVFP4MoE
from ..layers.rope import rope_frequencies, rope_tables
from ..models import Decoder
from ..models.decoder import Block
from ..models.mixtral import ExpertMLP


@dataclass(frozen=True)
class Calibration:
    """Largest magnitudes. inputs: of each linear's input; cache: of keys and values, both by the
    linear's Hugging Face name, such as model.layers.0.self_attn.q_proj."""

    inputs: dict[str, float]
    cache: dict[str, float]


def calibrate(model: Decoder, batches: Iterable[np.ndarray]) -> Calibration:
    """Runs a model over batches of tokens, int32 [B, T], in the model's own precision.

    An expert that no token reached takes the largest range of the layer's experts.
    """
    graph, state = nnx.split(model)
    measure = jax.jit(lambda state, tokens: _ranges(nnx.merge(graph, state), tokens))
    total: list[dict[str, jax.Array]] | None = None
    for tokens in batches:
        ranges = measure(state, jnp.asarray(tokens, jnp.int32))
        total = ranges if total is None else jax.tree.map(jnp.maximum, total, ranges)
    assert total is not None, "calibration without text"
    layers = {key: np.concatenate([part[key] for part in total]) for key in total[0]}
    inputs: dict[str, float] = {}
    cache: dict[str, float] = {}
    mixtral = model.config.architecture == "mixtral"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for layer in range(model.config.num_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        for name in ("q_proj", "k_proj", "v_proj"):
            inputs[f"{attention}.{name}"] = float(layers["attention"][layer])
        inputs[f"{attention}.o_proj"] = float(layers["output"][layer])
        cache[f"{attention}.k_proj"] = float(layers["key"][layer])
        cache[f"{attention}.v_proj"] = float(layers["value"][layer])
        mlp = f"{prefix}.block_sparse_moe" if mixtral else f"{prefix}.mlp"
        down = np.atleast_1d(layers["down"][layer])
        stems = (
            [mlp] if model.config.moe is None else [f"{mlp}.experts.{e}" for e in range(len(down))]
        )
        for stem, value in zip(stems, np.where(down > 0, down, down.max()), strict=True):
            inputs[f"{stem}.{names[0]}"] = inputs[f"{stem}.{names[1]}"] = float(
                layers["mlp"][layer]
            )
            inputs[f"{stem}.{names[2]}"] = float(value)
    return Calibration(inputs, cache)


def _ranges(model: Decoder, tokens: jax.Array) -> list[dict[str, jax.Array]]:
    """Per segment: largest magnitudes, leaves [layers] or, for experts, [layers, E]."""
    config = model.config
    frequencies = rope_frequencies(config.resolved_head_dim, config.rope_theta, config.rope_scaling)
    rope = rope_tables(jnp.arange(tokens.shape[1])[None], frequencies)
    x, found = model.embedding(tokens), []
    for segment in model.segments:
        graph, parameters = nnx.split(model.blocks[segment.name])

        def body(x, layer, graph=graph):
            block = nnx.merge(graph, layer)
            ranges: dict[str, jax.Array] = {}
            attend = _watch(block, ranges)
            x, _ = block(x, rope=rope, segment_ids=None, rounding_keys=None, attend=attend)
            return x, ranges

        x, ranges = jax.lax.scan(body, x, parameters)
        found.append(ranges)
    return found


def _watch(block: Block, ranges: dict[str, jax.Array]) -> AttentionFunction:
    """Makes the block's linears write down what they are given; the same for keys and values."""

    def watch(part: nnx.Module, name: str, found: Callable[[jax.Array], dict]) -> None:
        layer = getattr(part, name)

        def call(x: jax.Array, *arguments: Any, **keywords: Any) -> Any:
            ranges.update(found(x))
            return layer(x, *arguments, **keywords)

        setattr(part, name, call)

    def attend(query, key, value, pattern):
        ranges.update(key=_largest(key), value=_largest(value))
        return dot_product_attention(query, key, value, pattern)

    watch(block.attention, "qkv", lambda x: {"attention": _largest(x)})
    watch(block.attention, "output", lambda x: {"output": _largest(x)})
    if isinstance(block.mlp, ExpertMLP):
        moe = block.mlp.moe
        watch(block.mlp, "moe", lambda x: {"mlp": _largest(x), "down": _down_inputs(moe, x)})
    else:
        watch(block.mlp, "gate_up", lambda x: {"mlp": _largest(x)})
        watch(block.mlp, "down", lambda x: {"down": _largest(x)})
    return attend


def _down_inputs(moe: NVFP4MoE, x: jax.Array) -> jax.Array:
    """The largest input of each expert's down projection, [E]."""
    tokens = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    logits = jnp.dot(tokens, moe.router[...], precision=jax.lax.Precision.HIGHEST)
    _, chosen = jax.lax.top_k(logits, moe.experts_per_token)

    def expert(carry, inputs):
        number, kernel = inputs  # kernel [D, 2, F]
        gate_up = jnp.einsum("md,dcf->mcf", tokens, kernel)
        hidden = jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]
        routed = jnp.any(chosen == number, axis=-1)
        return carry, _largest(jnp.where(routed[:, None], hidden, 0))

    return jax.lax.scan(expert, None, (jnp.arange(moe.num_experts), moe.gate_up[...]))[1]


def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x.astype(jnp.float32)))
