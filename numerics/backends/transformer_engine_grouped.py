"""The experts' GEMMs through Transformer Engine: one expert after the other, as dense layers.

It has no NVFP4 products of several groups in JAX, and `jax.vmap` of its dense layer fails.

Shapes: x [E, C, K], kernel [E, K, *N]: every expert has C rows. Rows without a token are zero,
which is exact.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import UserError
from ..partitioning import constrain, mesh_axis_sizes
from ..random_bits import fold
from ..recipe import Recipe
from . import transformer_engine
from .operands import LogicalAxes, Signature, Tiles, one_group_an_expert


def fprop(
    recipe: Recipe, x: jax.Array, kernel: jax.Array, tiles: Tiles, kernel_axes: LogicalAxes = None
) -> jax.Array:
    """y [E, C, *N] in x's dtype."""
    _check(tiles)
    product = _product(recipe, kernel_axes)
    y = jax.lax.map(lambda expert: product(expert[0], expert[1], None), (x, kernel))
    return y.astype(x.dtype)


def forward(
    recipe: Recipe,
    x: jax.Array,
    kernel: jax.Array,
    tiles: Tiles,
    words: jax.Array,
    kernel_axes: LogicalAxes = None,
) -> tuple[jax.Array, Any]:
    """fprop, and the experts' pullbacks. words: uint32 [2], the call's rounding key."""
    _check(tiles)
    product = _product(recipe, kernel_axes)
    y, pullbacks = jax.lax.map(
        lambda expert: transformer_engine.with_pullback(recipe, product, *expert),
        (x, kernel, _expert_words(words, x.shape[0])),
    )
    return y.astype(x.dtype), pullbacks


def backward(
    recipe: Recipe,
    residuals: Any,
    g: jax.Array,
    tiles: Tiles,
    words: jax.Array,
    signature: Signature,
    kernel_axes: LogicalAxes = None,
) -> tuple[jax.Array, jax.Array]:
    """(dx, dw) like x and the kernel. g: [E, C, *N]."""
    del tiles
    dx, dw = jax.lax.map(
        lambda expert: transformer_engine.pull_back(recipe, *expert),
        (residuals, g, _expert_words(words, g.shape[0])),
    )
    dw = dw if kernel_axes is None else constrain(dw, *kernel_axes)
    return dx, dw.astype(signature.kernel.dtype)


def _product(recipe: Recipe, kernel_axes: LogicalAxes) -> transformer_engine.Product:
    axes = None if kernel_axes is None else kernel_axes[1:]
    return functools.partial(transformer_engine.multiply, recipe, axes, "expert_rows")


def _expert_words(words: jax.Array, num_experts: int) -> jax.Array:
    """uint32 [E, 2]."""
    return jax.vmap(fold, (None, 0))(words, jnp.arange(num_experts))


def _check(tiles: Tiles) -> None:
    one_group_an_expert("transformer_engine", tiles)
    if "expert" in (sizes := mesh_axis_sizes()):
        raise UserError(
            f"backend=transformer_engine: mesh.expert={sizes['expert']} divides experts, which it "
            "multiplies one after the other: use backend=xla, or mesh.fsdp instead"
        )
