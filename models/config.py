"""What a model is: plain numbers, the same in Python, in YAML and beside a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from ..errors import UserError
from ..layers.rope import RopeScaling

__all__ = ["MoEConfig", "ModelConfig", "RopeScaling"]


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts feed-forward.

    capacity_factor: None computes every chosen expert (dropless); a number limits each expert to
      capacity_factor · tokens · experts_per_token / num_experts tokens and drops the rest.
    load_balance_loss_weight, router_z_loss_weight: the training loop multiplies the losses by these.
    """

    num_experts: int
    experts_per_token: int
    capacity_factor: Optional[float] = None
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


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    architecture: a name in `models.ARCHITECTURES`.
    head_dim: None means embed_dim / num_heads.
    mlp_dim: width of the gated feed-forward, of one expert when `moe` is set.
    max_positions: longest sequence the model is made for, in tokens.
    sliding_window: a token sees itself and the sliding_window - 1 tokens before it; None sees all.
    attention_bias, mlp_bias: biases on the block's linears, as the architecture places them.
    qk_norm: RMSNorm on every query and key head.

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
    head_dim: Optional[int] = None
    rope_theta: float = 10_000.0
    rope_scaling: Optional[RopeScaling] = None
    sliding_window: Optional[int] = None
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: Optional[MoEConfig] = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "mlp_dim",
            "max_positions", "head_dim", "rope_theta", "sliding_window", "norm_epsilon",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value <= 0:
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
