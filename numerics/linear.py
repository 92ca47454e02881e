"""A linear layer's three GEMMs under one custom VJP.

    fprop  y  = x  w      x: 1D along K, nearest             w: 2D, nearest
    dgrad  dx = g  w^T    g: 1D along N, stochastic          the same quantised w
    wgrad  dw = x^T g     both: RHT, then 1D along tokens; g stochastic

(arXiv 2509.25149; other recipes fill in the six operands differently.) The quantised operands of
the backward GEMMs are residuals: saved, not computed again.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from .backends import emulated as backend
from .backends.operands import GEMM_NAME
from .formats import BLOCK
from .random_bits import content_hash, fold, key_words
from .recipe import Recipe


def linear(
    x: jax.Array,
    kernel: jax.Array,
    *,
    recipe: Recipe,
    key: jax.Array | None = None,
    content_seeded: bool = False,
    precision: jax.lax.PrecisionLike = None,
    output_dtype: DTypeLike | None = None,
) -> jax.Array:
    """y = x w with the recipe's rounding in all three GEMMs.

    x: [..., K]; kernel: [K, *N], float32 for float32 gradients. Returns [..., *N] in `output_dtype`
    (None: x's dtype).
    key: a JAX PRNG key that decides the stochastic rounding of this call's gradients. With
    content_seeded=True the incoming gradient's own bits are mixed in, so that calls that share a
    key (a layer whose key is not advanced, or no key at all) still draw different bits for
    different gradients. precision: of the float32 recipe's matmul, as in `jax.lax.dot_general`.

    Raises ValueError for operands that do not fit, and when the recipe rounds stochastically but
    neither key nor content_seeded is given.
    """
    if kernel.ndim < 2 or x.ndim < 1 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"linear needs x [..., K] and kernel [K, N], got {x.shape} and {kernel.shape}: the "
            "last axis of x must equal the first of the kernel"
        )
    check_operands(recipe, x, kernel.shape[0], kernel.shape[-1])
    dtype = x.dtype if output_dtype is None else jnp.dtype(output_dtype)
    if recipe.is_float32:
        axes = (((x.ndim - 1,), (0,)), ((), ()))
        return jax.lax.dot_general(
            x, kernel, axes, precision=precision, preferred_element_type=jnp.float32
        ).astype(dtype)
    words = rounding_words(recipe, key, content_seeded)
    return _linear(recipe, content_seeded, dtype, x, kernel, words)


def check_operands(recipe: Recipe, x: jax.Array, in_features: int, out_features: int) -> None:
    """Raises ValueError for an x that is not float and for lengths that blocks do not divide."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"a linear layer needs a float x, got {x.dtype}: cast it first")
    if recipe.uses_fp4 and (in_features % BLOCK or out_features % BLOCK):
        raise ValueError(
            f"recipe {recipe.name!r} needs multiples of {BLOCK}, got {in_features} features in and "
            f'{out_features} out: pad them, or use recipe "bf16"'
        )


def rounding_words(recipe: Recipe, key: jax.Array | None, content_seeded: bool) -> jax.Array:
    """uint32 [2] from the key of a call. Raises ValueError when one is needed and there is none."""
    if recipe.uses_stochastic_rounding and key is None and not content_seeded:
        raise ValueError(
            f"recipe {recipe.name!r} rounds gradients stochastically: pass key= or "
            "content_seeded=True"
        )
    return jnp.zeros(2, jnp.uint32) if key is None else key_words(key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _linear(
    recipe: Recipe,
    content_seeded: bool,
    dtype: jnp.dtype,
    x: jax.Array,
    kernel: jax.Array,
    words: jax.Array,
) -> jax.Array:
    return backend.fprop(recipe, x, kernel)[0].astype(dtype)


def _linear_forward(recipe, content_seeded, dtype, x, kernel, words):
    y, residuals = backend.forward(recipe, x, kernel, words)
    y = checkpoint_name(y.astype(dtype), GEMM_NAME)
    # Empty arrays carry the dtypes through the residuals, which hold arrays only.
    return y, (residuals, words, jnp.zeros(0, x.dtype), jnp.zeros(0, kernel.dtype))


def _linear_backward(recipe, content_seeded, dtype, saved, g):
    residuals, words, x_like, kernel_like = saved
    if content_seeded and recipe.uses_stochastic_rounding:
        words = fold(words, content_hash(g))
    dx, dw = backend.backward(recipe, residuals, g, words, (x_like.dtype, kernel_like.dtype))
    return dx, dw, np.zeros(words.shape, jax.dtypes.float0)


_linear.defvjp(_linear_forward, _linear_backward)
