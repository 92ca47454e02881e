"""Which kind of device a program is made for, and what the emulation does differently on a CPU."""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

# Part of the key of JAX's caches: what was traced for one kind of device is not reused for another.
_target = jax.make_user_context(default_value=None)

# For `jax.jit`: a value that the program rounds to bfloat16 is rounded. Otherwise XLA keeps it in
# float32 wherever the two conversions meet, which depends on the mesh, and the codes with it.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


class DeviceKind(NamedTuple):
    """What a program is made for."""

    platform: str  # "cpu" or "gpu"
    name: str  # such as "NVIDIA B200"
    compute_capability: str | None  # such as "10.0", NVIDIA's only

    @classmethod
    def of(cls, device: Any) -> "DeviceKind":
        """Of a `jax.Device`, or of anything with its attributes; of a platform's name alone."""
        if isinstance(device, DeviceKind):
            return device
        if isinstance(device, str):
            return cls(device, device, None)
        capability = getattr(device, "compute_capability", None)
        return cls(device.platform, device.device_kind, capability)

    def __str__(self) -> str:
        return "this CPU" if self.platform == "cpu" else self.name


def compiling_for(device: Any) -> contextlib.AbstractContextManager[None]:
    """Within this context everything is built and traced for such a device, which need not be one
    that this process has: a `jax.Device`, or a platform's name ("cpu", "gpu")."""
    return _target(DeviceKind.of(device))


def target_device() -> DeviceKind:
    """What `compiling_for` says, by default the first of JAX's devices."""
    return _target.value or DeviceKind.of(jax.devices()[0])


def target_platform() -> str:
    """The platform of `compiling_for`, by default that of JAX's default devices."""
    return _target.value.platform if _target.value else jax.default_backend()


def on_cpu() -> bool:
    """Whether the program is made for CPUs, where float32 matrix products are the fast ones."""
    return target_platform() == "cpu"


def matmul_operand(x: jax.Array) -> jax.Array:
    """`x` as a matrix product should read it here: 16-bit floats become float32 on a CPU.

    The product of the same values, accumulated in float32, is the same, and faster there. The
    barrier keeps XLA from skipping the rounding to 16 bits that `x` has been through.
    """
    if not on_cpu() or x.dtype == jnp.float32:
        return x
    return jax.lax.optimization_barrier(x).astype(jnp.float32)


def row_major(x: jax.Array) -> jax.Array:
    """`x`, which a GPU keeps with its last axis contiguous; its gradient likewise.

    For what a loop over layers saves: XLA takes the memory layout that suits one reader of the
    stack of all layers, and makes a transposed copy of the stack for it.
    """
    if on_cpu():
        return x
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
