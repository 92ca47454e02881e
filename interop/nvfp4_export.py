"""Writing a checkpoint of ours as an NVFP4 folder for inference engines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import UserError, check_choice
from ..numerics import get_recipe
from . import compressed_tensors, modelopt
from .calibration import Calibration
from .checkpoint import Checkpoint, open_checkpoint
from .hub_export import (
    SHARD_BYTES,
    copy_companions,
    export_config,
    export_plain,
    hub_writers,
)
from .layout import Parameter, Piece
from .nvfp4 import global_scale, pack
from .output_directory import Progress, begin, output_directory
from .parallel import in_parallel
from .weights import check_finite

FORMATS: dict[str, ModuleType] = {"nvfp4": compressed_tensors, "modelopt-nvfp4": modelopt}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT32 = np.dtype(np.float32)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_UINT8 = np.dtype(np.uint8)
SCALE_ARITHMETIC = ("float32", "bfloat16")


@dataclass(frozen=True)
class ExportOptions:
    """How to quantise.

    format: "nvfp4" (compressed-tensors) or "modelopt-nvfp4".
    calibration: measured ranges of activations, which makes it W4A4; None leaves activations alone.
    kv_cache: "fp8" or "nvfp4" writes key/value scales, for ModelOpt; needs a calibration.
    scales: arithmetic of compressed-tensors' scales. float32 is the better one; bfloat16 is what
      llm-compressor does to bfloat16 weights, bit for bit.
    """

    format: str = "nvfp4"
    calibration: Calibration | None = None
    kv_cache: str | None = None
    scales: str = "float32"

    def __post_init__(self) -> None:
        check_choice("format", self.format, FORMATS)
        check_choice("scales", self.scales, SCALE_ARITHMETIC)
        if self.scales == "bfloat16" and self.format != "nvfp4":
            raise UserError("scales=bfloat16 is llm-compressor's arithmetic: use format=nvfp4")
        if self.kv_cache is None:
            return
        check_choice("kv_cache", self.kv_cache, ("fp8", "nvfp4"))
        if self.format != "modelopt-nvfp4":
            raise UserError(f"kv_cache={self.kv_cache} needs format=modelopt-nvfp4")
        if self.calibration is None:
            raise UserError(f"kv_cache={self.kv_cache} needs activations=calibrated")


def to_nvfp4(
    checkpoint: str | Path,
    output: str | Path,
    options: ExportOptions = ExportOptions(),  # noqa: B008  frozen
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], Progress] | None = None,
) -> Path:
    """Writes a checkpoint as an NVFP4 folder: codes and scales for the blocks' linears, BF16 else.

    Linears that a model trained in FP4 kept in BF16 stay BF16; embeddings, head, norms, biases and
    routers always do. q, k and v share a tensor scale, and so do gate and up, as fused kernels
    need.

    Raises:
      UserError: no checkpoint there, or it cannot be quantised.
    """
    source = open_checkpoint(checkpoint)
    kind = FORMATS[options.format]
    quantized = [p for p in source.layout.parameters if is_quantized(source, p)]
    plain = [p for p in source.layout.parameters if p not in quantized]
    if not quantized:
        raise UserError(f"{source.step_folder} has no linear to quantise: export it with to-hf")
    tensors = _tensors(source, quantized, plain, options)
    total = sum(t.itemsize * math.prod(shape) for t, shape in tensors.values())
    with output_directory(Path(output), source=source.folder, needed_bytes=total) as folder:
        with hub_writers(folder, tensors, shard_bytes) as writers:
            dtypes = dict.fromkeys(tensors, _BFLOAT16)
            done = begin(progress, _bytes(source))
            export_plain(source, writers, dtypes, plain, lambda _: done)

            def convert(job: tuple[Parameter, tuple[int, ...]]) -> None:
                parameter, leading = job
                pieces = source.layout.pieces(parameter, leading)
                slab = source.reader.read(parameter, leading)
                check_finite(slab, " or ".join(piece.name for piece in pieces))
                for name, array in quantize_slab(slab, pieces, options).items():
                    writers[name].write(name, array)
                done(slab.nbytes)

            in_parallel(convert, ((p, leading) for p in quantized for leading in p.slabs()))
            for name, array in _calibrated(source, quantized, options).items():
                writers[name].write(name, array)
        config = {**export_config(source, "bfloat16"), "dtype": "bfloat16"}
        ignore = ignored_linears(source, plain)
        activations = options.calibration is not None
        if kind is modelopt:
            arguments: dict[str, Any] = {"activations": activations, "kv_cache": options.kv_cache}
            config["quantization_config"] = modelopt.quantization_config(ignore, **arguments)
            text = json.dumps(modelopt.quantization(ignore, **arguments), indent=2)
            (folder / modelopt.CONFIG_FILE).write_text(text + "\n", "utf-8")
        else:
            config["quantization_config"] = compressed_tensors.quantization_config(
                ignore, activations=activations
            )
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        copy_companions(source, folder)
    return Path(output)


def is_quantized(source: Checkpoint, parameter: Parameter) -> bool:
    """Whether this parameter is a linear that becomes NVFP4."""
    if parameter.kind not in ("qkv", "output", "gate_up", "down"):
        return False
    precision = source.settings.get("precision")
    if precision is None or not get_recipe(precision["recipe"]).uses_fp4:
        return True
    group = "attention" if parameter.kind in ("qkv", "output") else "mlp"
    return parameter.path[1] == "middle" and precision["rules"][group]


def quantize_slab(
    slab: np.ndarray, pieces: tuple[Piece, ...], options: ExportOptions
) -> dict[str, np.ndarray]:
    """The tensors of one slab's linears, which share a tensor scale.

    slab: in stored order; its pieces are those of `Layout.pieces`.
    """
    kind = FORMATS[options.format]
    rounded = options.scales == "bfloat16"
    amax = max(abs(float(slab.max())), abs(float(slab.min())))
    scale = global_scale(amax, kind.RULE, in_bfloat16=rounded)
    result = {}
    for piece in pieces:
        weight = slab[piece.index].reshape(-1, slab.shape[-1])
        packed = pack(weight, scale, kind.RULE, in_bfloat16=rounded)
        shape = (1,) if kind is compressed_tensors else ()
        arrays = (packed.codes, packed.scales, np.full(shape, scale, np.float32))
        result |= dict(zip(kind.PARTS.of(piece.name), arrays, strict=True))
    return result


def ignored_linears(source: Checkpoint, plain: list[Parameter]) -> list[str]:
    """Names of the linears that stay in high precision: the head, routers, BF16 blocks."""
    kinds = ("router", "qkv", "output", "gate_up", "down")
    names = [
        piece.name.removesuffix(".weight")
        for parameter in plain
        if parameter.kind in kinds
        for leading in parameter.slabs()
        for piece in source.layout.pieces(parameter, leading)
    ]
    return ["lm_head", *sorted(names)]


def _tensors(
    source: Checkpoint, quantized: list[Parameter], plain: list[Parameter], options: ExportOptions
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """dtype and shape of every tensor of the folder, in the order of the layers' files."""
    kind = FORMATS[options.format]
    shapes = source.layout.tensor_shapes()
    calibrated = _calibrated(source, quantized, options)
    tensors: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for parameter in source.layout.parameters:
        for leading in parameter.slabs():
            for piece in source.layout.pieces(parameter, leading):
                shape = shapes[piece.name]
                if parameter in plain:
                    tensors[piece.name] = (_BFLOAT16, shape)
                    continue
                codes, scales, scale = kind.PARTS.of(piece.name)
                rows, columns = shape
                tensors[codes] = (_UINT8, (rows, columns // 2))
                tensors[scales] = (_E4M3, (rows, columns // 16))
                tensors[scale] = (_FLOAT32, (1,) if kind is compressed_tensors else ())
    return tensors | {name: (_FLOAT32, array.shape) for name, array in calibrated.items()}


def _calibrated(
    source: Checkpoint, quantized: list[Parameter], options: ExportOptions
) -> dict[str, np.ndarray]:
    """Scales of inputs and of the key/value cache by tensor name."""
    if options.calibration is None:
        return {}
    kind = FORMATS[options.format]
    inputs, cache = options.calibration.inputs, options.calibration.cache
    result = {}
    for parameter in quantized:
        for leading in parameter.slabs():
            for piece in source.layout.pieces(parameter, leading):
                stem = piece.name.removesuffix(".weight")
                result[f"{stem}.{kind.INPUT_SCALE}"] = kind.input_scale(inputs[stem])
    if options.kv_cache is not None:
        for stem, amax in cache.items():
            suffix = "k_scale" if stem.endswith("k_proj") else "v_scale"
            result[f"{stem}.{suffix}"] = modelopt.cache_scale(amax, options.kv_cache)
    return result


def _bytes(source: Checkpoint) -> int:
    return sum(
        math.prod(shape) * source.reader.dtypes[name].itemsize
        for name, shape in source.reader.shapes.items()
    )
