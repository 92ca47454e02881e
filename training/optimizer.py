"""AdamW and its learning-rate schedules, all from optax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from ..errors import UserError
from .state import Parameters, path_name

_UNDECAYED = ("bias", "scale")  # last path component of parameters that weight decay leaves alone


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule.

    Attributes:
      learning_rate: peak rate, reached after the warmup.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: decoupled decay of matrices; biases and norm scales never decay.
      clip_norm: largest global gradient norm; None does not clip.
      schedule: "cosine", "wsd" (warmup, stable, decay: linear) or "constant".
      warmup_steps: steps of linear warmup from 0.
      decay_fraction: share of all steps that "wsd" decays over, at the end.
      final_fraction: final rate as a share of the peak.
      first_moment_dtype: dtype that the first moment is rounded to after each step; bfloat16 saves
        2 bytes per parameter. The second moment is always float32.
    """

    learning_rate: float = 3e-3
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 20
    decay_fraction: float = 0.2
    final_fraction: float = 0.1
    first_moment_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        for name, low, high in (
            ("learning_rate", 0.0, float("inf")),
            ("b1", 0.0, 1.0),
            ("b2", 0.0, 1.0),
            ("weight_decay", 0.0, float("inf")),
            ("decay_fraction", 0.0, 1.0),
            ("final_fraction", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if not (low <= value <= high and math.isfinite(value)):
                raise UserError(
                    f"optimizer.{name}={value} must lie between {low} and {high}, and be finite"
                )
        for name in ("eps", "clip_norm"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"optimizer.{name}={value} must be positive")
        if self.warmup_steps < 0:
            raise UserError(f"optimizer.warmup_steps={self.warmup_steps} must not be negative")


def make_schedule(config: OptimizerConfig, max_steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of updates already made.

    The first step of a warmup of n has rate peak / n (not 0: that step would do nothing), the n-th
    the peak; then it falls towards `final_fraction` of the peak at the end of `max_steps`.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = config.warmup_steps
    remaining = max(max_steps - warmup, 1)
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(peak, remaining, alpha=config.final_fraction)
    elif config.schedule == "wsd":
        decay = max(min(round(config.decay_fraction * max_steps), remaining), 1)
        stable = remaining - decay
        main = optax.linear_schedule(peak, final, decay, transition_begin=stable)
    else:
        main = optax.constant_schedule(peak)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        ramp = peak * (count + 1) / max(warmup, 1)
        return jnp.where(count < warmup, ramp, main(count - warmup)).astype(jnp.float32)

    return schedule


def decay_mask(parameters: Parameters) -> Any:
    """True for the leaves that weight decay applies to: all but biases and norm scales.

    By name and not by rank: parameters are stacked over layers, and fused biases have several axes.
    """

    return jax.tree_util.tree_map_with_path(
        lambda path, _: path_name(path).rpartition(".")[2] not in _UNDECAYED, parameters
    )


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """AdamW as an optax chain.

    Clipping by the global norm is in `step.py`, which has the norm already.
    """
    return optax.chain(
        optax.scale_by_adam(
            b1=config.b1, b2=config.b2, eps=config.eps, mu_dtype=config.first_moment_dtype
        ),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(schedule),
    )
