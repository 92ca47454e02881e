"""For every test: settings that JAX reads once, when something first asks for its devices."""

import os
import shutil
import tempfile

# An installed CUDA plugin must be there to compile for, on machines without CUDA (planning/).
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

# Most tests compile a program to run it once, and many compile the same ones, in processes of their
# own too: a test is quicker with a compiler that hurries and remembers. See `optimized` below.
_COMPILED = tempfile.mkdtemp(prefix="fp4zoo-tests-xla-")
os.environ.update(
    JAX_DISABLE_MOST_OPTIMIZATIONS="1",
    JAX_COMPILATION_CACHE_DIR=_COMPILED,
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1",
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="0",
)

import jax  # noqa: E402  it reads the environment when it is imported
import pytest  # noqa: E402


def pytest_sessionfinish():
    shutil.rmtree(_COMPILED, ignore_errors=True)


@pytest.fixture(scope="module")
def optimized():
    """XLA as users have it: for bits that fusion could change, and for figures of memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")  # for processes that a test starts
        jax.config.update("jax_disable_most_optimizations", False)
        yield
        jax.config.update("jax_disable_most_optimizations", True)
