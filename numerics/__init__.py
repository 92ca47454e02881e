"""NVFP4 arithmetic: pure functions on arrays, no NNX."""

from .backends import BACKENDS, Choice, LinearSizes, choose_backend
from .backends.operands import GEMM_NAME, QUANTIZED_NAME
from .formats import Format
from .grouped import grouped_linear
from .hadamard import random_hadamard
from .linear import linear
from .quantize import QuantizedTensor, quantize
from .recipe import RECIPES, Operand, Recipe, get_recipe, nvfp4_recipe

__all__ = [
    "BACKENDS",
    "GEMM_NAME",
    "QUANTIZED_NAME",
    "RECIPES",
    "Choice",
    "Format",
    "LinearSizes",
    "Operand",
    "QuantizedTensor",
    "Recipe",
    "choose_backend",
    "get_recipe",
    "grouped_linear",
    "linear",
    "nvfp4_recipe",
    "quantize",
    "random_hadamard",
]
