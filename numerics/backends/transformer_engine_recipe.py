"""What Transformer Engine for JAX can be asked for; importing this does not import it."""

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import warnings

from ..recipe import Recipe, nvfp4_recipe

TESTED_VERSION = "2.20.2"
REMEDY = "docs/blackwell.md says how to install it; or use backend=xla"
_NEEDED = ("QuantizeMeta", "QuantizeMetaSet", "QuantizerFactory")


@functools.cache
def installation_fault() -> str | None:
    """Why it cannot be imported; None if it can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return f"Transformer Engine is not installed: {REMEDY}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it does not find; the error below says it
            quantize = importlib.import_module("transformer_engine.jax.quantize")
    except Exception as error:  # its loader raises whatever the libraries that it misses raise
        return f"Transformer Engine does not import ({_first_line(error)}): {REMEDY}"
    if missing := [name for name in _NEEDED if not hasattr(quantize, name)]:
        return (
            f"Transformer Engine {importlib.metadata.version('transformer_engine')} has no "
            f"{missing[0]} for JAX, which {TESTED_VERSION} has: {REMEDY}"
        )
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def recipe_fault(recipe: Recipe) -> str | None:
    """Which operand of the recipe it would ignore; None if it honours all of them.

    Its NVFP4 recipe can leave out the Hadamard transform, stochastic rounding and 2D weights,
    and nothing else: other fields of its recipe class are ignored without a word.
    """
    if as_options(recipe) is not None:
        return None
    closest = nvfp4_recipe()
    for operand in ("fprop_x", "fprop_w", "dgrad_g", "dgrad_w", "wgrad_x", "wgrad_g"):
        if getattr(recipe, operand) != getattr(closest, operand):
            return (
                f"Transformer Engine has no {operand} as in recipe {recipe.name!r}, only those of "
                "recipe nvfp4 without some of its parts: use backend=xla or emulated"
            )
    raise AssertionError(recipe)


def as_options(recipe: Recipe) -> dict[str, bool] | None:
    """The recipe as arguments of `nvfp4_recipe`; None for one that it cannot make."""
    names = ("hadamard", "stochastic_rounding", "two_dimensional_weights")
    for values in itertools.product((True, False), repeat=3):
        options: dict[str, bool] = dict(zip(names, values, strict=True))
        if nvfp4_recipe(**options).operands == recipe.operands:
            return options
    return None


def multiple_of(recipe: Recipe) -> int:
    """What features must be multiples of: its Hadamard kernel has tiles, cuBLAS aligned rows."""
    return 128 if recipe.wgrad_x.hadamard else 32
