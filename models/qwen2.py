"""Qwen2 and Qwen2.5: Llama with biases on the q/k/v projections alone (arXiv 2407.10671)."""

from __future__ import annotations

from flax import nnx

from ..errors import UserError
from ..layers.attention import Attention
from ..numerics import Recipe
from .config import ModelConfig
from .decoder import attention_of
from .llama import Llama


class Qwen2(Llama):
    """The Qwen2 family; its `attention_bias` is on q, k and v, never on the output projection."""

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        super().check(config)
        if not config.attention_bias:
            raise UserError(
                "model.attention_bias=false: model.architecture=qwen2 has biases on q, k and v; "
                "set it to true, or use llama"
            )

    @classmethod
    def make_attention(
        cls, config: ModelConfig, recipe: Recipe, backend: str, rngs: nnx.Rngs
    ) -> Attention:
        return attention_of(config, recipe, backend, rngs, output_bias=False)
