"""Checkpoints of ours out as plain Hugging Face folders, exactly, a tensor at a time."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError, check_choice
from .array_files import StoredArray
from .checkpoint import HUB_FOLDER, Checkpoint, open_checkpoint
from .hub_config import hub_config
from .hub_directory import INDEX, SINGLE
from .layout import Parameter, Piece
from .output_directory import Progress, begin, copy_files, output_directory
from .parallel import in_parallel
from .parameter_files import chunk_rows
from .safetensors_files import SafetensorsWriter
from .weights import FLOATS, check_finite, finite_check

SHARD_BYTES = 5_000_000_000


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
    with output_directory(Path(output), source=source.folder, needed_bytes=total) as folder:
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
    done = begin(progress, sum(sizes))

    def convert(job: tuple[Parameter, tuple[int, ...]]) -> None:
        parameter, leading = job
        pieces = source.layout.pieces(parameter, leading)
        for first, piece, data in _slab_parts(source, parameter, leading, pieces):
            dtype = dtypes[piece.name]
            if data.dtype != dtype:
                array = data.read() if isinstance(data, StoredArray) else data
                data = cast(array, dtype, piece.name)
            check = finite_check(piece.name)
            writers[piece.name].write(piece.name, data, first=first, check=check)
            done(data.nbytes)

    in_parallel(convert, ((p, leading) for p in parameters for leading in p.slabs()))


def _slab_parts(
    source: Checkpoint, parameter: Parameter, leading: tuple[int, ...], pieces: tuple[Piece, ...]
) -> Iterator[tuple[int, Piece, np.ndarray | StoredArray]]:
    """(first element, piece, data): a slab's tensors, large ones in several parts."""
    if len(pieces) == 1:  # rows are rows of the tensor
        (piece,) = pieces
        rows = chunk_rows(parameter, source.reader.dtypes[parameter.name])
        width = math.prod(piece.split[1:])
        for start in range(0, piece.split[0], rows):
            stop = min(start + rows, piece.split[0])
            yield start * width, piece, source.reader.find(parameter, leading, slice(start, stop))
        return
    if parameter.kind == "gate_up":
        for piece in pieces:
            yield 0, piece, source.reader.find(parameter, leading, piece.index[0])
        return
    slab = source.reader.read(parameter, leading)
    for piece in pieces:
        yield 0, piece, np.ascontiguousarray(slab[piece.index])


def cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """`array` rounded once to `dtype`; UserError where a value is not finite or becomes so."""
    if array.dtype == dtype:
        return array
    check_finite(array, name)
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
        copy_files(sorted(source.tokenizer_folder.iterdir()), folder)
    others = source.folder / HUB_FOLDER
    if source.conversion is not None and others.is_dir():
        copy_files(
            [file for file in sorted(others.iterdir()) if file.name != "config.json"], folder
        )


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
