"""NVFP4 as checkpoints hold it: packed codes, one E4M3 scale per 16 weights, one tensor scale.

Weights are [out, in], blocks of 16 run along `in`. The arithmetic is that of the tool that a format
belongs to, operation by operation, because ties and last bits depend on it: compressed-tensors 0.20
(which takes 2688 / amax as 2688 · (1 / amax)) and ModelOpt 0.47. It is not that of training.

Legend: N out, K in.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..errors import UserError
from ..numerics.formats import BLOCK, E2M1_MAX, E4M3_MAX, NVFP4_MAX, round_e2m1, round_e4m3

Rule = Literal["compressed-tensors", "modelopt"]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Both codes of a byte, the low nibble first.
_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=1)
_CHUNK_ELEMENTS = 2**21  # what is worked on at once stays in the cache
_ZERO_SCALE = {"compressed-tensors": 0.125, "modelopt": 1.0}  # of a block of zeros
_LEAST_SCALE = {"compressed-tensors": 0.0, "modelopt": 2.0**-9}


@dataclass(frozen=True)
class Packed:
    """One matrix: codes uint8 [N, K/2] (low nibble first), scales float8_e4m3fn [N, K/16]."""

    codes: np.ndarray
    scales: np.ndarray


def global_scale(amax: float, rule: Rule, *, in_bfloat16: bool = False) -> np.float32:
    """compressed-tensors' divisor 2688 / amax, or ModelOpt's factor amax / 2688.

    in_bfloat16: as llm-compressor does for a bfloat16 weight: every step rounded to bfloat16.

    A matrix of zeros has 1, so that no block divides zero by zero.
    """
    if amax == 0:
        return np.float32(1)
    if rule == "modelopt":
        return np.float32(amax) / np.float32(NVFP4_MAX)
    dtype = np.dtype(ml_dtypes.bfloat16 if in_bfloat16 else np.float32)
    value = np.maximum(np.asarray(amax, dtype), ml_dtypes.finfo(dtype).smallest_normal)
    with np.errstate(over="ignore"):
        scale = (np.asarray(1, dtype) / value).astype(dtype) * np.asarray(NVFP4_MAX, dtype)
    return np.float32(scale) if np.isfinite(np.float32(scale)) else np.float32(1)


def pack(weight: np.ndarray, scale: np.float32, rule: Rule, *, in_bfloat16: bool = False) -> Packed:
    """Quantises a matrix with a given tensor scale.

    weight: float [N, K], K a multiple of 16. scale: of `global_scale`.

    Raises:
      UserError: K is not a multiple of 16.
    """
    rows, columns = weight.shape
    if columns % BLOCK:
        raise UserError(f"a matrix with {columns} inputs cannot be NVFP4: blocks have {BLOCK}")
    codes = np.empty((rows, columns // 2), np.uint8)
    scales = np.empty((rows, columns // BLOCK), ml_dtypes.float8_e4m3fn)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        some = _pack(weight[part], jnp.float32(scale), rule=rule, in_bfloat16=in_bfloat16)
        codes[part], scales[part] = jax.device_get(some)
    return Packed(codes, scales)


@functools.partial(jax.jit, static_argnames=("rule", "in_bfloat16"))
def _pack(
    weight: jax.Array, scale: jax.Array, *, rule: Rule, in_bfloat16: bool
) -> tuple[jax.Array, jax.Array]:
    rows, columns = weight.shape
    x = weight.astype(jnp.float32).reshape(rows, columns // BLOCK, BLOCK)
    amax = jnp.max(jnp.abs(x), axis=-1)  # [N, K/16]
    if rule == "modelopt":
        local = _divide(amax, E2M1_MAX * scale)
        local = jnp.where(local == 0, _ZERO_SCALE[rule], local)
    else:
        local = _divide(amax, jnp.float32(E2M1_MAX))
        if in_bfloat16:
            local = jax.lax.reduce_precision(local, exponent_bits=8, mantissa_bits=7)
        local = scale * local
    local = round_e4m3(jnp.clip(local, _LEAST_SCALE[rule], E4M3_MAX))
    local = jnp.where(local == 0, _ZERO_SCALE[rule], local)
    step = local * scale if rule == "modelopt" else _divide(local, scale)
    y = jnp.clip(_divide(x, step[..., None]), -E2M1_MAX, E2M1_MAX)
    bits = jax.lax.bitcast_convert_type(jnp.abs(round_e2m1(y)), jnp.int32)
    # Exponent and first mantissa bit are the code, but for the subnormal 0.5.
    magnitude = jnp.where(bits > 0x3F000000, (bits >> 22) - 252, (bits != 0).astype(jnp.int32))
    # As in both tools a negative number that rounds to zero keeps its sign, -0.0 does not.
    negative = jax.lax.bitcast_convert_type(x, jnp.uint32) > jnp.uint32(0x80000000)
    code = (magnitude | jnp.where(negative, 8, 0)).reshape(rows, columns // 2, 2)
    packed = (code[..., 0] | (code[..., 1] << 4)).astype(jnp.uint8)
    return packed, local.astype(jnp.float8_e4m3fn)


def _divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """x / divisor, rounded once; without the barrier XLA multiplies by the divisor's reciprocal."""
    return x / jax.lax.optimization_barrier(jnp.broadcast_to(divisor, x.shape))


def unpack(
    packed: Packed, scale: np.ndarray, rule: Rule, dtype: np.dtype, out: np.ndarray | None = None
) -> np.ndarray:
    """The matrix's values [N, K], computed in float32 and rounded once to `dtype`."""
    scales = packed.scales.astype(np.float32)
    rows, blocks = scales.shape
    step = scales * np.float32(scale) if rule == "modelopt" else scales / np.float32(scale)
    result = np.empty((rows, blocks * BLOCK), dtype) if out is None else out
    count = max(1, _CHUNK_ELEMENTS // (blocks * BLOCK))
    for start in range(0, rows, count):
        part = slice(start, min(start + count, rows))
        values = _PAIRS[packed.codes[part]].reshape(-1, blocks, BLOCK)
        result[part] = (values * step[part, :, None]).reshape(-1, blocks * BLOCK)
    return result
