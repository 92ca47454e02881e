"""Drop-in NNX layers."""

from .dense import NVFP4Dense

__all__ = ["NVFP4Dense"]
