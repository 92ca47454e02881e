"""Whether a run fits, before anything is allocated.

First an estimate from shapes alone, within seconds for any size of model; then, once the step is
compiled, XLA's own account of it. A run that does not fit ends with one message instead of being
killed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from ..errors import UserError
from ..models import ModelConfig
from ..numerics import Recipe, get_recipe

GIB = 2**30
PACKED = 0.5 + 1 / 16  # bytes of an FP4 code and its share of a block's scale
USABLE = 0.92  # of what is free: allocators fragment, and the rest of the program lives there too


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per device."""

    parameters: int
    optimizer: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.gradients + self.activations

    def table(self, available: int) -> str:
        """The estimate beside what is there, in GiB per device, as lines of text."""
        rows = {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "activations": self.activations,
            "total": self.total,
            "available": available,
        }
        lines = [f"  {name:12}{value / GIB:10,.2f}" for name, value in rows.items()]
        return "\n".join(["Memory in GiB per device (estimate):", *lines])


def sharded_bytes(tree: Any, shardings: Any) -> int:
    """Bytes per device of a tree of shapes laid out by a tree of shardings."""

    def size(leaf: Any, sharding: Any) -> int:
        return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, tree, shardings)))


def activation_bytes(
    config: ModelConfig,
    recipe: Recipe | str,
    *,
    tokens: int,
    sequence_length: int,
    activation_size: int,
    remat: str,
    on_cpu: bool,
    packed: bool = False,
    loss_chunks: int = 1,
    tensor: int = 1,
    expert: int = 1,
    fsdp: int = 1,
) -> int:
    """Bytes that the forward pass leaves for the backward pass, and the largest temporaries.

    tokens: of one microbatch on one device. activation_size: bytes of one activation. tensor,
    expert, fsdp: sizes of these axes of the mesh; the first divides all but the inputs of width D,
    which every device of it has whole, the second the experts' matrices, the third packed weights
    as they are kept. Per block and token, with D the width, Q and K the query and key/value widths,
    F the feed-forward's, times the experts that a token uses:

        saved by any policy    D                          the block's input
        linears' inputs        D + Q + D + F              as wgrad wants them
                               + the rounded weights      per block, not per token
        linears' outputs       Q + 2 K + D + 2 F + D
        remat=none, besides    D + Q + 2 K                between attention and feed-forward,
                                                          q/k/v after RoPE
        while a block runs     4 D + 2 (Q + 2 K) + 2 F    norms, q/k/v after RoPE, attention,
                                                          the product of gate and up

    remat=save_quantized keeps inputs and weights that are FP4, and outputs unless all is FP32.
    Rounded values are held in bfloat16, in float32 on a CPU (see numerics/backends/emulated.py);
    packed: as FP4, by a backend that multiplies in FP4.
    Temporaries: one block's gradients, its activations unless they are stored and, for FP4, four
    float32 arrays as wide as gate and up together; or logits and their gradient, float32 [tokens /
    loss_chunks, V], and with several chunks the head's float32 matrix and the gradient of one
    chunk.
    """
    recipe = get_recipe(recipe)
    width = config.embed_dim
    query = config.num_heads * config.resolved_head_dim
    key = config.num_kv_heads * config.resolved_head_dim
    experts = config.moe.experts_per_token if config.moe is not None else 1
    hidden = config.mlp_dim * experts
    copies = config.moe.num_experts / expert if config.moe is not None else 1
    weights = width * (2 * query + 2 * key) + 3 * width * config.mlp_dim * copies

    rounded_size = PACKED if packed and recipe.uses_fp4 else 4 if on_cpu else 2
    saved = width * activation_size / tensor
    inputs = (width * (1 + experts) + (query + hidden) / tensor) * rounded_size
    rounded_weights = 0 if recipe.is_float32 else weights * rounded_size / tensor
    kept_weights = rounded_weights / fsdp if packed else rounded_weights
    outputs = query + 2 * key + width * (1 + experts) + 2 * hidden
    others = 4 * width + 2 * (query + 2 * key) + 2 * hidden
    outputs, others = (size * activation_size / tensor for size in (outputs, others))
    scores = (
        2 * config.num_heads * sequence_length * 4 / tensor if on_cpu else 0
    )  # elsewhere: flash
    rounding = 4 * 4 * 2 * hidden / tensor if recipe.uses_fp4 else 0

    fp4, fp32 = recipe.uses_fp4, recipe.is_float32
    whole = saved + inputs + outputs + others
    between = (width + query + 2 * key) * activation_size / tensor
    per_token, per_block = {
        "none": (saved + inputs + outputs + between, kept_weights),
        "save_quantized": (
            saved + (inputs if fp4 else 0) + (0 if fp32 else outputs),
            kept_weights if fp4 else 0,
        ),
        "full": (saved, 0),
    }[remat]
    times = 1 if remat == "none" else 2
    one_block = tokens * (times * whole + scores + rounding) + 2 * rounded_weights
    vocabulary = config.vocab_size / tensor
    logits = 2 * (tokens // loss_chunks) * vocabulary * 4
    if loss_chunks > 1:
        logits += 2 * width * vocabulary * 4
    stored = config.num_layers * (tokens * per_token + per_block)
    return int(stored + max(one_block, logits))


def available_bytes(devices: Sequence[Any], *, processes: int = 1) -> int:
    """Free memory per device. Devices of one CPU share that machine's memory (or container's), and
    so do the processes on it."""
    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return min(_free(device.memory_stats()) for device in devices)
    return host_available_bytes() // (len(devices) * processes)


def _free(stats: dict[str, int] | None) -> int:
    assert stats is not None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def host_available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take: of the machine and of its control group, if limited.

    root: of the file system, for tests.
    """
    candidates = []
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            candidates.append(int(line.split()[1]) * 1024)
    for directory, limit, usage in _control_groups(root):
        limit_text, usage_text = _read(directory / limit), _read(directory / usage)
        if limit_text.isdigit() and usage_text.isdigit():
            # Page cache counts as usage but is given up under pressure.
            candidates.append(int(limit_text) - int(usage_text) + _reclaimable(directory))
    if candidates:
        return max(min(candidates), 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # macOS: no /proc


def _control_groups(root: Path) -> list[tuple[Path, str, str]]:
    groups = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: limits of all ancestors hold
            base = root / "sys/fs/cgroup"
            directory = base / path.lstrip("/")
            for folder in (directory, *directory.parents):
                groups.append((folder, "memory.max", "memory.current"))
                if folder == base:
                    break
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            groups += [(base / path.lstrip("/"), *names), (base, *names)]
    return groups


def _reclaimable(directory: Path) -> int:
    for line in _read(directory / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def check_fits(estimate: MemoryEstimate, available: int, mesh: Mesh, remat: str) -> None:
    """Raises UserError, with the table and what to change, if the estimate is too large."""
    if estimate.total <= available * USABLE:
        return
    raise UserError(
        f"this run needs {estimate.total / GIB:,.1f} GiB per device and {available / GIB:,.1f} GiB "
        f"are available on each of {mesh.size} device(s)",
        lines=[estimate.table(available), _remedies(estimate, available, remat)],
    )


def check_compiled(compiled: Any, available: int, mesh: Mesh, remat: str) -> int:
    """Bytes per device of a compiled step by XLA's account (its arguments included).

    Raises:
      UserError: if they exceed what is there.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    needed = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    if needed > available * USABLE:
        raise UserError(
            f"the compiled step needs {needed / GIB:,.1f} GiB per device "
            f"({analysis.temp_size_in_bytes / GIB:,.1f} of them temporary) and "
            f"{available / GIB:,.1f} GiB are available on each of {mesh.size} device(s): "
            + _change_activations(remat)
        )
    return needed


def _remedies(estimate: MemoryEstimate, available: int, remat: str) -> str:
    state = estimate.total - estimate.activations
    advice = []
    if state > available * USABLE:
        devices = math.ceil(state / (available * USABLE))
        advice.append(
            f"parameters, optimizer and gradients alone need {state / GIB:,.1f} GiB: split them "
            f"over {devices} times as many such devices (mesh.fsdp, mesh.expert or mesh.tensor), "
            "or choose a smaller model="
        )
    if estimate.activations > available * USABLE / 2:
        advice.append(_change_activations(remat))
    if not advice:
        advice.append(f"{_change_activations(remat)}, split over more devices (mesh.fsdp)")
    return "What to change: " + "; ".join(advice)


def _change_activations(remat: str) -> str:
    stronger = {"none": "save_quantized or remat=full", "save_quantized": "full"}.get(remat)
    remat_advice = f"set remat={stronger}, " if stronger else ""
    return (
        f"{remat_advice}lower batch_size or raise gradient_accumulation, shorten sequence_length, "
        "or choose a smaller model="
    )
