"""Where the GEMMs run.

A backend is a module for dense layers with `fprop`, `forward` and `backward`, and its twin for
experts: see emulated.py.
"""

from types import ModuleType

from . import (
    emulated,
    emulated_grouped,
    transformer_engine,
    transformer_engine_grouped,
    xla,
    xla_grouped,
)
from .choice import AUTO, Choice, LinearSizes, choose_backend

__all__ = [
    "AUTO",
    "BACKENDS",
    "DENSE_BACKENDS",
    "GROUPED_BACKENDS",
    "Choice",
    "LinearSizes",
    "choose_backend",
]

DENSE_BACKENDS: dict[str, ModuleType] = {
    "emulated": emulated,
    "xla": xla,
    "transformer_engine": transformer_engine,
}
GROUPED_BACKENDS: dict[str, ModuleType] = {
    "emulated": emulated_grouped,
    "xla": xla_grouped,
    "transformer_engine": transformer_engine_grouped,
}
BACKENDS = tuple(DENSE_BACKENDS)
