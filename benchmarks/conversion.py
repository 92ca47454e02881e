"""Speed and memory of conversion on a synthetic Mixtral in shards, beside `cp` of the same bytes.

    python benchmarks/conversion.py FOLDER [--layers 16] [--repeats 3] [--only to-hf]

Writes about three times the model's size (6.2 GB at 16 layers) into FOLDER and removes it again.
Each command runs in a process of its own; memory is its peak resident set, which counts the pages
of the source that it has mapped.

What a copy costs depends on what ran before it: on dirty pages that are still being written, on
whether the page cache takes memory that was just freed or that a virtual machine must first get
from its host. So each conversion stands between two copies of the very bytes that it reads, every
one begins with nothing dirty and the output of the one before removed, and the ratio is that to the
mean of its neighbours. Both are timed twice: until the command ends, when most of the bytes are in
the page cache alone, and until a `sync` after it has ended. Medians and the best of all repeats are
reported.
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from fp4zoo.interop.hub_config import hub_config
from fp4zoo.interop.hub_export import hub_writers
from fp4zoo.interop.layout import Layout
from fp4zoo.models import ModelConfig, MoEConfig

_PROGRAM = """
import os, resource, sys, time
from fp4zoo import convert
begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
status = convert.main(sys.argv[1:])
seconds, used = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
os.sync()
print(seconds, time.perf_counter() - begin,
      used.ru_utime - before.ru_utime, used.ru_stime - before.ru_stime,
      used.ru_maxrss * 1024, status)
"""
# By name: what is read, and the options.
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "from-hf": ("hf", ()),
    "to-hf": ("ours", ()),
    "to-hf nvfp4": ("ours", ("--format", "nvfp4")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=COMMANDS, action="append", help="may be repeated")
    options = parser.parse_args()
    folder = options.folder / "fp4zoo-conversion-benchmark"
    folder.mkdir()
    try:
        size = write_model(folder / "hf", options.layers)
        runs: dict[str, list[Run]] = {}
        convert("from-hf", folder / "hf", folder / "ours")
        for _ in range(options.repeats):
            measure(folder, size, options.only or list(COMMANDS), runs)
        for name, found in runs.items():
            report(f"{name}, median of {len(found)}", found, size)
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
class Timing:
    """Wall seconds of a command, and of it with the `sync` that ends when all is on the disk."""

    command: float
    on_disk: float


@dataclass(frozen=True)
class Run:
    """One conversion: its time, those of the copies beside it, CPU seconds, peak bytes."""

    time: Timing
    copies: tuple[Timing, Timing]
    user: float
    system: float
    peak: float

    @property
    def ratio(self) -> float:
        """Speed as a share of cp's."""
        return statistics.mean(copy.command for copy in self.copies) / self.time.command

    @property
    def ratio_on_disk(self) -> float:
        """The same with the `sync` after each."""
        return statistics.mean(copy.on_disk for copy in self.copies) / self.time.on_disk


def measure(folder: Path, size: int, commands: Sequence[str], runs: dict[str, list[Run]]) -> None:
    """Runs every conversion once, between two copies."""
    out = folder / "out"
    for name in commands:
        source, options = COMMANDS[name]
        before = copy(folder / source, folder / "copy")
        time, user, system, peak = convert(name.split()[0], folder / source, out, *options)
        if name == "to-hf" and name not in runs:
            same(folder / "hf", out)
        shutil.rmtree(out)
        run = Run(time, (before, copy(folder / source, folder / "copy")), user, system, peak)
        runs.setdefault(name, []).append(run)
        report(name, [run], size)


def copy(source: Path, target: Path) -> Timing:
    """Times `cp -r`; the copy is removed."""
    os.sync()
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    timing = timed(begin, time.perf_counter() - begin)
    shutil.rmtree(target)
    return timing


def timed(begin: float, command: float) -> Timing:
    os.sync()
    return Timing(command, time.perf_counter() - begin)


def convert(*arguments: object) -> tuple[Timing, float, float, float]:
    """(time, user and system seconds, peak bytes) of convert.py in a process, without imports."""
    os.sync()
    command = [sys.executable, "-c", _PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    line = done.stdout.split("\n")[-2]
    seconds, on_disk, user, system, peak, status = map(float, line.split())
    assert status == 0
    return Timing(seconds, on_disk), user, system, peak


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
    """Prints medians over the runs, the best ratios, and the largest peak."""

    def speed(seconds: Iterable[float]) -> str:
        return f"{size / 1e9 / statistics.median(seconds):.2f}"

    def share(ratios: list[float]) -> str:
        best = f" (best {max(ratios):.2f})" if len(ratios) > 1 else ""
        return f"{statistics.median(ratios):.2f} of cp{best}"

    copies = [copy for run in runs for copy in run.copies]
    user, system = (statistics.median(t) for t in zip(*((r.user, r.system) for r in runs),
                                                      strict=True))  # fmt: skip
    print(
        f"{name}: {speed(run.time.command for run in runs)} GB/s, "
        f"cp {speed(copy.command for copy in copies)}: {share([run.ratio for run in runs])}; "
        f"with sync {speed(run.time.on_disk for run in runs)}, "
        f"cp {speed(copy.on_disk for copy in copies)}: {share([r.ratio_on_disk for r in runs])}; "
        f"CPU {user:.1f} s + {system:.1f} s of the kernel's; "
        f"peak {max(run.peak for run in runs) / 2**30:.2f} GiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
