"""Qwen3 and Qwen3-MoE: Llama and Mixtral with an RMSNorm on every query and key head.

Source: arXiv 2505.09388.
"""

from __future__ import annotations

from ..errors import UserError
from .config import ModelConfig
from .llama import Llama
from .mixtral import Mixtral


class Qwen3(Llama):
    """The dense Qwen3 family."""

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        super().check(config)
        _check_head_norms(config)


class Qwen3MoE(Mixtral):
    """The Qwen3 mixtures of experts; `mlp_dim` is the width of one expert."""

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        super().check(config)
        _check_head_norms(config)


def _check_head_norms(config: ModelConfig) -> None:
    if not config.qk_norm:
        raise UserError(
            f"model.qk_norm=false: model.architecture={config.architecture} normalises query and "
            "key heads; set it to true"
        )
