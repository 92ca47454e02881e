"""The NVFP4 recipe in plain NumPy, written from its equations: what `linear` must compute.

    S_enc = min(2688 / A, FLT_MAX);  s = e4m3(min(b (S_enc / 6), 448));  r = min(S_enc / s, FLT_MAX)
    q = e2m1(clip(x r, -6, 6));  x ~ q s (A / 2688)         (arXiv 2509.25149, appendix)

Products are float64 of exact operands, so what differs from ours is float32 accumulation alone.
"""

import functools
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np

from fp4zoo.numerics import Format, Operand, Recipe
from fp4zoo.numerics.backends.operands import DGRAD_SALT, WGRAD_SALT
from fp4zoo.numerics.hadamard import MATRIX
from fp4zoo.numerics.random_bits import fold, random_bits

FLOAT32_MAX = np.finfo(np.float32).max
HIGH_PRECISION = {
    Format.BF16: ml_dtypes.bfloat16,
    Format.FP16: np.float16,
    Format.FP32: np.float32,
}


class Gemms(NamedTuple):
    y: np.ndarray  # float64 [T, N]
    dx: np.ndarray  # float64 [T, K]
    dw: np.ndarray  # float64 [K, N]


def round_stochastic(y: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """To the grid of spacing 1/2, 1 or 2 around y, shifted by the upper 16 bits."""
    spacing = 2.0 ** np.floor(np.log2(np.maximum(np.abs(y), 1))) / 2
    shift = (np.asarray(bits) >> 16).astype(np.float64) / 2**16 + 2.0**-17 - 0.5
    return np.rint(y / spacing + shift) * spacing


def quantized(x, *, two_dimensional=False, bits=None, exact=False) -> np.ndarray:
    """x as NVFP4 holds it, float64, blocks along the last axis. exact: codes not rounded."""
    x = np.asarray(x, np.float32)
    block = 16 if two_dimensional else 1
    blocks = x.reshape(x.shape[0] // block, block, x.shape[1] // 16, 16)
    amax = np.abs(x).max(initial=0)
    with np.errstate(divide="ignore", over="ignore"):
        encode = np.float32(1) if amax == 0 else min(np.float32(2688) / amax, FLOAT32_MAX)
        scale = np.abs(blocks).max(axis=(1, 3), keepdims=True) * (encode * np.float32(1 / 6))
        scale = np.minimum(scale, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        factor = np.minimum(np.float32(1) / (scale * (np.float32(1) / encode)), FLOAT32_MAX)
        scaled = np.clip(blocks * factor, -6, 6)
    if exact:
        codes = scaled
    elif bits is None:
        codes = scaled.astype(ml_dtypes.float4_e2m1fn)
    else:
        codes = round_stochastic(scaled.astype(np.float64), np.reshape(bits, blocks.shape))
    values = codes.astype(np.float64) * scale * np.float64(amax / np.float32(2688))
    return values.reshape(x.shape)


def hadamard(x: np.ndarray) -> np.ndarray:
    """Of each 16 along the last axis, summed in order in float32."""
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    total = blocks[..., :1] * MATRIX[0]
    for i in range(1, 16):
        total += blocks[..., i : i + 1] * MATRIX[i]
    return total.reshape(x.shape)


def operand(spec: Operand, x, bits=None, exact=False) -> np.ndarray:
    """A matrix as a GEMM sees it, contracted along its last axis; float64."""
    x = np.asarray(x, np.float32)
    if spec.hadamard:
        x = hadamard(x).astype(ml_dtypes.bfloat16).astype(np.float32)
    if spec.format is not Format.NVFP4:
        return x.astype(HIGH_PRECISION[spec.format]).astype(np.float64)
    stochastic = spec.stochastic
    return quantized(
        x,
        two_dimensional=spec.two_dimensional,
        bits=bits if stochastic else None,
        exact=exact and stochastic,
    )


def pad_rows(x, multiple=16) -> np.ndarray:
    x = np.asarray(x)
    return np.pad(x, ((0, -x.shape[0] % multiple), (0, 0)))


@functools.partial(jax.jit, static_argnums=1)
def gradient_bits(words, shape) -> tuple[jax.Array, jax.Array]:
    """Bits of the dgrad and the wgrad copy of g; shape: g's, [T, N]."""
    padded = (shape[0] + -shape[0] % 16, shape[1])
    return random_bits(fold(words, DGRAD_SALT), shape), random_bits(fold(words, WGRAD_SALT), padded)


def gemms(recipe: Recipe, x, w, g, bits=(None, None), exact=False) -> Gemms:
    """y = x w, dx = g w^T, dw = x^T g. x: [T, K], w: [K, N], g: [T, N], in float32.

    bits: uint32 [T, N] and [T to a multiple of 16, N]. exact: gradients before stochastic rounding.
    """
    w = np.asarray(w)
    dgrad_bits, wgrad_bits = bits
    wgrad_bits = None if wgrad_bits is None else np.asarray(wgrad_bits).T
    y = operand(recipe.fprop_x, x) @ operand(recipe.fprop_w, w.T).T
    dx = operand(recipe.dgrad_g, g, dgrad_bits, exact) @ operand(recipe.dgrad_w, w).T
    wgrad_x = operand(recipe.wgrad_x, pad_rows(x).T)
    return Gemms(y, dx, wgrad_x @ operand(recipe.wgrad_g, pad_rows(g).T, wgrad_bits, exact).T)


def assert_close(actual, expected, tolerance=2e-6):
    """Within `tolerance` of the largest value: a code more or less is 1e-3 of it or more."""
    expected = np.asarray(expected, np.float64)
    actual = np.asarray(actual, np.float64).reshape(expected.shape)
    error = np.abs(actual - expected).max(initial=0)
    assert error <= tolerance * np.abs(expected).max(initial=0), error


def count_e2m1_roundings(jaxpr) -> int:
    """How many tensors a jaxpr rounds to E2M1: each multiplies by the literal 1.5 * 2^22."""
    return sum(
        equation.primitive.name == "mul"
        and any(getattr(v, "val", None) == 1.5 * 2**22 for v in equation.invars)
        for equation in equations(jaxpr)
    )


def count_primitive(jaxpr, name: str) -> int:
    return sum(equation.primitive.name == name for equation in equations(jaxpr))


def equations(jaxpr):
    """Those of a jaxpr and of all that lie in its equations' parameters."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for part in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)
