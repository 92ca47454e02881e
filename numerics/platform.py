"""Which kind of device a program is made for, and what the emulation does differently on a CPU."""

import contextlib

import jax
import jax.numpy as jnp

# Part of the key of JAX's caches: what was traced for one platform is not reused for another.
_target = jax.make_user_context(default_value=None)


def compiling_for(platform: str) -> contextlib.AbstractContextManager[None]:
    """Within this context everything is traced for that platform ("cpu", "gpu"; a device's
    `platform`), which need not be one that this process has devices of."""
    return _target(platform)


def target_platform() -> str:
    """The platform of `compiling_for`, by default that of JAX's default devices."""
    return _target.value or jax.default_backend()


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
