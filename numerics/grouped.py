"""The linear layer of a mixture's experts: one GEMM an expert, rows in tiles of one expert."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .backends import emulated_grouped as backend
from .formats import BLOCK
from .linear import check_operands, rounding_words
from .random_bits import content_hash, fold
from .recipe import Recipe


def grouped_linear(
    x: jax.Array,
    kernel: jax.Array,
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    *,
    recipe: Recipe,
    key: jax.Array | None = None,
    content_seeded: bool = False,
) -> jax.Array:
    """Each tile of rows times its expert's kernel, with the recipe's rounding in all three GEMMs.

    x: [tiles, rows, K], rows a multiple of 16, rows without a token zero; kernel: [experts, K, *N];
    tile_expert: int32 [tiles], ascending; num_tiles: int32 scalar, how many tiles hold tokens (the
    others give 0 and cost nothing). Returns [tiles, rows, *N] in x's dtype. key, content_seeded:
    see `linear`.

    Raises ValueError for shapes that do not fit.
    """
    if x.ndim != 3 or kernel.ndim < 3 or x.shape[-1] != kernel.shape[1] or x.shape[1] % BLOCK:
        raise ValueError(
            f"grouped_linear needs x [tiles, rows, K] with rows a multiple of {BLOCK} and kernel "
            f"[experts, K, N], got {x.shape} and {kernel.shape}"
        )
    check_operands(recipe, x, kernel.shape[1], kernel.shape[-1])
    words = rounding_words(recipe, key, content_seeded)
    return _grouped(recipe, content_seeded, x, kernel, tile_expert, num_tiles, words)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped(recipe, content_seeded, x, kernel, tile_expert, num_tiles, words):
    return backend.fprop(recipe, x, kernel, tile_expert, num_tiles)[0]


def _grouped_forward(recipe, content_seeded, x, kernel, tile_expert, num_tiles, words):
    y, residuals = backend.forward(recipe, x, kernel, tile_expert, num_tiles, words)
    # Empty arrays carry the dtypes through the residuals, which hold arrays only.
    return y, (
        residuals,
        tile_expert,
        num_tiles,
        words,
        jnp.zeros(0, x.dtype),
        jnp.zeros(0, kernel.dtype),
    )


def _grouped_backward(recipe, content_seeded, saved, g):
    residuals, tile_expert, num_tiles, words, x_like, kernel_like = saved
    if content_seeded and recipe.uses_stochastic_rounding:
        words = fold(words, content_hash(g))
    dtypes = (x_like.dtype, kernel_like.dtype)
    dx, dw = backend.backward(recipe, residuals, g, tile_expert, num_tiles, words, dtypes)
    no_gradient = [
        np.zeros(leaf.shape, jax.dtypes.float0) for leaf in (tile_expert, num_tiles, words)
    ]
    return dx, dw, *no_gradient


_grouped.defvjp(_grouped_forward, _grouped_backward)
