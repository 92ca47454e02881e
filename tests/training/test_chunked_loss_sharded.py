"""Head and loss in chunks on eight devices: the same values, and one reduction for all chunks."""

import os
import re
import subprocess
import sys

import pytest

PROGRAM = """
import dataclasses, re, sys
import jax, numpy as np
from fp4zoo import configs
from fp4zoo.training.program import Program
from fp4zoo.training.sharding import MeshConfig

assert jax.device_count() == 8
options = ["model=llama-tiny", "precision=fp32", "model.num_layers=1", "model.vocab_size=8192"]
options += ["model.embed_dim=64", "model.mlp_dim=64", "batch_size=16", "sequence_length=64"]

def program(mesh, chunks):
    config = configs.load([*options, f"loss_chunks={chunks}"])
    return Program(dataclasses.replace(config, mesh=mesh))

random = np.random.default_rng(0)
shape = (16, 64)
batch = {
    "tokens": random.integers(0, 8192, shape).astype(np.int32),
    "targets": random.integers(0, 8192, shape).astype(np.int32),
    "loss_mask": np.ones(shape, np.float32),
    "segment_ids": np.ones(shape, np.int32),
    "positions": np.tile(np.arange(64, dtype=np.int32), (16, 1)),
}
results = {}
for name, mesh in (
    ("fsdp", MeshConfig(fsdp=8)),
    ("mixed", MeshConfig(data=2, fsdp=2, tensor=2)),
    ("context", MeshConfig(data=2, fsdp=2, context=2)),
):
    for chunks in (1, 8):
        made = program(mesh, chunks)
        step = made.compile_train_step()
        text, memory = step.as_text(), step.memory_analysis().temp_size_in_bytes
        state, metrics = step(made.initial_state(), made.place(batch))
        print(name, chunks, float(metrics["loss"]), float(metrics["gradient_norm"]), memory)
        parts = {part.split(" ")[0]: part for part in re.split(r"\\n(?=%)", text)}
        loops = [parts[name] for name in re.findall(r"body=(%[\\w.-]+)", text)]
        assert loops or chunks == 1
        for body in loops:
            for line in body.splitlines():
                if re.search(r"(all-reduce|reduce-scatter|all-gather)(-start)?\\(", line):
                    shape = re.search(r"\\[([\\d,]*)\\]", line)[1].split(",")
                    size = np.prod([int(length or 1) for length in shape])
                    assert size < 64 * 8192 / 8, line  # nothing as large as the head
"""


@pytest.mark.slow
def test_chunks_on_a_mesh():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [line.split() for line in result.stdout.splitlines() if re.match(r"\w+ \d ", line)]
    assert len(rows) == 6
    for (name, _, loss, norm, memory), (_, _, chunked, chunked_norm, less) in zip(
        rows[::2], rows[1::2], strict=True
    ):
        assert float(chunked) == pytest.approx(float(loss), rel=1e-6), name
        assert float(chunked_norm) == pytest.approx(float(norm), rel=1e-4), name
        assert int(less) < int(memory), name
