"""Eight (fake) devices compute what one computes, however the operands are sharded."""

import os
import subprocess
import sys

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


def test_sharded_is_unsharded():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
