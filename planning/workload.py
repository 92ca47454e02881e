"""What a step must do, from the configuration alone: the estimate that needs no compiler.

It ranks candidates in a search, and its traffic is that of well-fused kernels, which the published
steps of `hardware.PUBLISHED` ran; `counting.py` reads the same figures from a compiled program.

Legend: D width, Q query width, K key/value width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..models import ARCHITECTURES, ModelConfig
from ..models.precision_plan import LinearShape, fit_rules, make_segments
from ..numerics import Recipe, get_recipe
from ..numerics.formats import Format
from ..training.memory import PACKED
from .roofline import Collective, Work

if TYPE_CHECKING:
    from ..configs.schema import TrainConfig

_OPTIMIZER_BYTES = 40  # per parameter: master, two moments and gradient read, three written; norms
_LOGITS_PASSES = 6  # float32: written, softmax, loss, its gradient, read by two products
_SEQUENCE_PASSES = {  # activations read or written per block and pass, in units of a width
    "D": 8,  # two norms, two residual additions
    "Q + 2 K": 3,  # rotary embedding, attention
    "F": 3,  # gate times up
}
_PRODUCT_PRECISION = {Format.NVFP4: "fp4", Format.FP32: "fp32", Format.FP16: "fp16"}


def precision_of(recipe: Recipe) -> str:
    """What a recipe's products are computed in: fp4, bf16, fp16 or fp32."""
    return _PRODUCT_PRECISION.get(recipe.dgrad_g.format, "bf16")


def expected_work(config: TrainConfig, sizes: Mapping[str, int]) -> Work:
    """Per device and step.

    sizes: of the mesh axes. Recomputation is counted by `config.remat`; FP4 products are taken to
    run in hardware.
    """
    model, recipe = config.model, get_recipe(config.precision.recipe)
    parallel = sizes["data"] * sizes["fsdp"] * sizes["expert"] * sizes["context"]
    tokens = config.batch_size * config.sequence_length / parallel
    tensor = sizes["tensor"]
    architecture = ARCHITECTURES[model.architecture]
    groups = {
        "attention": architecture.attention_linears(model),
        "mlp": architecture.mlp_linears(model),
    }
    rules = fit_rules(config.precision.rules, recipe, model)
    flops: dict[str, float] = {}
    traffic = 0.0
    passes = 4 if config.remat == "full" else 3  # forward, dgrad, wgrad
    for segment in make_segments(model.num_layers, recipe, rules):
        layers = segment.stop - segment.start
        traffic += layers * tokens * _sequence_bytes(model) / tensor * (passes / 3)
        for group, segment_recipe in (("attention", segment.attention), ("mlp", segment.mlp)):
            for shape in groups[group]:
                router = shape.name == "router"
                precision = "fp32" if router else precision_of(segment_recipe)
                work = passes * layers * tokens * shape.flops / tensor
                flops[precision] = flops.get(precision, 0.0) + work
                if precision == "fp4":
                    traffic += layers * tokens * _quantizing_bytes(shape) / tensor
    head = 3 * tokens * 2 * model.embed_dim * model.vocab_size / tensor
    precision = {"float32": "fp32", "float16": "fp16"}.get(
        config.precision.activation_dtype, "bf16"
    )
    flops[precision] = flops.get(precision, 0.0) + head
    traffic += _LOGITS_PASSES * 4 * tokens * model.vocab_size / tensor
    parameters = parameter_counts(model)
    local = (parameters["shared"] + parameters["experts"] / sizes["expert"]) / (
        sizes["fsdp"] * tensor
    )
    traffic += _OPTIMIZER_BYTES * local
    span = min(config.sequence_length, model.sliding_window or config.sequence_length)
    product = 2 * model.num_heads * model.resolved_head_dim * span / 2  # masked half skipped
    products = 7 if config.remat == "none" else 9  # forward 2, backward 5, forward again 2
    return Work(
        gemm_flops=flops,
        attention_flops=products * model.num_layers * tokens * product / tensor,
        traffic_bytes=traffic,
        collectives=_collectives(config, sizes, tokens, parameters),
    )


def parameter_counts(model: ModelConfig) -> dict[str, float]:
    """Of the blocks' matrices that every token uses and embeddings, and of the experts."""
    architecture = ARCHITECTURES[model.architecture]
    shapes = [*architecture.attention_linears(model), *architecture.mlp_linears(model)]
    embeddings = (1 if model.tie_embeddings else 2) * model.vocab_size * model.embed_dim
    shared = sum(shape.parameters for shape in shapes if shape.copies == 1)
    experts = sum(shape.parameters for shape in shapes if shape.copies > 1)
    return {
        "shared": model.num_layers * shared + embeddings,
        "experts": model.num_layers * experts,
    }


def _sequence_bytes(model: ModelConfig) -> float:
    """Activations that a block's norms, additions, rotations and gates read and write, per token:
    once forward, twice backward, 2 bytes each."""
    active = model.moe.experts_per_token if model.moe is not None else 1
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.resolved_head_dim
    elements = (
        _SEQUENCE_PASSES["D"] * model.embed_dim
        + _SEQUENCE_PASSES["Q + 2 K"] * heads
        + _SEQUENCE_PASSES["F"] * model.mlp_dim * active
    )
    return 3 * 2 * elements


def _quantizing_bytes(shape: LinearShape) -> float:
    """Per token of one linear: x and the gradient g are read for their amax, read again, and
    written twice, blocks along either axis, as Transformer Engine's kernels do it."""
    return 2 * (2 + PACKED) * (shape.in_features + shape.out_features) * shape.active


def _collectives(
    config: TrainConfig, sizes: Mapping[str, int], tokens: float, parameters: dict[str, float]
) -> tuple[Collective, ...]:
    """What the mesh makes devices send: see docs/planning.md for the table."""
    model = config.model
    data, fsdp, expert, context, tensor = (
        sizes[name] for name in ("data", "fsdp", "expert", "context", "tensor")
    )
    inner = context * tensor
    uses_fp4 = get_recipe(config.precision.recipe).uses_fp4
    weight_bytes = PACKED if uses_fp4 else 2
    microbatches = config.gradient_accumulation
    matrices = (parameters["shared"] + parameters["experts"] / expert) / tensor
    entries = []

    def add(kind: str, group: int, span: int, runs: int, received: float) -> None:
        if group > 1:
            entries.append(Collective(kind, group, span, runs, received))

    def ring(group: int) -> float:
        return (group - 1) / group

    layers, width = model.num_layers, model.embed_dim
    span = fsdp * expert * inner
    gathers = 2 * microbatches  # before the forward and before the backward pass
    add("all-gather", fsdp, span, gathers * layers, ring(fsdp) * gathers * weight_bytes * matrices)
    add("reduce-scatter", fsdp, span, layers, ring(fsdp) * microbatches * 4 * matrices)
    add("all-reduce", data, data * span, layers, 2 * ring(data) * 4 * matrices / fsdp)
    add(
        "all-reduce",
        expert,
        expert * inner,
        layers,
        2 * ring(expert) * 4 * parameters["shared"] / (tensor * fsdp),
    )
    exchanged = 2 * tokens * width  # bytes of the residual stream
    active = model.moe.experts_per_token if model.moe is not None else 0
    add(
        "all-to-all",
        expert,
        expert * inner,
        4 * layers * microbatches,
        4 * ring(expert) * layers * active * exchanged,
    )
    add(
        "all-gather",
        tensor,
        tensor,
        4 * layers * microbatches,
        4 * ring(tensor) * layers * exchanged,
    )
    add(
        "reduce-scatter",
        tensor,
        tensor,
        4 * layers * microbatches,
        4 * ring(tensor) * layers * exchanged,
    )
    keys = 2 * 2 * tokens * context * model.num_kv_heads * model.resolved_head_dim / tensor
    add("all-gather", context, inner, 3 * layers * microbatches, 3 * ring(context) * layers * keys)
    return tuple(entries)
