"""The linear layer of a mixture's experts: one GEMM an expert, rows in tiles of one expert."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .backends import GROUPED_BACKENDS
from .backends.operands import GEMM_NAME, LogicalAxes, Shard, Signature, Tiles, saved_as
from .formats import BLOCK
from .linear import Call, backward_words, check_backend, check_operands, rounding_words
from .recipe import Recipe


def grouped_linear(
    x: jax.Array,
    kernel: jax.Array,
    tile_expert: jax.Array | None = None,
    num_tiles: jax.Array | None = None,
    *,
    row_ids: jax.Array | None = None,
    shard: Shard = Shard(),  # noqa: B008  frozen
    recipe: Recipe,
    key: jax.Array | None = None,
    content_seeded: bool = False,
    backend: str = "emulated",
    kernel_axes: LogicalAxes = None,
) -> jax.Array:
    """Each tile of rows times its expert's kernel, with the recipe's rounding in all three GEMMs.

    x: [tiles, rows, K], rows a multiple of 16, rows without a token zero; kernel: [experts, K, *N];
    tile_expert: int32 [tiles], the number of experts for a tile without tokens; num_tiles: int32
    scalar, tiles from there on have none either (they give 0 and cost nothing). Without these two x
    is [experts, rows, K]. Returns [tiles, rows, *N] in x's dtype, in float32 where
    it is an addend (shard.in_features).

    row_ids: uint32 [tiles, rows], by which stochastic rounding knows a row wherever it stands.
    shard: the mesh axes of an enclosing `jax.shard_map`; see there what comes back. key,
    content_seeded, backend, kernel_axes: see `linear`.

    Raises ValueError for shapes that do not fit, and for tiles where the backend has none.
    """
    in_parts = shard.storage is not None and shard.storage[1] == 1
    fits = kernel.ndim >= 3 and (in_parts or x.shape[-1] == kernel.shape[1])
    if x.ndim != 3 or not fits or x.shape[1] % BLOCK:
        raise ValueError(
            f"grouped_linear needs x [tiles, rows, K] with rows a multiple of {BLOCK} and kernel "
            f"[experts, K, N], got {x.shape} and {kernel.shape}"
        )
    if tile_expert is None and x.shape[0] != kernel.shape[0]:
        raise ValueError(
            f"grouped_linear without tile_expert needs x [experts, rows, K], got {x.shape} for "
            f"{kernel.shape[0]} experts"
        )
    check_operands(recipe, x, kernel.shape[1], kernel.shape[-1])
    words = rounding_words(recipe, key, content_seeded)
    if recipe.dgrad_w.stochastic and shard != Shard():
        raise ValueError(
            f"recipe {recipe.name!r} rounds weights stochastically, whose bits would depend on the "
            "mesh here: give the mixture a capacity_factor, or a recipe that does not"
        )
    if tile_expert is not None and num_tiles is not None:
        holds_tokens = jnp.arange(x.shape[0]) < num_tiles
        tile_expert = jnp.where(holds_tokens, tile_expert, kernel.shape[0])
    tiles = Tiles(tile_expert, row_ids, shard)
    backend = check_backend(recipe, backend)
    call = Call(recipe, backend, content_seeded, kernel_axes, jnp.dtype(x.dtype))
    return _grouped(call, x, kernel, tiles, words)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    call: Call, x: jax.Array, kernel: jax.Array, tiles: Tiles, words: jax.Array
) -> jax.Array:
    gemms = GROUPED_BACKENDS[call.backend]
    return gemms.fprop(call.recipe, x, kernel, tiles, call.kernel_axes)


def _grouped_forward(call, x, kernel, tiles, words):
    gemms = GROUPED_BACKENDS[call.backend]
    y, residuals = gemms.forward(call.recipe, x, kernel, tiles, words, call.kernel_axes)
    y = saved_as(GEMM_NAME, y)
    return y, (residuals, tiles, words, Signature.of(x, kernel))


def _grouped_backward(call, saved, g):
    residuals, tiles, words, signature = saved
    gemms = GROUPED_BACKENDS[call.backend]
    key = backward_words(call, words, g, tiles.shard.whole_hash)
    dx, dw = gemms.backward(call.recipe, residuals, g, tiles, key, signature, call.kernel_axes)
    return dx, dw, *jax.tree.map(_no_gradient, (tiles, words))


def _no_gradient(leaf: jax.Array) -> np.ndarray:
    return np.zeros(leaf.shape, jax.dtypes.float0)


_grouped.defvjp(_grouped_forward, _grouped_backward)
