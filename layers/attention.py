"""Causal grouped-query self-attention with RoPE, packed documents and a sliding window.

The projections are NVFP4Dense layers; the query-key and attention-value products and the softmax
are always high precision. `dot_product_attention` is where an implementation is chosen.

Legend: B batch, T query tokens, S key tokens, D embedding dimension, N query heads, K key/value
heads, G = N/K query heads per key/value head, H head dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ..numerics import Recipe
from ..numerics.partitioning import constrain, gather, mesh_axis_sizes, partition_spec
from ..numerics.platform import matmul_operand, on_cpu, target_platform
from .dense import NVFP4Dense
from .norm import RMSNorm
from .rope import RopeScaling, RopeTables, apply_rope, rope_frequencies, rope_tables

_default_init = jax.nn.initializers.normal(0.02)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionPattern:
    """Which keys a query sees: those at or before it, in its own document, inside the window.

    query_segment_ids, key_segment_ids: int32 [B, T] and [B, S], or None for one document a row.
    query_offset: the key index of the first query, int32 scalar or [B]; None means 0. A key/value
      cache sets it, and the causal rule then also hides the cache's unwritten end.
    sliding_window: a query at index q sees keys q - sliding_window < k <= q; None for no limit.
    """

    query_segment_ids: jax.Array | None = None
    key_segment_ids: jax.Array | None = None
    query_offset: jax.Array | None = None
    sliding_window: int | None = field(default=None, metadata={"static": True})

    def segment_mask(self) -> jax.Array | None:
        """True where query and key share a document, bool [B, 1, T, S]; None without ids."""
        if self.query_segment_ids is None or self.key_segment_ids is None:
            return None
        return (self.query_segment_ids[:, :, None] == self.key_segment_ids[:, None, :])[:, None]

    def mask(self, query_length: int, key_length: int) -> jax.Array:
        """Everything at once: True where a query may see a key, bool [B or 1, 1, T, S]."""
        offset = jnp.zeros(1, jnp.int32) if self.query_offset is None else self.query_offset
        rows = jnp.arange(query_length)[:, None] + jnp.reshape(offset, (-1, 1, 1, 1))
        columns = jnp.arange(key_length)
        mask = columns <= rows
        if self.sliding_window is not None:
            mask &= columns > rows - self.sliding_window
        segments = self.segment_mask()
        return mask if segments is None else mask & segments


# query [B, T, N, H], key and value [B, S, K, H] -> [B, T, N, H] in the query's dtype
AttentionFunction = Callable[[jax.Array, jax.Array, jax.Array, AttentionPattern], jax.Array]


@dataclass(frozen=True)
class AttentionImplementation:
    """A function and the promise that matters most: whether it keeps packed documents apart."""

    function: AttentionFunction
    honours_segment_ids: bool


def _xla(query, key, value, pattern):
    # Without the checkpoint, differentiation stores two float32 [B, N, T, S] tensors a layer; with
    # it the scores are computed again from query and key, which is also faster on a CPU (0.85x).
    # Inside scan no optimisation barrier is needed to keep XLA from undoing this.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def core(query, key, value, pattern):
        mask = pattern.mask(query.shape[1], key.shape[1])
        wide = (matmul_operand(part) for part in (query, key, value))
        mixed = jax.nn.dot_product_attention(*wide, mask=mask, implementation="xla")
        return mixed.astype(query.dtype)

    return core(query, key, value, pattern)


def _cudnn(query, key, value, pattern):
    # cuDNN's flash attention skips blocks by its own causal and window rules, which know no offset.
    call = functools.partial(
        jax.nn.dot_product_attention, query, key, value, implementation="cudnn"
    )
    if pattern.query_offset is not None:
        return call(mask=pattern.mask(query.shape[1], key.shape[1]))
    window = None if pattern.sliding_window is None else (pattern.sliding_window - 1, 0)
    return call(mask=pattern.segment_mask(), is_causal=True, local_window_size=window)


ATTENTION_IMPLEMENTATIONS: dict[str, AttentionImplementation] = {
    "xla": AttentionImplementation(_xla, honours_segment_ids=True),
    "cudnn": AttentionImplementation(_cudnn, honours_segment_ids=True),
}


def _automatic_implementation(query: jax.Array) -> str:
    """cuDNN where its documented limits allow it, XLA everywhere else."""
    head_dim, length = query.shape[-1], query.shape[1]
    fits = (
        target_platform() == "gpu"
        and query.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and length % 2 == 0
    )
    return "cudnn" if fits else "xla"


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pattern: AttentionPattern,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """softmax(q kᵀ / sqrt(H)) v over the keys that `pattern` allows, softmax in float32.

    query [B, T, N, H], key and value [B, S, K, H] -> [B, T, N, H]; all of one dtype. Query head n
    uses key/value head n // G. A row that may see no key at all averages all values.

    `implementation` is "auto" (by platform) or a name in ATTENTION_IMPLEMENTATIONS.

    Raises:
      ValueError: an unknown implementation, or one that would ignore the segment ids.
    """
    if implementation == "auto":
        implementation = _automatic_implementation(query)
    if implementation not in ATTENTION_IMPLEMENTATIONS:
        names = ", ".join(["auto", *ATTENTION_IMPLEMENTATIONS])
        raise ValueError(
            f"unknown attention implementation {implementation!r}; choose from {names}"
        )
    chosen = ATTENTION_IMPLEMENTATIONS[implementation]
    if pattern.query_segment_ids is not None and not chosen.honours_segment_ids:
        raise ValueError(
            f"attention implementation {implementation!r} ignores segment ids, so packed documents "
            "would see each other; use 'xla' or 'auto', or batches without segment ids"
        )
    return chosen.function(query, key, value, pattern)


def context_parallel_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pattern: AttentionPattern,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """`dot_product_attention` of whole sequences, which the mesh axis context may cut into parts.

    Every device has its part of the queries and gathers the keys and values of its sequences from
    the others; their gradients are summed on the way back. K/V heads are few, so that this moves
    less than the queries of a ring would, and any implementation can compute it. query, key and
    value have one length.
    """
    sizes = mesh_axis_sizes()
    axes = ("batch", "sequence", "kv_heads", None)
    spec = partition_spec(axes, key.shape, sizes)
    if "context" not in (spec[1] or ()):
        return dot_product_attention(query, key, value, pattern, implementation=implementation)

    # Where the products are float32 anyway, so are the gradients that the devices add.
    dtype = jnp.float32 if on_cpu() else None

    def attend(query, key, value, segment_ids):
        local = AttentionPattern(
            segment_ids,
            None
            if segment_ids is None
            else jax.lax.all_gather(segment_ids, "context", axis=1, tiled=True),
            query_offset=jax.lax.axis_index("context") * query.shape[1],
            sliding_window=pattern.sliding_window,
        )
        key, value = (gather(part, "context", 1, dtype) for part in (key, value))
        return dot_product_attention(query, key, value, local, implementation=implementation)

    return jax.shard_map(
        attend,
        in_specs=(spec, spec, spec, PartitionSpec(*spec[:2])),
        out_specs=spec,
        check_vma=False,
    )(query, key, value, pattern.query_segment_ids)


class Attention(nnx.Module):
    """Causal self-attention: one fused q/k/v projection, rotary embedding, output projection.

    `qkv` is one NVFP4Dense(D, (K, G + 2, H)): per key/value head its G query heads, then the key,
    then the value, so that sharding over K keeps whole groups together. `qk_norm` adds an RMSNorm
    over each query and key head (Qwen3). `recipe`, `rounding`, `backend` and `name` are
    NVFP4Dense's.

    `attend` of a call stands in for the attention product itself: a key/value cache, a look at
    what goes through.

    Raises:
      ValueError: `num_heads` is not a multiple of `num_kv_heads`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float = 10_000.0,
        rope_scaling: RopeScaling | None = None,
        sliding_window: int | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        norm_epsilon: float = 1e-6,
        kernel_init: jax.nn.initializers.Initializer = _default_init,
        output_kernel_init: jax.nn.initializers.Initializer = _default_init,
        recipe: str | Recipe = "nvfp4",
        rounding: Literal["stream", "explicit"] = "stream",
        backend: str = "auto",
        implementation: str = "auto",
        name: str = "Attention",
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{name}: num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}; "
                "each key/value head serves the same number of query heads"
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        self.sliding_window = sliding_window
        self.implementation = implementation
        groups = num_heads // num_kv_heads
        self.qkv = NVFP4Dense(
            embed_dim,
            (num_kv_heads, groups + 2, self.head_dim),
            use_bias=qkv_bias,
            kernel_init=kernel_init,
            recipe=recipe,
            rounding=rounding,
            backend=backend,
            kernel_axes=("embed", "kv_heads", None, None),
            name=f"{name}.qkv",
            rngs=rngs,
        )
        self.output = NVFP4Dense(
            num_heads * self.head_dim,
            embed_dim,
            use_bias=output_bias,
            kernel_init=output_kernel_init,
            recipe=recipe,
            rounding=rounding,
            backend=backend,
            kernel_axes=("heads", "embed"),
            name=f"{name}.output",
            rngs=rngs,
        )
        head_norm = functools.partial(RMSNorm, self.head_dim, epsilon=norm_epsilon, rngs=rngs)
        self.query_norm = head_norm() if qk_norm else None
        self.key_norm = head_norm() if qk_norm else None

    def rope(self, positions: jax.Array) -> RopeTables:
        """This layer's rotary tables for int32 `positions` [B or 1, T]."""
        frequencies = rope_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)
        return rope_tables(positions, frequencies)

    def project(
        self, x: jax.Array, rope: RopeTables, *, rounding_key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, T, D] -> rotated query [B, T, N, H], rotated key and value [B, T, K, H]."""
        fused = self.qkv(x, rounding_key=rounding_key)  # [B, T, K, G + 2, H]
        fused = constrain(fused, "batch", "sequence", "kv_heads", None, None)
        query = fused[..., :-2, :].reshape(*x.shape[:-1], self.num_heads, self.head_dim)
        key, value = fused[..., -2, :], fused[..., -1, :]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return apply_rope(query, rope), apply_rope(key, rope), value

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        rope: RopeTables | None = None,
        rounding_keys: jax.Array | None = None,
        attend: AttentionFunction | None = None,
    ) -> jax.Array:
        """x [B, T, D] -> [B, T, D] in x's dtype.

        segment_ids: int32 [B, T]; only tokens with equal ids see each other.
        positions: int32 [B or 1, T] for the rotary embedding, 0 … T-1 when absent.
        rope: tables that several layers share, instead of `positions`.
        rounding_keys: two keys (q/k/v and output) for stochastic rounding, for rounding="explicit".
        attend: computes the attention product instead of `context_parallel_attention`.
        """
        if rope is None:
            rope = self.rope(jnp.arange(x.shape[1])[None] if positions is None else positions)
        qkv_key, output_key = (None, None) if rounding_keys is None else rounding_keys
        query, key, value = self.project(x, rope, rounding_key=qkv_key)
        pattern = AttentionPattern(segment_ids, segment_ids, sliding_window=self.sliding_window)
        mixed = (attend or self._attend)(query, key, value, pattern)
        mixed = mixed.reshape(*x.shape[:-1], self.num_heads * self.head_dim)
        mixed = constrain(mixed, "batch", "sequence", "heads")
        return self.output(mixed, rounding_key=output_key)

    def _attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, pattern: AttentionPattern
    ) -> jax.Array:
        if pattern.sliding_window is not None and pattern.sliding_window >= query.shape[1]:
            pattern = dataclasses.replace(pattern, sliding_window=None)  # it hides nothing
        return context_parallel_attention(
            query, key, value, pattern, implementation=self.implementation
        )
