"""Which mesh, accumulation and remat policy to run with: many estimated, the best few compiled."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from ..errors import UserError
from ..models import REMAT_POLICIES, packs_residuals
from ..models import create as create_model
from ..numerics.platform import DeviceKind, compiling_for
from ..training.auto_mesh import estimate
from ..training.memory import GIB, USABLE
from ..training.sharding import MeshConfig
from ..training.state import Parameters, abstract_model
from .compilation import compile_step
from .forecast import Forecast, make_forecast
from .hardware import HARDWARE
from .roofline import step_time
from .targets import Target
from .workload import expected_work

if TYPE_CHECKING:
    from ..configs.planning import PlanConfig


@dataclass(frozen=True)
class Candidate:
    """A configuration with its estimate: bytes per device and seconds per step."""

    config: PlanConfig
    estimated_bytes: float
    estimated_seconds: float

    def describe(self) -> str:
        """Such as "fsdp 8 x tensor 4, 2 parts, remat=full"."""
        sizes = {
            field.name: getattr(self.config.mesh, field.name)
            for field in dataclasses.fields(self.config.mesh)
        }
        mesh = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        parts = self.config.gradient_accumulation
        return f"{mesh or 'one device'}, {parts} part(s), remat={self.config.remat}"


def search(config: PlanConfig, target: Target, console: Console) -> Forecast:
    """The fastest that fits, of the compiled ones; prints how all of these came out.

    Keeps model, batch_size and sequence_length.

    Raises:
      UserError: if by estimate nothing fits.
    """
    ranked = rank(config, target)
    usable = USABLE * target.memory_bytes
    fitting = [candidate for candidate in ranked if candidate.estimated_bytes <= usable]
    if not fitting:
        least = min(ranked, key=lambda candidate: candidate.estimated_bytes, default=None)
        detail = (
            "no mesh divides the model and the batch"
            if least is None
            else f"the smallest, {least.describe()}, needs {least.estimated_bytes / GIB:,.0f} GiB "
            f"per device of {target.memory_bytes / GIB:,.0f}"
        )
        raise UserError(
            f"search: nothing fits into {config.devices} x {target.name}: {detail}; raise devices="
        )
    chosen = fitting[: config.search_compiles]
    forecasts: list[tuple[Candidate, Forecast | UserError]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=len(chosen))
        for candidate in chosen:
            progress.update(task, description=candidate.describe())
            forecasts.append((candidate, _try(candidate.config, target)))
            progress.advance(task)
    console.print(f"{len(ranked)} candidates, {len(fitting)} fit by estimate:")
    console.print(_table(forecasts, fitting[len(chosen) :][:5]))
    done = [forecast for _, forecast in forecasts if isinstance(forecast, Forecast)]
    if not done:
        failure = forecasts[0][1]
        assert isinstance(failure, UserError)
        raise failure
    return min(done, key=lambda forecast: (not forecast.fits, forecast.time.seconds))


def rank(config: PlanConfig, target: Target) -> list[Candidate]:
    """All candidates, by estimated seconds; those that are equally fast by memory."""
    hardware = HARDWARE[target.name]
    parameters, packed = _model(config, target)
    candidates = []
    for mesh, parts, remat in itertools.product(
        _meshes(config, target), _divisors(config.batch_size), REMAT_POLICIES
    ):
        changed = dataclasses.replace(config, mesh=mesh, gradient_accumulation=parts, remat=remat)
        sizes = mesh.sizes(config.devices)
        try:
            needed = estimate(changed, parameters, sizes, on_cpu=False, packed=packed).total
        except UserError:  # the mesh does not divide model or batch
            continue
        seconds = step_time(
            expected_work(changed, sizes), hardware, target.memory_bandwidth
        ).slow_seconds
        candidates.append(Candidate(changed, needed, seconds))
    return sorted(candidates, key=lambda c: (round(c.estimated_seconds, 4), c.estimated_bytes))


def _meshes(config: PlanConfig, target: Target) -> Iterator[MeshConfig]:
    """Meshes over all devices: tensor within one NVLink domain, experts where there are some."""
    model, domain = config.model, HARDWARE[target.name].nvlink_domain
    experts = model.moe.num_experts if model.moe is not None else 1
    for tensor in _divisors(config.devices):
        if tensor > min(domain, 16) or model.num_kv_heads % tensor or model.mlp_dim % tensor:
            continue
        for expert in _divisors(config.devices // tensor):
            if experts % expert or (expert > 1 and tensor > 1 and expert * tensor > domain):
                continue
            rest = config.devices // (tensor * expert)
            for fsdp in _divisors(rest):
                if model.embed_dim % fsdp == 0:
                    yield MeshConfig(data=rest // fsdp, fsdp=fsdp, expert=expert, tensor=tensor)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _model(config: PlanConfig, target: Target) -> tuple[Parameters, bool]:
    """The model's parameters as shapes, which depend on no mesh; whether its residuals are FP4."""
    precision = config.precision

    def create() -> nnx.Module:
        return create_model(
            config.model,
            recipe=precision.recipe,
            rules=precision.rules,
            backend=config.backend,
            rngs=nnx.Rngs(0),
        )

    capability = ".".join(map(str, target.compute_capability))
    with compiling_for(DeviceKind("gpu", target.device_kind, capability)):
        model: Any
        model, _, parameters = abstract_model(create)
    return parameters, packs_residuals(model.backends)


def _try(config: PlanConfig, target: Target) -> Forecast | UserError:
    try:
        return make_forecast(config, target, compile_step(config, target, config.devices))
    except UserError as error:  # what this candidate's mesh does not divide
        return error


def _table(forecasts: list[tuple[Candidate, Forecast | UserError]], rest: list[Candidate]) -> Table:
    """The compiled ones as they came out, then the next by estimate."""
    first = Column("candidate", overflow="fold")  # names are to be read whole
    table = Table(first, "GiB per device", "step, s", "tokens/s per GPU", "from")
    outcomes = sorted(
        (entry for entry in forecasts if isinstance(entry[1], Forecast)),
        key=lambda entry: (not entry[1].fits, entry[1].time.seconds),  # pyright: ignore
    )
    for candidate, forecast in outcomes:
        assert isinstance(forecast, Forecast)
        gib = forecast.step.memory.total / GIB
        table.add_row(
            candidate.describe(),
            f"{gib:,.1f}" + ("" if forecast.fits else " (does not fit)"),
            f"{forecast.time.seconds:.3f}",
            f"{forecast.tokens_per_second(forecast.time.seconds):,.0f}",
            "compiled",
        )
    for candidate, error in forecasts:
        if isinstance(error, UserError):
            table.add_row(candidate.describe(), "", "", "", str(error))
    for candidate in rest:
        config = candidate.config
        tokens = config.batch_size * config.sequence_length / config.devices
        table.add_row(
            candidate.describe(),
            f"{candidate.estimated_bytes / GIB:,.1f}",
            f"{candidate.estimated_seconds:.3f}",
            f"{tokens / candidate.estimated_seconds:,.0f}",
            "estimate",
        )
    return table
