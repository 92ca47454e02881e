"""What one step of a compiled program does on one device: matrix products, attention, traffic.

Everything here is read from the text of the compiled program (see `hlo.py`), nothing is modelled.
"""

from __future__ import annotations

import collections
import math
import re
from dataclasses import dataclass

from .hlo import Computation, Execution, Instruction, Module, replica_group
from .roofline import Collective, Work

# A shorter contraction is a Hadamard transform or a block sum, not a layer's product.
_SHORTEST_CONTRACTION = 16

_PRECISIONS = {"f4e2m1fn": "fp4", "bf16": "bf16", "f16": "fp16", "f32": "fp32", "f64": "fp64"}
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Instructions that move nothing through memory by themselves.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "opt-barrier", "add-dependency", "iota",
    "async-start", "async-update", "domain",
}  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """Per device and step.

    Attributes:
      work: operations, bytes and collectives.
      gemms: runs of matrix products, by precision of the operands (fp4, fp8, bf16, fp16, fp32).
      attentions: runs of cuDNN's fused attention, forward and backward.
      unknown_loops: loops whose number of iterations depends on data; their bodies count once.
    """

    work: Work
    gemms: dict[str, int]
    attentions: int
    unknown_loops: int


def count(text: str, num_devices: int = 1) -> Counts:
    """Counts a compiled program. num_devices: that a collective without groups spans."""
    module = Module(text)
    gemms: dict[str, int] = collections.defaultdict(int)
    gemm_flops: dict[str, float] = collections.defaultdict(float)
    attentions, attention_flops, traffic = 0, 0.0, 0.0
    collectives: dict[tuple[str, int, int], list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for execution in module.executions():
        instruction, times = execution.instruction, execution.times
        kind = instruction.opcode.removesuffix("-start")
        target = instruction.custom_call_target
        if (product := _gemm(execution)) is not None:
            precision, flops = product
            gemms[precision] += times
            gemm_flops[precision] += times * flops
        elif target.startswith("__cudnn$fmha"):
            attentions += times
            attention_flops += times * _attention_flops(execution)
        elif kind in _COLLECTIVES:
            group = replica_group(instruction.attributes) or list(range(num_devices))
            received = _received(kind, execution, len(group))
            if received:
                entry = collectives[kind, len(group), max(group) - min(group) + 1]
                entry[0] += times
                entry[1] += times * received
        elif not execution.in_fusion and not _holds_gemm(module, instruction):
            traffic += times * _traffic(module, execution)
    return Counts(
        work=Work(
            gemm_flops=dict(gemm_flops),
            attention_flops=attention_flops,
            traffic_bytes=traffic,
            collectives=tuple(
                Collective(*key, runs=int(runs), num_bytes=received)
                for key, (runs, received) in sorted(collectives.items())
            ),
        ),
        gemms=dict(gemms),
        attentions=attentions,
        unknown_loops=len(module.unknown_loops),
    )


def _gemm(execution: Execution) -> tuple[str, float] | None:
    """(precision, operations) of a matrix product; None for everything else."""
    instruction, computation = execution.instruction, execution.computation
    if instruction.opcode == "dot":
        left = computation.shape_of(instruction.operands[0])
        axes = instruction.dimensions("lhs_contracting_dims")
        contraction = math.prod(left.dimensions[axis] for axis in axes)
    elif instruction.custom_call_target == "__cudnn$blockScaledDot":
        left = computation.shape_of(instruction.operands[0])  # [batch, M, K]
        contraction = left.dimensions[-1]
    elif instruction.custom_call_target.startswith("te_gemm"):  # Transformer Engine, any layout
        left, right = (computation.shape_of(name) for name in instruction.operands[0:3:2])
        contraction = math.isqrt(left.size * right.size // instruction.shapes[0].size)
    elif instruction.custom_call_target.startswith("__cublas$"):
        left = computation.shape_of(instruction.operands[0])
        found = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', instruction.attributes)
        axes = [int(axis) for axis in re.findall(r"\d+", found[1])] if found else [-1]
        contraction = math.prod(left.dimensions[axis] for axis in axes)
    else:
        return None
    if contraction <= _SHORTEST_CONTRACTION:
        return None
    precision = _PRECISIONS.get(left.dtype, "fp8" if left.dtype.startswith("f8") else left.dtype)
    return precision, 2.0 * instruction.shapes[0].size * contraction


def _attention_flops(execution: Execution) -> float:
    """Of cuDNN's fused attention, whose operands are [B, T, N, H] and [B, S, K, H]: two products
    forward; backward five, with the one that is computed again."""
    instruction, computation = execution.instruction, execution.computation
    query, key = (computation.shape_of(name) for name in instruction.operands[:2])
    batch, length, heads, head_dim = query.dimensions
    product = 2.0 * batch * heads * length * key.dimensions[1] * head_dim
    if '"mask_type": "CAUSAL"' in instruction.attributes:
        product /= 2
    return product * (5 if "Backward" in instruction.custom_call_target else 2)


def _received(kind: str, execution: Execution, group: int) -> float:
    """Bytes that reach one device, sent around a ring."""
    computation = execution.computation
    operands = sum(
        computation.instructions[name].num_bytes
        for name in execution.instruction.operands
        if name in computation.instructions
    )
    if group < 2 and kind != "collective-permute":
        return 0.0
    share = (group - 1) / group
    return operands * {
        "all-gather": group - 1,
        "all-reduce": 2 * share,
        "reduce-scatter": share,
        "all-to-all": share,
        "ragged-all-to-all": share,
    }.get(kind, 1.0)


def _fused(module: Module, instruction: Instruction) -> Computation | None:
    if instruction.opcode not in ("fusion", "fusion-start"):
        return None
    found = re.search(r"\bcalls=%([\w.\-]+)", instruction.attributes)
    return module.computations[found[1]] if found else None


def _holds_gemm(module: Module, instruction: Instruction) -> bool:
    fused = _fused(module, instruction)
    return fused is not None and any(
        _gemm(Execution(item, fused, 1, True)) for item in fused.instructions.values()
    )


def _traffic(module: Module, execution: Execution) -> float:
    """Bytes that a kernel reads and writes; of a slice, and of an update in place, its own."""
    instruction, computation = execution.instruction, execution.computation
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0.0
    fused = _fused(module, instruction)
    if fused is None:
        operands = [computation.instructions[name] for name in instruction.operands]
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * instruction.num_bytes
        if instruction.opcode == "dynamic-update-slice":
            return 2 * operands[1].num_bytes
        return instruction.num_bytes + sum(operand.num_bytes for operand in operands)
    return _bytes_read(fused) + _bytes_written(fused, fused.root)


def _bytes_read(fused: Computation) -> float:
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    for item in fused.instructions.values():
        for name in item.operands:
            users[name].append(item)

    def read(source: Instruction) -> float:
        """Bytes of `source` that its users look at."""
        total = 0.0
        for user in users[source.name]:
            if user.opcode in ("dynamic-slice", "slice", "gather"):
                total += user.num_bytes
            elif user.opcode == "bitcast":
                total += read(user)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == source.name:
                pass  # the rest stays where it is
            else:
                return source.num_bytes
        return min(total, source.num_bytes)

    return sum(read(item) for item in fused.instructions.values() if item.opcode == "parameter")


def _bytes_written(fused: Computation, root: Instruction) -> float:
    if root.opcode == "tuple":
        return sum(_bytes_written(fused, fused.instructions[name]) for name in root.operands)
    if root.opcode == "bitcast":
        return _bytes_written(fused, fused.instructions[root.operands[0]])
    if root.opcode == "dynamic-update-slice":
        return fused.instructions[root.operands[1]].num_bytes
    return root.num_bytes
