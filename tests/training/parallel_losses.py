"""Losses of short runs on meshes of fake devices: a program for test_parallel.py.

Reads {"keys": [...], "meshes": {name: [keys]}} from argv, prints one JSON object: for each mesh,
"one" (no mesh) among them, the losses, the collectives in the compiled step with the shapes they
move, and its bytes of parameters and optimizer state per device.
"""

import json
import math
import re
import sys

import jax
import numpy as np

from fp4zoo.configs import load
from fp4zoo.training.program import Program

STEPS, ROWS, LENGTH, VOCABULARY = 20, 8, 64, 64
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def packed_batch():
    """Two documents a row and padding at the end."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
    first = LENGTH // 3
    segment_ids = np.ones((ROWS, LENGTH), np.int32)
    segment_ids[:, first:], segment_ids[:, -5:] = 2, 0
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    positions[:, first:] -= first
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": (segment_ids > 0).astype(np.float32),
        "segment_ids": segment_ids,
        "positions": positions,
    }


def run(keys):
    sizes = dict(key.removeprefix("mesh.").split("=") for key in keys if key.startswith("mesh."))
    devices = jax.devices()[: math.prod(map(int, sizes.values()))]
    program = Program(load(keys), devices)
    compiled = program.compile_train_step()
    state, batch = program.initial_state(), program.place(packed_batch())
    stored = jax.tree.leaves((state.parameters, state.optimizer))
    stored_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in stored)
    argument_bytes = compiled.memory_analysis().argument_size_in_bytes
    losses = []
    for _ in range(STEPS):
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))
    moved = [[match[2], match[1]] for match in COLLECTIVE.finditer(compiled.as_text())]
    return {
        "losses": losses,
        "collectives": moved,
        "stored_bytes": stored_bytes,
        "argument_bytes": argument_bytes,
    }


def main():
    case = json.loads(sys.argv[1])
    meshes = {"one": []} | case["meshes"]
    results = {}
    for name, mesh in meshes.items():
        keys = mesh if any(key.startswith("mesh.fsdp") for key in mesh) else ["mesh.fsdp=1", *mesh]
        results[name] = run([*case["keys"], *keys])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
