"""ModelOpt NVFP4, the format of TensorRT-LLM and vLLM's `modelopt_fp4`, in and out."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import __version__
from ..errors import UserError
from .hub_directory import HubDirectory, read_json
from .quantized_weights import PartNames, QuantizedWeights, find_parts

RULE = "modelopt"
PARTS = PartNames("weight", "weight_scale", "weight_scale_2")
INPUT_SCALE = "input_scale"
CONFIG_FILE = "hf_quant_config.json"
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")


class ModelOptWeights(QuantizedWeights):
    """The weights of a folder in this format, dequantised."""

    def __init__(self, directory: HubDirectory):
        path = directory.path / CONFIG_FILE
        quantization = directory.config.get("quantization_config", {})
        if path.is_file():
            quantization = read_json(path).get("quantization", {})
        algorithm = quantization.get("quant_algo") if isinstance(quantization, dict) else None
        if algorithm not in _ALGORITHMS:
            raise UserError(
                f"{path}: quant_algo={algorithm!r} cannot be read, only {' and '.join(_ALGORITHMS)}"
            )
        parts, rest = find_parts(
            directory, PARTS, lambda _, entry: entry.dtype == np.uint8,
            (INPUT_SCALE, "k_scale", "v_scale"),
        )  # fmt: skip
        super().__init__(directory, RULE, parts, rest)


def input_scale(amax: float) -> np.ndarray:
    """The factor of a linear's calibrated input, a float32 scalar."""
    return np.asarray(np.float32(amax) / np.float32(2688), np.float32)


def cache_scale(amax: float, kv_cache: str) -> np.ndarray:
    """The factor of calibrated keys or values in an "fp8" or "nvfp4" cache, a float32 scalar."""
    largest = 448 if kv_cache == "fp8" else 2688
    return np.asarray(np.float32(amax) / np.float32(largest), np.float32)


def quantization(ignore: list[str], *, activations: bool, kv_cache: str | None) -> dict[str, Any]:
    """hf_quant_config.json. kv_cache: "fp8", "nvfp4" or None."""
    return {
        "producer": {"name": "fp4zoo", "version": __version__},
        "quantization": {
            "quant_algo": "NVFP4" if activations else "W4A16_NVFP4",
            "kv_cache_quant_algo": None if kv_cache is None else kv_cache.upper(),
            "group_size": 16,
            "exclude_modules": ignore,
        },
    }


def quantization_config(
    ignore: list[str], *, activations: bool, kv_cache: str | None
) -> dict[str, Any]:
    """The same for config.json."""
    whole = quantization(ignore, activations=activations, kv_cache=kv_cache)
    operand = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group: dict[str, Any] = {"weights": operand, "targets": ["Linear"]}
    if activations:
        group["input_activations"] = operand
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": whole["quantization"]["quant_algo"],
        "producer": whole["producer"],
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }
    if kv_cache is not None:
        bits = 8 if kv_cache == "fp8" else 4
        config["kv_cache_scheme"] = {"dynamic": False, "num_bits": bits, "type": "float"}
    return config
