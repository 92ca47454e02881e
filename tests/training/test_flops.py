import dataclasses
from types import SimpleNamespace

import pytest

from fp4zoo.models import ModelConfig, count_parameters
from fp4zoo.training.flops import flops_per_token, peak_flops

LLAMA_8B = ModelConfig(
    "llama", vocab_size=128256, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8,
    mlp_dim=14336, max_positions=8192,
)  # fmt: skip


def test_six_times_the_parameters_of_the_matrices_plus_attention():
    embedding, norms = 128256 * 4096, (2 * 32 + 1) * 4096
    matrices = count_parameters(LLAMA_8B) - embedding - norms
    attention = 12 * 32 * 4096 * 8192 / 2
    assert flops_per_token(LLAMA_8B, 8192) == pytest.approx(6 * matrices + attention)


def test_only_the_experts_that_a_token_uses_count(tiny, tiny_moe):
    router = 6 * tiny.num_layers * tiny.embed_dim * tiny_moe.moe.num_experts
    mlp = 6 * tiny.num_layers * 3 * tiny.embed_dim * tiny.mlp_dim
    difference = flops_per_token(tiny_moe, 16) - flops_per_token(tiny, 16)
    assert difference == pytest.approx(router + mlp)


def test_a_window_limits_the_attention(tiny):
    windowed = dataclasses.replace(tiny, sliding_window=16)
    assert flops_per_token(windowed, 64) == flops_per_token(tiny, 16)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA B200", 2250e12),
        ("cpu", None),
    ],
)
def test_the_longest_name_decides_the_peak(kind, peak):
    assert peak_flops(SimpleNamespace(device_kind=kind)) == peak
