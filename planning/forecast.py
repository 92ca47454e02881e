"""A plan's result: what was compiled and what is modelled, as numbers, as tables, as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ..models import describe_backends
from ..training.flops import flops_per_token
from ..training.memory import GIB, USABLE
from ..training.sharding import describe_mesh
from .compilation import CompiledStep
from .hardware import HARDWARE, Hardware
from .roofline import StepTime, assumptions, peak, step_time
from .targets import Target
from .workload import expected_work

if TYPE_CHECKING:
    from ..configs.planning import PlanConfig


@dataclass(frozen=True)
class Forecast:
    """One configuration on one kind of GPU.

    Attributes:
      config: what was compiled.
      target: the GPU.
      step: the compiled step.
      time: the model's, with the traffic of well-fused kernels.
      compiled_time: the model's, with the traffic of the compiled program's own kernels.
      model_flops: per step, over all devices: what the model needs, without recomputation.
    """

    config: PlanConfig
    target: Target
    step: CompiledStep
    time: StepTime
    compiled_time: StepTime
    model_flops: float

    @property
    def hardware(self) -> Hardware:
        return HARDWARE[self.target.name]

    @property
    def fits(self) -> bool:
        """Whether the step leaves an allocator its margin, as train.py requires."""
        return self.step.memory.total <= USABLE * self.target.memory_bytes

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch_size * self.config.sequence_length

    def tokens_per_second(self, seconds: float) -> float:
        """Per device, of steps that take so long."""
        return self.tokens_per_step / seconds / self.config.devices

    def tflops(self, seconds: float) -> float:
        """The model's own 10^12 operations per second and device."""
        return self.model_flops / seconds / self.config.devices / 1e12

    @property
    def gpu_hours(self) -> float | None:
        """Of a run over `tokens` tokens."""
        if self.config.tokens is None:
            return None
        steps = self.config.tokens / self.tokens_per_step
        return steps * self.time.seconds * self.config.devices / 3600

    def assumptions(self) -> list[str]:
        """What the numbers take for granted; those that were not compiled are the time's."""
        counts = self.step.counts
        stated = [
            f"memory: XLA's account of the compiled step; it fits in {USABLE:.0%} of the device",
            "parameters, optimizer, GEMMs, collectives: read from the compiled program",
            "time: a roofline over the compiled GEMMs, attention and collectives; other kernels "
            "as well fused as Transformer Engine's (slow end: as XLA compiled them)",
            *assumptions(self.hardware, self.target.memory_bandwidth),
        ]
        if self.hardware.calibrated_on != self.target.name:
            stated.append(
                f"no published step of {self.target.name}: its efficiency is "
                f"{self.hardware.calibrated_on}'s"
            )
        if counts.attentions == 0:
            stated.append(
                "attention was compiled as matrix products, not as cuDNN's fused kernel: its "
                "scores [T, T] are in the memory and in the other GEMMs"
            )
        if counts.unknown_loops:
            stated.append(
                f"{counts.unknown_loops} loops run as often as the data says and count once: "
                "GEMMs, FLOPs and time are too low; set model.moe.capacity_factor"
            )
        return stated

    def as_json(self) -> dict[str, Any]:
        """The result under the names that plan.py promises; sizes in GiB, bytes per device."""
        memory, counts = self.step.memory, self.step.counts
        return {
            "fits": self.fits,
            "gib_per_device": memory.total / GIB,
            "device_gib": self.target.memory_bytes / GIB,
            "parameters_gib": memory.parameters / GIB,
            "optimizer_gib": memory.optimizer / GIB,
            "temporaries_gib": memory.temporaries / GIB,
            "fp4_gemms": counts.gemms.get("fp4", 0),
            "other_gemms": sum(n for name, n in counts.gemms.items() if name != "fp4"),
            "flops_per_step": self.model_flops,
            "collective_bytes": counts.work.bytes_by_collective(),
            "step_seconds": self.time.seconds,
            "tokens_per_second_per_device": self.tokens_per_second(self.time.seconds),
            "tflops_per_device": self.tflops(self.time.seconds),
            "assumptions": self.assumptions(),
        }

    def print(self, console: Console) -> None:
        """The result as tables."""
        config, target = self.config, self.target
        console.print(
            f"[bold]{config.devices} x {target.device_kind}[/bold], "
            f"{describe_mesh(self.step.program.mesh)}; {self.step.program.num_parameters:,} "
            f"parameters, {config.batch_size} x {config.sequence_length} tokens a step in "
            f"{config.gradient_accumulation} part(s), remat={config.remat}; compiled in "
            f"{self.step.seconds:.0f} s"
        )
        if self.step.program.mesh_reason is not None:
            console.print(self.step.program.mesh_reason)
        console.print(describe_backends(self.step.program.backends))
        console.print(self._memory_table())
        console.print(self._work_table())
        if self.step.counts.work.collectives:
            console.print(self._collective_table())
        console.print(self._time_table())
        console.print("\n".join(f"- {line}" for line in self.assumptions()), highlight=False)

    def _memory_table(self) -> Table:
        memory = self.step.memory
        estimate = self.step.program.estimate_memory()
        table = Table("memory per device", "GiB", "from", title_justify="left")

        def row(name: str, num_bytes: float, source: str, style: str | None = None) -> None:
            table.add_row(name, f"{num_bytes / GIB:,.2f}", source, style=style)

        row("parameters", memory.parameters, "compiled")
        row("optimizer", memory.optimizer, "compiled")
        row("temporaries", memory.temporaries, "compiled")
        row("  of them gradients", estimate.gradients, "estimate")
        row("  of them activations", estimate.activations, "estimate")
        row("batch, outputs", memory.inputs + memory.outputs, "compiled")
        verdict = "fits" if self.fits else "does not fit"
        row("total", memory.total, verdict, "bold green" if self.fits else "bold red")
        row("of the device", self.target.memory_bytes, "XLA's description of it")
        return table

    def _work_table(self) -> Table:
        counts = self.step.counts
        table = Table("work per device and step", "kernels", "TFLOP", "peak TFLOP/s", "from")
        for precision, runs in sorted(counts.gemms.items()):
            flops = counts.work.gemm_flops[precision] / 1e12
            limit = peak(self.hardware, precision) / 1e12
            table.add_row(
                f"GEMMs {precision}", f"{runs:,}", f"{flops:,.1f}", f"{limit:,.0f}", "compiled"
            )
        limit = peak(self.hardware, "bf16") / 1e12
        table.add_row(
            "attention",
            f"{counts.attentions:,}",
            f"{counts.work.attention_flops / 1e12:,.1f}",
            f"{limit:,.0f}",
            "compiled",
        )
        needed = self.model_flops / self.config.devices / 1e12
        table.add_row("the model's own", "", f"{needed:,.1f}", "", "formula")
        return table

    def _collective_table(self) -> Table:
        table = Table("collective", "devices", "runs", "GiB received per device", "from")
        for entry in self.step.counts.work.collectives:
            gib = entry.num_bytes / GIB
            table.add_row(
                entry.kind, f"{entry.group:,}", f"{entry.runs:,}", f"{gib:,.3f}", "compiled"
            )
        return table

    def _time_table(self) -> Table:
        fast, slow = self.time, self.compiled_time
        bf16 = peak(self.hardware, "bf16") / 1e12
        table = Table("per step (a model)", "fast end", "slow end")
        table.add_row("arithmetic, s", f"{fast.arithmetic:.3f}", f"{slow.arithmetic:.3f}")
        table.add_row("other kernels, s", f"{fast.streaming:.3f}", f"{slow.streaming:.3f}")
        table.add_row("collectives, s", f"{fast.communication:.3f}", f"{slow.communication:.3f}")
        ends = (fast.seconds, slow.slow_seconds)
        table.add_row("step, s", *(f"{end:.3f}" for end in ends), style="bold")
        table.add_row("tokens/s per GPU", *(f"{self.tokens_per_second(end):,.0f}" for end in ends))
        table.add_row("TFLOP/s per GPU", *(f"{self.tflops(end):,.0f}" for end in ends))
        table.add_row("MFU of the BF16 peak", *(f"{self.tflops(end) / bf16:.1%}" for end in ends))
        if self.gpu_hours is not None:
            hours = [self.gpu_hours * end / fast.seconds for end in ends]
            table.add_row(
                f"GPU-hours for {self.config.tokens:.3g} tokens", *(f"{h:,.0f}" for h in hours)
            )
            wall = [f"{h / self.config.devices / 24:,.1f}" for h in hours]
            table.add_row("days", *wall)
            if self.config.price is not None:
                table.add_row("cost", *(f"{h * self.config.price:,.0f}" for h in hours))
        return table


def make_forecast(config: PlanConfig, target: Target, step: CompiledStep) -> Forecast:
    """Applies the time model to a compiled step."""
    hardware = HARDWARE[target.name]
    sizes = dict(step.program.mesh.shape)
    compiled = step.counts.work
    modelled = dataclasses.replace(
        compiled, traffic_bytes=expected_work(config, sizes).traffic_bytes
    )
    tokens = config.batch_size * config.sequence_length
    return Forecast(
        config=config,
        target=target,
        step=step,
        time=step_time(modelled, hardware, target.memory_bandwidth),
        compiled_time=step_time(compiled, hardware, target.memory_bandwidth),
        model_flops=tokens * flops_per_token(config.model, config.sequence_length),
    )
