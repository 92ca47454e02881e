"""What each way of saving memory saves, by XLA's account of the compiled training step.

    python benchmarks/memory.py [TARGET] [key=value ...]

TARGET is a GPU of plan.py, such as b200, compiled for without one; without it, this machine's first
device. Nothing is allocated and nothing runs. The table in docs/memory.md is what it prints.
"""

from __future__ import annotations

import dataclasses
import sys

import jax

from fp4zoo.configs import load
from fp4zoo.planning.targets import cudnn_of, find_target, target_devices, use_cpu
from fp4zoo.training.program import Program
from fp4zoo.training.sharding import MeshConfig

GIB = 2**30
SHAPE = ["model=llama-3.2-1b", "precision=nvfp4", "batch_size=8", "sequence_length=1024"]
# name in the table -> keys that differ from the row before; the first saves nothing.
ROWS = {
    "nothing saved": ["loss_chunks=1"],
    "`loss_chunks=8`": ["loss_chunks=8"],
    "and `remat=save_quantized`": ["remat=save_quantized"],
    "or `remat=full`": ["remat=full"],
    "and `optimizer.first_moment_dtype=bfloat16`": ["optimizer.first_moment_dtype=bfloat16"],
}


def main() -> None:
    arguments = sys.argv[1:]
    target = None
    if arguments and "=" not in arguments[0]:
        use_cpu()
        target = find_target(arguments.pop(0))
        devices = target_devices(target.name, 1)
    else:
        devices = jax.devices()[:1]
    print("| | state | temporaries | together | less |\n|---|---|---|---|---|")
    first = None
    overrides = [*SHAPE, *arguments]
    for name, keys in ROWS.items():
        overrides += keys
        config = load(overrides)
        program = Program(dataclasses.replace(config, mesh=MeshConfig()), devices)
        if target is None:
            compiled = program.compile_train_step()
        else:
            with cudnn_of(target):
                compiled = program.compile_train_step()
        analysis = compiled.memory_analysis()
        state, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
        together = state + temporary
        first = first or together
        cells = [f"{size / GIB:.2f}" for size in (state, temporary, together)]
        print(f"| {name} | {' | '.join(cells)} | {1 - together / first:.0%} |", flush=True)


if __name__ == "__main__":
    main()
