"""How long a step should take: a roofline over what it computes, reads, writes and sends.

    seconds = operations / (peak x efficiency) + bytes / (bandwidth x 0.85), collectives beside it

This is a model, with one constant per GPU that is fitted (`Hardware.efficiency`); its assumptions
are `ASSUMPTIONS`, and what it leaves out, latency of small kernels and of collectives, stragglers,
the input pipeline, is in that constant.
"""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import Hardware

# Share of the memory bandwidth that kernels which only stream reach.
STREAMING = 0.85

ASSUMPTIONS = (
    "peaks are the data sheets', dense; matrix products and attention reach {efficiency:.0%} of "
    "them (fitted to published steps of {calibrated_on})",
    "attention runs at the BF16 peak, its masked half skipped",
    "other kernels reach {streaming:.0%} of {bandwidth:.2f} TB/s",
    "NVLink {nvlink:,.0f} GB/s per direction within {domain} GPUs, {network:,.0f} GB/s per GPU "
    "between them; collectives are rings",
    "fast end: collectives are hidden behind arithmetic; slow end: none is",
    "TFLOP/s count the model's own operations: 3 x forward, attention halved for the causal mask, "
    "no recomputation",
)


@dataclass(frozen=True)
class Collective:
    """The runs of one kind of collective over groups of one extent.

    Attributes:
      kind: XLA's name, such as all-gather.
      group: devices that take part.
      span: distance between the first and the last of them, in devices, plus one: which links it
        goes over.
      runs: per step.
      num_bytes: that one device receives in a step, by a ring over the group.
    """

    kind: str
    group: int
    span: int
    runs: int
    num_bytes: float


@dataclass(frozen=True)
class Work:
    """What one device does in one step.

    Attributes:
      gemm_flops: operations of matrix products, by precision (fp4, fp8, bf16, fp16, fp32).
      attention_flops: of the fused attention, masked half not counted.
      traffic_bytes: read and written by all other kernels.
      collectives: what is sent.
    """

    gemm_flops: dict[str, float]
    attention_flops: float
    traffic_bytes: float
    collectives: tuple[Collective, ...] = ()

    def bytes_by_collective(self) -> dict[str, float]:
        """Received bytes per device, by kind."""
        totals: dict[str, float] = {}
        for entry in self.collectives:
            totals[entry.kind] = totals.get(entry.kind, 0.0) + entry.num_bytes
        return totals


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by part. `seconds` hides the collectives, `slow_seconds` does not."""

    arithmetic: float
    streaming: float
    communication: float

    @property
    def seconds(self) -> float:
        return max(self.arithmetic + self.streaming, self.communication)

    @property
    def slow_seconds(self) -> float:
        return self.arithmetic + self.streaming + self.communication


def peak(hardware: Hardware, precision: str) -> float:
    """FLOP/s of products in that precision; one without units of its own runs as bf16."""
    return hardware.peaks.get(precision, hardware.peaks["bf16"])


def link_bandwidth(hardware: Hardware, collective: Collective) -> float:
    """Bytes per second at which a device of the group receives.

    A ring that leaves the NVLink domain goes through the ports of all its members in a domain.
    """
    if collective.span <= hardware.nvlink_domain:
        return hardware.nvlink
    members = max(1, collective.group * hardware.nvlink_domain // collective.span)
    return min(hardware.nvlink, hardware.network * members)


def step_time(work: Work, hardware: Hardware, memory_bandwidth: float) -> StepTime:
    """The roofline. memory_bandwidth: bytes per second, from the target's text."""
    arithmetic = sum(
        flops / peak(hardware, precision) for precision, flops in work.gemm_flops.items()
    )
    arithmetic += work.attention_flops / peak(hardware, "bf16")
    return StepTime(
        arithmetic=arithmetic / hardware.efficiency,
        streaming=work.traffic_bytes / (memory_bandwidth * STREAMING),
        communication=sum(
            entry.num_bytes / link_bandwidth(hardware, entry) for entry in work.collectives
        ),
    )


def assumptions(hardware: Hardware, memory_bandwidth: float) -> list[str]:
    """What the model takes for granted, as sentences."""
    values = {
        "efficiency": hardware.efficiency,
        "calibrated_on": hardware.calibrated_on.upper(),
        "streaming": STREAMING,
        "bandwidth": memory_bandwidth / 1e12,
        "nvlink": hardware.nvlink / 1e9,
        "domain": hardware.nvlink_domain,
        "network": hardware.network / 1e9,
    }
    return [text.format(**values) for text in ASSUMPTIONS]
