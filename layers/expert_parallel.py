"""A mixture's experts on a mesh: who sends which rows where.

Every device routes its own tokens, and an all-to-all over the mesh axis expert, and over no other,
takes rows to the devices that hold their experts and back; along tensor every device moves its part
of the features. No device ever has all tokens.

With a capacity the products between are ordinary sharded ones, so that every backend runs them.
Dropless ones are a device's own affair: how many rows an expert has is known to nobody before.

Legend: B sequences, T tokens, K choices a token, E experts, C rows an expert, D embed_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..errors import UserError
from ..numerics.backends.operands import Shard
from ..numerics.formats import BLOCK
from ..numerics.partitioning import MESH_AXES, gather, mesh_axis_sizes, partition_spec
from .dispatch import Dispatch, from_experts, plan_dispatch, row_ids, to_experts


class Rows(NamedTuple):
    """What the experts get."""

    x: jax.Array  # [tiles, rows, D], or [E, C, D] with a capacity
    tile_expert: jax.Array | None
    row_ids: jax.Array | None
    shards: tuple[Shard, Shard]  # of the products with gate_up and down


# Consecutive sequences of a batch share a group up to so many tokens.
_GROUP_TOKENS = 1024


class Routed(NamedTuple):
    """What `mixture` returns."""

    y: jax.Array  # [B, T, D]
    experts: jax.Array  # int32 [B, T, K], E for a token that goes nowhere
    is_kept: jax.Array  # bool [B, T, K]


# (rows, gate_up, down, rounding keys) -> rows of the same shape
Experts = Callable[[Rows, jax.Array, jax.Array, jax.Array | None], jax.Array]


@dataclass(frozen=True)
class Mixture:
    """What routing and dispatch need to know of a layer.

    Attributes:
      capacity_factor: see NVFP4MoE.
      group_size: see NVFP4MoE.
      uses_fp4: whether rows of different groups must not share a block.
      needs_row_ids: whether rounding is stochastic.
      name: of the layer, for messages.
    """

    num_experts: int
    experts_per_token: int
    capacity_factor: float | None
    group_size: int | None
    uses_fp4: bool
    needs_row_ids: bool
    name: str

    def run(
        self,
        x: jax.Array,
        logits: jax.Array,
        mask: jax.Array,
        gate_up: jax.Array,
        down: jax.Array,
        keys: jax.Array | None,
        experts: Experts,
    ) -> Routed:
        """x [B, T, D], router logits float32 [B, T, E], mask bool [B, T]: False goes nowhere.

        gate_up [E, D, 2, F], down [E, F, D]: the kernels. experts: what is done with rows, kernels
        and the rounding keys.
        """
        sizes = mesh_axis_sizes()
        numbers = jnp.arange(mask.size, dtype=jnp.uint32).reshape(mask.shape)
        group = self._group_tokens(mask.shape)
        self._check(x.shape, gate_up.shape, group, sizes)
        mesh = _Mesh(sizes, x.shape, gate_up.shape, group, BLOCK if self.uses_fp4 else 1)
        run = self._dropless if self.capacity_factor is None else self._with_capacity
        return run(mesh, (x, logits, mask, numbers), (gate_up, down, keys), experts)

    def _dropless(self, mesh: _Mesh, tokens, parameters, experts: Experts) -> Routed:
        def local(x, logits, mask, numbers, gate_up, down, keys):
            weights, chosen = self._route(logits, mask)
            dispatch, rows = self._dispatch(mesh, x, chosen, numbers)
            gate_up, down = mesh.whole_kernels(gate_up, down)
            out = experts(mesh.whole_features(rows), gate_up, down, keys)
            out = mesh.part_of_features(out).astype(x.dtype)
            return self._combine(mesh, out, weights, chosen, dispatch)

        specs = (*mesh.arguments, mesh.gate_up, mesh.down, PartitionSpec())
        return mesh.map(local, specs, mesh.routed)(*tokens, *parameters)

    def _with_capacity(self, mesh: _Mesh, tokens, parameters, experts: Experts) -> Routed:
        def to_rows(x, logits, mask, numbers):
            weights, chosen = self._route(logits, mask)
            dispatch, rows = self._dispatch(mesh, x, chosen, numbers)
            return weights, chosen, dispatch, rows.x, rows.row_ids

        def to_tokens(out, weights, chosen, dispatch):
            return self._combine(mesh, out, weights, chosen, dispatch)

        dispatched = (mesh.tokens, mesh.tokens, mesh.dispatch, mesh.rows, mesh.row_ids)
        *routed, rows, ids = mesh.map(to_rows, mesh.arguments, dispatched)(*tokens)
        out = experts(Rows(rows, None, ids, (Shard(), Shard())), *parameters)
        specs = (mesh.rows, mesh.tokens, mesh.tokens, mesh.dispatch)
        return mesh.map(to_tokens, specs, mesh.routed)(out, *routed)

    # One device's part

    def _route(self, logits: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(weights float32 [B, T, K], experts int32 [B, T, K])."""
        top, chosen = jax.lax.top_k(jax.nn.softmax(logits), self.experts_per_token)
        weights = top / jnp.sum(top, axis=-1, keepdims=True)
        return weights, jnp.where(mask[..., None], chosen, self.num_experts)

    def _dispatch(self, mesh: _Mesh, x, chosen, numbers) -> tuple[Dispatch, Rows]:
        dispatch = plan_dispatch(
            chosen.reshape(-1, mesh.group_tokens or numbers.size, chosen.shape[-1]),
            self.num_experts,
            self.capacity_factor,
            group_rows=BLOCK if self.uses_fp4 else 1,
            num_parts=mesh.num_parts,
        )
        x = mesh.to_holders(to_experts(x.reshape(-1, x.shape[-1]), dispatch))
        ids = None
        if self.needs_row_ids:
            ids = mesh.to_holders(row_ids(numbers.reshape(-1), dispatch))
        if dispatch.tile_expert is None:
            x, ids = self._by_expert(mesh, (x, ids))
            return dispatch, Rows(x, None, ids, (Shard(), Shard()))
        tile_expert = mesh.to_holders(dispatch.tile_expert)
        x = x.reshape(-1, dispatch.rows_per_tile, x.shape[-1])
        ids = None if ids is None else ids.reshape(x.shape[:2])
        return dispatch, Rows(x, tile_expert, ids, mesh.shards)

    def _combine(self, mesh: _Mesh, out, weights, chosen, dispatch: Dispatch) -> Routed:
        if dispatch.tile_expert is None:
            parts, features = mesh.num_parts, out.shape[-1]
            split = out.reshape(self.num_experts // parts, parts, -1, features)
            out = jnp.swapaxes(split, 0, 1)
        rows = mesh.to_holders(out.reshape(dispatch.num_rows, -1))
        y = from_experts(rows, weights.reshape(-1, weights.shape[-1]), dispatch)
        is_kept = dispatch.is_kept.reshape(chosen.shape)
        return Routed(y.reshape(*chosen.shape[:2], -1), chosen, is_kept)

    def _by_expert(self, mesh: _Mesh, rows):
        """Leaves [R, ...] that came from each device in its order of experts -> [E, C, ...]."""

        def group(leaf: jax.Array) -> jax.Array:
            here = self.num_experts // mesh.num_parts
            split = leaf.reshape(mesh.num_parts, here, -1, *leaf.shape[1:])
            return jnp.swapaxes(split, 0, 1).reshape(here, -1, *leaf.shape[1:])

        return jax.tree.map(group, rows)

    def _group_tokens(self, shape: tuple[int, ...]) -> int | None:
        """Tokens a group, of the whole batch [B, T]: the same on every mesh.

        None: there is nothing to keep apart, so a device's tokens are one group.
        """
        batch, length = shape
        if self.capacity_factor is None and not self.uses_fp4:
            return None
        if self.group_size is not None:
            return self.group_size
        if length < BLOCK:  # decoding: a token would be a group
            return None
        if self.capacity_factor is not None:
            return length
        # Every expert of every group is padded to whole blocks, which short sequences feel.
        together = max(1, _GROUP_TOKENS // length)
        return length * max(n for n in range(1, together + 1) if batch % n == 0)

    def _check(self, shape, gate_up_shape, group: int | None, sizes: Mapping[str, int]) -> None:
        batch, length, _ = shape
        num_experts, _, _, mlp_dim = gate_up_shape
        if self.group_size is not None and length % self.group_size:
            raise UserError(
                f"{self.name}: group_size={self.group_size} does not divide a sequence of {length} "
                "tokens; choose a divisor, or null for whole sequences"
            )
        if not sizes:
            return
        for dimension, size, axes in (
            ("num_experts", num_experts, MESH_AXES["experts"]),
            ("batch", batch, MESH_AXES["batch"]),
            ("sequence", length, MESH_AXES["sequence"]),
        ):
            if size % _parts(axes, sizes):
                raise UserError(
                    f"{self.name}: {_blame(axes, sizes)} does not divide {dimension}={size}; "
                    "choose sizes that do"
                )
        if not self.uses_fp4 and self.capacity_factor is None:
            return
        context, tensor = sizes.get("context", 1), sizes.get("tensor", 1)
        if length < BLOCK or (context > 1 and length // context % (group or length)):
            raise UserError(
                f"{self.name}: mesh.context={context} cuts a sequence of {length} tokens inside a "
                f"group of {group or BLOCK}; set model.moe.group_size to a divisor of "
                f"{length // context}"
            )
        rows = batch // _parts(MESH_AXES["batch"], sizes)  # of a device
        if group is not None and rows * length % group:
            raise UserError(
                f"{self.name}: {_blame(MESH_AXES['batch'], sizes)} leaves a device {rows} "
                f"sequence(s) of {length} tokens, not whole groups of {group}; set "
                f"model.moe.group_size={length}, here and wherever the same FP4 codes are wanted"
            )
        if self.uses_fp4 and mlp_dim // tensor % BLOCK:
            raise UserError(
                f"{self.name}: mesh.tensor={tensor} cuts mlp_dim={mlp_dim} inside a block of "
                f"{BLOCK}; choose a size that divides {mlp_dim // BLOCK}"
            )


def _parts(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in axes)


def _blame(axes: tuple[str, ...], sizes: Mapping[str, int]) -> str:
    return " * ".join(f"mesh.{axis}={sizes[axis]}" for axis in axes if axis in sizes)


class _Mesh:
    """How tokens, rows and kernels lie, and what moves between devices. Without a mesh: nothing."""

    def __init__(
        self, sizes: Mapping[str, int], shape, gate_up_shape, group: int | None, block: int
    ):
        self._sizes = sizes
        self.group_tokens = group
        self.num_parts = sizes.get("expert", 1)
        batch = tuple(name for name in MESH_AXES["batch"] if name in sizes)
        rows = tuple(name for name in ("context", *batch) if name in sizes and name != "expert")
        features = partition_spec(("features",), shape[-1:], sizes)[0]
        self._split_features = features is not None
        expert = "expert" if "expert" in sizes else None
        self.tokens = partition_spec(("batch", "sequence"), shape[:2], sizes)
        self.x = PartitionSpec(*self.tokens, features)
        self.rows = PartitionSpec(expert, rows or None, features)
        self.row_ids = PartitionSpec(expert, rows or None)
        devices = PartitionSpec((*rows, *(() if expert is None else (expert,))) or None)
        self.dispatch = devices  # of each of its arrays: they are the device's own
        axes = ("experts", "embed", None, "mlp")
        self.gate_up = partition_spec(axes, gate_up_shape, sizes)
        self.down = PartitionSpec(self.gate_up[0], self.gate_up[3], self.gate_up[1])
        features = "tensor" if self.gate_up[3] else None
        split = {"rows": rows, "experts": () if expert is None else (expert,)}
        stored = "fsdp" if self.gate_up[1] else None  # along the embedding
        # Parts that hold whole blocks are rounded before they are gathered.
        rounded = stored is not None and shape[-1] // sizes[stored] % block == 0
        self._gathered = None if rounded else stored
        self.shards = (
            Shard(**split, out_features=features, storage=("fsdp", 1) if rounded else None),
            Shard(**split, in_features=features, storage=("fsdp", 2) if rounded else None),
        )
        self.arguments = (self.x, self.tokens, self.tokens, self.tokens)
        self.routed = Routed._make((self.x, self.tokens, self.tokens))  # specs in arrays' places

    def map(self, function, in_specs, out_specs):
        """`function` on every device's part of its arguments."""
        if not self._sizes:
            return function
        # check_vma: the kernels' custom gradients are addends, which it cannot know.
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def to_holders(self, rows: jax.Array) -> jax.Array:
        """[P * n, ...]: part p goes to device p along expert, or comes back from it."""
        if self.num_parts == 1:
            return rows
        return jax.lax.all_to_all(rows, "expert", split_axis=0, concat_axis=0, tiled=True)

    def whole_features(self, rows: Rows) -> Rows:
        if not self._split_features:
            return rows
        # In float32, so that the gradients' addends are rounded after they are added.
        return rows._replace(x=gather(rows.x, "tensor", 2, jnp.float32))

    def part_of_features(self, out: jax.Array) -> jax.Array:
        """The sum of the devices' addends along tensor, of which each keeps its features."""
        if not self._split_features:
            return out if "tensor" not in self._sizes else jax.lax.psum(out, "tensor")
        return jax.lax.psum_scatter(out, "tensor", scatter_dimension=2, tiled=True)

    def whole_kernels(self, gate_up: jax.Array, down: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Those whose stored parts cut blocks."""
        if self._gathered is None:
            return gate_up, down
        return gather(gate_up, self._gathered, 1), gather(down, self._gathered, 2)
