"""Hugging Face checkpoints in and out, exactly, a tensor at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from .. import models
from ..errors import UserError, check_choice
from ..models import ModelConfig, PrecisionRules
from ..numerics import Recipe
from ..training.checkpoints import FOLDER, PARAMETERS
from .checkpoint import (
    HUB_FOLDER,
    TOKENIZER_FOLDER,
    Checkpoint,
    Conversion,
    open_checkpoint,
    write_settings,
)
from .hub_config import hub_config, model_config
from .hub_directory import INDEX, SINGLE, open_hub_directory
from .layout import LayerSegment, Layout, Parameter, Piece
from .output_directory import output_directory
from .parameter_files import ParameterWriter, chunk_rows
from .safetensors_files import SafetensorsWriter
from .weights import (
    FLOATS,
    Weights,
    check_finite,
    check_tensors,
    check_tied_head,
    hub_weights,
)

SHARD_BYTES = 5_000_000_000
_WORKERS = 2  # one reads or checks while another writes; more only hold more memory
Progress = Callable[[int], object]  # takes the bytes that were just done


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
    origin = Origin(directory.config, directory.tokenizer_files(), directory.other_files())
    return write_checkpoint(
        weights, config, origin, output, pad_vocabulary=pad_vocabulary, progress=progress
    )


@dataclass(frozen=True)
class Origin:
    """What goes with a checkpoint besides its weights: config.json and small files."""

    config: dict[str, Any]
    tokenizer_files: list[Path]
    other_files: list[Path]


def write_checkpoint(
    weights: Weights,
    config: ModelConfig,
    origin: Origin,
    output: str | Path,
    *,
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
    with output_directory(Path(output), needed_bytes=_size(weights, layout)) as folder:
        write_parameters(weights, layout, folder / FOLDER / "0" / PARAMETERS, progress)
        write_settings(folder, layout.config, conversion)
        _copy(origin.tokenizer_files, folder / TOKENIZER_FOLDER)
        _copy(origin.other_files, folder / HUB_FOLDER)
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
    done = _progress(progress, _size(weights, layout))
    jobs = []
    for parameter in layout.parameters:
        dtype = _stored_dtype(weights, layout, parameter)
        writer.add(parameter, dtype)
        for leading in parameter.slabs():
            jobs.append((parameter, dtype, leading))

    def convert(job: tuple[Parameter, np.dtype, tuple[int, ...]]) -> None:
        parameter, dtype, leading = job
        pieces = layout.pieces(parameter, leading)
        tensors = [weights.read(piece.name) for piece in pieces]
        rows = chunk_rows(parameter, dtype)
        for start in range(0, parameter.slab_shape[0], rows):
            data = _chunk(parameter, pieces, tensors, start, start + rows)
            check_finite(data, " or ".join(piece.name for piece in pieces))
            data = data.astype(dtype, copy=False)
            writer.write(parameter, leading, start // rows, data)
            done(data.nbytes)

    run_in_parallel(convert, iter(jobs))
    writer.finish()


def to_hugging_face(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], Progress] | None = None,
) -> Path:
    """Writes a checkpoint of ours as a plain Hugging Face folder.

    dtype: "float32", "bfloat16" or "float16"; None keeps what a converted checkpoint came in, and
      the float32 of a trained one.
    shard_bytes: where the weights exceed this, they are split over several files.

    Raises:
      UserError: no checkpoint there, a value that is not finite, one that overflows `dtype`.
    """
    source = open_checkpoint(checkpoint)
    if dtype is not None:
        check_choice("dtype", dtype, FLOATS)
    dtypes = export_dtypes(source, dtype)
    shapes = source.layout.tensor_shapes()
    tensors = {name: (dtypes[name], shapes[name]) for name in shapes}
    total = sum(t.itemsize * math.prod(shape) for t, shape in tensors.values())
    with output_directory(Path(output), needed_bytes=total) as folder:
        with hub_writers(folder, tensors, shard_bytes) as writers:
            export_plain(source, writers, dtypes, list(source.layout.parameters), progress)
        config = export_config(source, dtype)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        copy_companions(source, folder)
    return Path(output)


def export_plain(
    source: Checkpoint,
    writers: dict[str, SafetensorsWriter],
    dtypes: dict[str, np.dtype],
    parameters: list[Parameter],
    progress: Callable[[int], Progress] | None = None,
) -> None:
    """Writes these parameters' tensors, one slab or part of one at a time."""
    sizes = (math.prod(p.shape) * source.reader.dtypes[p.name].itemsize for p in parameters)
    done = _progress(progress, sum(sizes))
    jobs = ((parameter, leading) for parameter in parameters for leading in parameter.slabs())

    def convert(job: tuple[Parameter, tuple[int, ...]]) -> None:
        parameter, leading = job
        pieces = source.layout.pieces(parameter, leading)
        for first, piece, data in _slab_parts(source, parameter, leading, pieces):
            check_finite(data, piece.name)
            done(data.nbytes)
            writers[piece.name].write(
                piece.name, cast(data, dtypes[piece.name], piece.name), first=first
            )

    run_in_parallel(convert, jobs)


def _slab_parts(
    source: Checkpoint, parameter: Parameter, leading: tuple[int, ...], pieces: tuple[Piece, ...]
) -> Iterator[tuple[int, Piece, np.ndarray]]:
    """(first element, piece, data): a slab's tensors, large ones in several parts."""
    if len(pieces) == 1:  # rows are rows of the tensor
        (piece,) = pieces
        rows = chunk_rows(parameter, source.reader.dtypes[parameter.name])
        width = math.prod(piece.split[1:])
        for start in range(0, piece.split[0], rows):
            stop = min(start + rows, piece.split[0])
            data = source.reader.read(parameter, leading, (slice(start, stop),))
            yield start * width, piece, data
        return
    if parameter.kind == "gate_up":
        for piece in pieces:
            yield 0, piece, source.reader.read(parameter, leading, piece.index)
        return
    slab = source.reader.read(parameter, leading)
    for piece in pieces:
        yield 0, piece, np.ascontiguousarray(slab[piece.index])


def cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """`array` rounded once to `dtype`; UserError where a finite value becomes infinite."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    if dtype.itemsize < array.dtype.itemsize and not np.isfinite(result).all():
        raise UserError(
            f"tensor {name!r} has a value of {np.abs(array).max():g}, too large for {dtype.name}: "
            "export in float32 or bfloat16"
        )
    return result


def export_dtypes(source: Checkpoint, dtype: str | None) -> dict[str, np.dtype]:
    """The dtype that every Hugging Face tensor of a checkpoint is exported in."""
    names = source.layout.tensor_shapes()
    if dtype is not None:
        return {name: FLOATS[dtype] for name in names}
    if source.conversion is None:
        return {name: FLOATS["float32"] for name in names}
    origin = source.conversion
    return {name: FLOATS[origin.other_dtypes.get(name, origin.dtype)] for name in names}


def export_config(source: Checkpoint, dtype: str | None) -> dict[str, Any]:
    """The config.json: that which came with a converted checkpoint, else one of our making."""
    if source.conversion is None:
        return hub_config(source.model, dtype or "float32")
    config = dict(source.conversion.config)
    config.pop("quantization_config", None)
    if dtype is not None:
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    return config


def copy_companions(source: Checkpoint, folder: Path) -> None:
    """Tokenizer, generation settings and licence, as far as the checkpoint has them."""
    if source.tokenizer_folder is not None:
        _copy(sorted(source.tokenizer_folder.iterdir()), folder)
    others = source.folder / HUB_FOLDER
    if source.conversion is not None and others.is_dir():
        _copy([file for file in sorted(others.iterdir()) if file.name != "config.json"], folder)


@contextlib.contextmanager
def hub_writers(
    folder: Path, tensors: dict[str, tuple[np.dtype, tuple[int, ...]]], shard_bytes: int
) -> Iterator[dict[str, SafetensorsWriter]]:
    """The writer of every tensor's file: one file, or shards with an index."""
    if shard_bytes < 1:
        raise UserError(f"shard_bytes={shard_bytes} must be positive")
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = dtype.itemsize * math.prod(shape)
        if shards[-1] and filled + nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
        total += nbytes
    count = len(shards)
    files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    files = [SINGLE] if count == 1 else files
    with contextlib.ExitStack() as stack:
        writers = {}
        for file, names in zip(files, shards, strict=True):
            chosen = {name: tensors[name] for name in names}
            writer = stack.enter_context(SafetensorsWriter(folder / file, chosen))
            writers |= dict.fromkeys(names, writer)
        yield writers
    if count > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True)
                      for name in names}  # fmt: skip
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _chunk(
    parameter: Parameter,
    pieces: tuple[Piece, ...],
    tensors: list[np.ndarray],
    start: int,
    stop: int,
) -> np.ndarray:
    """Rows [start, stop) of a slab in stored order; without a copy where one tensor holds them."""
    if len(pieces) == 1 and pieces[0].split == parameter.slab_shape:
        return tensors[0].reshape(parameter.slab_shape)[start:stop]
    if parameter.kind == "gate_up":
        return tensors[start].reshape(pieces[start].split)[None]
    dtypes = {tensor.dtype for tensor in tensors}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
    data = np.zeros((stop - start, *parameter.slab_shape[1:]), dtype)
    if len(pieces) == 1:  # the vocabulary, whose padding stays zero
        rows = tensors[0].reshape(pieces[0].split)[start:stop]
        data[: len(rows)] = rows
        return data
    assert stop - start == parameter.slab_shape[0]
    for piece, tensor in zip(pieces, tensors, strict=True):
        data[piece.index] = tensor.reshape(piece.split)
    return data


def run_in_parallel(function: Callable[[Any], None], jobs: Iterator[Any]) -> None:
    """Runs the jobs in a few threads, never more of them begun than there are threads."""
    with ThreadPoolExecutor(_WORKERS) as pool:
        running: set[Future[None]] = set()
        for job in jobs:
            running.add(pool.submit(function, job))
            if len(running) == _WORKERS:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()  # an exception ends the loop; the pool waits for the rest
        for future in running:
            future.result()


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


def _progress(progress: Callable[[int], Progress] | None, total: int) -> Progress:
    return (lambda nbytes: None) if progress is None else progress(total)


def _copy(files: list[Path], folder: Path) -> None:
    if files:
        folder.mkdir(exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)
