"""The random Hadamard transform (RHT) of the two weight-gradient operands.

x~ = reshape(x, (-1, 16)) @ (diag(sign) H / 4): it spreads an outlier over its 16 neighbours. The
matrix is orthogonal and both operands of wgrad carry it along the contracted axis, so it cancels in
the product and is never inverted. Source: arXiv 2509.25149; the sign vector is Transformer
Engine's.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

from .formats import BLOCK

SIGN = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


def _sylvester(size: int) -> np.ndarray:
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


MATRIX = SIGN[:, None] * _sylvester(BLOCK) / np.float32(4)  # [16, 16], every entry +-1/4


def random_hadamard(x: jax.Array, axis: int = -1) -> jax.Array:
    """The transform of each run of 16 along `axis`, summed in float32, rounded once to x's dtype.

    x: float array, x.shape[axis] a multiple of 16. Returns x's shape and dtype. The weight-gradient
    GEMM rounds the result to bfloat16, whatever the dtype of x: that is what the hardware holds.
    Raises ValueError for another length and for integers.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"the Hadamard transform needs a float array, got {x.dtype}: cast it first"
        )
    axis = axis % x.ndim
    if x.shape[axis] % BLOCK:
        raise ValueError(
            f"the Hadamard transform needs a multiple of {BLOCK} along axis {axis}, got "
            f"{x.shape[axis]}: pad with zeros"
        )
    split = (*x.shape[:axis], x.shape[axis] // BLOCK, BLOCK, *x.shape[axis + 1 :])
    blocks = x.astype(jnp.float32).reshape(split)
    # Sixteen multiply-adds in order: the order of the reference's matmul, bit for bit in float32,
    # and along the token axis (contiguous rows) half the time of XLA:CPU's batched 16 x 16 dot.
    coefficients = MATRIX.reshape(BLOCK, BLOCK, *[1] * (x.ndim - axis - 1))
    terms = [
        jax.lax.slice_in_dim(blocks, i, i + 1, axis=axis + 1) * coefficients[i]
        for i in range(BLOCK)
    ]
    return functools.reduce(operator.add, terms).reshape(x.shape).astype(x.dtype)
