"""A linear layer's three GEMMs under one custom VJP.

    fprop  y  = x  w      x: 1D along K, nearest             w: 2D, nearest
    dgrad  dx = g  w^T    g: 1D along N, stochastic          the same quantised w
    wgrad  dw = x^T g     both: RHT, then 1D along tokens; g stochastic

(arXiv 2509.25149; other recipes fill in the six operands differently.) The quantised operands of
the backward GEMMs are residuals: saved, not computed again.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..errors import check_choice
from .backends import BACKENDS, DENSE_BACKENDS
from .backends.emulated import gather_tokens
from .backends.operands import GEMM_NAME, LogicalAxes, Signature, saved_as
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
    backend: str = "emulated",
    kernel_axes: LogicalAxes = None,
) -> jax.Array:
    """y = x w with the recipe's rounding in all three GEMMs.

    x: [..., K]; kernel: [K, *N], float32 for float32 gradients. Returns [..., *N] in `output_dtype`
    (None: x's dtype).
    key: a JAX PRNG key that decides the stochastic rounding of this call's gradients. With
    content_seeded=True the incoming gradient's own bits are mixed in, so that calls that share a
    key (a layer whose key is not advanced, or no key at all) still draw different bits for
    different gradients. precision: of the float32 recipe's matmul, as in `jax.lax.dot_general`;
    None is full float32, which a GPU's own default (TF32) is not.
    backend: where an FP4 recipe's GEMMs run, a name in BACKENDS; `choose_backend` knows what this
    device can. kernel_axes: logical names of the kernel's dimensions (numerics/partitioning.py), so
    that what a mesh moves of it is FP4.

    Raises ValueError for operands that do not fit, for an unknown backend, and when the recipe
    rounds stochastically but neither key nor content_seeded is given.
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
        if precision is None:
            precision = jax.lax.Precision.HIGHEST
        x = gather_tokens(x, kernel_axes and kernel_axes[:1])
        return jax.lax.dot_general(
            x, kernel, axes, precision=precision, preferred_element_type=jnp.float32
        ).astype(dtype)
    words = rounding_words(recipe, key, content_seeded)
    call = Call(recipe, check_backend(recipe, backend), content_seeded, kernel_axes, dtype)
    return _linear(call, x, kernel, words)


class Call(NamedTuple):
    """The static arguments of a call. Hashable."""

    recipe: Recipe
    backend: str
    content_seeded: bool
    kernel_axes: LogicalAxes
    dtype: jnp.dtype  # of y


def check_backend(recipe: Recipe, backend: str) -> str:
    """The backend's name; that of ordinary products for a recipe without FP4."""
    check_choice("backend", backend, BACKENDS)
    return backend if recipe.uses_fp4 else "emulated"


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(call: Call, x: jax.Array, kernel: jax.Array, words: jax.Array) -> jax.Array:
    gemms = DENSE_BACKENDS[call.backend]
    return gemms.fprop(call.recipe, x, kernel, call.kernel_axes).astype(call.dtype)


def _linear_forward(call, x, kernel, words):
    gemms = DENSE_BACKENDS[call.backend]
    y, residuals = gemms.forward(call.recipe, x, kernel, words, call.kernel_axes)
    y = saved_as(GEMM_NAME, y.astype(call.dtype))
    return y, (residuals, words, Signature.of(x, kernel))


def _linear_backward(call, saved, g):
    residuals, words, signature = saved
    gemms = DENSE_BACKENDS[call.backend]
    key = backward_words(call, words, g)
    dx, dw = gemms.backward(call.recipe, residuals, g, key, signature, call.kernel_axes)
    return dx, dw, np.zeros(words.shape, jax.dtypes.float0)


def backward_words(
    call: Call,
    words: jax.Array,
    g: jax.Array,
    whole_hash: Callable[[jax.Array], jax.Array] = lambda part: part,
) -> jax.Array:
    """The rounding key of the backward pass. whole_hash: of g from that of this device's part."""
    if call.content_seeded and call.recipe.uses_stochastic_rounding:
        return fold(words, whole_hash(content_hash(g)))
    return words


_linear.defvjp(_linear_forward, _linear_backward)
