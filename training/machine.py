"""What a machine has that a run depends on: software, shared memory, and the cluster it is in."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax

# Distributions whose versions decide what works, each with the names it may have.
_SOFTWARE = {
    "JAX": ("jax",),
    "jaxlib": ("jaxlib",),
    "CUDA plugin": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    "Flax": ("flax",),
    "Optax": ("optax",),
    "Orbax": ("orbax-checkpoint",),
    "Grain": ("grain",),
    "Transformer Engine": ("transformer-engine", "transformer_engine_jax"),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
_CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")

MISSING = "not installed"

# What launchers, JAX, XLA and NCCL read. Values of others are nobody's business.
_PREFIXES = (
    "SLURM_", "OMPI_", "PMI_", "PMIX_", "KUBERNETES_", "JOB_COMPLETION_INDEX", "JAX_", "XLA_",
    "NCCL_", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVTE_", "TF_GPU_", "MASTER_",
    "WORLD_SIZE", "RANK", "LOCAL_RANK",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Version of each piece of software, `MISSING` where there is none."""
    found = {"Python": platform.python_version()}
    for name, distributions in _SOFTWARE.items():
        found[name] = _installed(distributions) or MISSING
    found["cuDNN"] = _cudnn() or MISSING
    return found


def _installed(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _cudnn() -> str | None:
    """Of the library that JAX has loaded, else of the installed package."""
    try:
        from jax._src.lib import cuda_versions

        number = cuda_versions.cudnn_get_version()  # pyright: ignore[reportOptionalMemberAccess]
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    except Exception:  # no plugin, another JAX, or the plugin does not find the library
        return _installed(_CUDNN)


def plugin_fault() -> str | None:
    """Why the installed CUDA plugin does not go with JAX; None if it does, or there is none."""
    plugin = _installed(_SOFTWARE["CUDA plugin"])
    if plugin is None or plugin.split(".")[:3] == jax.__version__.split(".")[:3]:
        return None
    return (
        f"the CUDA plugin {plugin} is not of JAX {jax.__version__}: install the same version of "
        "jax, jaxlib and the plugin"
    )


def shared_memory(path: Path = Path("/dev/shm")) -> tuple[int, int] | None:
    """(total, free) bytes of the shared-memory file system; None where there is none."""
    if not path.is_dir():
        return None
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


def cluster_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that say how processes find one another, and how JAX and NCCL behave."""
    return {
        name: value for name, value in sorted(environment.items()) if name.startswith(_PREFIXES)
    }
