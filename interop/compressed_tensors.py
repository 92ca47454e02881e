"""compressed-tensors `nvfp4-pack-quantized`, the format of vLLM and transformers, in and out."""

from __future__ import annotations

from typing import Any

import numpy as np

from .hub_directory import HubDirectory
from .quantized_weights import PartNames, QuantizedWeights, check_format, find_parts

FORMAT = "nvfp4-pack-quantized"
RULE = "compressed-tensors"
PARTS = PartNames("weight_packed", "weight_scale", "weight_global_scale")
INPUT_SCALE = "input_global_scale"


class CompressedTensorsWeights(QuantizedWeights):
    """The weights of a folder in this format, dequantised."""

    def __init__(self, directory: HubDirectory):
        found = directory.config["quantization_config"].get("format")
        check_format(found, FORMAT, "format", directory.path / "config.json")
        parts, rest = find_parts(
            directory, PARTS, lambda *_: True,
            (INPUT_SCALE, "k_scale", "v_scale"),
        )  # fmt: skip
        super().__init__(directory, RULE, parts, rest)


def input_scale(amax: float) -> np.ndarray:
    """The divisor of a linear's calibrated input, float32 [1]."""
    return np.array([np.float32(2688) / np.float32(amax)], np.float32)


def quantization_config(ignore: list[str], *, activations: bool) -> dict[str, Any]:
    """What config.json says about the format. ignore: linears that are not quantised."""
    weights: dict[str, Any] = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
        "observer": "memoryless_minmax",
    }
    inputs = {**weights, "dynamic": "local", "observer": "static_minmax"} if activations else None
    group = {
        "targets": ["Linear"],
        "format": FORMAT,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",  # without it loaders initialise the weights anew
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }
