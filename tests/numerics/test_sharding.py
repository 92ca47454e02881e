"""Eight (fake) devices compute what one computes, however the operands are sharded."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from fp4zoo.numerics import get_recipe, linear
from fp4zoo.numerics.backends.emulated import forward, prepare
from fp4zoo.numerics.random_bits import content_hash, key_words

recipe = get_recipe("nvfp4")
words = key_words(jax.random.key(3))
random = np.random.default_rng(0)
x = (random.normal(size=(8, 32, 128)) * np.exp(random.normal(size=(8, 32, 1)))).astype(np.float32)
w = (random.normal(size=(128, 256)) * 0.1).astype(np.float32)
g = random.normal(size=(8, 32, 256)).astype(np.float32)

@jax.jit
def gemms(x, w, g):
    call = functools.partial(linear, recipe=recipe, key=jax.random.key(3), content_seeded=True)
    y, pullback = jax.vjp(call, x, w)
    return y, *pullback(g)

@jax.jit
def codes(x, w, g):
    _, residuals = forward(recipe, x, w, words)
    stochastic = [
        prepare(recipe.dgrad_g, g, (-1, -2), words),
        prepare(recipe.wgrad_g, g, (-2, -1), words),
    ]
    return residuals, stochastic, content_hash(g)

assert jax.device_count() == 8
mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
one = gemms(x, w, g)
one_codes = codes(x, w, g)
assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(one_codes[:2])) > 1
for name, specs in {
    "batch": (P(("a", "b")), P(), P(("a", "b"))),
    "tokens": (P("a", "b"), P(), P("a", "b")),
    "K": (P("a", None, "b"), P("b"), P("a")),
    "N": (P("a"), P(None, ("b", "a")), P(None, None, ("b", "a"))),
}.items():
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip((x, w, g), specs)
    ]
    for a, b in zip(gemms(*placed), one):
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error < 1e-6, (name, error)
    for a, b in zip(jax.tree.leaves(codes(*placed)), jax.tree.leaves(one_codes)):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)
"""


# Products that a device makes of its own part, and what is added up of them.
PACKED = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType
from fp4zoo.numerics import get_recipe, linear
from fp4zoo.numerics.partitioning import AXIS_NAMES, add_parts, partition_spec

random = np.random.default_rng(0)

def both(axes, x, w, g):
    call = functools.partial(
        linear, recipe=get_recipe("nvfp4"), key=jax.random.key(3), backend="xla", kernel_axes=axes
    )
    y, pullback = jax.vjp(call, x, w)
    return y, *pullback(g)

for axes, features in ((("embed", None, "mlp"), (2, 128)), (("mlp", "embed"), (64,))):
    x = random.normal(size=(8, 64, 128)).astype(np.float32)
    w = (random.normal(size=(128, *features)) * 0.1).astype(np.float32)
    g = random.normal(size=(8, 64, *features)).astype(np.float32)
    one = jax.jit(functools.partial(both, axes))(x, w, g)
    for sizes in ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2, "tensor": 2}):
        shape = tuple(sizes.get(name, 1) for name in AXIS_NAMES)
        mesh = jax.make_mesh(shape, AXIS_NAMES, axis_types=(AxisType.Auto,) * len(shape))
        with jax.set_mesh(mesh):
            several = jax.jit(functools.partial(both, axes))(x, w, g)
        for name, a, b in zip(("y", "dx", "dw"), several, one):
            error = np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max()
            assert error < 1e-6, (axes, sizes, name, error)
        parts = random.normal(size=(4, 2, *w.shape)).astype(np.float32)
        with jax.set_mesh(mesh):
            total = jax.jit(add_parts, static_argnums=range(1, 1 + w.ndim))(
                parts, *axes
            )
        np.testing.assert_allclose(total, parts.sum((0, 1)), atol=1e-5)
        assert total.sharding.spec == partition_spec(axes, w.shape, sizes), total.sharding
        y, dx, dw = several
        assert dw.sharding.spec == partition_spec(axes, w.shape, sizes), dw.sharding
        # What was added up over tensor is left in the parts that lie between the blocks.
        summed = y if axes[0] == "mlp" else dx
        kept = partition_spec(("batch", "residual_sequence", None), summed.shape, sizes)
        assert summed.sharding.is_equivalent_to(jax.NamedSharding(mesh, kept), 3), summed.sharding
"""


@pytest.mark.parametrize("program", [PROGRAM, PACKED], ids=["emulated", "packed"])
def test_sharded_is_unsharded(program):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
