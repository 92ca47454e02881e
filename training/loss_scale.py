"""Dynamic loss scaling: a pure pytree that travels inside the jitted training step.

The loss is multiplied by `scale` before the backward pass and the gradients are divided by it
afterwards. A step whose loss or gradients are not finite halves the scale; `interval` consecutive
finite steps double it. The scale is always a power of two, so that scaling and unscaling are exact
unless a value under- or overflows.

With `enabled=False` the scale stays 1 for ever; the non-finite guard in `step.py` does not depend
on it and keeps working.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..errors import UserError

MINIMUM_EXPONENT, MAXIMUM_EXPONENT = -24, 100  # powers of two that leave room in float32 both ways


def _is_power_of_two(value: float) -> bool:
    if not (math.isfinite(value) and value > 0):
        return False
    mantissa, exponent = math.frexp(value)
    return mantissa == 0.5 and MINIMUM_EXPONENT <= exponent - 1 <= MAXIMUM_EXPONENT


@dataclass(frozen=True)
class LossScaleConfig:
    """How the loss scale moves, and when a run of bad steps ends the run.

    Attributes:
      enabled: False keeps the scale at 1; non-finite steps are skipped all the same.
      initial: scale of the first step, a power of two.
      interval: consecutive finite steps after which the scale doubles.
      floor: smallest scale, a power of two.
      ceiling: largest scale, a power of two.
      max_consecutive_skips: non-finite steps in a row after which training stops with an error.
    """

    enabled: bool = True
    initial: float = 2.0**15
    interval: int = 2000
    floor: float = 1.0
    ceiling: float = 2.0**24
    max_consecutive_skips: int = 20

    def __post_init__(self) -> None:
        for name in ("initial", "floor", "ceiling"):
            value = getattr(self, name)
            if not _is_power_of_two(value):
                raise UserError(
                    f"precision.loss_scale.{name}={value} is not a power of two: use one, such as "
                    "1 or 32768"
                )
        if not self.floor <= self.initial <= self.ceiling:
            raise UserError(
                f"precision.loss_scale.initial={self.initial:g} lies outside floor="
                f"{self.floor:g} .. ceiling={self.ceiling:g}: choose it between them"
            )
        for name in ("interval", "max_consecutive_skips"):
            value = getattr(self, name)
            if value < 1:
                raise UserError(f"precision.loss_scale.{name}={value} must be at least 1")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DynamicLossScale:
    """The loss scale as training state.

    The limits are static fields, so that they survive jit, tree maps and a checkpoint's restore
    (a scale whose floor is lost through jit drifts to zero).

    Attributes:
      scale: float32 scalar, a power of two.
      finite_steps: int32 scalar, consecutive finite steps since the scale last moved.
      config: limits and interval; static.
    """

    scale: jax.Array
    finite_steps: jax.Array
    config: LossScaleConfig = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(cls, config: LossScaleConfig) -> DynamicLossScale:
        """The state before the first step."""
        scale = config.initial if config.enabled else 1.0
        return cls(jnp.float32(scale), jnp.int32(0), config)

    def scale_loss(self, loss: jax.Array) -> jax.Array:
        """The float32 `loss` times the scale: differentiate this."""
        return loss * self.scale

    def unscale(self, tree):
        """Divide every leaf by the scale, in float32."""
        inverse = 1.0 / self.scale  # exact: a power of two within float32's normal range
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) * inverse, tree)

    def update(self, finite: jax.Array) -> DynamicLossScale:
        """The state after a step that was finite (bool scalar) or was not."""
        if not self.config.enabled:
            return self
        finite_steps = jnp.where(finite, self.finite_steps + 1, 0)
        grow = finite_steps >= self.config.interval
        grown = jnp.minimum(self.scale * 2, self.config.ceiling)
        shrunk = jnp.maximum(self.scale / 2, self.config.floor)
        scale = jnp.where(finite, jnp.where(grow, grown, self.scale), shrunk)
        return dataclasses.replace(
            self,
            scale=scale.astype(jnp.float32),
            finite_steps=jnp.where(grow, 0, finite_steps).astype(jnp.int32),
        )
