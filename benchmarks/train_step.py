"""What NVFP4 emulation costs a training step, and what fp4zoo costs over plain JAX.

    python benchmarks/train_step.py [--rounds 15]

Everything is timed in one run, the variants in turn, so that the machine's mood hits all of them;
the ratios are of medians. The steps are the ones that train.py runs (training/program.py); the twin
is plain_llama.py.
"""

import argparse
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import plain_llama

from fp4zoo.configs import load
from fp4zoo.training.program import Program

FULL_RECIPE = ["precision=nvfp4", "precision.rules.first_blocks=0", "precision.rules.last_blocks=0"]
VARIANTS = {
    "fp32": ["precision=fp32"],
    "nvfp4": [*FULL_RECIPE, "precision.activation_dtype=float32"],
    "nvfp4, bf16 activations": FULL_RECIPE,
    "bf16": ["precision=bf16"],
}
SHAPES = {
    "width 256": dict(layers=4, width=256, mlp=1024, batch=8),
    "width 1024": dict(layers=2, width=1024, mlp=4096, batch=4),
}
HEADS, KV_HEADS, VOCABULARY, LENGTH = 8, 4, 4096, 256


def overrides(layers: int, width: int, mlp: int, batch: int) -> list[str]:
    return [
        "model=llama-tiny",
        f"model.num_layers={layers}",
        f"model.embed_dim={width}",
        f"model.num_heads={HEADS}",
        f"model.num_kv_heads={KV_HEADS}",
        f"model.head_dim={width // HEADS}",
        f"model.mlp_dim={mlp}",
        f"batch_size={batch}",
        f"sequence_length={LENGTH}",
        "mesh=single",
    ]


def random_batch(batch: int, length: int = LENGTH) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCABULARY, (batch, length + 1), dtype=np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.ones((batch, length), np.float32),
        "segment_ids": np.ones((batch, length), np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length)),
    }


class Timed:
    """A compiled step that carries its donated state from call to call."""

    def __init__(self, compiled: Callable, state, batch, temporaries: int, compile_seconds: float):
        self.compiled, self.state, self.batch = compiled, state, batch
        self.temporaries, self.compile_seconds = temporaries, compile_seconds
        self.seconds: list[float] = []

    def __call__(self) -> None:
        begin = time.perf_counter()
        self.state, metrics = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.perf_counter() - begin)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds[2:])  # the first two warm caches


def temporary_bytes(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def zoo(keys: list[str], batch: dict[str, np.ndarray]) -> Timed:
    program = Program(load(keys))
    begin = time.perf_counter()
    compiled = program.compile_train_step()
    seconds = time.perf_counter() - begin
    state, placed = program.initial_state(), program.place(batch)
    return Timed(compiled, state, placed, temporary_bytes(compiled), seconds)


def twin(layers: int, width: int, mlp: int, batch: dict[str, np.ndarray]) -> Timed:
    parameters = plain_llama.init(
        jax.random.key(0),
        layers=layers,
        width=width,
        mlp=mlp,
        heads=HEADS,
        kv_heads=KV_HEADS,
        vocab=VOCABULARY,
    )
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, 300), b2=0.95, weight_decay=0.1)
    state = (parameters, optimizer.init(parameters))
    step = jax.jit(plain_llama.make_step(optimizer), donate_argnums=0)
    begin = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    seconds = time.perf_counter() - begin
    return Timed(compiled, state, batch, temporary_bytes(compiled), seconds)


def compare(title: str, steps: dict[str, Timed], base: str, rounds: int) -> None:
    for _ in range(rounds + 2):
        for step in steps.values():
            step()
    header = f"{'median':>10s}{'ratio':>8s}{'temporaries':>14s}{'ratio':>8s}{'compile':>10s}"
    print(f"\n{title}\n{'':28s}{header}")
    for name, step in steps.items():
        print(
            f"{name:28s}{step.median * 1e3:7.1f} ms{step.median / steps[base].median:8.3f}"
            f"{step.temporaries / 2**20:10.1f} MiB{step.temporaries / steps[base].temporaries:8.3f}"
            f"{step.compile_seconds:8.1f} s",
            flush=True,
        )


def dense(rounds: int) -> None:
    for title, shape in SHAPES.items():
        batch = random_batch(shape["batch"])
        size = {name: shape[name] for name in ("layers", "width", "mlp")}
        steps = {"plain JAX": twin(batch=batch, **size)}
        steps |= {name: zoo(overrides(**shape) + keys, batch) for name, keys in VARIANTS.items()}
        compare(f"Llama, {title}, {shape}", steps, "fp32", rounds)
        ratio = steps["fp32"].median / steps["plain JAX"].median
        print(f"fp32 against plain JAX: time {ratio:.3f}, ", end="")
        print(f"temporaries {steps['fp32'].temporaries / steps['plain JAX'].temporaries:.3f}")


def mixture(rounds: int) -> None:
    """Eight experts, two a token, of half the dense width: the active FLOPs of llama-tiny."""
    batch = random_batch(8)
    common = ["batch_size=8", f"sequence_length={LENGTH}", "mesh=single"]
    for precision in ("fp32", "nvfp4"):
        keys = common + VARIANTS[precision]
        steps = {
            model: zoo([f"model={model}", *keys], batch) for model in ("llama-tiny", "mixtral-tiny")
        }
        compare(f"Mixtral-tiny, dropless, {precision}", steps, "llama-tiny", rounds)


def depth() -> None:
    """The size of the program, and the Python time of a step with next to no arithmetic."""
    sizes = {}
    for layers in (8, 32):
        shape = SHAPES["width 256"] | {"layers": layers}
        sizes[layers] = len(
            Program(load(overrides(**shape) + FULL_RECIPE)).lower_train_step().as_text()
        )
    ratio = sizes[32] / sizes[8]
    print(f"\nlowered HLO, 32 blocks / 8 blocks: {ratio:.3f} ({sizes[8]} characters for 8)")
    keys = [
        "model=llama-tiny",
        "model.num_layers=2",
        "model.embed_dim=32",
        "model.head_dim=16",
        "model.num_heads=2",
    ]
    keys += [
        "model.num_kv_heads=1",
        "model.mlp_dim=32",
        "model.vocab_size=512",
        "batch_size=1",
        "sequence_length=16",
    ]
    batch = {name: value[:1, :16] % 512 for name, value in random_batch(1, 16).items()}
    program = Program(load([*keys, "mesh=single", "precision=fp32"]))
    compiled, state = program.compile_train_step(), program.initial_state()
    seconds = []
    for _ in range(300):
        begin = time.perf_counter()
        state, metrics = compiled(state, program.place(batch))
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - begin)
    milliseconds = statistics.median(seconds) * 1e3
    print(f"a step of next to no arithmetic, Python and all: {milliseconds:.2f} ms")


def machine() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{os.cpu_count()} x {model}, Python {platform.python_version()}, JAX {jax.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Ratios of training-step times, in one run.")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each variant")
    sections = {"dense": dense, "mixture": mixture, "depth": lambda rounds: depth()}
    parser.add_argument("--only", choices=sections, help="one section instead of all")
    arguments = parser.parse_args()
    print(machine())
    for name, section in sections.items():
        if arguments.only in (None, name):
            functools.partial(section)(arguments.rounds)


if __name__ == "__main__":
    main()
