"""Put NVFP4 into a model of your own: a byte-level causal MLP, nothing of fp4zoo but its layers.

    python examples/custom_model.py [--steps 200]

The model is plain Flax NNX with `nnx.Linear`. `quantize_model` swaps the linear layers of its
blocks; the embedding and the output head stay in high precision. Both versions start from the same
weights, see the same batches, and print their losses side by side.
"""

import argparse
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fp4zoo.layers import quantize_model

WIDTH, HIDDEN, BLOCKS, CONTEXT = 128, 512, 3, 64


class Block(nnx.Module):
    """Mixes each byte with the one `shift` places before it, then an MLP on top."""

    def __init__(self, shift: int, rngs: nnx.Rngs):
        self.shift = shift
        self.norm = nnx.RMSNorm(2 * WIDTH, rngs=rngs)
        self.up = nnx.Linear(2 * WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [batch, sequence, width]
        before = jnp.pad(x, ((0, 0), (self.shift, 0), (0, 0)))[:, : x.shape[1]]
        return x + self.down(jax.nn.gelu(self.up(self.norm(jnp.concatenate([x, before], axis=-1)))))


class ByteModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(256, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(2**i, rngs) for i in range(BLOCKS)])
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, bytes_: jax.Array) -> jax.Array:  # [batch, sequence] -> [..., 256]
        x = self.embedding(bytes_)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@nnx.jit
def train_step(model: ByteModel, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    def loss_function(model: ByteModel) -> jax.Array:
        logits = model(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_function)(model)
    optimizer.update(model, gradients)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    steps = parser.parse_args().steps

    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = np.frombuffer(text, np.uint8)
    models = {
        "float32": ByteModel(nnx.Rngs(0)),
        "nvfp4": quantize_model(ByteModel(nnx.Rngs(0)), recipe="nvfp4", include=r"blocks\..*"),
    }
    optimizers = {
        name: nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)
        for name, model in models.items()
    }
    losses = {name: [] for name in models}
    random = np.random.default_rng(0)
    for step in range(1, steps + 1):
        starts = random.integers(0, len(data) - CONTEXT - 1, size=32)
        batch = jnp.asarray(
            np.stack([data[start : start + CONTEXT + 1] for start in starts]), jnp.int32
        )
        for name, model in models.items():
            losses[name].append(float(train_step(model, optimizers[name], batch)))
        if step == 1 or step % 50 == 0 or step == steps:
            recent = "   ".join(f"{name} {np.mean(losses[name][-20:]):.3f}" for name in models)
            print(f"step {step:4d}   {recent}   nats per byte", flush=True)


if __name__ == "__main__":
    main()
