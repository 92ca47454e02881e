"""What the emulation does differently on a CPU, where float32 matrix products are the fast ones."""

import jax
import jax.numpy as jnp


def on_cpu() -> bool:
    """Whether JAX's default devices are CPUs."""
    return jax.default_backend() == "cpu"


def matmul_operand(x: jax.Array) -> jax.Array:
    """`x` as a matrix product should read it here: 16-bit floats become float32 on a CPU.

    The product of the same values, accumulated in float32, is the same, and faster there. The
    barrier keeps XLA from skipping the rounding to 16 bits that `x` has been through.
    """
    if not on_cpu() or x.dtype == jnp.float32:
        return x
    return jax.lax.optimization_barrier(x).astype(jnp.float32)
