"""Mixtral: Llama's attention with a mixture of experts as feed-forward (arXiv 2401.04088)."""

from __future__ import annotations

import jax
from flax import nnx

from ..errors import UserError
from ..layers.moe import NVFP4MoE
from ..numerics import Recipe
from .config import ModelConfig, MoEConfig
from .decoder import Auxiliary, Decoder, kernel_init, output_kernel_init
from .precision_plan import ROUTER, LinearShape


class ExpertMLP(nnx.Module):
    """An NVFP4MoE that keeps padding tokens out of the experts and reports per layer."""

    def __init__(
        self, config: ModelConfig, moe: MoEConfig, *, recipe: Recipe, backend: str, rngs: nnx.Rngs
    ):
        self.moe = NVFP4MoE(
            config.embed_dim,
            config.mlp_dim,
            moe.num_experts,
            moe.experts_per_token,
            capacity_factor=moe.capacity_factor,
            group_size=moe.group_size,
            router_init=kernel_init(),
            gate_up_init=kernel_init(),
            down_init=output_kernel_init(config),
            recipe=recipe,
            rounding="explicit",
            backend=backend,
            name="mlp.moe",
            rngs=rngs,
        )

    def __call__(
        self, x: jax.Array, *, segment_ids: jax.Array | None, rounding_keys: jax.Array | None
    ) -> tuple[jax.Array, Auxiliary]:
        """x [B, T, D] -> ([B, T, D], one layer's losses and counts); one rounding key."""
        token_mask = None if segment_ids is None else segment_ids != 0
        rounding_key = None if rounding_keys is None else rounding_keys[0]
        y, report = self.moe(x, token_mask=token_mask, rounding_key=rounding_key)
        return y, {
            "load_balance_loss": report.load_balance_loss,
            "router_z_loss": report.router_z_loss,
            "tokens_per_expert": report.tokens_per_expert,
            "dropped_fraction": report.dropped_fraction,
        }


class Mixtral(Decoder):
    """The Mixtral family."""

    num_mlp_keys = 1

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        _experts(config)
        if config.mlp_bias:
            raise UserError("model.mlp_bias=true: experts have no biases; set it to false")

    @classmethod
    def mlp_linears(cls, config: ModelConfig) -> tuple[LinearShape, ...]:
        moe = _experts(config)
        copies, active = moe.num_experts, moe.experts_per_token
        return (
            LinearShape(ROUTER, config.embed_dim, moe.num_experts),
            LinearShape("gate_up", config.embed_dim, 2 * config.mlp_dim, copies, active),
            LinearShape("down", config.mlp_dim, config.embed_dim, copies, active),
        )

    @classmethod
    def make_mlp(
        cls, config: ModelConfig, recipe: Recipe, backend: str, rngs: nnx.Rngs
    ) -> ExpertMLP:
        return ExpertMLP(config, _experts(config), recipe=recipe, backend=backend, rngs=rngs)


def _experts(config: ModelConfig) -> MoEConfig:
    if config.moe is None:
        raise UserError(
            "model.moe is missing: model.architecture=mixtral needs its num_experts and "
            "experts_per_token"
        )
    return config.moe
