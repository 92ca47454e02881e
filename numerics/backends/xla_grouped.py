"""The experts' GEMMs on FP4 tensor cores: one batched product for all experts of a device.

Shapes: x [E, C, K], kernel [E, K, *N]: every expert has C rows. Rows without a token are zero,
which is exact. Tiles of several rows an expert (dropless mixtures) have no such product.
"""

import jax

from ..recipe import Recipe
from .operands import LogicalAxes, Signature, Tiles, one_group_an_expert
from .placement import Placement
from .xla import Residuals, backward_groups, forward_groups, fprop_groups


def fprop(
    recipe: Recipe, x: jax.Array, kernel: jax.Array, tiles: Tiles, kernel_axes: LogicalAxes = None
) -> jax.Array:
    """y [E, C, *N] in x's dtype."""
    one_group_an_expert("xla", tiles)
    place = Placement.of_experts(kernel_axes, x.shape[1], kernel.shape)
    return fprop_groups(recipe, x, kernel, place)[0].astype(x.dtype)


def forward(
    recipe: Recipe,
    x: jax.Array,
    kernel: jax.Array,
    tiles: Tiles,
    words: jax.Array,
    kernel_axes: LogicalAxes = None,
) -> tuple[jax.Array, Residuals]:
    """fprop, and what the backward GEMMs need. words: uint32 [2], the call's rounding key."""
    one_group_an_expert("xla", tiles)
    place = Placement.of_experts(kernel_axes, x.shape[1], kernel.shape)
    rows_at = tiles.place(x.shape[-1], None)
    y, residuals = forward_groups(recipe, x, kernel, words, place, rows_at)
    return y.astype(x.dtype), residuals


def backward(
    recipe: Recipe,
    residuals: Residuals,
    g: jax.Array,
    tiles: Tiles,
    words: jax.Array,
    signature: Signature,
    kernel_axes: LogicalAxes = None,
) -> tuple[jax.Array, jax.Array]:
    """(dx, dw) like x and the kernel. g: [E, C, *N]; dw accumulates in float32."""
    one_group_an_expert("xla", tiles)
    features = signature.kernel.shape[2:]
    place = Placement.of_experts(kernel_axes, g.shape[1], signature.kernel.shape)
    rows_at = tiles.place(g.shape[-1], None)
    dx, dw = backward_groups(recipe, residuals, g, words, features, place, rows_at)
    return dx.astype(signature.x.dtype), dw.astype(signature.kernel.dtype)
