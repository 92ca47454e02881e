"""A mixture on eight (fake) devices has the codes that it has on one, whatever the mesh.

One flipped code of activations, weights or gradients, forward or backward, moves some result by a
hundredth of the largest; what may differ is the order of sums, in the last digits.
"""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("optimized")

PROGRAM = """
import math
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from fp4zoo.layers import NVFP4MoE
from fp4zoo.training.sharding import MeshConfig, make_mesh

random = np.random.default_rng(0)
x = (random.normal(size=(8, 64, 64)) * np.exp(random.normal(size=(8, 64, 1)))).astype(np.float32)
g = random.normal(size=x.shape).astype(np.float32)
mask = np.ones(x.shape[:2], bool)
mask[:, -5:] = False
layer = NVFP4MoE(
    64, 64, 4, 2, group_size=32, recipe="nvfp4", rounding="explicit", rngs=nnx.Rngs(0)
)
router = random.normal(size=(64, 4)).astype(np.float32)
x[..., 0], router[0] = 1, [0, 0, 0, -1e4]  # nobody chooses the last expert
layer.router[...] = jnp.asarray(router)
graph, parameters = nnx.split(layer)

@jax.jit
def run(parameters, x, g):
    def call(parameters, x):
        layer = nnx.merge(graph, parameters)
        y, report = layer(x, token_mask=mask, rounding_key=jax.random.key(3))
        return y, report.tokens_per_expert
    y, pullback, counts = jax.vjp(call, parameters, x, has_aux=True)
    return y, counts, *pullback(g)

one = run(parameters, x, g)
counts = np.asarray(one[1])
assert counts[3] == 0 and np.all(counts[:3] > 100) and counts.sum() == 2 * mask.sum(), counts
for sizes in MESHES:
    config = MeshConfig(**{"fsdp": 1, **sizes})
    with jax.set_mesh(make_mesh(config, jax.devices()[: math.prod(sizes.values())])):
        many = run(parameters, x, g)
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one)):
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error < 1e-5, (sizes, a.shape, error)
"""


def run(*meshes):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles in less time
    }
    done = subprocess.run(
        [sys.executable, "-c", f"MESHES = {meshes}\n{PROGRAM}"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_mixture_on_a_product_of_axes():
    """Half of the devices along expert hold an expert that gets no tokens."""
    run({"fsdp": 2, "tensor": 2, "expert": 2})


@pytest.mark.slow
def test_a_mixture_on_every_axis():
    """With expert=4 one device gets no tokens at all."""
    run({"data": 4}, {"fsdp": 8}, {"tensor": 2}, {"expert": 4}, {"context": 2})
