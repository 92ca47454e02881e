"""Reads the text of a compiled XLA program: instructions, shapes, and how often each is run.

`compiled.cost_analysis()` knows nothing when a program is compiled ahead of time for a GPU, so the
text of the optimised module is counted instead. A loop's body counts as often as the loop runs;
XLA writes the number of iterations beside each loop of a scan. Fusions are walked into: a matrix
product may lie inside one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

_BITS = {
    "pred": 8, "token": 0, "opaque": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4,
    "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16, "s32": 32, "u32": 32,
    "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{\s*$")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%([\w.\-]+)")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%([\w.\-]+))"
)


@dataclass(frozen=True)
class Shape:
    """dtype as XLA writes it (bf16, f4e2m1fn), and the dimensions."""

    dtype: str
    dimensions: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dimensions)

    @property
    def num_bytes(self) -> float:
        bits = _BITS.get(self.dtype, 8)  # all other floating-point types have 8
        return self.size * bits / 8


@dataclass
class Instruction:
    """One line. `shapes` is the result's, tuples flattened; `attributes` the text after the
    operands; `operands` their names."""

    name: str
    opcode: str
    shapes: list[Shape]
    operands: list[str]
    attributes: str
    is_root: bool

    @property
    def num_bytes(self) -> float:
        return sum(shape.num_bytes for shape in self.shapes)

    @property
    def custom_call_target(self) -> str:
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def dimensions(self, attribute: str) -> tuple[int, ...]:
        """Such as lhs_contracting_dims={1,2}; () when absent."""
        found = re.search(rf"\b{attribute}=\{{([0-9,]*)\}}", self.attributes)
        return tuple(int(part) for part in found[1].split(",") if part) if found else ()


@dataclass
class Computation:
    """Instructions by name, in the order of the text."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(item for item in self.instructions.values() if item.is_root)

    def shape_of(self, name: str) -> Shape:
        """The (first) shape of an operand."""
        return self.instructions[name].shapes[0]


@dataclass(frozen=True)
class Execution:
    """An instruction, where it stands, and how often one step runs it on one device.

    in_fusion: it is part of a kernel rather than one of its own.
    """

    instruction: Instruction
    computation: Computation
    times: int
    in_fusion: bool


class Module:
    """A compiled program.

    Attributes:
      computations: by name.
      unknown_loops: loops without a known number of iterations; their bodies count once.
    """

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self._entry = ""
        self.unknown_loops: list[str] = []
        current: Computation | None = None
        for line in text.splitlines():
            if current is None:
                header = _COMPUTATION.match(line)
                if header and not line.startswith("HloModule"):
                    current = Computation(header[2])
                    self.computations[current.name] = current
                    if header[1]:
                        self._entry = current.name
            elif line.startswith("}"):
                current = None
            elif (instruction := _parse(line)) is not None:
                current.instructions[instruction.name] = instruction
        if not self._entry:
            raise ValueError("the text is not an HLO module: it has no ENTRY computation")

    def executions(self) -> Iterator[Execution]:
        """Every instruction that a step runs, with its count."""
        self.unknown_loops.clear()
        yield from self._walk(self._entry, 1, False)

    def _walk(self, name: str, times: int, in_fusion: bool) -> Iterator[Execution]:
        computation = self.computations[name]
        for instruction in computation.instructions.values():
            yield Execution(instruction, computation, times, in_fusion)
            opcode, attributes = instruction.opcode, instruction.attributes
            if opcode == "while":
                found = _TRIP_COUNT.search(attributes)
                if found is None:
                    self.unknown_loops.append(instruction.name)
                trips = int(found[1]) if found else 1
                for called in _CALLED.findall(attributes):
                    yield from self._walk(called, times * trips, in_fusion)
            elif opcode == "conditional":
                for several, one in _BRANCHES.findall(attributes):
                    for called in [one] if one else _NAME.findall(several):
                        yield from self._walk(called, times, in_fusion)
            elif opcode in ("fusion", "fusion-start"):
                for called in _CALLED.findall(attributes):
                    yield from self._walk(called, times, True)
            elif opcode in ("call", "async-start"):
                for called in _CALLED.findall(attributes):
                    yield from self._walk(called, times, in_fusion)
            # to_apply of a reduction, scatter or collective is a function of scalars: no work.


def replica_group(attributes: str) -> list[int]:
    """Devices of the first group of a collective; [] for one that spans all devices.

    XLA writes groups as a list {{0,1},{2,3}}, as an iota [4,2]<=[2,4]T(1,0), or by the axes of a
    mesh, mesh['data'=2,'fsdp'=4] {'fsdp'}.
    """
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([0-9,]*)\}", attributes):
        return [int(part) for part in found[1].split(",") if part]
    if found := re.search(
        r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", attributes
    ):
        groups, dimensions = (_numbers(found[index]) for index in (1, 2))
        devices = np.arange(math.prod(dimensions)).reshape(dimensions)
        if found[3]:
            devices = devices.transpose(_numbers(found[3]))
        return devices.reshape(groups)[0].tolist()
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:[^{]*)\{([^}]*)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        chosen = re.findall(r"'([^']+)'", found[2])
        devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        first = tuple(slice(None) if name in chosen else 0 for name in sizes)
        return devices[first].reshape(-1).tolist()
    return []


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _parse(line: str) -> Instruction | None:
    start = _INSTRUCTION.match(line)
    if start is None:
        return None
    rest = line[start.end() :]
    end = _end_of_shape(rest)
    shapes = [
        Shape(dtype, tuple(int(n.lstrip("<=")) for n in dimensions.split(",") if n))
        for dtype, dimensions in _SHAPE.findall(rest[:end])
    ]
    opcode, _, arguments = rest[end:].lstrip().partition("(")
    close = _closing(arguments)
    return Instruction(
        name=start[2],
        opcode=opcode,
        shapes=shapes,
        operands=[] if opcode == "constant" else _NAME.findall(arguments[:close]),
        attributes=arguments[close + 1 :],
        is_root=start[1] is not None,
    )


def _end_of_shape(text: str) -> int:
    """Where the result's shape ends: at the first blank outside brackets."""
    depth = 0
    for index, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == " " and depth == 0:
            return index
    return len(text)


def _closing(text: str) -> int:
    """Position of the parenthesis that closes the one before `text`."""
    depth = 1
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text)
