"""The real training step of a configuration, compiled by XLA for GPUs that are not there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from ..errors import UserError
from ..training import memory
from ..training.program import Program
from .counting import Counts, count
from .targets import COMPILER_OPTIONS, Target, cudnn_of, target_devices

if TYPE_CHECKING:
    from ..configs.schema import TrainConfig


@dataclass(frozen=True)
class StepMemory:
    """Bytes per device by XLA's account of a compiled step.

    Attributes:
      parameters: float32 masters.
      optimizer: its state.
      inputs: the batch and counters.
      temporaries: gradients, activations and workspace, at their peak.
      outputs: what the step returns beyond the state that it takes over.
    """

    parameters: int
    optimizer: int
    inputs: int
    temporaries: int
    outputs: int

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.inputs + self.temporaries + self.outputs


@dataclass(frozen=True)
class CompiledStep:
    """What came out of the compiler.

    Attributes:
      program: the configuration on the target's devices.
      memory: per device.
      counts: of one step on one device.
      seconds: that tracing and compiling took.
    """

    program: Program
    memory: StepMemory
    counts: Counts
    seconds: float


def compile_step(config: TrainConfig, target: Target, num_devices: int) -> CompiledStep:
    """Compiles the step that train.py would run on `num_devices` of `target`.

    Raises:
      UserError: what train.py would refuse, or what XLA cannot compile for this GPU.
    """
    begin = time.monotonic()
    devices = target_devices(target.name, num_devices)
    program = Program(config, devices, available=target.memory_bytes)
    try:
        with cudnn_of(target), jax.set_mesh(program.mesh):
            compiled = program.lower_train_step().compile(compiler_options=COMPILER_OPTIONS)
    except jax.errors.JaxRuntimeError as error:
        first_line = str(error).strip().splitlines()[0]
        raise UserError(
            f"target={target.name}: XLA cannot compile this step: {first_line}"
        ) from error
    analysis = compiled.memory_analysis()
    parameters = _bytes(program.state.parameters)
    optimizer = _bytes(program.state.optimizer)
    step_memory = StepMemory(
        parameters=parameters,
        optimizer=optimizer,
        inputs=analysis.argument_size_in_bytes - parameters - optimizer,
        temporaries=analysis.temp_size_in_bytes,
        outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    )
    counts = count(compiled.as_text(), num_devices)
    return CompiledStep(program, step_memory, counts, time.monotonic() - begin)


def _bytes(state: Any) -> int:
    """Per device, of a tree of shapes with shardings."""
    return memory.sharded_bytes(state, jax.tree.map(lambda leaf: leaf.sharding, state))
