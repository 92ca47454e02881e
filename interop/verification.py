"""How a Hugging Face folder differs from a checkpoint of ours: in tensors and predictions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..errors import UserError
from ..models import Decoder, ModelConfig
from .checkpoint import Checkpoint
from .hub_config import model_config
from .hub_directory import open_hub_directory
from .hub_export import export_config
from .layout import Layout
from .quantized_weights import QuantizedWeights
from .weights import check_tensors, hub_weights

FP4_ERROR = 0.2  # root-mean-square error of NVFP4 weights, relative: 0.09 to 0.15 are usual


@dataclass(frozen=True)
class TensorDifference:
    """One tensor: largest absolute and relative root-mean-square difference."""

    name: str
    largest: float
    relative: float
    allowed: float

    @property
    def is_fine(self) -> bool:
        return self.relative <= self.allowed


def compare_tensors(source: Checkpoint, folder: str | Path) -> list[TensorDifference]:
    """Every tensor of a Hugging Face folder, plain or NVFP4, against the checkpoint's.

    Allowed is rounding to the folder's dtype, and FP4's error for what is FP4 there.

    Raises:
      UserError: the folder is of another model: in its shapes, or in what its config.json says of
        the computation.
    """
    directory = open_hub_directory(folder)
    weights = hub_weights(directory)
    config = model_config(directory.config, str(directory.path / "config.json"))
    layout = source.layout
    expected = model_config(export_config(source, None), str(source.step_folder))
    _check_same_model(config, expected, source, folder)
    check_tensors(weights, Layout(config), directory.path)
    quantized = weights.quantized if isinstance(weights, QuantizedWeights) else frozenset()
    found = []
    for parameter in layout.parameters:
        for leading in parameter.slabs():
            slab = source.reader.read(parameter, leading)
            for piece in layout.pieces(parameter, leading):
                theirs = weights.read(piece.name)
                ours = slab[piece.index].reshape(theirs.shape)
                rounding = 0.0
                if theirs.dtype != ours.dtype:
                    rounding = float(np.finfo(np.float16).eps if theirs.dtype == np.float16
                                     else 2.0**-8)  # fmt: skip
                allowed = FP4_ERROR if piece.name in quantized else rounding
                found.append(_difference(piece.name, ours, theirs, allowed))
    return found


def _check_same_model(
    found: ModelConfig, expected: ModelConfig, source: Checkpoint, folder: str | Path
) -> None:
    for name in (field.name for field in dataclasses.fields(expected)):
        theirs, ours = getattr(found, name), getattr(expected, name)
        if theirs != ours:
            raise UserError(
                f"{folder} is of another model than {source.step_folder}: by its config.json "
                f"model.{name}={theirs}, the checkpoint has {ours}"
            )


def _difference(
    name: str, ours: np.ndarray, theirs: np.ndarray, allowed: float
) -> TensorDifference:
    first, second = ours.astype(np.float32), theirs.astype(np.float32)
    error = first - second
    norm = float(np.sqrt(np.mean(np.square(first)))) or 1.0
    relative = float(np.sqrt(np.mean(np.square(error)))) / norm
    return TensorDifference(name, float(np.abs(error).max(initial=0)), relative, allowed)


def divergence(reference: Decoder, other: Decoder, tokens: jax.Array) -> float:
    """Mean Kullback-Leibler divergence of the next-token distributions, nats per token.

    tokens: int32 [B, T]. KL(reference || other).
    """

    @nnx.jit
    def row(reference: Decoder, other: Decoder, tokens: jax.Array) -> jax.Array:
        first = jax.nn.log_softmax(reference(tokens))
        second = jax.nn.log_softmax(other(tokens))
        return jnp.mean(jnp.sum(jnp.exp(first) * (first - second), axis=-1))

    return float(np.mean([row(reference, other, tokens[i : i + 1]) for i in range(len(tokens))]))
