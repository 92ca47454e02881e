"""Drop-in NNX layers."""

from .dense import NVFP4Dense
from .moe import MoEAuxiliary, NVFP4MoE

__all__ = ["MoEAuxiliary", "NVFP4Dense", "NVFP4MoE"]
