"""A checkpoint of ours as a model in memory, and its tokenizer."""

from __future__ import annotations

import logging
from typing import Any

import jax.numpy as jnp
from flax import nnx

from .. import models
from ..data import Tokenizer, load_tokenizer_file
from ..errors import UserError
from ..models import Decoder, PrecisionRules
from ..numerics import Recipe
from ..training.checkpoints import load_parameters
from ..training.sharding import MeshConfig, make_mesh
from ..training.state import abstract_model
from .checkpoint import Checkpoint


def load_model(
    source: Checkpoint,
    *,
    recipe: Recipe | str = "fp32",
    rules: PrecisionRules = PrecisionRules(),  # noqa: B008  frozen
    activation_dtype: str = "float32",
) -> Decoder:
    """The model with its weights as float32 parameters; arguments as for `models.create`."""

    def create() -> Decoder:
        return models.create(
            source.model,
            recipe=recipe,
            rules=rules,
            activation_dtype=activation_dtype,
            rngs=nnx.Rngs(0),
        )

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax remarks on every item it reads
    _, graph, shapes = abstract_model(create)
    parameters: Any = load_parameters(source.step_folder, shapes, make_mesh(MeshConfig()))
    return nnx.merge(graph, parameters)


def load_tokenizer_of(source: Checkpoint) -> Tokenizer:
    """The tokenizer that came with the checkpoint; UserError if none did."""
    if source.tokenizer_folder is None:
        raise UserError(
            f"{source.folder} has no tokenizer/: copy the model's tokenizer.json (and "
            "tokenizer_config.json) into that folder"
        )
    return load_tokenizer_file(source.tokenizer_folder)


def token_rows(tokenizer: Tokenizer, text: str, *, length: int, most: int) -> jnp.ndarray:
    """A text's tokens as int32 [B, length], at most `most` rows; UserError if it is too short."""
    tokens = [tokenizer.start_id, *tokenizer.encode(text)]
    length = min(length, len(tokens))
    rows = min(len(tokens) // length, most)
    if len(tokens) < 16:
        raise UserError(f"the text has {len(tokens)} tokens, too few to measure on: give more")
    return jnp.asarray(tokens[: rows * length], jnp.int32).reshape(rows, length)
