"""Where the packed operands of a layer lie on a mesh: it is codes and scales that devices send.

A GEMM has one axis of tokens and one of features, of which an array may have several. Merging two
axes of which a mesh splits the inner one would make XLA move everything; so here parts that lie on
one device stay together. A product does not depend on the order, and blocks of 16 stay whole.

Products are local to a device, in `jax.shard_map`, and what they leave to be added is added by name
(`Placement.product`): partial weight gradients are scattered to where the parameter is stored, and
partial activations to the parts of the sequence that devices keep between the blocks.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..formats import BLOCK
from ..partitioning import STORAGE_AXES, dividing_axes, mesh_axis_sizes
from .operands import LogicalAxes
from .packed import ALIGNMENT, Packed

MeshAxes = tuple[str, ...]  # that one dimension is split over


class Order(NamedTuple):
    """In which order axes are merged."""

    # The mesh's parts of the rows and of their sequence: [B, T] as [b, t, B/b, T/t].
    token_parts: tuple[int, int] | None = None
    block_major: bool = False  # features [*A, F] as [F/16, *A, 16], where the mesh splits F

    def merge(
        self, x: jax.Array, num_features: int, row_blocks: bool, feature_blocks: bool
    ) -> jax.Array:
        """[E, *rows, *features] -> [E, R, C].

        row_blocks, feature_blocks: whether the last axis of either has one entry for 16.
        """
        del row_blocks  # parts of a sequence hold whole blocks
        rows = x.shape[1 : x.ndim - num_features]
        features = x.shape[x.ndim - num_features :]
        if self.token_parts is not None and len(rows) == 2:
            b, t = self.token_parts
            x = x.reshape(x.shape[0], b, rows[0] // b, t, rows[1] // t, *features)
            x = jnp.swapaxes(x, 2, 3)
        x = x.reshape(x.shape[0], math.prod(rows), *features)
        if self.block_major and num_features > 1:
            if feature_blocks:
                x = jnp.moveaxis(x, -1, 2)
            else:
                x = x.reshape(*x.shape[:-1], features[-1] // BLOCK, BLOCK)
                x = jnp.moveaxis(x, -2, 2)
        return x.reshape(*x.shape[:2], math.prod(features))

    def split(self, x: jax.Array, rows: tuple[int, ...], features: tuple[int, ...]) -> jax.Array:
        """[E, R, C] -> [E, *rows, *features]: what `merge` has merged."""
        if self.block_major and len(features) > 1:
            x = x.reshape(*x.shape[:2], features[-1] // BLOCK, *features[:-1], BLOCK)
            x = jnp.moveaxis(x, 2, -2)
        if self.token_parts is not None and len(rows) == 2:
            b, t = self.token_parts
            x = x.reshape(x.shape[0], b, t, rows[0] // b, rows[1] // t, *features)
            x = jnp.swapaxes(x, 2, 3)
        return x.reshape(x.shape[0], *rows, *features)


class Side(NamedTuple):
    """One side of a product: an array's axes of rows, of in features or of out features."""

    multiplied: tuple[MeshAxes, ...] = ()  # where it is multiplied, per axis
    stored: tuple[MeshAxes, ...] = ()  # where results are kept

    @property
    def names(self) -> MeshAxes:
        """Of the axes merged into one, as they are multiplied."""
        return sum(self.multiplied, ())


class Placement(NamedTuple):
    """Where a layer's x [E, *rows, K], kernel [E, K, *N] and g [E, *rows, *N] are multiplied.

    All axes are empty without a mesh, and where nobody said what the kernel's dimensions are.
    """

    order: Order = Order()
    groups: MeshAxes = ()
    rows: Side = Side()
    inside: Side = Side()  # K
    outside: Side = Side()  # N

    @classmethod
    def of(
        cls, kernel_axes: LogicalAxes, rows: tuple[int, ...], kernel_shape: tuple[int, ...]
    ) -> "Placement":
        """For a dense layer: x [1, *rows, K], kernel [1, K, *N]."""
        sizes = mesh_axis_sizes()
        if kernel_axes is None or not sizes:
            return cls()
        if len(rows) == 2:
            multiplied = [_split("batch", rows[0], 1, sizes), _split("sequence", rows[1], 1, sizes)]
        else:
            multiplied = [_split("tokens", rows[0], 1, sizes), *(() for _ in rows[1:])]
        return cls._of((None, *kernel_axes), kernel_shape, rows, multiplied, sizes)

    @classmethod
    def of_experts(
        cls, kernel_axes: LogicalAxes, num_rows: int, kernel_shape: tuple[int, ...]
    ) -> "Placement":
        """For x [E, num_rows, K] and kernel [E, K, *N]."""
        sizes = mesh_axis_sizes()
        if kernel_axes is None or not sizes:
            return cls()
        multiplied = [_split("expert_rows", num_rows, 1, sizes)]
        return cls._of(kernel_axes, kernel_shape, (num_rows,), multiplied, sizes)

    @classmethod
    def _of(cls, axes, kernel_shape, rows, multiplied, sizes) -> "Placement":
        groups, inside, *outside = axes
        features = kernel_shape[2:]
        here = [s // _parts(names, sizes) for s, names in zip(rows, multiplied, strict=True)]
        if here[-1] % BLOCK or math.prod(here) % ALIGNMENT:  # a device's part is no whole blocks
            multiplied = [() for _ in rows]
        kept, parts = multiplied, None
        if len(rows) == 2:
            between = _split("residual_sequence", rows[1], BLOCK, sizes)
            if between[: len(multiplied[1])] == multiplied[1]:
                kept = [multiplied[0], between]
            if multiplied[1]:
                parts = _parts(multiplied[0], sizes), _parts(multiplied[1], sizes)
        # Of several axes of out features one is split, the last or the first.
        last = _split(outside[-1], features[-1], ALIGNMENT, sizes)
        split = [() for _ in features[:-1]] + [last]
        if len(features) > 1 and not last:
            split[0] = _split(outside[0], features[0], 1, sizes)
        stored = _split(inside, kernel_shape[1], ALIGNMENT, sizes)
        return cls(
            Order(parts, len(features) > 1 and bool(last)),
            _split(groups, kernel_shape[0], 1, sizes),
            Side(tuple(multiplied), tuple(kept)),
            Side((_whole(inside, stored),), (stored,)),
            Side(tuple(map(_whole, outside, split)), tuple(split)),
        )

    @property
    def on_mesh(self) -> bool:
        return bool(self.rows.multiplied)

    def stored(self, weight: Packed) -> Packed:
        """[E, K, N], where the master weights are."""
        return self._place(weight, sum(self.inside.stored, ()), sum(self.outside.stored, ()))

    def gathered(self, weight: Packed) -> Packed:
        """[E, K, N] as a product needs it: split as its activations are."""
        return self._place(weight, self.inside.names, self.outside.names)

    def input(self, x: Packed, *, swapped: bool = False) -> Packed:
        """[E, M, K], or [E, K, M] with swapped."""
        return self._activation(x, self.inside, swapped)

    def gradient(self, g: Packed, *, swapped: bool = False) -> Packed:
        """[E, M, N], or [E, N, M] with swapped."""
        return self._activation(g, self.outside, swapped)

    def product(
        self,
        multiply: Callable[[Packed, Packed], jax.Array],
        left: Packed,
        right: Packed,
        sides: tuple[Side, Side],
        contracted: Side,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> jax.Array:
        """[E, *A, *B] of left [E, A, C] and right [E, B, C].

        multiply: of such operands. shapes: A and B, before they were merged. sides: what they are.
        On a mesh every device multiplies what it has; then mesh axes of `contracted` along which
        the result is kept in parts scatter it, and the others add it up.
        """
        if not self.on_mesh:
            return self.order.split(multiply(left, right), *shapes)
        sizes = mesh_axis_sizes()
        order = Order(None, self.order.block_major)  # a device has one part
        result = [names for side in sides for names in side.multiplied]
        scattered = [
            (axis, name)
            for axis, names in enumerate(names for side in sides for names in side.stored)
            for name in names
            if name in contracted.names and name not in result[axis]
        ]
        added = tuple(n for n in contracted.names if n not in {name for _, name in scattered})

        def local(left: Packed, right: Packed) -> jax.Array:
            rows, features = (
                tuple(s // _parts(n, sizes) for s, n in zip(shape, side.multiplied, strict=True))
                for shape, side in zip(shapes, sides, strict=True)
            )
            partial = order.split(multiply(left, right), rows, features)
            for axis, name in scattered:
                partial = jax.lax.psum_scatter(
                    partial, name, scatter_dimension=axis + 1, tiled=True
                )
            return jax.lax.psum(partial, added) if added else partial

        specs = tuple(_specs(self.groups, side.names, contracted.names) for side in sides)
        for axis, name in scattered:
            result[axis] += (name,)
        out_spec = _spec(self.groups, *result)
        return jax.shard_map(local, in_specs=specs, out_specs=out_spec, check_vma=False)(
            left, right
        )

    def _activation(self, x: Packed, features: Side, swapped: bool) -> Packed:
        axes = self.rows.names, features.names
        return self._place(x, *(reversed(axes) if swapped else axes))

    def _place(self, operand: Packed, *axes: MeshAxes) -> Packed:
        if not self.on_mesh:
            return operand
        specs = _specs(self.groups, *axes)
        move = jax.lax.with_sharding_constraint
        codes = move(operand.codes, specs.codes)
        scales = None if operand.scales is None else move(operand.scales, specs.scales)
        return Packed(codes, scales, operand.scale)


def _split(axis: str | None, size: int, multiple: int, sizes: Mapping[str, int]) -> MeshAxes:
    """Mesh axes that split `size` into parts of whole multiples."""
    return () if size % multiple else dividing_axes(axis, size // multiple, sizes)


def _whole(axis: str | None, names: MeshAxes) -> MeshAxes:
    """Those along which it is split where it is multiplied."""
    return () if axis in STORAGE_AXES else names


def _parts(names: MeshAxes, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[name] for name in names)


def _specs(groups: MeshAxes, *axes: MeshAxes) -> Packed:
    """PartitionSpecs of an operand whose last two dimensions are split over these axes."""
    spec: Any = _spec(groups, *axes)
    scale: Any = _spec(groups, (), ())
    return Packed(spec, spec, scale)


def _spec(*axes: MeshAxes) -> PartitionSpec:
    return PartitionSpec(*(names or None for names in axes))
