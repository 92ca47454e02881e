"""Model architectures: a registry, and one file per architecture."""

from __future__ import annotations

import functools
import math

import jax
from flax import nnx

from ..errors import check_choice
from ..numerics import Recipe
from .config import ModelConfig, MoEConfig, RopeScaling
from .decoder import REMAT_POLICIES, Decoder
from .llama import Llama
from .mixtral import Mixtral
from .precision_plan import (
    PrecisionPlan,
    PrecisionRow,
    PrecisionRules,
    describe_backends,
    packs_residuals,
)
from .qwen2 import Qwen2
from .qwen3 import Qwen3, Qwen3MoE

__all__ = [
    "ARCHITECTURES",
    "REMAT_POLICIES",
    "Decoder",
    "Llama",
    "Mixtral",
    "MoEConfig",
    "ModelConfig",
    "PrecisionPlan",
    "PrecisionRow",
    "PrecisionRules",
    "Qwen2",
    "Qwen3",
    "Qwen3MoE",
    "RopeScaling",
    "count_parameters",
    "create",
    "describe_backends",
    "packs_residuals",
]

ARCHITECTURES: dict[str, type[Decoder]] = {
    "llama": Llama,
    "mixtral": Mixtral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3MoE,
}


def create(
    config: ModelConfig,
    *,
    recipe: Recipe | str = "nvfp4",
    rules: PrecisionRules = PrecisionRules(),  # noqa: B008  frozen
    remat: str = "none",
    activation_dtype: str = "float32",
    backend: str = "auto",
    rngs: nnx.Rngs,
) -> Decoder:
    """A freshly initialised model.

    recipe: precision of the blocks' linears, a Recipe or the name of one; `rules` says which blocks
      and projections an FP4 recipe covers. `model.plan` shows the result.
    remat: what the backward pass finds stored: "none" stores every activation it needs,
      "save_quantized" the quantised operands (the rest is computed again, the quantising is not),
      "full" nothing but the blocks' inputs.
    activation_dtype: "float32", "bfloat16" or "float16".
    backend: where FP4 products run: "auto", by what the device can do (`model.backends` says which
      and why), "emulated", "xla" or "transformer_engine".
    rngs: only its `params` stream is used.

    Raises:
      UserError: an unknown architecture, remat policy, dtype or backend, numbers that do not fit,
        or a backend that cannot run the recipe on this device.
    """
    check_choice("model.architecture", config.architecture, ARCHITECTURES)
    return _build(config, recipe, rules, remat, activation_dtype, backend, rngs)


# One program to compile, kept for the next model like this one, instead of dozens of small ones.
@functools.partial(nnx.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _build(
    config: ModelConfig,
    recipe: Recipe | str,
    rules: PrecisionRules,
    remat: str,
    activation_dtype: str,
    backend: str,
    rngs: nnx.Rngs,
) -> Decoder:
    return ARCHITECTURES[config.architecture](
        config,
        recipe=recipe,
        rules=rules,
        remat=remat,
        activation_dtype=activation_dtype,
        backend=backend,
        rngs=rngs,
    )


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters, tied ones once, without allocating any."""
    model = nnx.eval_shape(lambda: create(config, recipe="fp32", rngs=nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
