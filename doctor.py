"""What this machine can run, and why: `python doctor.py`, with train.py's arguments if any.

Looks at devices, software, memory and cluster, says on which backend each precision would run and
why on no other, and checks what `python train.py` with the same arguments needs before it starts.

Exit status: 0; 1 when train.py would fail; 2 for a mistake in the command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fp4zoo.configs import cli, load
from fp4zoo.configs.schema import TrainConfig
from fp4zoo.errors import UserError
from fp4zoo.numerics import choose_backend, get_recipe
from fp4zoo.numerics.backends.choice import AUTO, NAMES
from fp4zoo.numerics.platform import DeviceKind
from fp4zoo.training import machine, memory
from fp4zoo.training.cluster import find_launch
from fp4zoo.training.program import Program
from fp4zoo.training.sharding import describe_mesh

PRECISIONS = ("nvfp4", "bf16", "fp16", "fp32")
_SMALL_SHARED_MEMORY = 64 * 2**20  # Docker's default: data workers and NCCL outgrow it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (None: sys.argv's) and returns the exit status."""
    return cli.run(diagnose, argv, "train")


@dataclass(frozen=True)
class Finding:
    """One check of train.py's start. fault: why it would fail; None if it would not."""

    name: str
    detail: str
    fault: str | None = None


def diagnose(config: TrainConfig, devices: Sequence[Any] | None = None) -> int:
    """Prints everything and returns the exit status. devices: by default JAX's."""
    console = Console()
    if devices is None:
        try:
            devices = jax.devices()
        except RuntimeError as error:  # JAX_PLATFORMS names one that does not start
            first_line = str(error).splitlines()[0]
            console.print(f"[bold red]JAX has no devices:[/] {escape(first_line)}")
            return 1
    console.print(_machine_table(devices))
    console.print(_backend_table(devices[0]))
    if variables := machine.cluster_variables():
        table = Table("cluster variable", "value")
        for name, value in variables.items():
            table.add_row(name, escape(value))
        console.print(table)
    findings = check(config, devices)
    for finding in findings:
        if finding.fault is None:
            console.print(f"[green]ok[/]     {finding.name}: {escape(finding.detail)}")
        else:
            console.print(f"[bold red]fails[/]  {finding.name}: {escape(finding.fault)}")
    failed = any(finding.fault for finding in findings)
    console.print(f"python train.py {'would fail' if failed else 'would start'}", style="bold")
    return 1 if failed else 0


def check(config: TrainConfig, devices: Sequence[Any]) -> list[Finding]:
    """What train.py does before it allocates anything, in its order."""
    findings = [Finding("software", f"JAX {jax.__version__}", machine.plugin_fault())]
    findings.append(_cluster(config))
    available = memory.available_bytes(devices)
    try:
        program = Program(config, devices, available=available)
    except UserError as error:
        return [*findings, Finding("configuration", "", str(error))]
    findings.append(
        Finding(
            "configuration", f"{program.num_parameters:,} parameters, {describe_mesh(program.mesh)}"
        )
    )
    estimate = program.estimate_memory()
    detail = (
        f"{estimate.total / memory.GIB:,.2f} GiB per device by estimate, "
        f"{available / memory.GIB:,.2f} available"
    )
    try:
        memory.check_fits(estimate, available, program.mesh, config.remat)
        findings.append(Finding("memory", detail))
    except UserError as error:
        findings.append(Finding("memory", "", str(error)))
    findings.append(_shared_memory())
    findings.append(_output(config))
    findings += _inputs(config)
    return findings


def _cluster(config: TrainConfig) -> Finding:
    """How train.py would join other processes; doctor.py itself stays alone."""
    try:
        launch = find_launch(config.cluster, os.environ)
    except UserError as error:
        return Finding("cluster", "", str(error))
    if launch is None:
        return Finding("cluster", "one process")
    found = "as JAX finds out"
    return Finding(
        "cluster",
        f"process {found if launch.process_id is None else launch.process_id} of "
        f"{found if launch.num_processes is None else launch.num_processes}, coordinator "
        f"{launch.coordinator or found}",
    )


def _shared_memory() -> Finding:
    sizes = machine.shared_memory()
    if sizes is None:
        return Finding("shared memory", "this system has no /dev/shm")
    total, free = sizes
    fault = None
    if free < _SMALL_SHARED_MEMORY:
        fault = (
            f"/dev/shm has {free / 2**20:,.0f} MiB free of {total / 2**20:,.0f}: data workers and "
            "NCCL need more; start the container with --shm-size=8g, or --ipc=host"
        )
    return Finding("shared memory", f"{free / memory.GIB:,.2f} GiB free in /dev/shm", fault)


def _output(config: TrainConfig) -> Finding:
    """The run's folder, or the nearest one above it that there is."""
    wanted = Path(config.output_dir or "runs").absolute()
    folder = next(path for path in (wanted, *wanted.parents) if path.exists())
    writable = folder.is_dir() and os.access(folder, os.W_OK)
    fault = None if writable else f"output_dir={wanted}: {folder} is not a folder to write to"
    return Finding("output", str(wanted), fault)


def _inputs(config: TrainConfig) -> list[Finding]:
    findings = []
    for key, path in (("data.path", config.data.path), ("checkpoint", config.checkpoint)):
        if path is not None and not any(mark in path for mark in "*?["):
            there = Path(path).exists()
            findings.append(Finding(key, path, None if there else f"{key}={path} does not exist"))
    return findings


def _machine_table(devices: Sequence[Any]) -> Table:
    table = Table(show_header=False)
    kind = DeviceKind.of(devices[0])
    name = f"{len(devices)} x {kind.name}"
    if kind.compute_capability is not None:
        name += f", compute capability {kind.compute_capability}"
    elif kind.platform == "cpu" and machine.versions()["CUDA plugin"] != machine.MISSING:
        name += "; the CUDA plugin is installed, and JAX uses no GPU"
    table.add_row("devices", name)
    free = memory.available_bytes(devices)
    table.add_row("free memory", f"{free / memory.GIB:,.2f} GiB per device")
    host = memory.host_available_bytes()
    table.add_row("free host memory", f"{host / memory.GIB:,.2f} GiB, {os.cpu_count()} CPUs")
    if (sizes := machine.shared_memory()) is not None:
        total, free = (size / memory.GIB for size in sizes)
        table.add_row("/dev/shm", f"{free:,.2f} of {total:,.2f} GiB free")
    for name, version in machine.versions().items():
        table.add_row(name, version)
    return table


def _backend_table(device: Any) -> Table:
    """For every precision what backend=auto takes, and what keeps it from the others."""
    table = Table("precision", "backend", "why", "why not the others")
    for precision in PRECISIONS:
        recipe = get_recipe(load([f"precision={precision}"]).precision.recipe)
        choice = choose_backend(AUTO, recipe, device)
        refusals = []
        for name in NAMES:
            if name == choice.name or not recipe.uses_fp4:
                continue
            try:
                choose_backend(name, recipe, device)
                refusals.append(f"{name}: runs too, but is not the first choice")
            except UserError as error:
                refusals.append(f"{name}: {str(error).removeprefix(f'backend={name}: ')}")
        table.add_row(precision, choice.name, escape(choice.reason), escape("\n".join(refusals)))
    return table


if __name__ == "__main__":
    sys.exit(main())
