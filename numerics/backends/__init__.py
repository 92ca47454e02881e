"""Where the GEMMs run. A backend is a module with `forward` and `backward`: see emulated.py."""

from . import emulated, emulated_grouped

__all__ = ["emulated", "emulated_grouped"]
