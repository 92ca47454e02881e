"""The three GEMMs of a linear layer through Transformer Engine's `dense`, which rounds by itself.

Its recipe is ours (`transformer_engine_recipe.py`), so codes, scales and amax are the emulation's
but for what its kernels do in their own way: activations and gradients are rounded to bfloat16
first, the weight's gradient comes back in bfloat16, stochastic rounding has a state for every
device, and on a mesh the amax of activations and gradients is that of a device's part.

`dense` has its own VJP: what `forward` keeps for `backward` is the pullback of it.

Legend: M tokens, K in features, N out features; x [..., K], kernel [K, *N], g [..., *N].
"""

import contextlib
import dataclasses
import functools
import importlib
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import UserError
from ..formats import BLOCK
from ..partitioning import MESH_AXES, STORAGE_AXES, constrain, dividing_axes, mesh_axis_sizes
from ..random_bits import fold, random_bits
from ..recipe import Recipe
from .emulated import token_axes
from .operands import QUANTIZED_NAME, WGRAD_SALT, LogicalAxes, Signature
from .placement import Placement
from .transformer_engine_recipe import as_options, multiple_of

_ROWS = 64  # of a device, a multiple of this: tokens are padded with zeros, which is exact
Product = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]


def fprop(
    recipe: Recipe, x: jax.Array, kernel: jax.Array, kernel_axes: LogicalAxes = None
) -> jax.Array:
    """y = x w in bfloat16. x: [..., K], kernel: [K, *N] -> [..., *N]."""
    return _dense(recipe, kernel_axes, x, kernel, None)


def forward(
    recipe: Recipe,
    x: jax.Array,
    kernel: jax.Array,
    words: jax.Array,
    kernel_axes: LogicalAxes = None,
) -> tuple[jax.Array, Any]:
    """fprop, and its pullback. words: uint32 [2], the call's rounding key."""
    product = functools.partial(_dense, recipe, kernel_axes)
    return with_pullback(recipe, product, x, kernel, words)


def backward(
    recipe: Recipe,
    residuals: Any,
    g: jax.Array,
    words: jax.Array,
    signature: Signature,
    kernel_axes: LogicalAxes = None,
) -> tuple[jax.Array, jax.Array]:
    """(dx, dw) like x and the kernel. g: [..., *N]."""
    dx, dw = pull_back(recipe, residuals, g, words)
    dw = dw if kernel_axes is None else constrain(dw, *kernel_axes)
    return dx, dw.astype(signature.kernel.dtype)


def with_pullback(
    recipe: Recipe, product: Product, x: jax.Array, kernel: jax.Array, words: jax.Array
) -> tuple[jax.Array, Any]:
    """What `jax.vjp` makes of product(x, kernel, rounding state)."""
    return jax.vjp(product, x, kernel, _rounding_state(recipe, words))


def pull_back(
    recipe: Recipe, pullback: Any, g: jax.Array, words: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(dx, dw) of g, whose codes are rounded with these words: they may depend on g."""
    if recipe.uses_stochastic_rounding:
        x, kernel, state = pullback.args_res  # arguments that are residuals as they are
        assert jax.tree.leaves(state), "jax.vjp no longer tells that the state is one of them"
        state = _rounding_state(recipe, words)
        pullback = dataclasses.replace(pullback, args_res=[x, kernel, state])
    dx, dw, _ = pullback(g.astype(jnp.bfloat16))
    return dx, dw


def multiply(
    recipe: Recipe,
    kernel_axes: LogicalAxes,
    rows_axis: str,
    x: jax.Array,
    kernel: jax.Array,
    state: jax.Array | None,
) -> jax.Array:
    """y bfloat16 [M, *N] of x [M, K]. rows_axis: the logical axis of M, if the kernel has some."""
    x, kernel = x.astype(jnp.bfloat16), jnp.asarray(kernel)
    num_rows, sizes = x.shape[0], mesh_axis_sizes()
    num_parts = 1
    whole: LogicalAxes = None
    if kernel_axes is not None and sizes:
        # Its rules gather what a product needs whole: not codes of parts with an amax each.
        whole = tuple(None if axis in STORAGE_AXES else axis for axis in kernel_axes)
        _check_parts(recipe, kernel.shape, kernel_axes, whole, sizes)
        num_parts = _parts(rows_axis, num_rows, sizes)
        x = constrain(x, rows_axis, whole[0])
    _announce_mesh(sizes)
    y = _module("jax.dense").dense(
        _pad_rows(x, num_parts),
        kernel,
        contracting_dims=((1,), (0,)),
        quantizer_set=quantizers(recipe, state),
    )
    y = y.reshape(num_parts, -1, *y.shape[1:])[:, : num_rows // num_parts]
    y = y.reshape(num_rows, *y.shape[2:])
    return y if whole is None else constrain(y, rows_axis, *whole[1:])


def quantizers(recipe: Recipe, state: jax.Array | None = None) -> Any:
    """Transformer Engine's quantizer set for a recipe that `recipe_fault` has nothing against.

    state: uint32 [devices, 4], for stochastic rounding of gradients; None: to nearest.
    """
    quantize = _module("jax.quantize")
    options = as_options(recipe)
    assert options is not None, recipe
    hadamard = options["hadamard"]
    stochastic = {} if state is None else {"stochastic_rounding_rng_state": state}
    return quantize.QuantizerFactory.create_set(
        # Every field: their defaults come from environment variables.
        fp8_recipe=_module("common.recipe").NVFP4BlockScaling(
            disable_rht=not hadamard,
            disable_stochastic_rounding=state is None,
            disable_2d_quantization=not options["two_dimensional_weights"],
            row_scaled_activation=False,
            nvfp4_4over6="none",
            backward_override=None,
        ),
        quantize_meta_set=quantize.QuantizeMetaSet(
            x=quantize.QuantizeMeta(use_rht=hadamard),
            kernel=quantize.QuantizeMeta(use_rht=False),
            grad=quantize.QuantizeMeta(use_rht=hadamard, **stochastic),
        ),
        checkpoint_name=QUANTIZED_NAME,
    )


def _module(name: str) -> Any:
    """Imported when it is used: most machines do not have it."""
    return importlib.import_module(f"transformer_engine.{name}")


def _dense(
    recipe: Recipe,
    kernel_axes: LogicalAxes,
    x: jax.Array,
    kernel: jax.Array,
    state: jax.Array | None,
) -> jax.Array:
    """y [..., *N] of x [..., K]."""
    merged = token_axes(x)[None]
    order = Placement.of(kernel_axes, merged.shape[1:-1], (1, *kernel.shape)).order
    y = multiply(
        recipe, kernel_axes, "tokens", order.merge(merged, 1, False, False)[0], kernel, state
    )
    y = order._replace(block_major=False).split(y[None], merged.shape[1:-1], kernel.shape[1:])
    return y.reshape(*x.shape[:-1], *kernel.shape[1:])


def _rounding_state(recipe: Recipe, words: jax.Array) -> jax.Array | None:
    """Its generator's state, uint32 [devices, 4]; None where nothing is rounded stochastically."""
    if not recipe.uses_stochastic_rounding:
        return None
    num_devices = int(_module("jax.sharding").get_num_devices_in_mesh())
    bits = random_bits(fold(words, WGRAD_SALT), (num_devices, 4))
    return bits >> 1  # its own are 31 bits long: halves of numbers that it reads as signed


def _pad_rows(x: jax.Array, num_parts: int) -> jax.Array:
    """[M, K] with zeros at the end of each of the equal parts of M, to multiples of `_ROWS`."""
    parts = x.reshape(num_parts, -1, x.shape[1])
    missing = -parts.shape[1] % _ROWS
    if not missing:
        return x
    return jnp.pad(parts, ((0, 0), (0, missing), (0, 0))).reshape(-1, x.shape[1])


def _parts(axis: str | None, size: int, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[name] for name in dividing_axes(axis, size, sizes))


def _check_parts(
    recipe: Recipe,
    shape: tuple[int, ...],
    kernel_axes: tuple[str | None, ...],
    whole: tuple[str | None, ...],
    sizes: Mapping[str, int],
) -> None:
    """Raises UserError where a device's part of a kernel is one that it cannot round."""
    multiple = multiple_of(recipe)
    stored = [n // _parts(axis, n, sizes) for axis, n in zip(kernel_axes, shape, strict=True)]
    used = [n // _parts(axis, n, sizes) for axis, n in zip(whole, shape, strict=True)]
    if (
        used[0] % multiple
        or math.prod(used[1:]) % multiple
        or any(stored[axis] % BLOCK for axis in (0, -1))
    ):
        mesh = ", ".join(f"mesh.{name}={size}" for name, size in sizes.items())
        raise UserError(
            f"backend=transformer_engine: {mesh} leaves a device {list(used)} of a kernel "
            f"{list(shape)} and stores {list(stored)}: features must stay multiples of {multiple}, "
            f"and of {BLOCK} where they are stored: split them less, or use backend=xla"
        )


_announced = contextlib.ExitStack()  # the mesh resource that Transformer Engine has from us


def _announce_mesh(sizes: Mapping[str, int]) -> None:
    """Tells Transformer Engine what the mesh's axes are for.

    It asks when XLA partitions the program, which is after this call: so it stays told, until
    another mesh comes.
    """
    if not sizes:
        return
    # Parts of a weight's gradient are added up in float32, as all our gradients.
    os.environ.setdefault("NVTE_JAX_ALL_REDUCE_IN_FP32", "1")

    def axis(logical_axis: str) -> str | None:
        name = MESH_AXES[logical_axis][0]
        return name if name in sizes else None

    sharding = _module("jax.sharding")
    resource = sharding.MeshResource(
        dp_resource=axis("batch"),
        fsdp_resource=axis("embed"),
        tpsp_resource=axis("mlp"),
        cp_resource=axis("sequence"),
    )
    _announced.close()
    _announced.enter_context(sharding.global_shard_guard(resource))
