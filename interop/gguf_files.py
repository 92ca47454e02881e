"""GGUF files (llama.cpp) in, through the `gguf` package, which knows their quantisations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..data import load_tokenizer_file
from ..errors import UserError, did_you_mean
from ..layers.rope import RopeScaling, rope_frequencies
from ..models import ModelConfig, MoEConfig
from .config_reader import ConfigReader
from .gguf_header import check_header
from .gguf_tokenizer import gguf_tokenizer
from .hub_config import hub_config
from .hub_directory import tokenizer_files
from .hugging_face import Origin, write_checkpoint
from .layout import Layout
from .output_directory import Progress
from .weights import FLOATS, check_tensors

GGUF_SUFFIX = ".gguf"
_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
# The scalings of published Llama models; a file holds the resulting factors alone.
_LLAMA3 = [RopeScaling(factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0)]
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: its shape as in Hugging Face, its type's name, and the library's object."""

    name: str
    shape: tuple[int, ...]
    kind: str
    nbytes: int
    source: Any

    def read(self) -> np.ndarray:
        """Its values in their own dtype, or in float32 when they are quantised."""
        from gguf.quants import dequantize

        data = self.source.data
        if self.kind in ("F32", "F16"):
            return data.reshape(self.shape)
        if self.kind == "BF16":
            return data.view(np.uint16).view(ml_dtypes.bfloat16).reshape(self.shape)
        return dequantize(data, self.source.tensor_type).reshape(self.shape)

    @property
    def dtype(self) -> np.dtype:
        return FLOATS[{"F16": "float16", "BF16": "bfloat16"}.get(self.kind, "float32")]


@dataclass(frozen=True)
class GGUFFile:
    """An opened file: its fields, the model it is of, and its tensors."""

    path: Path
    metadata: dict[str, Any]
    architecture: str
    model: ModelConfig
    tensors: list[GGUFTensor]


def from_gguf(
    source: str | Path,
    output: str | Path,
    *,
    tokenizer: str | Path | None = None,
    progress: Callable[[int], Progress] | None = None,
) -> Path:
    """Converts a GGUF file into a checkpoint of ours; quantised tensors become float32.

    tokenizer: a folder with tokenizer files to take in place of the file's own tokenizer.

    Raises:
      UserError: an architecture, a tensor or a tokenizer that is not known, a value that is not
        finite.
    """
    file = open_gguf(source)
    weights = GGUFWeights(file)
    check_tensors(weights, Layout(file.model), file.path)
    files = _tokenizer_files(file, tokenizer)
    origin = Origin(hub_config(file.model, "float32"), files, [])
    return write_checkpoint(
        weights, file.model, origin, output, source=file.path, progress=progress
    )


def _tokenizer_files(file: GGUFFile, folder: str | Path | None) -> dict[str, bytes]:
    """The tokenizer's files by name: those of `folder`, else made from the file's own."""
    if folder is None:
        own = gguf_tokenizer(file.metadata, file.path)
        tokenizer, files = (None, {}) if own is None else (own.tokenizer, own.files)
    else:
        found = tokenizer_files(Path(folder).expanduser())
        if not found:
            raise UserError(f"tokenizer={folder} holds no tokenizer files: give another folder")
        tokenizer = load_tokenizer_file(Path(folder).expanduser())
        files = {file.name: file.read_bytes() for file in found}
    if tokenizer is not None and tokenizer.vocab_size > file.model.vocab_size:
        raise UserError(
            f"{file.path}: the model has {file.model.vocab_size} tokens, the tokenizer "
            f"{tokenizer.name} {tokenizer.vocab_size}: give its own with --tokenizer DIR"
        )
    return files


def open_gguf(path: str | Path) -> GGUFFile:
    """Reads a file's metadata; tensors stay on the disk.

    Raises:
      UserError: the `gguf` package is missing, no GGUF file, an unknown architecture.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError("GGUF files need the gguf package: pip install 'fp4zoo[gguf]'") from error
    path = Path(path).expanduser().absolute()
    try:
        check_header(path)
        reader = GGUFReader(str(path))
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read as GGUF ({reason}): download it again") from error
    tensors = [
        GGUFTensor(
            str(tensor.name),
            tuple(int(size) for size in reversed(tensor.shape)),
            tensor.tensor_type.name,
            int(tensor.n_bytes),
            tensor,
        )
        for tensor in reader.tensors
    ]
    return GGUFFile(path, metadata, *_model(metadata, {t.name: t for t in tensors}, path), tensors)


class GGUFWeights:
    """The tensors of a file under Hugging Face's names."""

    def __init__(self, file: GGUFFile):
        """Raises UserError for a tensor whose meaning is not known."""
        self._reads: dict[str, Callable[[], np.ndarray]] = {}
        self.dtypes: dict[str, np.dtype] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        model = file.model
        for tensor in file.tensors:
            if tensor.name == _ROPE_FACTORS:
                continue
            for name, read, shape in _named(tensor, model, file.path):
                self._reads[name], self.dtypes[name], self.shapes[name] = read, tensor.dtype, shape

    def read(self, name: str) -> np.ndarray:
        return self._reads[name]()

    def stored(self, name: str) -> None:
        """None: GGUF has other orders and formats."""


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {"ffn_gate_exps": 0, "ffn_up_exps": 1, "ffn_down_exps": 2}


def _named(
    tensor: GGUFTensor, model: ModelConfig, path: Path
) -> Iterator[tuple[str, Callable[[], np.ndarray], tuple[int, ...]]]:
    """(Hugging Face's name, how to read it, shape) of what one GGUF tensor holds."""
    stem, _, suffix = tensor.name.rpartition(".")
    if stem in _TOP:
        yield f"{_TOP[stem]}.{suffix}", tensor.read, tensor.shape
        return
    _, layer, kind = [*stem.split("."), "", ""][:3]
    prefix = f"model.layers.{layer}"
    mixtral = model.architecture == "mixtral"
    moe = f"{prefix}.block_sparse_moe" if mixtral else f"{prefix}.mlp"
    if kind in _BLOCK:
        read = tensor.read
        if kind in ("attn_q", "attn_k") and model.architecture in ("llama", "mixtral"):
            heads = model.num_heads if kind == "attn_q" else model.num_kv_heads
            yield (
                f"{prefix}.{_BLOCK[kind]}.{suffix}",
                lambda: _half_split(tensor.read(), heads),
                tensor.shape,
            )
            return
        yield f"{prefix}.{_BLOCK[kind]}.{suffix}", read, tensor.shape
    elif kind == "ffn_gate_inp":
        yield f"{moe}.gate.{suffix}", tensor.read, tensor.shape
    elif kind in _EXPERTS:
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        for expert in range(tensor.shape[0]):
            name = f"{moe}.experts.{expert}.{names[_EXPERTS[kind]]}.{suffix}"
            yield name, lambda expert=expert: tensor.read()[expert], tensor.shape[1:]
    else:
        raise UserError(f"{path}: tensor {tensor.name!r} is unknown: this model is not supported")


def _half_split(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp pairs neighbouring rows of a head for rotation; we pair row i with i + H/2."""
    rows = array.shape[0]
    pairs = array.reshape(heads, rows // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _model(
    metadata: dict[str, Any], tensors: dict[str, GGUFTensor], path: Path
) -> tuple[str, ModelConfig]:
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise UserError(
            f"{path}: architecture {kind!r} cannot be converted"
            f"{did_you_mean(str(kind), _ARCHITECTURES)}"
        )
    prefix = f"{kind}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items()
              if key.startswith(prefix)}  # fmt: skip
    get = ConfigReader(values, f"{path}: {kind}")
    get.only("rope.scaling.type", "none", "none", "")
    heads, dim = get.number("attention.head_count"), get.number("embedding_length")
    experts = get.number("expert_count") if get.value("expert_count", 0) else 0
    architecture = _ARCHITECTURES[kind]
    if architecture == "llama" and experts:
        architecture = "mixtral"
    width = "expert_feed_forward_length" if kind == "qwen3moe" else "feed_forward_length"
    head_dim = get.number("attention.key_length", default=max(1, dim // heads))
    theta = get.real("rope.freq_base", default=10_000.0)
    window = "attention.sliding_window"
    return kind, ModelConfig(
        architecture,
        vocab_size=tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 1,
        num_layers=get.number("block_count"),
        embed_dim=dim,
        num_heads=heads,
        num_kv_heads=get.number("attention.head_count_kv", default=heads),
        head_dim=head_dim,
        mlp_dim=get.number(width),
        max_positions=get.number("context_length"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(tensors.get(_ROPE_FACTORS), head_dim, theta, path),
        sliding_window=get.number(window) if window in values else None,
        norm_epsilon=float(f"{get.real('attention.layer_norm_rms_epsilon'):.6g}"),  # from float32
        tie_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        qk_norm=kind in ("qwen3", "qwen3moe"),
        moe=MoEConfig(experts, get.number("expert_used_count")) if experts else None,
    )


def _rope_scaling(
    tensor: GGUFTensor | None, head_dim: int, theta: float, path: Path
) -> RopeScaling | None:
    """The llama3 scaling whose factors these are."""
    if tensor is None:
        return None
    factors = tensor.read().astype(np.float64)
    plain = rope_frequencies(head_dim, theta)
    for scaling in _LLAMA3:
        expected = plain / rope_frequencies(head_dim, theta, scaling)
        if factors.shape == expected.shape and math.isclose(
            float(np.abs(factors / expected - 1).max()), 0, abs_tol=1e-4
        ):
            return scaling
    raise UserError(f"{path}: {_ROPE_FACTORS} is of no published Llama model: not supported")
