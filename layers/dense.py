"""NVFP4Dense: `nnx.Linear` whose three GEMMs follow a precision recipe."""

import logging
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ..errors import UserError, check_sizes
from ..numerics import LinearSizes, Recipe, choose_backend, get_recipe, linear
from ..numerics.backends import AUTO
from ..numerics.formats import BLOCK
from .rounding import RoundingStream

logger = logging.getLogger("fp4zoo")
Initializer = jax.nn.initializers.Initializer
_default_kernel_init = nnx.initializers.lecun_normal()
_default_bias_init = nnx.initializers.zeros_init()


class NVFP4Dense(nnx.Module):
    """y = x @ kernel + bias, its forward and backward GEMMs in the recipe's precision.

    A drop-in for `flax.nnx.Linear`: its arguments (but those that replace its matmul) plus
    `recipe`, the same `kernel` and `bias`, the same initial values from a seed. The master weight
    and its gradient are float32 (`param_dtype`); blocks of 16 run along the contracted axis of each
    GEMM, so `in_features` and the last of `out_features` are multiples of 16 for an FP4 recipe.

    kernel: [in_features, *out_features]; bias: [*out_features] or None.
    Source of the recipe: arXiv 2509.25149.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        kernel_init: Initializer = _default_kernel_init,
        bias_init: Initializer = _default_bias_init,
        recipe: str | Recipe = "nvfp4",
        rounding: Literal["stream", "explicit"] = "stream",
        on_unsupported: Literal["error", "bf16"] = "error",
        backend: str = "auto",
        kernel_axes: tuple[str | None, ...] | None = None,
        name: str = "NVFP4Dense",
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ):
        """
        in_features: length of x's last axis. out_features: an int, or several axes of one fused
        product.
        dtype: dtype of the output and of the activations (None: x's own). param_dtype: of the
        master weights.
        precision: of the float32 matmul of recipe "fp32"; the other recipes say themselves what
        they compute.
        recipe: a name or a `Recipe`. name: what error messages call the layer.
        rounding: "stream" keeps a random stream in the layer, advanced by each call under NNX
        transforms (like `nnx.Dropout`); "explicit" keeps none: pass `rounding_key` to the calls
        that are differentiated.

        on_unsupported: what to do when an FP4 recipe meets a dimension that is not a multiple of
        16: raise ValueError, or log a line and run this layer in bf16.

        Raises ValueError for sizes that are not positive integers.
        """
        self.in_features = in_features
        self.out_features = (
            tuple(out_features) if isinstance(out_features, Sequence) else (out_features,)
        )
        check_sizes(name, in_features=in_features)
        for size in self.out_features:
            check_sizes(name, out_features=size)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.name = name
        self.kernel_axes = kernel_axes
        self.recipe, self.backend = resolve_recipe(
            recipe,
            name,
            on_unsupported,
            backend,
            LinearSizes(in_features, math.prod(self.out_features)),
            in_features=in_features,
            out_features=self.out_features[-1],
        )
        kernel = kernel_init(
            rngs.params(), (in_features, math.prod(self.out_features)), param_dtype
        )
        self.kernel = nnx.Param(kernel.reshape(in_features, *self.out_features), **kernel_metadata)
        bias = (
            nnx.Param(bias_init(rngs.params(), self.out_features, param_dtype), **bias_metadata)
            if use_bias
            else None
        )
        self.bias: nnx.Param | None = nnx.data(bias)
        self.rounding = nnx.data(RoundingStream.create(rounding, self.recipe, rngs))

    def __call__(self, x: jax.Array, *, rounding_key: jax.Array | None = None) -> jax.Array:
        """x: [..., in_features] -> [..., *out_features].

        rounding_key: a JAX PRNG key for the stochastic rounding of this call's gradients; without
        it the layer's stream gives one.
        """
        x = x if self.dtype is None else x.astype(self.dtype)
        key, content_seeded = (
            self.rounding.draw(rounding_key)
            if self.rounding
            else (rounding_key, rounding_key is None)
        )
        y = linear(
            x,
            self.kernel[...],
            recipe=self.recipe,
            key=key,
            content_seeded=content_seeded,
            precision=self.precision,
            backend=self.backend,
            kernel_axes=self.kernel_axes,
        )
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


def resolve_recipe(
    recipe: str | Recipe,
    name: str,
    on_unsupported: Literal["error", "bf16"],
    backend: str,
    sizes: LinearSizes,
    **dimensions: int,
) -> tuple[Recipe, str]:
    """The recipe that a layer runs, and the backend that runs it on this device.

    dimensions: those that blocks of 16 lie along, by the names of the layer's arguments. sizes: for
    `choose_backend`.

    Raises UserError that names the layer, or logs a line and returns "bf16", as configured.
    """
    recipe = get_recipe(recipe)
    if on_unsupported not in ("error", "bf16"):
        raise UserError(f'on_unsupported={on_unsupported!r}: use "error" or "bf16"')
    fault, remedy = "", ""
    for dimension, value in dimensions.items():
        if recipe.uses_fp4 and value % BLOCK:
            fault = (
                f"{name}: {dimension}={value} is not a multiple of {BLOCK}, which recipe "
                f"{recipe.name!r} needs"
            )
            remedy = (
                f'use {value + -value % BLOCK}, leave the layer in recipe="bf16", or '
                'on_unsupported="bf16"'
            )
            break
    else:
        try:
            return recipe, choose_backend(backend, recipe, sizes=sizes).name
        except UserError as error:
            if on_unsupported == "error":
                raise UserError(f"{name}: {error}") from None
            fault = f"{name}: {error}"
    if on_unsupported == "error":
        raise UserError(f"{fault}: {remedy}")
    logger.warning("%s: this layer runs in bf16", fault)
    recipe = get_recipe("bf16")
    return recipe, choose_backend(AUTO, recipe).name
