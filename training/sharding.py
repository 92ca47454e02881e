"""How parameters and batches lie on the devices.

A parameter's dotted path gives its logical axes (`PARAMETER_AXES`), and a logical axis is split
over mesh axes by the table in numerics/partitioning.py. One device is the mesh on which every axis
has size 1; nothing else changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ..errors import UserError
from ..numerics.partitioning import AXIS_NAMES, MESH_AXES
from .state import Parameters, is_stacked, path_name

# First match wins. Parameters under `blocks.` have one more axis, "layers", in front.
PARAMETER_AXES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"embedding\.embedding", ("vocabulary", "embed")),
    (r"output_head\.kernel", ("embed", "vocabulary")),
    (r".*\.qkv\.kernel", ("embed", "kv_heads", None, None)),
    (r".*\.qkv\.bias", ("kv_heads", None, None)),
    (r".*\.attention\.output\.kernel", ("heads", "embed")),
    (r".*\.mlp\.gate_up\.kernel", ("embed", None, "mlp")),
    (r".*\.mlp\.gate_up\.bias", (None, "mlp")),
    (r".*\.mlp\.down\.kernel", ("mlp", "embed")),
    (r".*\.moe\.router", ("embed", None)),
    (r".*\.moe\.gate_up", ("experts", "embed", None, "mlp")),
    (r".*\.moe\.down", ("experts", "mlp", "embed")),
    (r".*\.(scale|bias)", (None,)),
)

_CONFIG_KEYS = {
    "embed": "model.embed_dim",
    "vocabulary": "model.vocab_size",
    "kv_heads": "model.num_kv_heads",
    "heads": "model.num_heads * head_dim",
    "mlp": "model.mlp_dim",
    "experts": "model.moe.num_experts",
    "batch": "batch_size / gradient_accumulation",
    "sequence": "sequence_length",
}


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; the product is the number of devices. One may be -1: the rest.
    0 is chosen for the run: the fastest by estimate that fits into the memory (auto_mesh.py).

    Attributes:
      data: copies of the model, each with its part of the batch.
      fsdp: parts that parameters and optimizer state are cut into; the batch is split over them
      too.
      expert: parts that the experts are divided into; the batch is split over them too.
      context: parts that a sequence is cut into.
      tensor: parts that each matrix's heads, hidden and vocabulary dimensions are cut into.
    """

    data: int = 1
    fsdp: int = -1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        free = [name for name in AXIS_NAMES if getattr(self, name) == -1]
        if len(free) > 1:
            raise UserError(
                f"mesh.{free[0]}=-1 and mesh.{free[1]}=-1: only one axis can be the rest of the "
                "devices; give the other a size"
            )
        for name in AXIS_NAMES:
            if (size := getattr(self, name)) < -1:
                raise UserError(
                    f"mesh.{name}={size} must be a positive size, 0 to be chosen, or -1"
                )

    @property
    def is_open(self) -> bool:
        """Whether there is something to choose: see auto_mesh.py."""
        return any(getattr(self, name) == 0 for name in AXIS_NAMES)

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Size of each axis on this many devices; of those to be chosen 1, and of fsdp the rest.

        Raises:
          UserError: if the sizes and the number of devices do not fit.
        """
        sizes = {name: getattr(self, name) for name in AXIS_NAMES}
        rest = -1 if sizes["fsdp"] == 0 and -1 not in sizes.values() else 1
        sizes = {n: size or (rest if n == "fsdp" else 1) for n, size in sizes.items()}
        fixed = math.prod(size for size in sizes.values() if size != -1)
        described = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        for name, size in sizes.items():
            if size == -1:
                if num_devices % fixed:
                    raise UserError(
                        f"mesh ({described}) does not divide the {num_devices} device(s): choose "
                        f"sizes whose product divides {num_devices}"
                    )
                sizes[name] = num_devices // fixed
        if math.prod(sizes.values()) != num_devices:
            raise UserError(
                f"mesh ({described or 'every axis 1'}) needs {fixed} device(s) and there are "
                f"{num_devices}: make the product {num_devices}, or set one axis to -1"
            )
        return sizes


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over all devices, axes in the order of `AXIS_NAMES` (tensor innermost)."""
    devices = jax.devices() if devices is None else devices
    shape = tuple(config.sizes(len(devices))[name] for name in AXIS_NAMES)
    if len(devices) > 1 and devices[0].platform != "cpu":
        from jax.experimental import mesh_utils  # knows the interconnect

        arranged = mesh_utils.create_device_mesh(shape, devices)
    else:
        arranged = np.asarray(devices).reshape(shape)
    return Mesh(arranged, AXIS_NAMES, axis_types=(AxisType.Auto,) * len(AXIS_NAMES))


def logical_axes(name: str) -> tuple[str | None, ...]:
    """Logical axes of the parameter of this dotted name.

    Raises:
      ValueError: for a name that the table does not know.
    """
    for pattern, axes in PARAMETER_AXES:
        if re.fullmatch(pattern, name):
            return (("layers",) if is_stacked(name) else ()) + axes
    raise ValueError(
        f"no sharding rule for the parameter {name!r}; add its axes to PARAMETER_AXES in "
        "training/sharding.py"
    )


def make_spec(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh, name: str
) -> PartitionSpec:
    """The mesh axes of an array with these logical axes; `name` is for the message.

    Raises:
      UserError: if a dimension cannot be divided evenly.
    """
    assert len(axes) == len(shape), (name, axes, shape)
    for axis, size in zip(axes, shape, strict=True):
        names = MESH_AXES[axis]
        parts = math.prod(mesh.shape[name] for name in names)
        if size % parts:
            blame = " * ".join(f"mesh.{n}={mesh.shape[n]}" for n in names if mesh.shape[n] > 1)
            raise UserError(
                f"{blame} does not divide {_CONFIG_KEYS[str(axis)]}={size} ({name}): choose "
                f"sizes that divide {size}"
            )
    return PartitionSpec(*(_entry(MESH_AXES[axis]) for axis in axes))


def _entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return names if len(names) > 1 else names[0] if names else None


def parameter_shardings(parameters: Parameters, mesh: Mesh) -> Parameters:
    """A NamedSharding for every parameter (arrays or shapes)."""

    def sharding(path, leaf) -> NamedSharding:
        name = path_name(path)
        return NamedSharding(mesh, make_spec(logical_axes(name), leaf.shape, mesh, name))

    return jax.tree_util.tree_map_with_path(sharding, parameters)


def shard_like_parameters(tree: Any, parameters: Parameters, mesh: Mesh) -> Any:
    """Shardings of any state: subtrees like the parameters get theirs, the rest is replicated.

    `tree` and `parameters` hold arrays or shapes. Optimizer moments lie where their parameters lie.
    """
    shardings = parameter_shardings(parameters, mesh)
    structure = jax.tree.structure(parameters)
    replicated = NamedSharding(mesh, PartitionSpec())

    def mirrors(subtree: Any) -> bool:
        return jax.tree.structure(subtree) == structure

    return jax.tree.map(
        lambda subtree: shardings if mirrors(subtree) else replicated, tree, is_leaf=mirrors
    )


def batch_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Sharding of a batch [B, T] or, with a leading axis of microbatches, [A, B, T].

    Raises:
      UserError: if the rows or the sequence cannot be divided evenly.
    """
    axes = (None,) * (len(shape) - 2) + ("batch", "sequence")
    return NamedSharding(mesh, make_spec(axes, shape, mesh, "batch"))


def describe_mesh(mesh: Mesh) -> str:
    """Such as "data 2 x fsdp 4"; "no mesh" for one device."""
    parts = [f"{name} {size}" for name, size in mesh.shape.items() if size > 1]
    return " x ".join(parts) or "one device"
