"""A run on eight (fake) devices is the run on one: each mesh axis alone, and their product.

Losses differ by the order of sums alone. In NVFP4 a sum that differs in its last bit may flip a
code, and then runs part within two steps, by up to 1e-3, as they do on one device when a parameter
changes by its last bit (docs/parallelism.md). In these twenty steps hardly any flips.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# Each compiles a step for several meshes.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

PROGRAM = Path(__file__).parent / "parallel_losses.py"
SHAPE = [
    "model.vocab_size=64",
    "model.num_layers=2",
    "model.embed_dim=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.mlp_dim=64",
    "batch_size=8",
    "sequence_length=64",
    "optimizer.learning_rate=3e-4",
]
MODELS = {
    "dense": ["model=llama-tiny", *SHAPE],
    "moe": ["model=mixtral-tiny", *SHAPE, "model.moe.num_experts=4", "model.moe.group_size=32"],
}
MODELS["capacity"] = [*MODELS["moe"], "model.moe.capacity_factor=0.5"]
PRECISIONS = {
    "fp32": ["precision=fp32"],
    "nvfp4": [
        "precision=nvfp4",
        "precision.rules.first_blocks=0",
        "precision.rules.last_blocks=0",
    ],
}
AXES = ("data", "fsdp", "tensor", "expert", "context")
ALONE = {axis: [f"mesh.{axis}=2"] for axis in AXES}
PRODUCT = {"product": ["mesh.fsdp=2", "mesh.tensor=2", "mesh.expert=2"]}
TOLERANCE = {"fp32": 1e-5, "nvfp4": 1e-4}


def losses(model, precision, meshes, *keys):
    """What parallel_losses.py prints, in a process with eight devices."""
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    case = {"keys": [*MODELS[model], *PRECISIONS[precision], *keys], "meshes": meshes}
    done = subprocess.run(
        [sys.executable, PROGRAM, json.dumps(case)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def assert_equal_losses(results, precision):
    expected = np.array(results["one"]["losses"])
    assert expected[0] - expected[-1] > 0.05  # it learns
    for name, result in results.items():
        difference = np.abs(np.array(result["losses"]) - expected).max()
        assert difference < TOLERANCE[precision], (name, difference)


def moved(result, operation):
    return [shape for kind, shape in result["collectives"] if kind == operation]


@pytest.fixture(scope="module")
def mixture():
    return losses("moe", "fp32", {"expert": ["mesh.expert=4"], "fsdp": ["mesh.fsdp=8"]} | PRODUCT)


def test_losses_of_a_mixture_on_a_product_of_axes(mixture):
    assert_equal_losses(mixture, "fp32")


def test_tokens_go_to_their_experts_by_all_to_all_alone(mixture):
    """Rows [.., D] to the experts and back, forward and backward; no device gathers tokens."""
    result = mixture["expert"]
    rows = [shape for shape in moved(result, "all-to-all") if "f32" in shape]
    assert len(rows) == 4, result["collectives"]
    assert not moved(mixture["one"], "all-to-all")
    assert moved(result, "all-gather") == []


def test_memory_of_parameters_and_optimizer_falls_with_the_devices(mixture):
    """What no axis splits are the norms' scales and a few scalars."""
    one, eight = mixture["one"], mixture["fsdp"]
    assert eight["stored_bytes"] == pytest.approx(one["stored_bytes"] / 8, rel=0.02)
    batch = 5 * 4 * 8 * 64  # five arrays of four bytes
    arguments = eight["argument_bytes"]
    assert arguments == pytest.approx((one["argument_bytes"] - batch) / 8 + batch / 8, rel=0.05)


@pytest.mark.parametrize("model", MODELS)
def test_losses_on_every_mesh(model):
    assert_equal_losses(losses(model, "fp32", ALONE | PRODUCT), "fp32")


@pytest.mark.parametrize("remat", ["save_quantized", "full"])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_losses_with_accumulation_and_remat(model, remat):
    results = losses(model, "fp32", PRODUCT, "gradient_accumulation=2", f"remat={remat}")
    assert_equal_losses(results, "fp32")


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_nvfp4_losses_on_every_mesh(model):
    assert_equal_losses(losses(model, "nvfp4", ALONE | PRODUCT), "nvfp4")


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_nvfp4_losses_with_accumulation_and_remat(model):
    keys = ["gradient_accumulation=2", "remat=save_quantized"]
    assert_equal_losses(losses(model, "nvfp4", PRODUCT, *keys), "nvfp4")
