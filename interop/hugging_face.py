"""Hugging Face checkpoints in, exactly, a tensor at a time; hub_export.py is the way out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import jax
import numpy as np
from flax import nnx

from .. import models
from ..errors import UserError
from ..models import ModelConfig, PrecisionRules
from ..numerics import Recipe
from ..training.checkpoints import FOLDER, PARAMETERS
from .array_files import StoredArray
from .checkpoint import (
    HUB_FOLDER,
    TOKENIZER_FOLDER,
    Conversion,
    write_settings,
)
from .hub_config import model_config
from .hub_directory import open_hub_directory
from .layout import LayerSegment, Layout, Parameter, Piece
from .output_directory import Progress, begin, copy_files, output_directory
from .parallel import in_parallel
from .parameter_files import ParameterWriter, chunk_rows
from .weights import (
    Weights,
    check_finite,
    check_tensors,
    check_tied_head,
    finite_check,
    hub_weights,
)


def from_hugging_face(
    source: str | Path,
    output: str | Path,
    *,
    pad_vocabulary: int = 1,
    progress: Callable[[int], Progress] | None = None,
) -> Path:
    """Converts a Hugging Face folder, plain or NVFP4, into a checkpoint of ours.

    pad_vocabulary: the vocabulary is padded with zeros to a multiple of this.
    progress: takes the total of bytes, returns what is called with the bytes that were done.

    Raises:
      UserError: anything about the folder that is not as it should be; nothing is left of `output`.
    """
    directory = open_hub_directory(source)
    config = model_config(directory.config, str(directory.path / "config.json"))
    weights = hub_weights(directory)
    check_tensors(weights, Layout(config), directory.path)
    check_tied_head(weights, Layout(config), directory.path)
    files = {file.name: file.read_bytes() for file in directory.tokenizer_files()}
    origin = Origin(directory.config, files, directory.other_files())
    return write_checkpoint(
        weights, config, origin, output, source=directory.path, pad_vocabulary=pad_vocabulary,
        progress=progress,
    )  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """What goes with a checkpoint besides its weights: config.json and small files."""

    config: dict[str, Any]
    tokenizer_files: dict[str, bytes]  # contents by name
    other_files: list[Path]


def write_checkpoint(
    weights: Weights,
    config: ModelConfig,
    origin: Origin,
    output: str | Path,
    *,
    source: Path,
    pad_vocabulary: int = 1,
    progress: Callable[[int], Progress] | None = None,
) -> Path:
    """Writes a checkpoint of ours from checked weights under Hugging Face's names."""
    if pad_vocabulary < 1:
        raise UserError(f"pad_vocabulary={pad_vocabulary} must be 1 or more")
    vocab_size = config.vocab_size
    padded = vocab_size + -vocab_size % pad_vocabulary
    layout = Layout(dataclasses.replace(config, vocab_size=padded), vocab_size=vocab_size)
    conversion = _conversion(weights, layout, origin.config, vocab_size)
    size = _size(weights, layout)
    with output_directory(Path(output), source=source, needed_bytes=size) as folder:
        write_parameters(weights, layout, folder / FOLDER / "0" / PARAMETERS, progress)
        write_settings(folder, layout.config, conversion)
        if origin.tokenizer_files:
            (folder / TOKENIZER_FOLDER).mkdir()
        for name, content in origin.tokenizer_files.items():
            (folder / TOKENIZER_FOLDER / name).write_bytes(content)
        copy_files(origin.other_files, folder / HUB_FOLDER)
    return Path(output)


def load_hugging_face(
    path: str | Path,
    *,
    recipe: Recipe | str = "fp32",
    rules: PrecisionRules = PrecisionRules(),  # noqa: B008  frozen
    remat: str = "none",
    activation_dtype: str = "float32",
) -> models.Decoder:
    """A model of ours with the weights of a Hugging Face folder, as float32 parameters.

    The other arguments are those of `models.create`.

    Raises:
      UserError: as `from_hugging_face`.
    """
    directory = open_hub_directory(path)
    config = model_config(directory.config, str(directory.path / "config.json"))
    weights = hub_weights(directory)
    check_tensors(weights, Layout(config), directory.path)
    check_tied_head(weights, Layout(config), directory.path)
    model = nnx.eval_shape(
        lambda: models.create(
            config, recipe=recipe, rules=rules, remat=remat, activation_dtype=activation_dtype,
            rngs=nnx.Rngs(0),
        )
    )  # fmt: skip
    segments = tuple(LayerSegment(s.name, s.start, s.stop) for s in model.segments)
    layout = Layout(config, segments)
    tree: dict[str, Any] = {}
    for parameter in layout.parameters:
        stored = [parameter.shape[axis] for axis in parameter.stored_axes]
        array = np.zeros(stored, np.float32)
        for leading in parameter.slabs():
            for piece in layout.pieces(parameter, leading):
                tensor = weights.read(piece.name)
                check_finite(tensor, piece.name)
                array[(*leading, *piece.index)] = tensor.reshape(piece.split)
        array = array.transpose(np.argsort(parameter.stored_axes))
        node = tree
        for key in parameter.path[:-1]:
            node = node.setdefault(key, {})
        node[parameter.path[-1]] = jax.numpy.asarray(array)
    nnx.update(model, nnx.State(tree))
    return model


def write_parameters(
    weights: Weights,
    layout: Layout,
    folder: Path,
    progress: Callable[[int], Progress] | None = None,
) -> None:
    """Writes every parameter of the layout from Hugging Face weights, in their dtype."""
    writer = ParameterWriter(folder)
    done = begin(progress, _size(weights, layout))
    dtypes = {p.name: _stored_dtype(weights, layout, p) for p in layout.parameters}
    for parameter in layout.parameters:
        writer.add(parameter, dtypes[parameter.name])

    def convert(job: tuple[Parameter, tuple[int, ...]]) -> None:
        parameter, leading = job
        dtype = dtypes[parameter.name]
        rows = chunk_rows(parameter, dtype)
        pieces = layout.pieces(parameter, leading)
        stored = [weights.stored(piece.name) for piece in pieces]
        tensors = [
            where if _is_stored_so(where, parameter, piece, dtype) else weights.read(piece.name)
            for where, piece in zip(stored, pieces, strict=True)
        ]
        for start in range(0, parameter.slab_shape[0], rows):
            data = _chunk(parameter, pieces, tensors, start, start + rows)
            if isinstance(data, np.ndarray):
                data = data.astype(dtype, copy=False)
            check = finite_check(" or ".join(piece.name for piece in pieces))
            writer.write(parameter, leading, start // rows, data, check=check)
            done(data.nbytes)

    in_parallel(convert, ((p, leading) for p in layout.parameters for leading in p.slabs()))
    writer.finish()


def _is_stored_so(
    where: StoredArray | None, parameter: Parameter, piece: Piece, dtype: np.dtype
) -> TypeGuard[StoredArray]:
    """Whether a tensor's bytes are those of chunks of the parameter."""
    whole = parameter.kind == "gate_up" or piece.split == parameter.slab_shape
    return where is not None and where.dtype == dtype and whole


def _chunk(
    parameter: Parameter,
    pieces: tuple[Piece, ...],
    tensors: Sequence[np.ndarray | StoredArray],
    start: int,
    stop: int,
) -> np.ndarray | StoredArray:
    """Rows [start, stop) of a slab in stored order; without a copy where one tensor holds them."""
    if len(pieces) == 1 and pieces[0].split == parameter.slab_shape:
        return tensors[0].reshape(parameter.slab_shape)[start:stop]
    if parameter.kind == "gate_up":
        return tensors[start].reshape(pieces[start].split)
    arrays = [tensor for tensor in tensors if isinstance(tensor, np.ndarray)]
    assert len(arrays) == len(pieces), parameter.name
    dtypes = {array.dtype for array in arrays}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
    data = np.zeros((stop - start, *parameter.slab_shape[1:]), dtype)
    if len(pieces) == 1:  # the vocabulary, whose padding stays zero
        rows = arrays[0].reshape(pieces[0].split)[start:stop]
        data[: len(rows)] = rows
        return data
    assert stop - start == parameter.slab_shape[0]
    for piece, array in zip(pieces, arrays, strict=True):
        data[piece.index] = array.reshape(piece.split)
    return data


def _stored_dtype(weights: Weights, layout: Layout, parameter: Parameter) -> np.dtype:
    """The dtype of all tensors of a parameter, or float32, which holds every one exactly."""
    dtypes = {
        weights.dtypes[piece.name]
        for leading in parameter.slabs()
        for piece in layout.pieces(parameter, leading)
    }
    return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)


def _conversion(
    weights: Weights, layout: Layout, config: dict[str, Any], vocab_size: int
) -> Conversion:
    names = {name: weights.dtypes[name].name for name in layout.tensor_shapes()}
    counts = {dtype: list(names.values()).count(dtype) for dtype in set(names.values())}
    dtype = max(sorted(counts), key=lambda dtype: counts[dtype])
    others = {name: other for name, other in names.items() if other != dtype}
    return Conversion(vocab_size, dtype, others, config)


def _size(weights: Weights, layout: Layout) -> int:
    return sum(
        math.prod(parameter.shape) * _stored_dtype(weights, layout, parameter).itemsize
        for parameter in layout.parameters
    )
