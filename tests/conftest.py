"""For every test: settings that JAX reads once, when something first asks for its devices."""

import os

# An installed CUDA plugin must be there to compile for, on machines without CUDA (planning/).
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
