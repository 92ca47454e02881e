"""Moving parameters between segmentations of the layers.

Blocks are stacked per segment (prefix, middle, suffix), and a precision plan decides where the
cuts lie. The same model trained in BF16 and in NVFP4 has the same layers cut differently.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .state import Parameters

SEGMENTS = ("prefix", "middle", "suffix")  # in the order of the layers


def restack(parameters: Parameters, like: Parameters) -> Parameters:
    """`parameters` with its layers cut into segments as in `like` (arrays or shapes).

    Where the two hold different layers or parameters, `parameters` comes back as it is, for a
    comparison of shapes to report.
    """
    blocks, wanted = parameters.get("blocks"), like.get("blocks")
    if not blocks or not wanted:
        return parameters
    order = [name for name in SEGMENTS if name in blocks]
    structures = {jax.tree.structure(blocks[name]) for name in order}
    structures |= {jax.tree.structure(segment) for segment in wanted.values()}
    depths = {name: _depth(wanted[name]) for name in SEGMENTS if name in wanted}
    depth = sum(_depth(blocks[name]) for name in order)
    if len(structures) != 1 or sum(depths.values()) != depth:
        return parameters
    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(blocks[name] for name in order))
    restacked, start = {}, 0
    for name, layers in depths.items():
        stop = start + layers
        restacked[name] = jax.tree.map(lambda leaf, a=start, b=stop: leaf[a:b], whole)
        start = stop
    return {**parameters, "blocks": restacked}


def _depth(segment: Parameters) -> int:
    return jax.tree.leaves(segment)[0].shape[0]
