"""mesh=auto: which axes the devices are arranged along, for a model, a batch and a memory.

Every mesh that divides model and batch is estimated, in bytes per device and in seconds per step;
of those that fit, the fastest is taken. No array is made, and equal arguments give equal meshes.

The seconds serve to compare meshes, no more: all of them compute the same, and differ in what the
devices send one another. Gradients and gathered parameters travel while others compute; what lies
between two products of a block does not. With P parameters held by a device (on its tensor and
expert part), t tokens, D the width, each device sends per step (all-gather and reduce-scatter over
n devices (n - 1) / n of this, an all-reduce twice that):

    data      P / fsdp gradients, all-reduced                             4 bytes, overlapped
    fsdp      P parameters gathered for each pass, gradients scattered    2 + 2 + 4, overlapped
    expert    t D for each expert of a token, there and back, both passes 2 bytes
              and the gradients of all but the experts, as for data
    context   keys and values, gathered and their gradients scattered     2 bytes
              and all gradients, as for data
    tensor    t D gathered and scattered around attention and feed-forward, both passes, 2 bytes
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from ..errors import UserError
from ..numerics import get_recipe
from ..numerics.partitioning import AXIS_NAMES
from . import memory
from .chunked_loss import choose_chunks
from .flops import flops_per_token
from .memory import GIB, USABLE
from .sharding import MeshConfig, logical_axes, make_spec
from .state import Parameters, path_name

if TYPE_CHECKING:
    from ..configs.schema import TrainConfig

# Of a recent GPU, rounded: bytes per second to its neighbours (NVLink; one 400 Gb/s adapter per
# device), seconds until a collective has begun, and FLOP per second.
_WITHIN_HOST, _BETWEEN_HOSTS = (450e9, 10e-6), (50e9, 30e-6)
_FLOPS = 1e15
_LARGEST_TENSOR = 8

Sizes = dict[str, int]


@dataclass(frozen=True)
class MeshChoice:
    """A mesh, and why it.

    Attributes:
      config: with a size for every axis.
      reason: one line.
    """

    config: MeshConfig
    reason: str


def choose_mesh(
    config: TrainConfig,
    parameters: Parameters,
    *,
    num_devices: int,
    devices_per_host: int,
    available: int,
    on_cpu: bool,
    packed: bool = False,
) -> MeshChoice:
    """Chooses the axes of `config.mesh` that are 0; the others stay as they are.

    parameters: of the model, as shapes. available: bytes of memory per device.

    Raises:
      UserError: if no mesh of so many devices divides model and batch.
    """
    found: list[tuple[Sizes, int]] = []
    refused: UserError | None = None
    for sizes in _candidates(config, num_devices):
        try:
            needed = estimate(config, parameters, sizes, on_cpu=on_cpu, packed=packed)
            found.append((sizes, needed.total))
        except UserError as error:
            refused = refused or error
    if not found:
        config.mesh.sizes(num_devices)  # raises if the sizes that are given cannot be
        raise UserError(
            f"mesh=auto finds no mesh of {num_devices} devices that divides this model and batch "
            f"(the first one: {refused}): use a multiple of {num_devices} for batch_size / "
            "gradient_accumulation, or fewer devices"
        )

    def order(each: tuple[Sizes, int]) -> tuple:
        """The fastest first; of meshes that are about equally fast, the smallest."""
        seconds = step_seconds(config, parameters, each[0], devices_per_host)
        return (float(f"{seconds:.2g}"), each[1], _tuple(each[0]))

    fits = [(sizes, size) for sizes, size in found if size <= available * USABLE]
    if fits:
        sizes, needed = min(fits, key=order)
        why = f"is the fastest by estimate of the {len(fits)} (of {len(found)}) meshes that fit"
    else:
        sizes, needed = min(found, key=lambda each: (each[1], _tuple(each[0])))
        why = f"needs the least of {len(found)} meshes, of which none fits"
    chosen = MeshConfig(**sizes)
    return MeshChoice(
        chosen,
        f"mesh=auto: {_described(sizes)} needs about {needed / GIB:,.2f} of {available / GIB:,.2f} "
        f"GiB per device and {why}",
    )


def estimate(
    config: TrainConfig,
    parameters: Parameters,
    sizes: Sizes,
    *,
    on_cpu: bool,
    packed: bool = False,
) -> memory.MemoryEstimate:
    """Bytes per device on a mesh of these sizes.

    Raises:
      UserError: if it does not divide model or batch.
    """
    mesh = AbstractMesh(tuple(sizes[name] for name in AXIS_NAMES), AXIS_NAMES)
    count = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
        name = path_name(path)
        spec = make_spec(logical_axes(name), leaf.shape, mesh, name)
        count += leaf.size // math.prod(
            sizes[axis] for entry in spec if entry for axis in _names(entry)
        )
    rows = config.batch_size // config.gradient_accumulation
    shape = (rows, config.sequence_length)
    make_spec(("batch", "sequence"), shape, mesh, "batch")
    tokens = rows * config.sequence_length // _split(sizes, "data", "fsdp", "expert", "context")
    chunks = config.loss_chunks
    if chunks is None:
        vocab_size = config.model.vocab_size // sizes["tensor"]
        chunks = choose_chunks(tokens, vocab_size, config.model.embed_dim)
    moment = jnp.dtype(config.optimizer.first_moment_dtype).itemsize
    copies = 2 if config.gradient_accumulation > 1 else 1
    return memory.MemoryEstimate(
        parameters=4 * count,
        optimizer=(4 + moment) * count,
        gradients=4 * copies * count,
        activations=memory.activation_bytes(
            config.model,
            get_recipe(config.precision.recipe),
            tokens=tokens,
            sequence_length=config.sequence_length,
            activation_size=jnp.dtype(config.precision.activation_dtype).itemsize,
            remat=config.remat,
            on_cpu=on_cpu,
            packed=packed,
            loss_chunks=chunks,
            tensor=sizes["tensor"],
            expert=sizes["expert"],
            fsdp=sizes["fsdp"],
        ),
    )


def step_seconds(
    config: TrainConfig, parameters: Parameters, sizes: Sizes, devices_per_host: int
) -> float:
    """About how long a step takes, for comparing meshes; see the top of this file."""
    model, size, parts = config.model, sizes, config.gradient_accumulation
    layers = model.num_layers * parts
    experts = shared = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
        if "experts" in logical_axes(path_name(path)):
            experts += leaf.size
        else:
            shared += leaf.size
    shared_here = shared / size["tensor"]
    held = shared_here + experts / (size["tensor"] * size["expert"])
    tokens = config.batch_size * config.sequence_length  # of a step
    compute = tokens * flops_per_token(model, config.sequence_length) / math.prod(size.values())
    tokens /= _split(size, "data", "fsdp", "expert", "context")  # of a device
    stream = model.num_layers * tokens * model.embed_dim * 2
    keys = model.num_layers * tokens * 2 * model.num_kv_heads * model.resolved_head_dim * 2
    chosen = model.moe.experts_per_token if model.moe is not None else 0
    gradients = 2 * 4 * parts / size["fsdp"]  # bytes per parameter held
    # Bytes sent while others compute, bytes that are waited for, collectives that are waited for.
    sent = {
        "data": (gradients * held, 0, 0),
        "fsdp": (8 * parts * held, 0, 0),
        "expert": (gradients * shared_here, 4 * chosen * stream / size["tensor"], 4 * layers),
        "context": (gradients * held, 2 * keys * size["context"] / size["tensor"], 4 * layers),
        "tensor": (0, 8 * stream, 8 * layers),
    }
    overlapped = exposed = 0.0
    span = 1
    for name in reversed(AXIS_NAMES):  # innermost first: `span` devices lie side by side
        span *= size[name]
        if size[name] > 1:
            speed, latency = _WITHIN_HOST if span <= devices_per_host else _BETWEEN_HOSTS
            share = (size[name] - 1) / size[name] / speed
            behind, before, collectives = sent[name]
            overlapped += behind * share
            exposed += before * share + collectives * latency
    return max(compute / _FLOPS, overlapped) + exposed


def _tuple(sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes[name] for name in ("tensor", "context", "expert", "fsdp", "data"))


def _candidates(config: TrainConfig, num_devices: int) -> Iterator[Sizes]:
    """All sizes whose product is the number of devices, with those that are given."""
    given = {name: getattr(config.mesh, name) for name in AXIS_NAMES}
    if -1 in given.values():  # the rest of the devices: nothing is left for the others
        yield MeshConfig(**{name: size or 1 for name, size in given.items()}).sizes(num_devices)
        return
    experts = config.model.moe.num_experts if config.model.moe is not None else 1
    largest = {"expert": experts, "context": config.sequence_length, "tensor": _LARGEST_TENSOR}
    ranges = []
    for name in AXIS_NAMES[1:]:
        upper = min(largest.get(name, num_devices), num_devices)
        ranges.append([given[name]] if given[name] else _divisors(num_devices, upper))
    for inner in itertools.product(*ranges):
        rest, remainder = divmod(num_devices, math.prod(inner))
        if not remainder and given["data"] in (0, rest):
            yield dict(zip(AXIS_NAMES, (rest, *inner), strict=True))


def _divisors(number: int, largest: int) -> list[int]:
    return [divisor for divisor in range(1, largest + 1) if number % divisor == 0]


def _split(sizes: Sizes, *names: str) -> int:
    return math.prod(sizes[name] for name in names)


def _names(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


def _described(sizes: Sizes) -> str:
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return " x ".join(parts) or "one device"
