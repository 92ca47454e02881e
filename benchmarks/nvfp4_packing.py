"""Packing weights as NVFP4 beside compressed-tensors' own functions, on the same matrices.

    python benchmarks/nvfp4_packing.py [--megabytes 60] [--repeats 5]

Both go from a bfloat16 matrix to codes, block scales and tensor scale: ours as `to-hf --format
nvfp4` does, with its check for NaN, theirs by `generate_gparam`, `calculate_qparams` and
`NVFP4PackedCompressor.compress`, on a CPU, with as many threads as torch takes. They alternate;
speeds are of the bfloat16 read. float32 copies of the weights must give equal bytes on both sides.
Needs `pip install -e '.[oracles]'`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from fp4zoo.interop.layout import Piece
from fp4zoo.interop.nvfp4_export import ExportOptions, quantize_slab
from fp4zoo.interop.weights import check_finite

_COLUMNS = 4096
Packed = tuple[np.ndarray, np.ndarray, np.ndarray]  # codes, scales, tensor scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=60, help="of one bfloat16 matrix")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = max(1, round(options.megabytes * 1e6 / 2 / _COLUMNS))
    rng = np.random.default_rng(0)
    values = rng.standard_normal((rows, _COLUMNS), np.float32) * 0.02
    weight = values.astype(ml_dtypes.bfloat16)
    tensor = torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)
    for ours, theirs in zip(pack_ours(values), pack_theirs(torch.from_numpy(values)), strict=True):
        assert ours.tobytes() == theirs.tobytes()
    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    pack_ours(weight)  # compiles
    pack_theirs(tensor)
    for _ in range(options.repeats):
        found["ours"].append(seconds(pack_ours, weight))
        found["theirs"].append(seconds(pack_theirs, tensor))
    speeds = {who: weight.nbytes / 1e9 / statistics.median(times) for who, times in found.items()}
    print(
        f"{rows} x {_COLUMNS} bfloat16, {weight.nbytes / 1e6:.0f} MB, {os.cpu_count()} cores, "
        f"median of {options.repeats}: {speeds['ours']:.3f} GB/s, compressed-tensors "
        f"{speeds['theirs']:.3f} GB/s, ratio {speeds['ours'] / speeds['theirs']:.1f}"
    )


def seconds(pack: Callable, weight: object) -> float:
    begin = time.perf_counter()
    pack(weight)
    return time.perf_counter() - begin


def pack_ours(weight: np.ndarray) -> Packed:
    check_finite(weight, "weight")
    codes, scales, scale = quantize_slab(
        weight, (Piece("x.weight", weight.shape),), ExportOptions()
    ).values()
    return codes, scales, scale


def pack_theirs(weight: torch.Tensor) -> Packed:
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    assert scheme.weights is not None
    global_scale = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
    blocks = weight.reshape(weight.shape[0], -1, 16)
    scale, _ = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=global_scale
    )
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
    done = NVFP4PackedCompressor.compress(state, scheme)
    return (
        done["weight_packed"].numpy(),
        done["weight_scale"].view(torch.uint8).numpy(),
        done["weight_global_scale"].numpy(),
    )


if __name__ == "__main__":
    main()
