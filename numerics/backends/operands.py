"""What the backends share: rounding one operand as a recipe says, and the names of residuals.

Every backend that rounds here has the same codes, scales and amax, bit for bit.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..formats import BLOCK, Format
from ..hadamard import random_hadamard
from ..platform import row_major
from ..quantize import round_scaled, scale_to_blocks, tensor_amax
from ..random_bits import Place, random_bits
from ..recipe import Operand

T = TypeVar("T")
# What `jax.checkpoint` policies may keep: quantised residuals, and GEMM outputs, without which the
# recomputation would have to quantise again.
QUANTIZED_NAME = "quantized"
GEMM_NAME = "gemm"
# One key a call, one stream an operand.
DGRAD_SALT, DGRAD_WEIGHT_SALT, WGRAD_INPUT_SALT, WGRAD_SALT = range(1, 5)


# Names in `partitioning.MESH_AXES` of a kernel's dimensions; None: nobody said.
LogicalAxes = tuple[str | None, ...] | None


@dataclasses.dataclass(frozen=True)
class Shard:
    """The mesh axes that an enclosing `jax.shard_map` has split a layer of experts over.

    Attributes:
      rows: those that the rows of one expert are spread over.
      experts: those that the experts are divided over.
      in_features: the one that the kernel's in features are split over, and with them x's.
      out_features: likewise the last axis of the out features.
      storage: the one that the kernel is split over where it lies, and along which of its
        dimensions; a product gets it whole, as it was rounded.
    """

    rows: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    in_features: str | None = None
    out_features: str | None = None
    storage: tuple[str, int] | None = None

    def whole_kernel(self, values: jax.Array, spec: Operand) -> jax.Array:
        """The rounded kernel from this device's part of it: 16 bits an element, 32 in float32."""
        if self.storage is None:
            return values
        name, axis = self.storage
        dtype = jnp.bfloat16 if spec.format is Format.NVFP4 else spec.format.dtype
        bits = jnp.uint16 if jnp.dtype(dtype).itemsize == 2 else jnp.uint32
        # As bits: XLA:CPU would send bfloat16 as float32.
        moved = jax.lax.bitcast_convert_type(values.astype(dtype), bits)
        whole = jax.lax.all_gather(moved, name, axis=axis, tiled=True)
        return jax.lax.bitcast_convert_type(whole, dtype).astype(values.dtype)

    def part_of_kernel(self, dw: jax.Array) -> jax.Array:
        """The sum of the devices' gradients of the whole kernel, of which each keeps its part."""
        if self.storage is None:
            return dw
        name, axis = self.storage
        return jax.lax.psum_scatter(dw, name, scatter_dimension=axis, tiled=True)

    def whole_amax(self, amax: jax.Array) -> jax.Array:
        """Each expert's amax on all devices from its amax on this one."""
        split = {axis for axis in (self.in_features, self.out_features) if axis is not None}
        # An operand that one of them does not split is the same there: its maximum too.
        axes = (*self.rows, *sorted(split))
        return jax.lax.pmax(amax, axes) if axes else amax

    def whole_hash(self, gradient_hash: jax.Array) -> jax.Array:
        """The content hash of the whole gradient of y from that of this device's part."""
        axes = (*self.rows, *self.experts)
        axes += () if self.out_features is None else (self.out_features,)
        return jax.lax.psum(gradient_hash, axes) if axes else gradient_hash


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """What `grouped_linear`'s rows [tiles, rows] are."""

    # int32 [tiles], the number of experts for a tile without tokens; None: tile e is expert e's.
    expert: jax.Array | None = None
    # uint32 [tiles, rows]: what stochastic rounding knows a row by; None: its place.
    row_ids: jax.Array | None = None
    shard: Shard = dataclasses.field(default=Shard(), metadata={"static": True})

    def place(self, length: int, axis_name: str | None) -> Place | None:
        """Of an array [tiles, rows, *features] whose last axis, of this length, is split so."""
        if self.row_ids is None:
            return None
        if axis_name is None:
            return Place(self.row_ids, 0, length)
        first = jax.lax.axis_index(axis_name) * length
        return Place(self.row_ids, first, length * jax.lax.axis_size(axis_name))


def one_group_an_expert(backend: str, tiles: Tiles) -> None:
    """Raises ValueError for rows in tiles, and for ones that a `jax.shard_map` has split."""
    if tiles.expert is not None or tiles.shard != Shard():
        raise ValueError(
            f"backend {backend!r} has one group of rows for each expert, x [experts, rows, K] "
            "without tile_expert: give the mixture a capacity_factor, or use backend='emulated'"
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Signature:
    """Shapes and dtypes of a call, for its backward pass."""

    x: jax.ShapeDtypeStruct
    kernel: jax.ShapeDtypeStruct

    @classmethod
    def of(cls, x: jax.Array, kernel: jax.Array) -> "Signature":
        return cls(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, kernel)))


class Rounded(NamedTuple):
    """x ~ values * scales * (amax / 2688), the scale repeated over its block. All float32."""

    values: jax.Array  # E2M1, x's shape
    scales: jax.Array  # E4M3, one a block
    amax: jax.Array  # broadcast against the scales
    blocked: tuple[int, ...]  # the axes that blocks run along, negative, ascending


def transform(spec: Operand, x: jax.Array, axis: int) -> jax.Array:
    """`x` as it is rounded: with the Hadamard transform along `axis` where `spec` has it."""
    # x is read several times: without the barrier XLA:CPU computes its producer again each time.
    x = jax.lax.optimization_barrier(x)
    if spec.hadamard:
        x = random_hadamard(x.astype(jnp.float32), axis)
        x = jax.lax.optimization_barrier(
            jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        )
    return x


def round_nvfp4(
    spec: Operand,
    x: jax.Array,
    axes: tuple[int, int],
    words: jax.Array | None = None,
    amax: Callable[[jax.Array], jax.Array] = tensor_amax,
    place: Place | None = None,
) -> Rounded:
    """Round a transformed `x` as an NVFP4 `spec` says.

    axes: (contracted axis, the other axis of 2D blocks), negative. words: uint32 [2], for
    stochastic rounding. amax: see `scale_to_blocks`. place: see `random_bits`.
    """
    assert spec.format is Format.NVFP4, spec
    blocked = tuple(sorted(axes)) if spec.two_dimensional else (axes[0],)
    scaled, scales, amax_value = scale_to_blocks(x, blocked, amax)
    bits = None
    if spec.stochastic:
        assert words is not None, "a stochastic operand without rounding words"
        bits = random_bits(words, x.shape, place)
    return Rounded(round_scaled(scaled, bits), scales, amax_value, blocked)


def expert_amax(block_bits: jax.Array) -> jax.Array:
    """amax of each entry of the leading axis, broadcast against the blocks."""
    return jnp.max(block_bits, axis=tuple(range(1, block_bits.ndim)), keepdims=True, initial=0)


def pad_rows(x: jax.Array, axis: int, multiple: int = BLOCK) -> jax.Array:
    """Zeros up to a multiple along `axis`: tokens that are exact, their codes are 0."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def save(operand: T, spec: Operand) -> T:
    """Name a quantised residual, so that a remat policy can keep it."""
    if spec.format is not Format.NVFP4:
        return operand
    return jax.tree.map(lambda leaf: saved_as(QUANTIZED_NAME, leaf), operand)


def saved_as(name: str, x: jax.Array) -> jax.Array:
    """`x` under the name that remat policies keep it by, in one memory layout."""
    return row_major(checkpoint_name(row_major(x), name))
