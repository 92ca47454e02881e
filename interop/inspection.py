"""What a folder or file of weights is, in text."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..models import ModelConfig
from ..training.checkpoints import FOLDER, PARAMETERS
from .checkpoint import open_checkpoint
from .gguf_files import GGUF_SUFFIX, open_gguf
from .hub_config import model_config
from .hub_directory import open_hub_directory
from .weights import hub_weights


@dataclass(frozen=True)
class Row:
    """One tensor: name, shape and dtype, as stored."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def describe(path: str | Path) -> str:
    """What `path` is: kind, model, sizes, dtypes, layout, and a table of its layers.

    Raises:
      UserError: it is nothing that is known, or is damaged.
    """
    path = Path(path).expanduser().absolute()
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if path.suffix == GGUF_SUFFIX:
        lines, rows = _gguf(path)
    elif (path / "config.json").is_file():
        lines, rows = _hub(path)
    elif (path / FOLDER).is_dir() or (path / PARAMETERS).is_dir() or _has_steps(path):
        lines, rows = _ours(path)
    else:
        raise UserError(
            f"{path} is neither a checkpoint of ours, nor a Hugging Face folder with config.json, "
            "nor a .gguf file"
        )
    dtypes = Counter()
    for row in rows:
        dtypes[row.dtype] += row.nbytes
    total = sum(dtypes.values())
    lines.append(f"size      {_size(total)} in {len(rows)} tensors")
    shares = (f"{dtype} {_size(count)}" for dtype, count in dtypes.most_common())
    lines.append(f"dtypes    {', '.join(shares)}")
    return "\n".join([*lines, "", *_table(rows)])


def _ours(path: Path) -> tuple[list[str], list[Row]]:
    source = open_checkpoint(path)
    segments = ", ".join(f"{s.name} {s.start}-{s.stop - 1}" for s in source.layout.segments)
    lines = [f"{source.step_folder}: a checkpoint of fp4zoo", *_model_lines(source.model)]
    lines.append(f"layout    layers stacked per segment: {segments}")
    if source.conversion is not None:
        origin = source.conversion
        lines.append(f"origin    Hugging Face, {origin.dtype}, vocabulary of {origin.vocab_size:,}")
    lines.append(f"tokenizer {source.tokenizer_folder or 'none'}")
    rows = []
    for parameter in source.layout.parameters:
        dtype = source.reader.dtypes[parameter.name]
        nbytes = math.prod(parameter.shape) * dtype.itemsize
        rows.append(Row(parameter.name, parameter.shape, dtype.name, nbytes))
    return lines, rows


def _hub(path: Path) -> tuple[list[str], list[Row]]:
    directory = open_hub_directory(path)
    config = model_config(directory.config, str(path / "config.json"))
    hub_weights(directory)
    quantization = directory.config.get("quantization_config", {}).get("quant_method")
    what = f"quantised by {quantization}" if quantization else "plain"
    lines = [f"{path}: a Hugging Face folder, {what}", *_model_lines(config)]
    files = {entry.path.name for entry in directory.tensors.values()}
    lines.append(f"layout    {len(files)} safetensors file{'s' if len(files) > 1 else ''}")
    tokenizer = [file.name for file in directory.tokenizer_files()]
    lines.append(f"tokenizer {', '.join(tokenizer) or 'none'}")
    entries = directory.tensors.items()
    return lines, [Row(n, e.shape, e.dtype.name, e.nbytes) for n, e in entries]


def _gguf(path: Path) -> tuple[list[str], list[Row]]:
    file = open_gguf(path)
    lines = [f"{path}: a GGUF file", *_model_lines(file.model)]
    return lines, [Row(t.name, t.shape, t.kind, t.nbytes) for t in file.tensors]


def _model_lines(model: ModelConfig) -> list[str]:
    attention = f"{model.num_heads} heads of {model.resolved_head_dim}"
    if model.num_kv_heads != model.num_heads:
        attention += f", {model.num_kv_heads} for keys and values"
    mlp = f"feed-forward {model.mlp_dim:,}"
    if model.moe is not None:
        mlp = f"{model.moe.num_experts} experts of {model.mlp_dim:,}"
        mlp += f", {model.moe.experts_per_token} a token"
    tied = ", tied" if model.tie_embeddings else ""
    return [
        f"model     {model.architecture}, {model.num_layers} layers of {model.embed_dim:,}, "
        f"{attention}, {mlp}",
        f"          vocabulary {model.vocab_size:,}{tied}, context {model.max_positions:,}",
    ]


def _table(rows: list[Row]) -> list[str]:
    """One line per tensor; those that differ in a layer's or expert's number alone share one."""
    groups: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for row in rows:
        parts = row.name.split(".")
        name = ".".join("*" if part.isdigit() else part for part in parts)
        groups.setdefault((name, row.shape, row.dtype), []).append(row.nbytes)
    width = max((len(name) for name, _, _ in groups), default=0)
    return [
        f"{name:{width}}  {f'{len(sizes)} x' if len(sizes) > 1 else '':>8} "
        f"{dtype:13} {str(list(shape)):26} {_size(sum(sizes)):>9}"
        for (name, shape, dtype), sizes in groups.items()
    ]


def _has_steps(path: Path) -> bool:
    return path.is_dir() and any((child / PARAMETERS).is_dir() for child in path.iterdir())


def _size(nbytes: int) -> str:
    for unit in ("B", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000  # type: ignore[assignment]
    return f"{nbytes:,.2f} GB"
