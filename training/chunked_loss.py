"""Output head and cross-entropy in one, some tokens at a time: no array holds all logits.

The logits of a batch are its largest array: 8192 tokens of a vocabulary of 128k are 4 GiB in
float32, and as much again for their gradient. Here each chunk of tokens goes through head, loss and
gradients before the next begins, so that one chunk's logits are all there is. The gradients are
computed in the forward pass, where the logits are; nothing is computed twice. (The idea is Liger
Kernel's, arXiv 2410.10989, section 3.2.)

On a mesh every device walks through its own tokens with a gradient of the head of its own, and the
devices' gradients are added once, at the end.

Legend: B batch, T tokens, D embedding dimension, V vocabulary, C chunks, N tokens of a chunk, P and
Q parts that the mesh splits batch and sequence into.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..numerics.partitioning import (
    STORAGE_AXES,
    add_parts,
    constrain,
    dividing_axes,
    gather_stored,
    mesh_axis_sizes,
)
from .cross_entropy import token_losses
from .sharding import logical_axes
from .state import Parameters, path_name

LOGITS_BYTES = 512 * 2**20  # of a chunk: large enough that its products are as fast as one

Head = Callable[[Parameters, jax.Array], jax.Array]
_Apply = Callable[[Sequence[jax.Array], jax.Array], jax.Array]


def choose_chunks(num_tokens: int, vocab_size: int, embed_dim: int) -> int:
    """Number of chunks for the tokens of one device: the fewest whose logits are small enough.

    1 where chunks would need more than they save: they keep the head's gradient, [D, V], beside
    the logits. vocab_size: of the part of the vocabulary that a device holds.
    """
    wanted = min(math.ceil(num_tokens * vocab_size * 4 / LOGITS_BYTES), num_tokens)
    chunks = next(n for n in range(max(wanted, 1), num_tokens + 1) if num_tokens % n == 0)
    saved = num_tokens - num_tokens // chunks
    return chunks if saved > embed_dim else 1


def chunked_losses(
    head: Head,
    parameters: Parameters,
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    chunks: int,
) -> tuple[jax.Array, jax.Array]:
    """-log p(target) of every token, and their weighted sum, which can be differentiated.

    head: (parameters, hidden [N, D]) -> logits float32 [N, V]. parameters: of the whole model; what
    the head does not use gets no gradient from here. hidden: [B, T, D]. targets: int32 [B, T].
    weights: float32 [B, T]; the gradient of their sum is computed in the forward pass, so a loss
    scale belongs into them. chunks: divides the tokens of one device.

    Returns:
      Losses float32 [B, T] in nats, without a gradient, and sum(weights * losses).
    """
    leaves, structure = jax.tree.flatten(parameters)
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(parameters)]
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    example = jax.ShapeDtypeStruct((1, hidden.shape[-1]), hidden.dtype)
    used = _used(head, structure, shapes, example)

    def apply(chosen: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        whole = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]  # of which none is read
        for index, leaf in zip(used, chosen, strict=True):
            whole[index] = leaf
        return head(jax.tree.unflatten(structure, whole), x)

    axes = tuple(logical_axes(names[index]) for index in used)
    # What a product needs whole is gathered here, once for all chunks.
    chosen = [gather_stored(leaves[index], *axes[at]) for at, index in enumerate(used)]
    weighted: Any = _weighted(apply, axes, chunks, chosen, hidden, targets, weights)
    losses, total = weighted
    return jax.lax.stop_gradient(losses), total


def _used(head: Head, structure: Any, shapes: list[Any], example: Any) -> list[int]:
    """Positions of the parameters that the head reads."""
    jaxpr = jax.make_jaxpr(lambda leaves, x: head(jax.tree.unflatten(structure, leaves), x))(
        shapes, example
    ).jaxpr
    read = {id(variable) for equation in jaxpr.eqns for variable in equation.invars}
    return [index for index in range(len(shapes)) if id(jaxpr.invars[index]) in read]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _weighted(
    apply: _Apply,
    axes: tuple[tuple[str | None, ...], ...],
    chunks: int,
    chosen: list[jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    def step(_: None, chunk: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        def one(x: jax.Array, targets: jax.Array) -> jax.Array:
            return token_losses(apply(chosen, x), targets)

        return None, jax.vmap(jax.vmap(one))(*chunk)

    split, join = _layout(hidden.shape, chunks)
    _, losses = jax.lax.scan(step, None, (split(hidden), split(targets)))
    losses = join(losses)
    return losses, jnp.sum(weights * losses)


def _weighted_forward(apply, axes, chunks, chosen, hidden, targets, weights):
    def one(x: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[Any, ...]:
        """Losses [N] and gradients of one chunk of one device."""

        def loss(chosen: list[jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
            losses = token_losses(apply(chosen, x), targets)
            return jnp.sum(weights * losses), losses

        gradients, losses = jax.grad(loss, argnums=(0, 1), has_aux=True)(chosen, x)
        return losses, *gradients

    def place(gradient: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
        whole = (None if name in STORAGE_AXES else name for name in names)
        return constrain(gradient, "batch", "sequence", *whole)  # [P, Q, ...]

    def step(total: list[jax.Array], chunk: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        losses, for_head, for_hidden = jax.vmap(jax.vmap(one))(*chunk)
        added = [
            place(old + new.astype(jnp.float32), names)
            for old, new, names in zip(total, for_head, axes, strict=True)
        ]
        return added, (losses, for_hidden)

    split, join = _layout(hidden.shape, chunks)
    parts = split(hidden), split(targets), split(weights)
    zeros = [
        place(jnp.zeros((*parts[0].shape[1:3], *leaf.shape), jnp.float32), names)
        for leaf, names in zip(chosen, axes, strict=True)
    ]
    summed, (losses, for_hidden) = jax.lax.scan(step, zeros, parts)
    losses = join(losses)
    for_head = [
        add_parts(g, *names).astype(leaf.dtype)
        for g, leaf, names in zip(summed, chosen, axes, strict=True)
    ]
    return (losses, jnp.sum(weights * losses)), (for_head, join(for_hidden), losses)


def _weighted_backward(apply, axes, chunks, residuals, cotangents):
    for_head, for_hidden, losses = residuals
    _, cotangent = cotangents  # the losses' own are dropped: see stop_gradient
    scaled = [(cotangent * gradient).astype(gradient.dtype) for gradient in for_head]
    return scaled, (cotangent * for_hidden).astype(for_hidden.dtype), None, cotangent * losses


_weighted.defvjp(_weighted_forward, _weighted_backward)


def _layout(shape: tuple[int, ...], chunks: int) -> tuple[Callable, Callable]:
    """(split, join): [B, T, ...] -> [C, P, Q, N, ...] and back, without moving tokens between
    devices."""
    rows, length = shape[:2]
    sizes = mesh_axis_sizes()
    p, q = (
        math.prod(sizes[name] for name in dividing_axes(axis, size, sizes))
        for axis, size in (("batch", rows), ("sequence", length))
    )
    tokens = rows * length // (p * q)
    if tokens % chunks:
        raise ValueError(f"{chunks} chunks do not divide the {tokens} tokens of a device")

    def split(x: jax.Array) -> jax.Array:
        rest = x.shape[2:]
        x = constrain(x, "batch", "sequence", *(None for _ in rest))
        x = x.reshape(p, rows // p, q, length // q, *rest)
        x = jnp.moveaxis(x, 2, 1).reshape(p, q, chunks, tokens // chunks, *rest)
        names = (None, "batch", "sequence", None, *(None for _ in rest))
        return constrain(jnp.moveaxis(x, 2, 0), *names)

    def join(x: jax.Array) -> jax.Array:
        rest = x.shape[4:]
        x = jnp.moveaxis(x, 0, 2).reshape(p, q, rows // p, length // q, *rest)
        x = jnp.moveaxis(x, 1, 2).reshape(rows, length, *rest)
        return constrain(x, "batch", "sequence", *(None for _ in rest))

    return split, join
