"""Swap the `nnx.Linear` leaves of any NNX model for NVFP4Dense."""

import re
from typing import Any, Literal, TypeVar

import jax
from flax import nnx
from flax.nnx.nn import dtypes

from ..numerics import Recipe, get_recipe
from .dense import NVFP4Dense
from .rounding import RoundingStream

Model = TypeVar("Model", bound=nnx.Module)
# What an nnx.Linear can replace of its own matmul, and NVFP4Dense cannot.
_LINEAR_DEFAULTS = {
    "dot_general": jax.lax.dot_general,
    "promote_dtype": dtypes.promote_dtype,
    "preferred_element_type": None,
}


def quantize_model(
    model: Model,
    recipe: str | Recipe = "nvfp4",
    *,
    include: str = r".*",
    exclude: str | None = None,
    on_unsupported: Literal["error", "bf16"] = "error",
    backend: str = "auto",
    rngs: nnx.Rngs | None = None,
) -> Model:
    """Replace, in place, every `nnx.Linear` whose name matches; return the model.

    A layer's name is its path, e.g. "blocks.0.mlp.up". `include` and `exclude` are regular
    expressions that must match the whole name. The parameters stay the very same variables, so an
    optimizer made before keeps working. Leave embeddings, the output head and routers out: they
    need high precision (arXiv 2509.25149).
    on_unsupported: for a layer that the backend cannot run in FP4 (such as dimensions that 16 does
    not divide), raise or run it in bf16 (logged). backend: see NVFP4Dense.
    rngs: seeds the stochastic rounding; nnx.Rngs(0) when absent.

    Raises TypeError for what is no NNX module; ValueError for a pattern that is no regular
    expression, when nothing matches, when a layer's dimensions do not fit the recipe's
    blocks, for an `nnx.Linear` with a `dot_general`, `promote_dtype` or `preferred_element_type` of
    its own, and for one in a container whose entries cannot be replaced.
    """
    recipe = get_recipe(recipe)
    if not isinstance(model, nnx.Pytree):
        raise TypeError(f"quantize_model needs an nnx.Module, got {type(model).__name__}")
    for argument, pattern in (("include", include), ("exclude", exclude)):
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{argument}={pattern!r} is no regular expression: {error}") from None
    rngs = nnx.Rngs(0) if rngs is None else rngs
    linears = {path: node for path, node in nnx.iter_graph(model) if type(node) is nnx.Linear}
    chosen = [path for path in linears if _matches(_name(path), include, exclude)]
    if not chosen:
        names = ", ".join(_name(path) for path in linears) or "none"
        raise ValueError(
            f"no nnx.Linear matches include={include!r}, exclude={exclude!r}: the model's linear "
            f"layers are {names}"
        )
    layers = {
        id(linears[path]): _convert(
            linears[path], recipe, _name(path), on_unsupported, backend, rngs
        )
        for path in chosen
    }
    swapped = _swap(model, layers, visited=set())
    left = [path for path, node in nnx.iter_graph(swapped) if id(node) in layers]
    if left:
        names = ", ".join(map(_name, left))
        raise ValueError(
            f"cannot swap {names}: it stands in a container that is neither module, list, dict nor "
            "tuple; exclude it"
        )
    return swapped


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path)


def _matches(name: str, include: str, exclude: str | None) -> bool:
    return re.fullmatch(include, name) is not None and (
        exclude is None or re.fullmatch(exclude, name) is None
    )


def _convert(
    linear: nnx.Linear,
    recipe: Recipe,
    name: str,
    on_unsupported: Literal["error", "bf16"],
    backend: str,
    rngs: nnx.Rngs,
) -> NVFP4Dense:
    """An NVFP4Dense that holds the very variables of `linear`, with stacked ones (nnx.vmap) too."""
    for option, default in _LINEAR_DEFAULTS.items():
        if getattr(linear, option) is not default:
            raise ValueError(
                f"{name}: an nnx.Linear with its own {option} cannot be swapped: exclude it"
            )

    def create() -> NVFP4Dense:
        return NVFP4Dense(
            linear.in_features,
            linear.out_features,
            use_bias=linear.use_bias,
            dtype=linear.dtype,
            param_dtype=linear.param_dtype,
            precision=linear.precision,
            recipe=recipe,
            rounding="explicit",
            on_unsupported=on_unsupported,
            backend=backend,
            name=name,
            rngs=nnx.Rngs(0),
        )

    dense = nnx.eval_shape(create)  # no memory for parameters that are replaced at once
    dense.kernel, dense.bias = linear.kernel, linear.bias
    if dense.recipe.uses_stochastic_rounding:
        stream = RoundingStream(rngs.stochastic_rounding(), stacked=linear.kernel.shape[:-2])
        dense.rounding = nnx.data(stream)
    return dense


def _swap(node: Any, layers: dict[int, NVFP4Dense], visited: set[int]) -> Any:
    """`node`, or what stands for it. Walks modules and plain containers, every reference."""
    if id(node) in layers:
        return layers[id(node)]
    if isinstance(node, dict | list):
        for key in node if isinstance(node, dict) else range(len(node)):
            node[key] = _swap(node[key], layers, visited)
    elif isinstance(node, tuple) and type(node) is tuple:
        swapped = [_swap(child, layers, visited) for child in node]
        return node if all(a is b for a, b in zip(swapped, node, strict=True)) else tuple(swapped)
    elif isinstance(node, nnx.Pytree) and id(node) not in visited:
        visited.add(id(node))
        for key, child in list(vars(node).items()):
            new = _swap(child, layers, visited)
            if new is not child:
                setattr(node, key, new)
    return node
