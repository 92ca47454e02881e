"""Which mesh axes every dimension of every array is split over: the one table of it.

A dimension has a logical name ("batch", "heads"), and `MESH_AXES` says which axes of the mesh it is
split over. Parameters get their names in training/sharding.py, activations where they are computed,
by `constrain`. Without a mesh the names mean nothing, and nothing is moved.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

# Outermost first: neighbours along the last one talk most.
AXIS_NAMES = ("data", "fsdp", "expert", "context", "tensor")

MESH_AXES: dict[str | None, tuple[str, ...]] = {
    None: (),
    # Activations.
    "batch": ("data", "fsdp", "expert"),
    "sequence": ("context",),
    "tokens": ("data", "fsdp", "expert", "context"),  # batch and sequence as one
    "expert_rows": ("context", "data", "fsdp"),  # of all devices, at their experts
    "residual_sequence": ("context", "tensor"),  # of the residual stream, between the blocks
    "lookup_batch": ("data", "expert"),  # while fsdp splits the vectors that are looked up
    "features": ("tensor",),  # of rows on their way to an expert
    # Parameters, and the activations that they make.
    "layers": (),
    "embed": ("fsdp",),
    "vocabulary": ("tensor",),
    "kv_heads": ("tensor",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
}

# Dimensions of parameters that are split where they are stored alone: a product needs them whole.
STORAGE_AXES = frozenset({"embed"})


def mesh_axis_sizes() -> dict[str, int]:
    """Sizes above 1 of the axes that `jax.set_mesh` has set and that XLA may split arrays over.

    Empty without a mesh. Axes that an enclosing `jax.shard_map` has already split are not among
    them, nor those of a mesh of somebody else's with other names.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if name in AXIS_NAMES and kind == AxisType.Auto and mesh.shape[name] > 1
    }


def dividing_axes(logical_axis: str | None, size: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes of a dimension, without the last ones as long as they do not divide it."""
    names = tuple(name for name in MESH_AXES[logical_axis] if sizes.get(name, 1) > 1)
    while size % math.prod(sizes[name] for name in names):
        names = names[:-1]
    return names


def partition_spec(
    logical_axes: tuple[str | None, ...], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> PartitionSpec:
    """How an array lies on a mesh with axes of these sizes; see `dividing_axes`."""
    return _spec(_axes(logical_axes, shape, sizes))


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Tells XLA where `x` lies: one name in `MESH_AXES`, or None for "not split", per dimension.

    The identity without a mesh (`jax.set_mesh`) or on one without these axes. A mesh axis that does
    not divide its dimension is left out: values never depend on where they lie. The gradient of `x`
    lies where `x` does.
    """
    sizes = mesh_axis_sizes()
    if not sizes:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(logical_axes, x.shape, sizes))


def gather_stored(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """A parameter with these axes, brought together along those that it is only stored by.

    Its gradient goes back to where the parameter lies: partial sums of devices are scattered there.
    """

    def whole(x: jax.Array) -> jax.Array:
        return constrain(x, *(None if axis in STORAGE_AXES else axis for axis in logical_axes))

    gather = jax.custom_vjp(whole)
    gather.defvjp(lambda x: (whole(x), None), lambda _, g: (constrain(g, *logical_axes),))
    return gather(x)


def add_parts(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """The sum over the first two axes of `x`, which the mesh splits as batch and sequence.

    logical_axes: of the others, a parameter's. The sum lies where the parameter does: what devices
    hold is scattered along the axes that it is stored by, and added up along the rest.
    """
    sizes = mesh_axis_sizes()
    if not sizes:
        return jnp.sum(x, (0, 1))
    whole = tuple(None if axis in STORAGE_AXES else axis for axis in logical_axes)
    before = _axes(("batch", "sequence", *whole), x.shape, sizes)
    summed, kept = before[0] + before[1], list(before[2:])
    scattered = [
        (dimension, name)
        for dimension, names in enumerate(_axes(logical_axes, x.shape[2:], sizes))
        for name in names
        if name in summed
    ]
    added = tuple(name for name in summed if name not in {n for _, n in scattered})

    def local(x: jax.Array) -> jax.Array:
        total = jnp.sum(x, (0, 1))
        for dimension, name in scattered:
            total = jax.lax.psum_scatter(total, name, scatter_dimension=dimension, tiled=True)
        return jax.lax.psum(total, added) if added else total

    for dimension, name in scattered:
        kept[dimension] += (name,)
    mapped = jax.shard_map(local, in_specs=_spec(before), out_specs=_spec(kept), check_vma=False)
    return mapped(x)


def _axes(
    logical_axes: tuple[str | None, ...], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], ...]:
    return tuple(
        dividing_axes(axis, size, sizes) for axis, size in zip(logical_axes, shape, strict=True)
    )


def _spec(axes: Iterable[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(names or None for names in axes))


def gather(x: jax.Array, mesh_axis: str, axis: int, dtype: DTypeLike | None = None) -> jax.Array:
    """Inside `jax.shard_map`: the parts of all devices along `mesh_axis`, in `dtype`.

    The gradients of the devices are added in float32 and rounded once to x's dtype; those of an x
    in 16 bits are rounded before only where `dtype` has 16 bits too.
    """
    return _gather(x, mesh_axis, axis, jnp.dtype(x.dtype if dtype is None else dtype), x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(x: jax.Array, mesh_axis: str, axis: int, dtype: jnp.dtype, own: jnp.dtype) -> jax.Array:
    del own
    return jax.lax.all_gather(x, mesh_axis, axis=axis, tiled=True).astype(dtype)


def _gather_forward(x, mesh_axis, axis, dtype, own):
    return _gather(x, mesh_axis, axis, dtype, own), None


def _gather_backward(mesh_axis, axis, dtype, own, _, g):
    del dtype
    wide = g.astype(jnp.float32)
    total = jax.lax.psum_scatter(wide, mesh_axis, scatter_dimension=axis, tiled=True)
    return (total.astype(own),)


_gather.defvjp(_gather_forward, _gather_backward)
