"""doctor.py on machines that are not here: devices are stand-ins with a real one's attributes."""

from dataclasses import dataclass

import jax
import pytest

from fp4zoo import doctor
from fp4zoo.configs import load
from fp4zoo.numerics.backends import choice
from fp4zoo.training import machine

TINY = ["model=llama-tiny"]


@dataclass(frozen=True)
class Device:
    """What doctor.py and a mesh ask a device for."""

    device_kind: str
    compute_capability: str | None
    gib: int
    id: int = 0
    platform: str = "gpu"
    process_index: int = 0

    def memory_stats(self):
        return {"bytes_limit": self.gib << 30, "bytes_in_use": 0}


B200 = Device("NVIDIA B200", "10.0", 178)
RTX_5090 = Device("NVIDIA GeForce RTX 5090", "12.0", 32)
H100 = Device("NVIDIA H100 80GB HBM3", "9.0", 79)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    for name in machine.cluster_variables():
        monkeypatch.delenv(name)


@pytest.fixture
def diagnose(capsys):
    def run(device, *overrides):
        status = doctor.diagnose(load([*TINY, *overrides]), None if device is None else [device])
        return status, capsys.readouterr().out

    return run


def row_of(printed, precision):
    """The cells of a precision's first line: precision, backend, why, why not the others."""
    line = next(line for line in printed.splitlines() if line.startswith(f"│ {precision}"))
    return [cell.strip() for cell in line.strip("│").split("│")]


@pytest.mark.parametrize("installed", [True, False], ids=["with TE", "without TE"])
def test_a_b200_runs_fp4_in_hardware(installed, diagnose, monkeypatch):
    fault = None if installed else "Transformer Engine is not installed"
    monkeypatch.setattr(choice, "installation_fault", lambda: fault)
    status, printed = diagnose(B200)
    assert status == 0
    assert "1 x NVIDIA B200, compute capability 10.0" in printed
    assert "178.00 GiB per device" in printed
    if installed:
        assert row_of(printed, "nvfp4")[1] == "transformer_engine"
        assert "xla: runs too, but is not the first choice" in printed
    else:
        assert row_of(printed, "nvfp4")[1] == "xla"
        assert "transformer_engine: Transformer Engine is not installed" in printed
    assert row_of(printed, "bf16")[1] == "emulated"
    assert "python train.py would start" in printed


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (RTX_5090, "consumer Blackwell (compute capability 12.0)"),
        (H100, "compute capability 9.0"),
    ],
)
def test_other_gpus_emulate_and_say_why(device, reason, diagnose):
    status, printed = diagnose(device)
    assert status == 0
    precision, backend, why, _ = row_of(printed, "nvfp4")
    assert backend == "emulated" and reason in why
    assert "xla: " in printed and "transformer_engine: " in printed


def test_this_cpu(diagnose):
    status, printed = diagnose(None)
    assert status == 0
    assert row_of(printed, "nvfp4")[1] == "emulated"
    for name in ("JAX", "Flax", "Grain", "cuDNN", "Transformer Engine", "/dev/shm", "free memory"):
        assert name in printed
    assert jax.__version__ in printed


def test_a_backend_that_the_device_lacks_fails(diagnose):
    status, printed = diagnose(H100, "backend=xla")
    assert status == 1
    line = next(line for line in printed.splitlines() if line.startswith("fails"))
    assert "configuration" in line and "backend=xla: NVIDIA H100" in line
    assert "python train.py would fail" in printed


def test_a_model_that_is_too_large_fails(diagnose):
    status, printed = diagnose(H100, "model=llama-3-8b")
    assert status == 1
    assert "fails  memory: this run needs" in printed


def test_a_folder_that_cannot_be_written_to_fails(diagnose, tmp_path):
    (tmp_path / "file").write_text("")
    status, printed = diagnose(None, f"output_dir={tmp_path / 'file' / 'run'}")
    assert status == 1
    assert "fails  output: output_dir=" in printed


def test_missing_text_fails(diagnose, tmp_path):
    status, printed = diagnose(None, f"data.path={tmp_path / 'absent.txt'}")
    assert status == 1
    assert "absent.txt does not exist" in printed


def test_little_shared_memory_fails(diagnose, monkeypatch):
    monkeypatch.setattr(machine, "shared_memory", lambda: (64 * 2**20, 10 * 2**20))
    status, printed = diagnose(None)
    assert status == 1
    assert "fails  shared memory: /dev/shm has 10 MiB free of 64" in printed


def test_a_plugin_of_another_jax_fails(diagnose, monkeypatch):
    real = machine._installed
    monkeypatch.setattr(
        machine,
        "_installed",
        lambda names: "0.1.0" if "jax-cuda13-plugin" in names else real(names),
    )
    status, printed = diagnose(None)
    assert status == 1
    assert "the CUDA plugin 0.1.0 is not of JAX" in printed


def test_no_devices_fail(diagnose, monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda'\nmore")

    monkeypatch.setattr(jax, "devices", devices)
    status, printed = diagnose(None)
    assert status == 1
    assert "JAX has no devices: Unable to initialize backend 'cuda'" in printed


def test_variables_of_the_cluster_are_shown(diagnose, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "16")
    monkeypatch.setenv("SECRET", "hunter2")
    _, printed = diagnose(None)
    assert "SLURM_PROCID" in printed and "OMPI_COMM_WORLD_SIZE" in printed
    assert "hunter2" not in printed


def test_how_processes_would_join_is_said_or_refused(diagnose):
    together = ["cluster.num_processes=4", "cluster.process_id=1"]
    status, printed = diagnose(None, *together, "cluster.coordinator=node1:1234")
    assert status == 0
    assert "cluster: process 1 of 4, coordinator node1:1234" in printed
    status, printed = diagnose(None, *together)
    assert status == 1
    assert "fails  cluster: " in printed


def test_mistakes_are_one_line_and_status_2(capsys):
    assert doctor.main(["model=lama-tiny"]) == 2
    assert capsys.readouterr().err.startswith("error: model=lama-tiny")
