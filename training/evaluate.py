"""Loss on the fixed validation batches, in nats per token and bits per byte."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..numerics.platform import COMPILER_OPTIONS
from .chunked_loss import chunked_losses
from .cross_entropy import token_losses
from .state import Parameters


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
      loss: nats per token.
      bits_per_byte: the same per byte of UTF-8 text, comparable across tokenizers; NaN when no
        target stands for any bytes.
      tokens: targets that were scored.
    """

    loss: float
    bits_per_byte: float
    tokens: int


@functools.partial(
    jax.jit, static_argnums=0, static_argnames="loss_chunks", compiler_options=COMPILER_OPTIONS
)
def loss_sum(
    graphdef: nnx.GraphDef,
    parameters: Parameters,
    batch: dict[str, jax.Array],
    *,
    loss_chunks: int = 1,
) -> jax.Array:
    """Sum of the token losses of a batch of [B, T] arrays: float32 scalar, nats.

    loss_chunks: parts that the tokens of a device go through head and loss in.
    """
    model: Any = nnx.merge(graphdef, parameters)
    hidden, _ = model.hidden(batch["tokens"], batch["segment_ids"], batch["positions"])
    if loss_chunks == 1:
        losses = token_losses(model.head(hidden), batch["targets"])
        return jnp.sum(losses * batch["loss_mask"])

    def head(parameters: Parameters, hidden: jax.Array) -> jax.Array:
        model: Any = nnx.merge(graphdef, parameters)
        return model.head(hidden)

    weights = batch["loss_mask"]
    return chunked_losses(head, parameters, hidden, batch["targets"], weights, loss_chunks)[1]


class Validation:
    """The validation batches, on the devices from the first evaluation on."""

    def __init__(
        self,
        batches: Sequence[dict[str, np.ndarray]],
        token_byte_lengths: np.ndarray,
        place: Callable[[dict[str, np.ndarray]], dict[str, jax.Array]],
        *,
        loss_chunks: int = 1,
    ):
        """batches: [B, T] arrays. token_byte_lengths: int [V], UTF-8 bytes that each token stands
        for. place: puts a batch on the devices. loss_chunks: see `loss_sum`."""
        self._batches, self._place, self._loss_chunks = batches, place, loss_chunks
        self._placed: list[dict[str, jax.Array]] = []
        scored = [batch["targets"][batch["loss_mask"] > 0] for batch in batches]
        self.num_tokens = sum(targets.size for targets in scored)
        self._num_bytes = sum(int(token_byte_lengths[targets].sum()) for targets in scored)

    def evaluate(self, graphdef: nnx.GraphDef, parameters: Parameters) -> Evaluation:
        """Scores every target whose loss_mask is 1, with the model of this graph.

        Raises:
          ValueError: if there is nothing to score.
        """
        if not self.num_tokens:
            raise ValueError("the validation batches hold no targets")
        if not self._placed:
            self._placed = [self._place(batch) for batch in self._batches]
        sums = [
            loss_sum(graphdef, parameters, batch, loss_chunks=self._loss_chunks)
            for batch in self._placed
        ]
        nats = math.fsum(float(value) for value in sums)
        bits_per_byte = nats / math.log(2) / self._num_bytes if self._num_bytes else math.nan
        return Evaluation(nats / self.num_tokens, bits_per_byte, self.num_tokens)
