"""The twin that our float32 step is measured against: the same Llama and AdamW in plain JAX.

No NNX, no fp4zoo. Parameters are a dict of arrays stacked over layers; the step is one jitted
function with donated state.

Legend: B batch, T tokens, D width, H heads, K key/value heads, G = H / K, F feed-forward,
V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import optax


def init(key, *, layers, width, mlp, heads, kv_heads, vocab):
    head_dim = width // heads
    keys = iter(jax.random.split(key, 8))

    def normal(*shape):
        return 0.02 * jax.random.normal(next(keys), shape)

    return {
        "embedding": normal(vocab, width),
        "head": normal(width, vocab),
        "final_norm": jnp.ones(width),
        "blocks": {
            "attention_norm": jnp.ones((layers, width)),
            "qkv": normal(layers, width, kv_heads, heads // kv_heads + 2, head_dim),
            "output": normal(layers, width, width),
            "mlp_norm": jnp.ones((layers, width)),
            "gate_up": normal(layers, width, 2, mlp),
            "down": normal(layers, mlp, width),
        },
    }


@functools.partial(jax.checkpoint, prevent_cse=False)
def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * scale


def rotate(x, cos, sin):
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


@functools.partial(jax.checkpoint, prevent_cse=False)
def attend(query, key, value, mask):
    return jax.nn.dot_product_attention(query, key, value, mask=mask)


def block(x, weights, cos, sin, mask):
    batch, length, width = x.shape
    fused = jnp.einsum("btd,dkgh->btkgh", norm(x, weights["attention_norm"]), weights["qkv"])
    query = fused[..., :-2, :].reshape(batch, length, -1, fused.shape[-1])
    key, value = fused[..., -2, :], fused[..., -1, :]
    mixed = attend(rotate(query, cos, sin), rotate(key, cos, sin), value, mask).reshape(
        batch, length, width
    )
    x = x + mixed @ weights["output"]
    gate_up = jnp.einsum("btd,dcf->btcf", norm(x, weights["mlp_norm"]), weights["gate_up"])
    return x + (jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]) @ weights["down"], None


def loss(parameters, batch):
    head_dim = parameters["blocks"]["qkv"].shape[-1]
    angles = batch["positions"][..., None] * 10_000.0 ** (-jnp.arange(0, head_dim, 2) / head_dim)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    length = batch["tokens"].shape[1]
    mask = batch["segment_ids"][:, None, :, None] == batch["segment_ids"][:, None, None, :]
    mask &= jnp.tril(jnp.ones((length, length), bool))
    x = parameters["embedding"][batch["tokens"]]
    x, _ = jax.lax.scan(
        lambda x, weights: block(x, weights, cos, sin, mask), x, parameters["blocks"]
    )
    logits = norm(x, parameters["final_norm"]) @ parameters["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


def make_step(optimizer):
    """(state, batch) -> (state, (loss, gradient norm)), clipped to norm 1; donate the state."""

    def step(state, batch):
        parameters, moments = state
        value, gradients = jax.value_and_grad(loss)(parameters, batch)
        gradient_norm = optax.global_norm(gradients)
        gradients = jax.tree.map(lambda g: g * jnp.minimum(1, 1 / gradient_norm), gradients)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), (value, gradient_norm)

    return step
