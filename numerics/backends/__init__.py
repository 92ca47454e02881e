"""Where the GEMMs run. A backend is a module with `forward` and `backward`; see emulated.py for their contract."""

from . import emulated

__all__ = ["emulated"]
