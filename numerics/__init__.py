"""NVFP4 arithmetic: pure functions on arrays, no NNX."""

from .backends.operands import GEMM_NAME, QUANTIZED_NAME
from .formats import Format
from .grouped import grouped_linear
from .hadamard import random_hadamard
from .linear import linear
from .quantize import QuantizedTensor, quantize
from .recipe import RECIPES, Operand, Recipe, get_recipe, nvfp4_recipe

__all__ = [
    "GEMM_NAME",
    "QUANTIZED_NAME",
    "RECIPES",
    "Format",
    "Operand",
    "QuantizedTensor",
    "Recipe",
    "get_recipe",
    "grouped_linear",
    "linear",
    "nvfp4_recipe",
    "quantize",
    "random_hadamard",
]
