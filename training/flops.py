"""Arithmetic of a training step, and the share of the device's peak that it reaches (MFU)."""

from __future__ import annotations

from typing import Any

from ..models import ModelConfig

# Dense BF16 tensor-core peak in FLOP/s, from the vendors' data sheets (no sparsity). MFU is stated
# against BF16 whatever the recipe, so that recipes can be compared; FP4 hardware may exceed 1.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA L40S": 362e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Floating-point operations per trained token: forward and backward (three times the forward),
    attention at full length halved for the causal mask, nothing for recomputation."""
    head_dim = config.resolved_head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    attention = config.embed_dim * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * config.embed_dim * config.mlp_dim
    if config.moe is not None:
        mlp = mlp * config.moe.experts_per_token + config.embed_dim * config.moe.num_experts
    span = min(sequence_length, config.sliding_window or sequence_length)
    scores = 2 * heads * head_dim * span / 2
    head = config.embed_dim * config.vocab_size
    return 6 * (config.num_layers * (attention + mlp + scores) + head)


def peak_flops(device: Any) -> float | None:
    """The device's BF16 peak in FLOP/s, or None when it is not in the table."""
    matches = [name for name in PEAK_FLOPS if device.device_kind.startswith(name)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None
