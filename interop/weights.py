"""The floating-point weights of a Hugging Face folder by name, whatever format they are in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from ..errors import UserError, did_you_mean
from .array_files import StoredArray
from .hub_directory import HubDirectory
from .layout import Layout

FLOATS = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_BUFFERS = ("rotary_emb.inv_freq", "masked_bias")  # saved by old versions, computed by us
# The exponent bits: all set means infinite or not a number.
_EXPONENTS = {2: {"bfloat16": 0x7F80, "float16": 0x7C00}, 4: {"float32": 0x7F800000}}


class Weights(Protocol):
    """Named float tensors, read one at a time."""

    @property
    def dtypes(self) -> Mapping[str, np.dtype]: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> np.ndarray: ...

    def stored(self, name: str) -> StoredArray | None:
        """Where the tensor lies as it is; None if it must be computed."""
        ...


class PlainWeights:
    """The tensors of a folder as they are."""

    def __init__(self, tensors: Mapping[str, StoredArray]):
        """Raises UserError for a tensor that is not float32, float16 or bfloat16."""
        self._tensors = {
            name: entry for name, entry in tensors.items() if not name.endswith(_BUFFERS)
        }
        for name, entry in self._tensors.items():
            if entry.dtype not in FLOATS.values():
                raise UserError(
                    f"{entry.path}: tensor {name!r} is {entry.dtype}, not float32, float16 or "
                    "bfloat16: this quantisation cannot be read"
                )
        self.dtypes = {name: entry.dtype for name, entry in self._tensors.items()}
        self.shapes = {name: entry.shape for name, entry in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        return self._tensors[name].read()

    def stored(self, name: str) -> StoredArray | None:
        return self._tensors[name]


def hub_weights(directory: HubDirectory) -> Weights:
    """The weights of a folder: plain, compressed-tensors NVFP4 or ModelOpt NVFP4.

    Raises:
      UserError: another quantisation, or parts of a quantised tensor are missing.
    """
    from .compressed_tensors import CompressedTensorsWeights
    from .modelopt import ModelOptWeights

    quantization = directory.config.get("quantization_config")
    if quantization is None and (directory.path / "hf_quant_config.json").is_file():
        quantization = {"quant_method": "modelopt"}
    if quantization is None:
        return PlainWeights(directory.tensors)
    if not isinstance(quantization, dict):
        raise UserError(
            f"{directory.path / 'config.json'}: quantization_config={quantization!r} should be an "
            "object: download it again"
        )
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        return CompressedTensorsWeights(directory)
    if method == "modelopt":
        return ModelOptWeights(directory)
    raise UserError(
        f"{directory.path / 'config.json'}: quant_method={method!r} cannot be read"
        f"{did_you_mean(str(method), ('compressed-tensors', 'modelopt'))}"
    )


def check_tensors(weights: Weights, layout: Layout, where: Path) -> None:
    """Raises UserError unless the folder holds exactly the model's tensors, in their shapes."""
    found = dict(weights.shapes)
    experts = 0 if layout.config.moe is None else layout.config.moe.num_experts
    if max(layout.config.num_layers, experts) > len(found):
        raise UserError(
            f"{where} lacks tensors: {layout.config.num_layers} layers, {experts} experts, but "
            f"only {len(found)} tensors: download it again"
        )
    wanted = layout.tensor_shapes()
    if layout.config.tie_embeddings and "lm_head.weight" in found:
        del found["lm_head.weight"]  # compared with the embedding by the caller
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    for names, what, remedy in (
        (missing, "lacks", "its config.json promises more than its files hold"),
        (extra, "has unknown", "its config.json describes another model"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(f"{where} {what} tensors {', '.join(names[:3])}{more}: {remedy}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise UserError(
                f"{where}: tensor {name!r} is {list(found[name])}, its config.json means "
                f"{list(shape)}: one of them is of another model"
            )


def check_tied_head(weights: Weights, layout: Layout, where: Path) -> None:
    """Raises UserError if a head is stored beside tied embeddings and differs from them."""
    name = "lm_head.weight"
    if not layout.config.tie_embeddings or name not in weights.shapes:
        return
    head, embedding = weights.read(name), weights.read("model.embed_tokens.weight")
    if head.shape != embedding.shape or head.tobytes() != embedding.tobytes():
        raise UserError(
            f"{where}: tie_word_embeddings=true, but lm_head.weight is not the embedding: set it "
            "to false in config.json, or remove the tensor"
        )


def check_finite(array: np.ndarray, name: str) -> None:
    """Raises UserError, naming the tensor, when a value is NaN or infinite."""
    exponent = _EXPONENTS[array.itemsize][array.dtype.name]
    flat = array.reshape(-1).view(np.uint16 if array.itemsize == 2 else np.uint32)
    scratch = np.empty(min(flat.size, 2**18), flat.dtype)  # stays in the cache
    for start in range(0, flat.size, 2**18):
        part = flat[start : start + 2**18]
        if np.bitwise_and(part, exponent, out=scratch[: part.size]).max() == exponent:
            values = part.view(array.dtype).astype(np.float32)
            kind = "NaN" if np.isnan(values).any() else "an infinite value"
            raise UserError(f"tensor {name!r} holds {kind}: the checkpoint is damaged or diverged")


def finite_check(name: str) -> Callable[[np.ndarray], None]:
    """`check_finite` of the blocks of one tensor, for `write_array`."""
    return functools.partial(check_finite, name=name)
