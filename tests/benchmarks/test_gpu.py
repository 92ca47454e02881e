"""benchmarks/gpu.py where there is no GPU: it must work the day there is one."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@dataclass(frozen=True)
class Device:
    device_kind: str
    compute_capability: str
    platform: str = "gpu"


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("benchmark_gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_everything_runs_in_toy_size_on_a_cpu(gpu, capsys):
    gpu.main(["--rounds", "1", "--layers", "1", "--length", "16"])
    printed = capsys.readouterr().out
    assert printed.startswith("no GPU here")
    rows = {line.split("  ")[0]: line for line in printed.splitlines()}
    assert float(rows["bf16"].split()[1]) > 0
    assert float(rows["nvfp4 emulated"].split()[2]) > 0
    assert float(rows["nvfp4 emulated"].split()[-1]) > 0


@pytest.mark.parametrize(
    ("device", "hardware", "precisions"),
    [
        (Device("NVIDIA A100-SXM4-80GB", "8.0"), False, ["bf16"]),
        (Device("NVIDIA H100 80GB HBM3", "9.0"), False, ["bf16", "fp8"]),
        (Device("NVIDIA GeForce RTX 5090", "12.0"), False, ["bf16", "fp8"]),
        (Device("NVIDIA B200", "10.0"), True, ["bf16", "fp8", "fp4"]),
    ],
)
def test_what_runs_on_which_gpu(gpu, device, hardware, precisions, capsys):
    assert ("nvfp4 xla" in gpu.variants(device)) is hardware
    assert list(gpu.products(device)) == precisions
    printed = capsys.readouterr().out
    assert ("no hardware FP4 through xla" in printed) is not hardware
