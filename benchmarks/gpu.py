"""What NVFP4 costs and brings on the GPU at hand: one run, one table to paste into an issue.

    python benchmarks/gpu.py [--layers 4] [--batch 4] [--length 4096] [--rounds 10]

Steps of a few blocks of Llama 3 8B as train.py runs them: bf16, NVFP4 emulated and, where the
device has FP4 tensor cores, NVFP4 in hardware, with memory and ratios. Then bare matrix products of
the same sizes in BF16, FP8 and FP4, what the hardware can do at best. Without a GPU everything runs
on the CPU in toy size, which shows that the script works and nothing else.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4zoo.configs import load
from fp4zoo.errors import UserError
from fp4zoo.numerics import choose_backend, get_recipe
from fp4zoo.numerics.backends import BACKENDS
from fp4zoo.numerics.platform import DeviceKind
from fp4zoo.training.flops import flops_per_token, peak_flops
from fp4zoo.training.memory import GIB
from fp4zoo.training.program import Program

BLOCKS = {"embed_dim": 4096, "num_heads": 32, "num_kv_heads": 8, "mlp_dim": 14336}
TOY = {"embed_dim": 128, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 256}
WARMUP = 2


def overrides(arguments: argparse.Namespace, sizes: dict[str, int]) -> list[str]:
    return [
        "model=llama-tiny",
        *(f"model.{name}={size}" for name, size in sizes.items()),
        f"model.head_dim={sizes['embed_dim'] // sizes['num_heads']}",
        f"model.num_layers={arguments.layers}",
        f"model.vocab_size={arguments.vocabulary}",
        f"model.max_positions={arguments.length}",
        f"batch_size={arguments.batch}",
        f"sequence_length={arguments.length}",
        "remat=save_quantized",
        "mesh=single",
        "precision.rules.first_blocks=0",
        "precision.rules.last_blocks=0",
    ]


def variants(device: Any) -> dict[str, list[str]]:
    """Steps to time; those in hardware only where the device runs them."""
    found = {"bf16": ["precision=bf16"], "nvfp4 emulated": ["precision=nvfp4", "backend=emulated"]}
    for backend in BACKENDS:
        if backend == "emulated" or device.platform == "cpu":
            continue
        try:
            choose_backend(backend, get_recipe("nvfp4"), device)
        except UserError as error:
            print(f"no hardware FP4 through {backend}: {error}")
        else:
            found[f"nvfp4 {backend}"] = ["precision=nvfp4", f"backend={backend}"]
    return found


def time_calls(call: Callable[[], Any], rounds: int) -> float:
    """Median seconds of a call, which ends when its result is there."""
    seconds = []
    for _ in range(WARMUP + rounds):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[WARMUP:])


def time_step(keys: list[str], device: Any, rounds: int) -> tuple[float, int, float]:
    """(seconds of a step, bytes that it needs by XLA's account, model FLOPs of a step)."""
    config = load(keys)
    program = Program(config, devices=[device])
    compiled = program.compile_train_step()
    random = np.random.default_rng(0)
    shape = (config.batch_size, config.sequence_length + 1)
    tokens = random.integers(0, config.model.vocab_size, shape, dtype=np.int32)
    batch = program.place(
        {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "loss_mask": np.ones(tokens[:, 1:].shape, np.float32),
            "segment_ids": np.ones(tokens[:, 1:].shape, np.int32),
            "positions": np.tile(np.arange(shape[1] - 1, dtype=np.int32), (shape[0], 1)),
        }
    )
    state = program.initial_state()

    def call() -> Any:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics

    seconds = time_calls(call, rounds)
    analysis = compiled.memory_analysis()
    needed = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    tokens_per_step = config.batch_size * config.sequence_length
    flops = tokens_per_step * flops_per_token(config.model, config.sequence_length)
    return seconds, needed, flops


def report_steps(arguments: argparse.Namespace, device: Any, sizes: dict[str, int]) -> None:
    peak = peak_flops(device)
    print(f"\n{'training step':24s}{'ms':>10s}{'x bf16':>9s}{'TFLOP/s':>10s}{'MFU':>8s}{'GiB':>9s}")
    base = None
    for name, keys in variants(device).items():
        seconds, needed, flops = time_step(
            [*overrides(arguments, sizes), *keys], device, arguments.rounds
        )
        base = seconds if base is None else base
        utilisation = f"{flops / seconds / peak:8.1%}" if peak else f"{'':8s}"
        print(
            f"{name:24s}{seconds * 1e3:10.2f}{base / seconds:9.2f}{flops / seconds / 1e12:10.1f}"
            f"{utilisation}{needed / GIB:9.3f}",
            flush=True,
        )


def products(device: Any) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """x [M, K] times w [N, K], by precision, of operands that are rounded beforehand."""

    def dot(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
        )

    def scaled(x: jax.Array, w: jax.Array) -> jax.Array:
        ones = [
            jnp.ones((1, side.shape[0], side.shape[1] // 16), jnp.float8_e4m3fn) for side in (x, w)
        ]
        return jax.nn.scaled_matmul(x[None], w[None], *ones, preferred_element_type=jnp.bfloat16)[0]

    found: dict[str, Callable] = {"bf16": dot}
    capability = DeviceKind.of(device).compute_capability
    if capability is not None and float(capability) >= 8.9:
        found["fp8"] = dot
    if choose_backend("auto", get_recipe("nvfp4"), device).name != "emulated":
        found["fp4"] = scaled
    return found


def report_products(arguments: argparse.Namespace, device: Any, sizes: dict[str, int]) -> None:
    dtypes = {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn, "fp4": jnp.float4_e2m1fn}
    shape = (arguments.batch * arguments.length, 2 * sizes["mlp_dim"], sizes["embed_dim"])
    rows, columns, contraction = shape
    title = f"product {rows} x {columns} x {contraction}"
    print(f"\n{title:32s}{'ms':>10s}{'TFLOP/s':>10s}{'x bf16':>9s}{'x fp8':>9s}")
    times: dict[str, float] = {}
    for name, product in products(device).items():
        keys = jax.random.split(jax.random.key(0))
        x = jax.random.normal(keys[0], (rows, contraction)).astype(dtypes[name])
        w = jax.random.normal(keys[1], (columns, contraction)).astype(dtypes[name])
        jitted = jax.jit(product)
        times[name] = time_calls(lambda call=jitted, x=x, w=w: call(x, w), arguments.rounds)
        speed = 2 * rows * columns * contraction / times[name] / 1e12
        ratios = "".join(
            f"{times[base] / times[name]:9.2f}" for base in ("bf16", "fp8") if base in times
        )
        print(f"{name:32s}{times[name] * 1e3:10.3f}{speed:10.1f}{ratios}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="NVFP4 on the GPU at hand.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--length", type=int, default=4096, help="tokens per sequence")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=10, help="timed calls of each variant")
    arguments = parser.parse_args(argv)
    device = jax.devices()[0]
    sizes = BLOCKS
    if device.platform == "cpu":
        print("no GPU here: toy sizes on the CPU, whose times say nothing about a GPU")
        sizes = TOY
        arguments.layers, arguments.batch = min(arguments.layers, 2), min(arguments.batch, 2)
        arguments.length, arguments.vocabulary = min(arguments.length, 64), 256
    kind = DeviceKind.of(device)
    capability = (
        f", compute capability {kind.compute_capability}" if kind.compute_capability else ""
    )
    print(f"{kind.name}{capability}, JAX {jax.__version__}")
    print(
        f"{arguments.layers} blocks of width {sizes['embed_dim']}, {arguments.batch} x "
        f"{arguments.length} tokens, all blocks in the precision named"
    )
    report_steps(arguments, device, sizes)
    report_products(arguments, device, sizes)


if __name__ == "__main__":
    main()
