"""Speed and memory of conversion on a synthetic Mixtral in shards, beside `cp` of the same bytes.

    python benchmarks/conversion.py FOLDER [--layers 16]

Writes about three times the model's size (6.2 GB at 16 layers) into FOLDER and removes it again.
Each command runs in a process of its own; memory is its peak resident set, which counts the pages
of the source that it has mapped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from fp4zoo.interop.hub_config import hub_config
from fp4zoo.interop.hub_export import hub_writers
from fp4zoo.interop.layout import Layout
from fp4zoo.models import ModelConfig, MoEConfig

_PROGRAM = """
import resource, sys, time
start = time.perf_counter()
from fp4zoo import convert
begin = time.perf_counter()
status = convert.main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(time.perf_counter() - begin, begin - start, used.ru_maxrss * 1024, used.ru_utime, status)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    folder = options.folder / "fp4zoo-conversion-benchmark"
    folder.mkdir()
    try:
        size = write_model(folder / "hf", options.layers)
        for _ in range(options.repeats):
            measure(folder, size)
    finally:
        shutil.rmtree(folder)


def write_model(folder: Path, layers: int) -> int:
    """Writes random weights, bfloat16 in shards of 4 GB; returns their size in bytes."""
    config = ModelConfig(
        "mixtral", vocab_size=32_000, num_layers=layers, embed_dim=2048, num_heads=32,
        num_kv_heads=8, mlp_dim=3584, max_positions=4096, moe=MoEConfig(8, 2),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    pool = (rng.standard_normal(2**26, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    dtype = pool.dtype
    tensors = {name: (dtype, shape) for name, shape in Layout(config).tensor_shapes().items()}
    folder.mkdir()
    with hub_writers(folder, tensors, 4_000_000_000) as writers:
        for name, (_, shape) in tensors.items():
            count = int(np.prod(shape))
            start = int(rng.integers(0, max(1, len(pool) - count)))
            data = np.resize(pool[start : start + count], shape)
            writers[name].write(name, data)
    (folder / "config.json").write_text(json.dumps(hub_config(config, "bfloat16")))
    largest = max(int(np.prod(shape)) * 2 for _, shape in tensors.values())
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{size / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB", flush=True)
    return size


def measure(folder: Path, size: int) -> None:
    copy = folder / "copy"
    os.sync()
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", folder / "hf", copy], check=True)
    report("cp", time.perf_counter() - begin, size, 0)
    shutil.rmtree(copy)
    ours = folder / "ours"
    commands = {
        "from-hf": ["from-hf", folder / "hf", ours],
        "to-hf": ["to-hf", ours, folder / "back"],
        "to-hf nvfp4": ["to-hf", ours, folder / "fp4", "--format", "nvfp4"],
        "from-hf nvfp4": ["from-hf", folder / "fp4", folder / "read"],
    }
    for name, arguments in commands.items():
        os.sync()
        command = [sys.executable, "-c", _PROGRAM, *map(str, arguments)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, imports, peak, user, status = map(float, done.stdout.split("\n")[-2].split())
        assert status == 0
        report(name, seconds, size, peak, f", {user:.1f} s of CPU, imports {imports:.1f} s")
        if name == "to-hf":
            same(folder / "hf", folder / "back")
            shutil.rmtree(folder / "back")
    for name in ("ours", "fp4", "read"):
        shutil.rmtree(folder / name)


def same(first: Path, second: Path) -> None:
    """Asserts that the folders' tensors are equal, byte for byte."""
    from fp4zoo.interop.hub_directory import open_hub_directory

    left, right = open_hub_directory(first).tensors, open_hub_directory(second).tensors
    assert left.keys() == right.keys()
    for name, entry in left.items():
        assert np.array_equal(entry.read().view(np.uint16), right[name].read().view(np.uint16)), (
            name
        )


def report(name: str, seconds: float, size: int, peak: float, more: str = "") -> None:
    memory = f", peak {peak / 2**30:.2f} GiB" if peak else ""
    print(f"{name:14} {seconds:6.1f} s  {size / 1e9 / seconds:5.2f} GB/s{memory}{more}", flush=True)


if __name__ == "__main__":
    main()
