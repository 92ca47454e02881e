"""The training step: one pure function (state, batch) -> (state, metrics) for `jax.jit`.

In this order: gradients of the scaled loss, accumulated in float32 over microbatches; unscaling;
the norm of every layer's gradient; clipping; the optimizer; and the guard, which throws all of it
away when anything was not finite.

Legend: A microbatches, B rows of a microbatch, T tokens, L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .chunked_loss import chunked_losses
from .cross_entropy import token_losses
from .loss_scale import DynamicLossScale
from .state import Parameters, TrainState, is_stacked, path_name

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class StepConfig:
    """What the step needs to know besides model and optimizer.

    Attributes:
      seed: seed of stochastic rounding.
      clip_norm: largest global gradient norm, None for no clipping.
      auxiliary_weights: weight of each of the model's auxiliary losses in the objective, by name.
      loss_chunks: parts that the tokens of a device go through head and loss in.
    """

    seed: int = 0
    clip_norm: float | None = None
    auxiliary_weights: tuple[tuple[str, float], ...] = ()
    loss_chunks: int = 1


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    config: StepConfig,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step as a pure function; jit it with the state donated.

    batch: tokens, targets, segment_ids, positions int32 and loss_mask float32, all [A, B, T]. The
    gradient is that of the sum of all token losses over the number of tokens in the whole batch, so
    it does not depend on how the batch is cut into microbatches.

    A step is skipped when its loss or any gradient is not finite, or the gradients' norm overflows
    float32: parameters, optimizer and schedule stay as they were, the loss scale halves, the
    counters count it.

    Metrics, float32 scalars unless noted: loss (nats per token, without auxiliary losses),
    gradient_norm (before clipping), learning_rate and loss_scale (as used in this step), tokens,
    skipped_steps and consecutive_skips (int32, after this step), finite (bool), gradient_squares
    [entries] (see `gradient_names`), and for mixtures of experts load_balance_loss, router_z_loss,
    dropped_fraction and expert_load (the busiest expert's tokens over the mean, worst layer).
    """

    def objective(
        parameters: Parameters,
        microbatch: Batch,
        rounding_key: jax.Array,
        num_tokens: jax.Array,
        num_microbatches: int,
        loss_scale: DynamicLossScale,
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        model: Any = nnx.merge(graphdef, parameters)
        hidden, auxiliary = model.hidden(
            microbatch["tokens"],
            microbatch["segment_ids"],
            microbatch["positions"],
            rounding_key=rounding_key,
        )
        targets, mask = microbatch["targets"], microbatch["loss_mask"]
        if config.loss_chunks == 1:
            losses = token_losses(model.head(hidden), targets)
            loss = jnp.sum(losses * mask) / num_tokens
            scaled = loss_scale.scale_loss(loss)
        else:
            weights = loss_scale.scale_loss(mask / num_tokens)
            losses, scaled = chunked_losses(
                head, parameters, hidden, targets, weights, config.loss_chunks
            )
            loss = jnp.sum(losses * mask) / num_tokens
        for name, weight in config.auxiliary_weights:
            scaled += loss_scale.scale_loss(weight * auxiliary[name] / num_microbatches)
        return scaled, (loss, auxiliary)

    def head(parameters: Parameters, hidden: jax.Array) -> jax.Array:
        model: Any = nnx.merge(graphdef, parameters)
        return model.head(hidden)

    def gradients_of(
        state: TrainState, batch: Batch, num_tokens: jax.Array
    ) -> tuple[Parameters, jax.Array, Metrics]:
        """(scaled float32 gradients, loss, auxiliary values averaged over microbatches)."""
        num_microbatches = batch["tokens"].shape[0]
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        differentiate = jax.grad(objective, has_aux=True)

        def one(index: jax.Array | int, microbatch: Batch) -> tuple[Parameters, tuple]:
            return differentiate(
                state.parameters,
                microbatch,
                jax.random.fold_in(key, index),
                num_tokens,
                num_microbatches,
                state.loss_scale,
            )

        if num_microbatches == 1:  # no loop, and no second copy of the gradients
            gradients, (loss, auxiliary) = one(0, jax.tree.map(lambda leaf: leaf[0], batch))
            return gradients, loss, auxiliary

        def accumulate(total: Parameters, indexed: tuple) -> tuple[Parameters, tuple]:
            gradients, reported = one(*indexed)
            total = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, gradients)
            return total, reported

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), state.parameters)
        indexed = (jnp.arange(num_microbatches), batch)
        gradients, (loss, auxiliary) = jax.lax.scan(accumulate, zeros, indexed)
        return gradients, jnp.sum(loss), jax.tree.map(lambda leaf: jnp.mean(leaf, 0), auxiliary)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        tokens = jnp.sum(batch["loss_mask"])
        gradients, loss, auxiliary = gradients_of(state, batch, jnp.maximum(tokens, 1.0))
        gradients = state.loss_scale.unscale(gradients)
        squares = gradient_squares(gradients)
        norm = jnp.sqrt(jnp.sum(squares))
        auxiliary_losses = [auxiliary[name] for name, _ in config.auxiliary_weights]
        finite = jnp.isfinite(norm) & jnp.isfinite(loss + sum(auxiliary_losses))
        if config.clip_norm is not None:
            factor = jnp.minimum(1.0, config.clip_norm / jnp.maximum(norm, 1e-30))
            gradients = jax.tree.map(lambda leaf: leaf * factor, gradients)
        updates, new_optimizer = optimizer.update(gradients, state.optimizer, state.parameters)
        new_parameters = optax.apply_updates(state.parameters, updates)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        skipped = state.skipped_steps + jnp.where(finite, 0, 1)
        consecutive = jnp.where(finite, 0, state.consecutive_skips + 1)
        metrics = {
            "loss": loss,
            "gradient_norm": norm,
            "learning_rate": jnp.float32(schedule(state.step - state.skipped_steps)),
            "loss_scale": state.loss_scale.scale,
            "tokens": tokens,
            "skipped_steps": skipped,
            "consecutive_skips": consecutive,
            "finite": finite,
            "gradient_squares": squares,
            **_auxiliary_metrics(auxiliary),
        }
        state = TrainState(
            step=state.step + 1,
            parameters=keep(new_parameters, state.parameters),
            optimizer=keep(new_optimizer, state.optimizer),
            loss_scale=state.loss_scale.update(finite),
            skipped_steps=skipped,
            consecutive_skips=consecutive,
        )
        return state, metrics

    return train_step


def gradient_squares(gradients: Parameters) -> jax.Array:
    """Sum of squares of each gradient, one per layer for stacked parameters: float32 [entries]."""
    sums = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        axes = range(1 if is_stacked(path_name(path)) else 0, leaf.ndim)
        sums.append(jnp.sum(jnp.square(leaf), axis=tuple(axes)).reshape(-1))
    return jnp.concatenate(sums)


def gradient_names(parameters: Parameters) -> list[str]:
    """Names of the entries of `gradient_squares`; those of a stack end in [layer of segment]."""
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
        name = path_name(path)
        stacked = is_stacked(name)
        names += [f"{name}[{layer}]" for layer in range(leaf.shape[0])] if stacked else [name]
    return names


def _auxiliary_metrics(auxiliary: Metrics) -> Metrics:
    metrics = {name: value for name, value in auxiliary.items() if value.ndim == 0}
    if "tokens_per_expert" in auxiliary:
        counts = auxiliary["tokens_per_expert"]  # [L, E]
        metrics["expert_load"] = jnp.max(jnp.max(counts, -1) / jnp.maximum(jnp.mean(counts, -1), 1))
    return metrics
