"""Drop-in NNX layers."""

from .dense import NVFP4Dense
from .moe import MoEAuxiliary, NVFP4MoE
from .quantize_model import quantize_model

__all__ = ["MoEAuxiliary", "NVFP4Dense", "NVFP4MoE", "quantize_model"]
