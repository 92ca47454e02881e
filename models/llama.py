"""Llama 2 to 3.2, and what shares their computation: Mistral (sliding window), SmolLM2 (tied)."""

from __future__ import annotations

import functools

import jax
from flax import nnx

from ..errors import UserError
from ..layers.dense import NVFP4Dense
from ..numerics import Recipe
from ..numerics.partitioning import constrain
from ..numerics.platform import row_major
from .config import ModelConfig
from .decoder import Auxiliary, Decoder, kernel_init, output_kernel_init
from .precision_plan import LinearShape


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) · up(x)), with gate and up as one product (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, *, recipe: Recipe, backend: str, rngs: nnx.Rngs):
        self.gate_up = NVFP4Dense(
            config.embed_dim,
            (2, config.mlp_dim),
            use_bias=config.mlp_bias,
            kernel_init=kernel_init(),
            recipe=recipe,
            rounding="explicit",
            backend=backend,
            kernel_axes=("embed", None, "mlp"),
            name="mlp.gate_up",
            rngs=rngs,
        )
        self.down = NVFP4Dense(
            config.mlp_dim,
            config.embed_dim,
            use_bias=config.mlp_bias,
            kernel_init=output_kernel_init(config),
            recipe=recipe,
            rounding="explicit",
            backend=backend,
            kernel_axes=("mlp", "embed"),
            name="mlp.down",
            rngs=rngs,
        )

    def __call__(
        self, x: jax.Array, *, segment_ids: jax.Array | None, rounding_keys: jax.Array | None
    ) -> tuple[jax.Array, Auxiliary]:
        """x [B, T, D] -> ([B, T, D], {}); two rounding keys."""
        del segment_ids
        gate_up_key, down_key = (None, None) if rounding_keys is None else rounding_keys
        gate_up = self.gate_up(x, rounding_key=gate_up_key)  # [B, T, 2, F]
        gate_up = constrain(gate_up, "batch", "sequence", None, "mlp")
        return self.down(_swiglu(gate_up), rounding_key=down_key), {}


@functools.partial(jax.checkpoint, prevent_cse=False)  # Cheap to compute again, large to store.
def _swiglu(gate_up: jax.Array) -> jax.Array:
    """silu(gate) · up, [B, T, 2, F] -> [B, T, F]."""
    gate_up = row_major(gate_up)
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]


class Llama(Decoder):
    """The Llama family (arXiv 2302.13971, 2407.21783)."""

    num_mlp_keys = 2

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        if config.moe is not None:
            raise UserError(
                f"model.moe is set, but model.architecture={config.architecture} has no experts: "
                "use mixtral or qwen3_moe"
            )

    @classmethod
    def mlp_linears(cls, config: ModelConfig) -> tuple[LinearShape, ...]:
        return (
            LinearShape("gate_up", config.embed_dim, 2 * config.mlp_dim),
            LinearShape("down", config.mlp_dim, config.embed_dim),
        )

    @classmethod
    def make_mlp(
        cls, config: ModelConfig, recipe: Recipe, backend: str, rngs: nnx.Rngs
    ) -> GatedMLP:
        return GatedMLP(config, recipe=recipe, backend=backend, rngs=rngs)
