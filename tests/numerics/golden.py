"""Reads the golden vectors of tests/golden (see its README for where they come from)."""

from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np

FOLDER = Path(__file__).parent.parent / "golden"


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / name) as data:
        return dict(data)


def as_array(values: np.ndarray):
    """float32 as it is, uint16 as the bits of bfloat16."""
    return jnp.asarray(values.view(ml_dtypes.bfloat16) if values.dtype == np.uint16 else values)


def unpack(codes: np.ndarray) -> np.ndarray:
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def code_bits(codes) -> np.ndarray:
    return np.asarray(codes).view(np.uint8) & 15


def scale_bits(scales) -> np.ndarray:
    return np.asarray(scales).view(np.uint8)
