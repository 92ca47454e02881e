"""Where the packed operands of a layer lie on a mesh: it is codes and scales that XLA moves.

A GEMM has one axis of tokens and one of features, of which an array may have several. Merging two
axes of which a mesh splits the inner one would make XLA move everything; so here parts that lie on
one device stay together. A product does not depend on the order, and blocks of 16 stay whole.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..formats import BLOCK
from ..partitioning import STORAGE_AXES, constrain, dividing_axes, mesh_axis_sizes
from .operands import LogicalAxes
from .packed import Packed


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


class Placement(NamedTuple):
    """Logical axes (numerics/partitioning.py) of a layer's merged arrays; None: nobody said."""

    order: Order = Order()
    weight: LogicalAxes = None  # of [E, K, N], like the master weights
    tokens: str | None = None  # of M; None: activations stay where they are
    splits_features: bool = False  # whether a mesh splits N where it multiplies

    @classmethod
    def of(
        cls, kernel_axes: LogicalAxes, x_shape: tuple[int, ...], kernel_shape: tuple[int, ...]
    ) -> "Placement":
        """For a dense layer: x [..., K], kernel [K, *N]."""
        if kernel_axes is None:
            return cls()
        sizes = mesh_axis_sizes()
        parts = None
        if len(x_shape) == 3:
            batch = _parts("batch", x_shape[0], sizes)
            sequence = _parts("sequence", x_shape[1] // BLOCK, sizes)
            if sequence > 1 and x_shape[1] % BLOCK == 0:
                parts = (batch, sequence)
        return cls._of((None, *kernel_axes), kernel_shape[1:], sizes, parts, "tokens")

    @classmethod
    def of_experts(cls, kernel_axes: LogicalAxes, kernel_shape: tuple[int, ...]) -> "Placement":
        """For kernel [E, K, *N]."""
        if kernel_axes is None:
            return cls()
        return cls._of(kernel_axes, kernel_shape[2:], mesh_axis_sizes(), None, "expert_rows")

    @classmethod
    def _of(cls, kernel_axes, features, sizes, token_parts, tokens) -> "Placement":
        groups, rows, first, last = kernel_axes[0], kernel_axes[1], kernel_axes[2], kernel_axes[-1]
        block_major = len(features) > 1 and _parts(last, features[-1] // BLOCK, sizes) > 1
        weight = (groups, rows, last if block_major else first)
        splits = _parts(_whole(weight)[2], math.prod(features), sizes) > 1
        return cls(Order(token_parts, block_major), weight, tokens, splits)

    def stored(self, weight: Packed) -> Packed:
        return _place(weight, self.weight)

    def gathered(self, weight: Packed) -> Packed:
        """As a product needs it: split as its activations are."""
        return weight if self.weight is None else _place(weight, _whole(self.weight))

    def input(self, x: Packed, *, swapped: bool = False) -> Packed:
        return self._activation(x, 1, swapped)

    def gradient(self, g: Packed, *, swapped: bool = False) -> Packed:
        return self._activation(g, 2, swapped)

    def weight_gradient(self, dw: jax.Array) -> jax.Array:
        return dw if self.weight is None else constrain(dw, *self.weight)

    def _activation(self, x: Packed, kernel_axis: int, swapped: bool) -> Packed:
        if self.tokens is None or self.weight is None:
            return x
        features = _whole(self.weight)[kernel_axis]
        axes = (features, self.tokens) if swapped else (self.tokens, features)
        return _place(x, (self.weight[0], *axes))


def _whole(axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    return tuple(None if axis in STORAGE_AXES else axis for axis in axes)


def _parts(axis: str | None, size: int, sizes: dict[str, int]) -> int:
    return math.prod(sizes[name] for name in dividing_axes(axis, size, sizes))


def _place(operand: Packed, axes: LogicalAxes) -> Packed:
    if axes is None:
        return operand
    scales = None if operand.scales is None else constrain(operand.scales, *axes)
    return Packed(constrain(operand.codes, *axes), scales, operand.scale)
