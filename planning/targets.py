"""GPUs to compile for without having one: XLA's own descriptions of them, and devices made of them.

The CUDA plugin of JAX carries a text about every GPU that XLA has been tuned for (a protocol buffer
`GpuTargetConfigProto` in text form, NUL-terminated, inside the shared library). It needs neither
CUDA nor a driver to compile for one of them; the two wheels that `REMEDY` names are enough.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..errors import UserError, check_choice

REMEDY = (
    "pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version} "
    "(Python 3.12 or newer; no GPU, driver or CUDA is needed)"
)

# Name on the command line -> (XLA's description, GPUs of one host).
NAMES = {
    "a100": ("NVIDIA A100-SXM4-80GB", 8),
    "h100": ("NVIDIA H100 80GB HBM3", 8),
    "h200": ("NVIDIA H200 141GB HBM3e", 8),
    "b200": ("NVIDIA B200", 8),
    "gb200": ("NVIDIA GB200", 4),
    "b300": ("NVIDIA B300", 8),
    "gb300": ("NVIDIA GB300", 4),
    "vr-nvl72": ("NVIDIA VR NVL72", 4),
    "rtx-pro-6000": ("NVIDIA RTX PRO 6000 Blackwell", 8),
}

_NO_CUDA = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # of the plugin's version against CUDA's libraries
    "TF_CPP_MIN_LOG_LEVEL": "3",  # what XLA logs when memory is tight is in the result
}

COMPILER_OPTIONS: dict[str, bool | str] = {
    # Without a GPU: CUB's sort asks a device how much scratch space it wants.
    "xla_gpu_enable_cub_radix_sort": False,
    # XLA of JAX 0.12 aborts where it makes a kernel of its own of an all-reduce of two arrays over
    # eight devices: NCCL does it here.
    "xla_gpu_experimental_use_collective_kernels": "",
}


@dataclass(frozen=True)
class Target:
    """A GPU as XLA knows it.

    Attributes:
      name: on the command line.
      device_kind: what JAX calls the device.
      compute_capability: such as (10, 0).
      memory_bytes: size of the device's memory.
      memory_bandwidth: bytes per second.
      num_cores: streaming multiprocessors.
      devices_per_host: GPUs that one machine has of them.
      cudnn_version: as cuDNN writes it, 92300 for 9.23.0; the one that the text was made with.
      text: the GpuTargetConfigProto.
    """

    name: str
    device_kind: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    memory_bandwidth: int
    num_cores: int
    devices_per_host: int
    cudnn_version: int
    text: str


def use_cpu() -> None:
    """For a program that only compiles for GPUs: JAX's own devices are the CPUs.

    To be called before anything asks JAX for its devices.
    """
    os.environ.update(_NO_CUDA)
    jax.config.update("jax_platforms", "cpu")


def plugin_library() -> Path | None:
    """The installed CUDA plugin's shared library; None without one."""
    for package in ("xla_cuda13", "xla_cuda12"):
        try:
            spec = importlib.util.find_spec(f"jax_plugins.{package}")
        except ModuleNotFoundError:  # no plugin at all
            return None
        if spec is not None and spec.origin is not None:
            library = Path(spec.origin).parent / "xla_cuda_plugin.so"
            if library.is_file():
                return library
    return None


def find_target(name: str) -> Target:
    """The GPU of that name.

    Raises:
      UserError: for an unknown name, or when the plugin is not installed.
    """
    check_choice("target", name, tuple(NAMES))
    library = plugin_library()
    if library is None:
        raise UserError(
            f"target={name}: the CUDA plugin of JAX is not installed: "
            + REMEDY.format(version=jax.__version__)
        )
    device_kind, devices_per_host = NAMES[name]
    text = _texts(library).get(device_kind)
    if text is None:
        raise UserError(
            f"target={name}: {library.name} of jax {jax.__version__} does not describe "
            f"{device_kind!r}: choose another target, or install a newer JAX with its plugin"
        )

    def number(field: str) -> int:
        found = re.search(rf"\b{field}: (\d+)", text)
        return int(found[1]) if found else 0  # text form leaves out what is 0

    version = re.search(r'\bdnn_version: "(\d+)\.(\d+)\.(\d+)"', text)
    major, minor, patch = (int(part) for part in version.groups()) if version else (0, 0, 0)
    return Target(
        name=name,
        device_kind=device_kind,
        compute_capability=(number("major"), number("minor")),
        memory_bytes=number("device_memory_size"),
        memory_bandwidth=number("memory_bandwidth"),
        num_cores=number("core_count"),
        devices_per_host=devices_per_host,
        cudnn_version=major * 10000 + minor * 100 + patch,
        text=text,
    )


def target_devices(name: str, count: int) -> list[Any]:
    """`count` devices of that GPU to make a mesh of, `devices_per_host` to a process.

    They can be compiled for and nothing else. The process must not have CUDA devices of its own:
    see `use_cpu`.

    Raises:
      UserError: for an unknown name, a count that does not fill its hosts, or without the plugin.
    """
    from jax.experimental import topologies

    target = find_target(name)
    if count < 1:
        raise UserError(f"devices={count}: at least 1")
    per_host = min(count, target.devices_per_host)
    if count % per_host:
        raise UserError(
            f"devices={count}: {name} comes in hosts of {per_host}: give a multiple of {per_host}"
        )
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        description = topologies.get_topology_desc(
            topology_name="",
            platform="cuda",
            target_config=target.text,
            topology=f"1x{count // per_host}x{per_host}",  # partitions x hosts x devices of a host
        )
    except NotImplementedError as error:  # JAX looked for the plugin before we said how
        raise UserError(
            f"target={name}: JAX started without its CUDA plugin: set "
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before anything asks JAX for devices"
        ) from error
    return list(description.devices)


@contextlib.contextmanager
def cudnn_of(target: Target) -> Iterator[None]:
    """While a program is lowered for `target`: JAX takes its cuDNN to be there.

    `jax.nn.dot_product_attention(implementation="cudnn")` asks the installed cuDNN for its version
    when it is traced, and nothing else of it: the custom call is compiled by XLA alone.
    """
    from jax._src.cudnn import fused_attention_stablehlo as module

    real = module.check_cudnn_version
    module.check_cudnn_version = lambda: target.cudnn_version
    try:
        yield
    finally:
        module.check_cudnn_version = real


@functools.cache
def _texts(library: Path) -> dict[str, str]:
    """Device description -> text, of every GPU in the library."""
    texts = {}
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        position = data.find(b"gpu_device_info {")
        while position >= 0:
            end = data.find(b"\0", position)
            text = data[data.rfind(b"\0", 0, position) + 1 : end].decode("utf-8", "replace")
            found = re.search(r'device_description_str: "([^"]*)"', text)
            if found:
                texts[found[1]] = text
            position = data.find(b"gpu_device_info {", end)
    return texts
