"""Speed and memory of conversion on a synthetic Mixtral in shards, beside `cp` of the same bytes.

    python benchmarks/conversion.py FOLDER [--layers 16] [--repeats 3]

Writes about three times the model's size (6.2 GB at 16 layers) into FOLDER and removes it again.
Each command runs in a process of its own; memory is its peak resident set, which counts the pages
of the source that it has mapped.

What a copy costs depends on what ran before it: on dirty pages that are still being written, on
whether the page cache takes memory that was just freed or that a virtual machine must first get
from its host. So each conversion stands between two copies of the very bytes that it reads, every
one begins with nothing dirty and the output of the one before removed, and the ratio is that to the
mean of its neighbours. Medians and the best of all repeats are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from fp4zoo.interop.hub_config import hub_config
from fp4zoo.interop.hub_export import hub_writers
from fp4zoo.interop.layout import Layout
from fp4zoo.models import ModelConfig, MoEConfig

_PROGRAM = """
import resource, sys, time
from fp4zoo import convert
begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
status = convert.main(sys.argv[1:])
seconds, used = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
print(seconds, used.ru_utime - before.ru_utime, used.ru_stime - before.ru_stime,
      used.ru_maxrss * 1024, status)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    folder = options.folder / "fp4zoo-conversion-benchmark"
    folder.mkdir()
    try:
        size = write_model(folder / "hf", options.layers)
        runs: dict[str, list[Run]] = {}
        convert("from-hf", folder / "hf", folder / "ours")
        for _ in range(options.repeats):
            measure(folder, size, runs)
        for name, found in runs.items():
            report(f"{name}: median of {len(found)}", found, size)
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


@dataclass(frozen=True)
class Run:
    """One conversion: wall time in seconds, that of a copy beside it, CPU time, peak memory."""

    seconds: float
    copy_seconds: float
    user: float
    system: float
    peak: float


def measure(folder: Path, size: int, runs: dict[str, list[Run]]) -> None:
    """Runs every conversion once."""
    out = folder / "out"
    for name, source, options in (
        ("from-hf", "hf", ()),
        ("to-hf", "ours", ()),
        ("to-hf nvfp4", "ours", ("--format", "nvfp4")),
    ):
        before = copy_seconds(folder / source, folder / "copy")
        seconds, user, system, peak = convert(name.split()[0], folder / source, out, *options)
        if name == "to-hf" and name not in runs:
            same(folder / "hf", out)
        shutil.rmtree(out)
        after = copy_seconds(folder / source, folder / "copy")
        run = Run(seconds, (before + after) / 2, user, system, peak)
        runs.setdefault(name, []).append(run)
        report(name, [run], size)


def copy_seconds(source: Path, target: Path) -> float:
    """Seconds of `cp -r`; the copy is removed."""
    os.sync()
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    return seconds


def convert(*arguments: object) -> tuple[float, float, float, float]:
    """(wall, user and system seconds, peak bytes) of convert.py in a process, without imports."""
    os.sync()
    command = [sys.executable, "-c", _PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, user, system, peak, status = map(float, done.stdout.split("\n")[-2].split())
    assert status == 0
    return seconds, user, system, peak


def same(first: Path, second: Path) -> None:
    """Asserts that the folders' tensors are equal, byte for byte."""
    from fp4zoo.interop.hub_directory import open_hub_directory

    left, right = open_hub_directory(first).tensors, open_hub_directory(second).tensors
    assert left.keys() == right.keys()
    for name, entry in left.items():
        assert np.array_equal(entry.read().view(np.uint16), right[name].read().view(np.uint16)), (
            name
        )


def report(name: str, runs: list[Run], size: int) -> None:
    def median(values: Iterable[float]) -> float:
        return statistics.median(values)

    ratios = [run.copy_seconds / run.seconds for run in runs]
    best = f", best {max(ratios):.2f}" if len(runs) > 1 else ""
    print(
        f"{name:24} {size / 1e9 / median(run.seconds for run in runs):5.2f} GB/s, "
        f"cp {size / 1e9 / median(run.copy_seconds for run in runs):5.2f}, "
        f"ratio {median(ratios):.2f}{best}, CPU {median(run.user for run in runs):.1f} s + "
        f"{median(run.system for run in runs):.1f} s of the kernel's, "
        f"peak {max(run.peak for run in runs) / 2**30:.2f} GiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
