"""What a model is: plain numbers, the same in Python, in YAML and beside a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import UserError
from ..layers.rope import RopeScaling
from ..numerics.formats import BLOCK

__all__ = ["MoEConfig", "ModelConfig", "RopeScaling"]


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts feed-forward.

    Attributes:
      num_experts: experts per block.
      experts_per_token: experts that a token uses, the most probable ones.
      capacity_factor: tokens that an expert takes at most of a group, as a multiple of tokens ·
        experts_per_token / num_experts; the rest is dropped. null drops none.
      group_size: tokens a group: what an expert's capacity refers to, and what its blocks along
        tokens do not cross; it divides a sequence's part on one device. null: a whole sequence, or
        in FP4 without a capacity several short ones of the batch, up to 1024 tokens, which must lie
        on one device.
      load_balance_loss_weight: weight of the load-balance loss, which is summed over blocks.
      router_z_loss_weight: weight of the router-z loss, which is summed over blocks.
    """

    num_experts: int
    experts_per_token: int
    capacity_factor: float | None = None
    group_size: int | None = None
    load_balance_loss_weight: float = 0.01
    router_z_loss_weight: float = 0.001

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise UserError(
                f"moe.experts_per_token={self.experts_per_token} must be between 1 and "
                f"moe.num_experts={self.num_experts}"
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise UserError(
                f"moe.capacity_factor={self.capacity_factor} must be positive, or null for dropless"
            )
        if self.group_size is not None and (self.group_size < BLOCK or self.group_size % BLOCK):
            raise UserError(
                f"moe.group_size={self.group_size} must be a multiple of {BLOCK}, or null"
            )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
      architecture: the model's family: llama, mixtral, qwen2, qwen3 or qwen3_moe.
      vocab_size: rows of the token embedding.
      num_layers: transformer blocks.
      embed_dim: width of the residual stream.
      num_heads: query heads per block.
      num_kv_heads: key/value heads per block; each serves num_heads / num_kv_heads query heads.
      mlp_dim: width of the gated feed-forward, of one expert where moe is set.
      max_positions: longest sequence that the model is made for, in tokens.
      head_dim: width of one attention head; null means embed_dim / num_heads.
      rope_theta: base of the rotary embedding's wavelengths.
      rope_scaling: the rotary embedding's llama3 scaling, or null.
      sliding_window: a token sees itself and the sliding_window - 1 tokens before it; null: all.
      norm_epsilon: added to the mean square in every RMSNorm.
      tie_embeddings: use the token embedding as the output head too.
      attention_bias: biases on the attention projections, as the architecture places them.
      mlp_bias: biases on the feed-forward projections.
      qk_norm: an RMSNorm on every query and key head.
      moe: mixture of experts, for architectures that have one, or null.

    Raises:
      UserError: numbers that cannot make a model, naming the key, the value and the remedy.
    """

    architecture: str
    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    mlp_dim: int
    max_positions: int
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "mlp_dim",
            "max_positions", "head_dim", "rope_theta", "sliding_window", "norm_epsilon",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"model.{name}={value} must be positive")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model.num_heads={self.num_heads} is not a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}; change one of them"
            )
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise UserError(
                f"model.embed_dim={self.embed_dim} is not a multiple of "
                f"model.num_heads={self.num_heads}; change one of them or set model.head_dim"
            )
        if self.resolved_head_dim % 2:
            raise UserError(
                f"model.head_dim={self.resolved_head_dim} is odd; rotary embedding needs it even"
            )

    @property
    def resolved_head_dim(self) -> int:
        """Dimension of one attention head."""
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim
