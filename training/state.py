"""Everything that a training step changes, as one pytree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .loss_scale import DynamicLossScale, LossScaleConfig

Parameters = dict[str, Any]  # nested, by attribute names, leaves float32 arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer and counters; all counters are int32 scalars.

    Attributes:
      step: steps taken, skipped ones included; also the number of batches consumed.
      parameters: the model's parameters as a nested dict of float32 arrays.
      optimizer: optax's state.
      loss_scale: the loss scale of the next step.
      skipped_steps: non-finite steps so far.
      consecutive_skips: non-finite steps since the last finite one.
    """

    step: jax.Array
    parameters: Parameters
    optimizer: optax.OptState
    loss_scale: DynamicLossScale
    skipped_steps: jax.Array
    consecutive_skips: jax.Array

    @classmethod
    def create(
        cls,
        parameters: Parameters,
        optimizer: optax.GradientTransformation,
        loss_scale: LossScaleConfig,
    ) -> TrainState:
        """The state before the first step."""
        return cls(
            step=jnp.int32(0),
            parameters=parameters,
            optimizer=optimizer.init(parameters),
            loss_scale=DynamicLossScale.create(loss_scale),
            skipped_steps=jnp.int32(0),
            consecutive_skips=jnp.int32(0),
        )

    def replace(self, **changes: Any) -> TrainState:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, Parameters]:
    """The model as (static part, parameters); `nnx.merge` puts it together again.

    Raises:
      ValueError: if the model has variables that are not parameters, which the step would not keep.
    """
    graphdef, parameters, rest = nnx.split(model, nnx.Param, ...)
    if jax.tree.leaves(rest):
        names = ", ".join(path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(rest))
        raise ValueError(
            f"the model holds variables that are not nnx.Param ({names}); the training step keeps "
            'parameters only: build the layers with rounding="explicit"'
        )
    return graphdef, nnx.to_pure_dict(parameters)


def abstract_model(create: Callable[[], nnx.Module]) -> tuple[nnx.Module, nnx.GraphDef, Parameters]:
    """(model, graphdef, parameters) of `create()` without allocating: leaves are shapes."""
    model = nnx.eval_shape(create)
    return model, *split_model(model)


def path_name(path: tuple) -> str:
    """A pytree path as a dotted name: blocks.middle.mlp.down.kernel."""
    return ".".join(
        str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry))))
        for entry in path
    )


def is_stacked(name: str) -> bool:
    """Whether the parameter of this dotted name has a leading axis over layers."""
    return name.startswith("blocks.")
