"""Which backend a layer's FP4 GEMMs run on, by what the device can do, and why not another.

FP4 tensor cores that train exist in compute capability 10.0 (B200, GB200) and 10.3 (B300, GB300).
Consumer Blackwell (12.0) has FP4 products but not the instructions around them that both hardware
backends compile to: XLA 0.12 ends in a fatal compiler error there.
"""

from typing import Any, NamedTuple

from ...errors import UserError, check_choice
from ..formats import BLOCK, Format
from ..platform import DeviceKind, target_device
from ..recipe import Recipe
from .transformer_engine_recipe import installation_fault, multiple_of, recipe_fault

AUTO = "auto"
CAPABILITIES = ("10.0", "10.3")
_CAPABLE = f"compute capability {' or '.join(CAPABILITIES)} (B200, GB200, B300, GB300)"
_CONSUMER = ("12.0", "12.1")
NAMES = ("emulated", "xla", "transformer_engine")
_ALIGNMENT = 32  # rows of packed codes start at multiples of 16 bytes for tensor cores


class Choice(NamedTuple):
    """A backend, and why it is the one."""

    name: str
    reason: str


class LinearSizes(NamedTuple):
    """What a backend needs to know of a layer."""

    in_features: int
    out_features: int  # of all output axes together
    in_tiles: bool = False  # experts whose rows come in tiles: a dropless mixture
    experts: int = 1


def choose_backend(
    name: str, recipe: Recipe, device: Any = None, sizes: LinearSizes | None = None
) -> Choice:
    """The backend `name`, or for "auto" the first that can run the recipe on the device.

    device: what the program is made for, an object with platform, device_kind and, for NVIDIA,
    compute_capability (None: the target of `compiling_for`, or JAX's first device). sizes: of one
    layer, when they are known.

    Raises UserError, with the remedy, for an unknown name and for a backend that cannot run the
    recipe or the sizes, or not on the device.
    """
    check_choice("backend", name, (AUTO, *NAMES))
    device = target_device() if device is None else DeviceKind.of(device)
    if not recipe.uses_fp4:
        return Choice("emulated", f"recipe {recipe.name} has no FP4 products")
    if name != AUTO:
        if fault := _fault(name, recipe, device, sizes):
            raise UserError(f"backend={name}: {fault}")
        return Choice(name, "as configured")
    if fault := _device_fault(device):
        return Choice("emulated", fault)
    refusals = []
    for candidate in ("transformer_engine", "xla"):
        fault = _fault(candidate, recipe, device, sizes)
        if fault is None and candidate == "transformer_engine" and sizes and sizes.experts > 1:
            fault = "it multiplies experts one after the other, xla all at once"
        if fault:
            refusals.append(f"not {candidate}: {fault}")
        else:
            return Choice(candidate, "; ".join([f"{device} has FP4 tensor cores", *refusals]))
    return Choice("emulated", "; ".join(refusals))


def _fault(name: str, recipe: Recipe, device: DeviceKind, sizes: LinearSizes | None) -> str | None:
    """What this backend cannot run, with the remedy; None if it can."""
    if name == "emulated":
        return _size_fault(name, sizes, BLOCK)
    # On a CPU the program of xla dequantises: for comparing.
    if not (name == "xla" and device.platform == "cpu") and (fault := _device_fault(device)):
        return f"{fault}; backend=emulated computes the same numbers anywhere"
    if name == "xla":
        return _mixed_products(recipe) or _size_fault(name, sizes, _ALIGNMENT)
    return (
        installation_fault()
        or recipe_fault(recipe)
        or _size_fault(name, sizes, multiple_of(recipe))
    )


def _device_fault(device: DeviceKind) -> str | None:
    capability = device.compute_capability
    if device.platform == "gpu" and capability in CAPABILITIES:
        return None
    if capability is None:
        fault = f"{device} has no FP4 tensor cores"
    elif capability in _CONSUMER:
        fault = (
            f"{device} is consumer Blackwell (compute capability {capability}): training in FP4 "
            f"needs instructions that only {_CAPABLE} has"
        )
    else:
        fault = f"{device} has compute capability {capability} and FP4 products need {_CAPABLE}"
    return fault


def _mixed_products(recipe: Recipe) -> str | None:
    for left, right in (("fprop_x", "fprop_w"), ("dgrad_g", "dgrad_w"), ("wgrad_x", "wgrad_g")):
        formats = [getattr(recipe, operand).format for operand in (left, right)]
        if formats.count(Format.NVFP4) == 1:
            return (
                f"recipe {recipe.name!r} has {left} in {formats[0].value} and {right} in "
                f"{formats[1].value}, and tensor cores multiply FP4 with FP4: use backend=emulated"
            )
    return None


def _size_fault(name: str, sizes: LinearSizes | None, multiple: int) -> str | None:
    if sizes is None:
        return None
    if sizes.in_tiles and name != "emulated":
        return (
            "experts without a capacity have rows in tiles, and this backend multiplies equal "
            "numbers of rows: set model.moe.capacity_factor (such as 1.25), or backend=emulated"
        )
    for dimension in ("in_features", "out_features"):
        size = getattr(sizes, dimension)
        if size % multiple:
            return (
                f"{dimension}={size} is not a multiple of {multiple}: use {size + -size % multiple}"
                f", {'recipe bf16' if name == 'emulated' else 'backend=emulated'}, or "
                "on_unsupported=bf16"
            )
    return None
