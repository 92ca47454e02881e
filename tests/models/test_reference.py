"""Logits against a second implementation: plain numpy, float64, one token at a time, no fusing.

The reference follows the published description (Llama, Mixtral; weights as separate matrices in
the layout of Hugging Face checkpoints) and shares no code with the models.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4zoo import models
from fp4zoo.models import ModelConfig, MoEConfig, RopeScaling

BASE = dict(
    architecture="llama", vocab_size=37, num_layers=2, embed_dim=24, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=40, max_positions=64,
)  # fmt: skip

CASES = {
    "grouped queries": {},
    "multi-head": dict(num_kv_heads=4),
    "one key/value head": dict(num_kv_heads=1),
    "tied": dict(tie_embeddings=True),
    "llama3 rope": dict(rope_theta=500_000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16)),
    "sliding window": dict(sliding_window=3),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "query, key and value biases": dict(architecture="qwen2", attention_bias=True),
    "query and key norms": dict(architecture="qwen3", qk_norm=True),
    "query and key norms, experts": dict(
        architecture="qwen3_moe", qk_norm=True, moe=MoEConfig(4, 2)
    ),
    "experts": dict(architecture="mixtral", moe=MoEConfig(5, 2), rope_theta=1e6),
    "one expert per token": dict(architecture="mixtral", moe=MoEConfig(3, 1)),
}


def random_weights(config, seed=0):
    """Matrices [in, out] per layer; norms are not all one, biases not all zero."""
    rng = np.random.default_rng(seed)
    width, head_dim = config.embed_dim, config.resolved_head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def matrix(*shape):
        return rng.normal(size=shape) / np.sqrt(shape[-2])

    def layer():
        weights = {
            "q": matrix(width, queries), "k": matrix(width, keys), "v": matrix(width, keys),
            "o": matrix(queries, width),
            "input_norm": 1 + 0.1 * rng.normal(size=width),
            "post_norm": 1 + 0.1 * rng.normal(size=width),
            "q_norm": 1 + 0.1 * rng.normal(size=head_dim),
            "k_norm": 1 + 0.1 * rng.normal(size=head_dim),
        }  # fmt: skip
        experts = () if config.moe is None else (config.moe.num_experts,)
        weights |= {
            "gate": matrix(*experts, width, config.mlp_dim),
            "up": matrix(*experts, width, config.mlp_dim),
            "down": matrix(*experts, config.mlp_dim, width),
        }
        if config.moe is not None:
            weights["router"] = matrix(width, config.moe.num_experts)
        for name, size in (("q", queries), ("k", keys), ("v", keys), ("o", width)):
            biased = config.attention_bias and (name, config.architecture) != ("o", "qwen2")
            weights[f"{name}_bias"] = biased * 0.1 * rng.normal(size=size)
        for name, size in (("gate", config.mlp_dim), ("up", config.mlp_dim), ("down", width)):
            weights[f"{name}_bias"] = config.mlp_bias * 0.1 * rng.normal(size=size)
        return weights

    return {
        "embedding": rng.normal(size=(config.vocab_size, width)),
        "layers": [layer() for _ in range(config.num_layers)],
        "norm": 1 + 0.1 * rng.normal(size=width),
        "head": matrix(width, config.vocab_size),
    }


def reference_logits(config, weights, tokens, segment_ids, positions):
    """Logits [T, V] of one row."""
    head_dim, group = config.resolved_head_dim, config.num_heads // config.num_kv_heads
    length = len(tokens)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2) + config.norm_epsilon) * scale

    def silu(x):
        return x / (1 + np.exp(-x))

    def rotate(x, position):
        result = np.empty_like(x)
        half = head_dim // 2
        for i in range(half):
            frequency = config.rope_theta ** (-2 * i / head_dim)
            scaling = config.rope_scaling
            if scaling is not None:
                turns = scaling.original_max_positions * frequency / (2 * np.pi)
                low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
                kept = min(max((turns - low) / (high - low), 0), 1)
                frequency *= kept + (1 - kept) / scaling.factor
            cos, sin = np.cos(position * frequency), np.sin(position * frequency)
            result[i] = x[i] * cos - x[i + half] * sin
            result[i + half] = x[i + half] * cos + x[i] * sin
        return result

    def heads(x, layer, name, count, position=None):
        projected = (x @ layer[name] + layer[f"{name}_bias"]).reshape(count, head_dim)
        if config.qk_norm and name != "v":
            projected = np.array([norm(head, layer[f"{name}_norm"]) for head in projected])
        if name != "v":
            projected = np.array([rotate(head, position) for head in projected])
        return projected

    def feed_forward(x, layer):
        def gated(gate, up, down):
            hidden = silu(x @ gate + layer["gate_bias"]) * (x @ up + layer["up_bias"])
            return hidden @ down + layer["down_bias"]

        if config.moe is None:
            return gated(layer["gate"], layer["up"], layer["down"])
        scores = np.exp(x @ layer["router"])
        scores /= scores.sum()
        chosen = np.argsort(-scores)[: config.moe.experts_per_token]
        total = scores[chosen].sum()
        return sum(
            scores[e] / total * gated(layer["gate"][e], layer["up"][e], layer["down"][e])
            for e in chosen
        )

    stream = [weights["embedding"][token].copy() for token in tokens]
    for layer in weights["layers"]:
        normed = [norm(x, layer["input_norm"]) for x in stream]
        query = [heads(x, layer, "q", config.num_heads, p) for x, p in zip(normed, positions)]  # noqa: B905
        key = [heads(x, layer, "k", config.num_kv_heads, p) for x, p in zip(normed, positions)]  # noqa: B905
        value = [heads(x, layer, "v", config.num_kv_heads) for x in normed]
        for t in range(length):
            visible = [
                s
                for s in range(t + 1)
                if segment_ids[s] == segment_ids[t]
                and (config.sliding_window is None or s > t - config.sliding_window)
            ]
            mixed = []
            for n in range(config.num_heads):
                scores = np.array([query[t][n] @ key[s][n // group] for s in visible])
                scores = np.exp(scores / np.sqrt(head_dim) - scores.max() / np.sqrt(head_dim))
                scores /= scores.sum()
                mixed.append(sum(w * value[s][n // group] for w, s in zip(scores, visible)))  # noqa: B905
            stream[t] = stream[t] + np.concatenate(mixed) @ layer["o"] + layer["o_bias"]
        stream = [x + feed_forward(norm(x, layer["post_norm"]), layer) for x in stream]
    head = weights["embedding"].T if config.tie_embeddings else weights["head"]
    return np.array([norm(x, weights["norm"]) @ head for x in stream])


def set_weights(model, weights):
    """Writes the reference's matrices into the fused, stacked parameters of a one-segment model."""
    config = model.config
    kv_heads, head_dim = config.num_kv_heads, config.resolved_head_dim

    def put(parameter, value):
        assert parameter.shape == value.shape
        parameter.set_value(jnp.asarray(value, jnp.float32))

    def stack(name):
        return np.stack([layer[name] for layer in weights["layers"]])

    def fuse(suffix):
        q, k, v = (stack(name + suffix) for name in "qkv")
        shape = (*q.shape[:-1], kv_heads, -1, head_dim)
        return np.concatenate([x.reshape(shape) for x in (q, k, v)], axis=-2)

    (block,) = model.blocks.values()
    put(block.attention_norm.scale, stack("input_norm"))
    put(block.mlp_norm.scale, stack("post_norm"))
    put(block.attention.qkv.kernel, fuse(""))
    put(block.attention.output.kernel, stack("o"))
    if config.attention_bias:
        put(block.attention.qkv.bias, fuse("_bias"))
    if config.attention_bias and config.architecture != "qwen2":
        put(block.attention.output.bias, stack("o_bias"))
    if config.qk_norm:
        put(block.attention.query_norm.scale, stack("q_norm"))
        put(block.attention.key_norm.scale, stack("k_norm"))
    gate_up = np.stack([stack("gate"), stack("up")], axis=-2)
    if config.moe is None:
        put(block.mlp.gate_up.kernel, gate_up)
        put(block.mlp.down.kernel, stack("down"))
        if config.mlp_bias:
            put(block.mlp.gate_up.bias, np.stack([stack("gate_bias"), stack("up_bias")], axis=-2))
            put(block.mlp.down.bias, stack("down_bias"))
    else:
        put(block.mlp.moe.router, stack("router"))
        put(block.mlp.moe.gate_up, gate_up)
        put(block.mlp.moe.down, stack("down"))
    put(model.embedding.embedding, weights["embedding"])
    put(model.final_norm.scale, weights["norm"])
    if not config.tie_embeddings:
        put(model.output_head.kernel, weights["head"])


def test_every_architecture_has_a_case():
    assert {(BASE | case)["architecture"] for case in CASES.values()} == set(models.ARCHITECTURES)


@pytest.mark.parametrize("case", CASES)
def test_logits(case):
    config = ModelConfig(**(BASE | CASES[case]))
    weights = random_weights(config)
    model = nnx.eval_shape(lambda: models.create(config, recipe="fp32", rngs=nnx.Rngs(0)))
    set_weights(model, weights)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, config.vocab_size, size=(2, 11)).astype(np.int32)
    segment_ids = np.array([[1] * 11, [1] * 4 + [2] * 7], np.int32)
    positions = np.array([range(11), [*range(4), *range(7)]], np.int32)
    logits = jax.jit(lambda *inputs: model(*inputs))(tokens, segment_ids, positions)
    for row in range(2):
        expected = reference_logits(config, weights, tokens[row], segment_ids[row], positions[row])
        assert np.std(expected) > 0.3
        np.testing.assert_allclose(logits[row], expected, atol=1e-4)
