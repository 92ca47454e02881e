"""A checkpoint of ours with all that travels with it, whether trained or converted.

A converted checkpoint is a folder like a run's:

    checkpoints/0/parameters   the weights, see parameter_files.py
    checkpoints/0/config       {"model": ..., "conversion": ...}, JSON
    tokenizer/                 the source's tokenizer files
    hugging_face/              its config.json, generation_config.json, licence
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError, check_choice, check_sizes
from ..models import ModelConfig, MoEConfig, PrecisionRules, RopeScaling
from ..numerics import get_recipe
from ..training.checkpoints import CONFIG, FOLDER, PARAMETERS, find_checkpoint, read_config
from .layout import LayerSegment, Layout
from .parameter_files import ParameterReader
from .weights import FLOATS

TOKENIZER_FOLDER = "tokenizer"
HUB_FOLDER = "hugging_face"
_SEGMENTS = ("prefix", "middle", "suffix")
_CONFIG_FILE = "metadata"  # Orbax's name for the file of a JSON item


@dataclass(frozen=True)
class Conversion:
    """What of a converted checkpoint's origin our own configuration does not say.

    vocab_size: rows of the vocabulary there. dtype: of its tensors, such as "bfloat16", but for
    those listed in other_dtypes. config: its config.json.
    """

    vocab_size: int
    dtype: str
    other_dtypes: dict[str, str]
    config: dict[str, Any]

    def __post_init__(self) -> None:
        check_sizes("conversion", vocab_size=self.vocab_size)
        for dtype in (self.dtype, *self.other_dtypes.values()):
            check_choice("conversion.dtype", dtype, FLOATS)
        if not isinstance(self.config, dict):
            raise UserError(f"conversion.config={self.config!r} is no object")


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: configuration and layout are read, weights are not."""

    step_folder: Path
    model: ModelConfig
    settings: dict[str, Any]  # the whole config item
    conversion: Conversion | None
    reader: ParameterReader
    layout: Layout

    @property
    def folder(self) -> Path:
        """The run's folder, or the converted checkpoint's."""
        return self.step_folder.parent.parent

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where its tokenizer lies, if it has one."""
        folder = self.folder / TOKENIZER_FOLDER
        return folder if folder.is_dir() else None

    @property
    def vocab_size(self) -> int:
        """Tokens that the model really knows: less than the model's where that is padded."""
        return self.model.vocab_size if self.conversion is None else self.conversion.vocab_size


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a run's folder, a converted checkpoint, or one step's folder.

    Raises:
      UserError: no checkpoint there, or its parameters are not what its configuration says.
    """
    step = find_checkpoint(path)
    settings = read_config(step)
    try:
        model, conversion = _interpret(settings)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(
            f"{step}: the configuration of the checkpoint is damaged ({error}): convert or train "
            "it again"
        ) from error
    reader = ParameterReader(step / PARAMETERS)
    layout = Layout(
        model,
        _segments(reader, model),
        vocab_size=None if conversion is None else conversion.vocab_size,
    )
    wanted = {parameter.name: parameter.shape for parameter in layout.parameters}
    for name in sorted(wanted.keys() | reader.shapes.keys()):
        if wanted.get(name) != reader.shapes.get(name):
            raise UserError(
                f"{step}: parameter {name} is {reader.shapes.get(name, 'absent')}, its "
                f"configuration says {wanted.get(name, 'absent')}: the checkpoint is damaged"
            )
    return Checkpoint(step, model, settings, conversion, reader, layout)


def _interpret(settings: dict[str, Any]) -> tuple[ModelConfig, Conversion | None]:
    model = model_from(settings["model"])
    precision = settings.get("precision")
    if precision is not None:
        get_recipe(precision["recipe"])
        PrecisionRules(**precision["rules"])
    if settings.get("conversion") is None:
        return model, None
    conversion = Conversion(**settings["conversion"])
    if conversion.vocab_size > model.vocab_size:
        raise UserError(f"a vocabulary of {conversion.vocab_size} in {model.vocab_size} rows")
    return model, conversion


def write_settings(folder: Path, model: ModelConfig, conversion: Conversion) -> None:
    """Writes the config item of a new checkpoint in `folder`, which has its parameters."""
    item = folder / FOLDER / "0" / CONFIG
    item.mkdir()
    settings = {"model": dataclasses.asdict(model), "conversion": dataclasses.asdict(conversion)}
    (item / _CONFIG_FILE).write_text(json.dumps(settings), encoding="utf-8")


def model_from(values: dict[str, Any]) -> ModelConfig:
    """A ModelConfig from its plain values."""
    values = dict(values)
    for key, kind in (("rope_scaling", RopeScaling), ("moe", MoEConfig)):
        if values.get(key) is not None:
            values[key] = kind(**values[key])
    return ModelConfig(**values)


def _segments(reader: ParameterReader, model: ModelConfig) -> tuple[LayerSegment, ...]:
    segments, start = [], 0
    for name in _SEGMENTS:
        shape = reader.shapes.get(f"blocks.{name}.attention_norm.scale")
        if shape is not None:
            segments.append(LayerSegment(name, start, start + shape[0]))
            start += shape[0]
    if start != model.num_layers:
        raise UserError(
            f"{reader.folder} holds {start} layers, its configuration says {model.num_layers}: the "
            "checkpoint is damaged"
        )
    return tuple(segments)
