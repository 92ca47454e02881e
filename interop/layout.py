"""Which Hugging Face tensors make up which of our parameters, for every architecture.

A parameter is stored on disk with its axes in `stored order`: an input axis comes last, as in the
[out, in] matrices of Hugging Face. Then every tensor there is a contiguous part of ours or a few
contiguous rows of it, and converting moves bytes without transposing a matrix.

Legend: L layers, E experts, D embedding dimension, K key/value heads, G query heads per key/value
head, H head dimension, F feed-forward dimension, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..models import ModelConfig

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Piece:
    """One Hugging Face tensor inside one slab.

    name: the tensor's. split: its shape with the output axis split as in the slab. index: its place
    in the slab in stored order. linear: "attention" or "mlp" for the weight of a linear that can be
    FP4; None for all that never is.
    """

    name: str
    split: tuple[int, ...]
    index: Index = ()
    linear: str | None = None


@dataclass(frozen=True)
class Parameter:
    """One of our parameters.

    path: its keys in the parameter tree. shape: its shape. leading: how many leading axes count
    layers and experts. order: axes of the rest (numbered within the rest) in stored order.
    first_layer: the layer of the model that its index 0 holds.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    leading: int
    order: tuple[int, ...]
    kind: str
    first_layer: int = 0

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def slab_shape(self) -> tuple[int, ...]:
        """Shape of one slab (one layer, one expert) in stored order."""
        rest = self.shape[self.leading :]
        return tuple(rest[axis] for axis in self.order)

    @property
    def stored_axes(self) -> tuple[int, ...]:
        """The permutation of all axes into stored order."""
        return (*range(self.leading), *(self.leading + axis for axis in self.order))

    def slabs(self) -> Iterator[tuple[int, ...]]:
        """Every leading index: (), (layer,) or (layer, expert)."""
        return itertools.product(*(range(size) for size in self.shape[: self.leading]))


@dataclass(frozen=True)
class LayerSegment:
    """Layers [start, stop) of a model, stacked under blocks.NAME."""

    name: str
    start: int
    stop: int


class Layout:
    """Our parameters of one model, and the Hugging Face tensors that they consist of.

    vocab_size: rows of the Hugging Face vocabulary where ours is padded (`config.vocab_size` rows).
    """

    def __init__(
        self,
        config: ModelConfig,
        segments: tuple[LayerSegment, ...] | None = None,
        *,
        vocab_size: int | None = None,
    ):
        self.config = config
        self.vocab_size = config.vocab_size if vocab_size is None else vocab_size
        self.segments = segments or (LayerSegment("middle", 0, config.num_layers),)
        self.parameters = tuple(self._parameters())

    def _parameters(self) -> Iterator[Parameter]:
        config = self.config
        dim, vocab = config.embed_dim, config.vocab_size
        yield Parameter(("embedding", "embedding"), (vocab, dim), 0, (0, 1), "embedding")
        for segment in self.segments:
            depth = segment.stop - segment.start
            for path, leading, shape, order, kind in self._block():
                yield Parameter(
                    ("blocks", segment.name, *path),
                    (depth, *leading, *shape),
                    1 + len(leading),
                    order,
                    kind,
                    segment.start,
                )
        yield Parameter(("final_norm", "scale"), (dim,), 0, (0,), "final_norm")
        if not config.tie_embeddings:
            yield Parameter(("output_head", "kernel"), (dim, vocab), 0, (1, 0), "head")

    def _block(self) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...],
                                       tuple[int, ...], str]]:  # fmt: skip
        """(path, expert axis, shape, stored order, kind) of the parameters of one layer."""
        config = self.config
        dim, width, head = config.embed_dim, config.mlp_dim, config.resolved_head_dim
        keys = config.num_kv_heads
        fused = config.num_heads // keys + 2
        yield ("attention_norm", "scale"), (), (dim,), (0,), "attention_norm"
        yield ("mlp_norm", "scale"), (), (dim,), (0,), "mlp_norm"
        yield ("attention", "qkv", "kernel"), (), (dim, keys, fused, head), (1, 2, 3, 0), "qkv"
        if config.attention_bias:
            yield ("attention", "qkv", "bias"), (), (keys, fused, head), (0, 1, 2), "qkv_bias"
        heads = config.num_heads * head
        yield ("attention", "output", "kernel"), (), (heads, dim), (1, 0), "output"
        if config.attention_bias and config.architecture != "qwen2":
            yield ("attention", "output", "bias"), (), (dim,), (0,), "output_bias"
        if config.qk_norm:
            yield ("attention", "query_norm", "scale"), (), (head,), (0,), "query_norm"
            yield ("attention", "key_norm", "scale"), (), (head,), (0,), "key_norm"
        if config.moe is None:
            yield ("mlp", "gate_up", "kernel"), (), (dim, 2, width), (1, 2, 0), "gate_up"
            yield ("mlp", "down", "kernel"), (), (width, dim), (1, 0), "down"
            if config.mlp_bias:
                yield ("mlp", "gate_up", "bias"), (), (2, width), (0, 1), "gate_up_bias"
                yield ("mlp", "down", "bias"), (), (dim,), (0,), "down_bias"
        else:
            experts = (config.moe.num_experts,)
            yield ("mlp", "moe", "router"), (), (dim, *experts), (1, 0), "router"
            yield ("mlp", "moe", "gate_up"), experts, (dim, 2, width), (1, 2, 0), "gate_up"
            yield ("mlp", "moe", "down"), experts, (width, dim), (1, 0), "down"

    def pieces(self, parameter: Parameter, leading: tuple[int, ...]) -> tuple[Piece, ...]:
        """The Hugging Face tensors in one slab, in the slab's order."""
        config = self.config
        kind, slab = parameter.kind, parameter.slab_shape
        if not leading:
            name = {"embedding": "model.embed_tokens", "final_norm": "model.norm",
                    "head": "lm_head"}[kind] + ".weight"  # fmt: skip
            if kind == "final_norm":
                return (Piece(name, slab),)
            return (Piece(name, (self.vocab_size, slab[1]), (slice(0, self.vocab_size),)),)
        layer = f"model.layers.{parameter.first_layer + leading[0]}"
        attention = f"{layer}.self_attn"
        suffix = "bias" if kind.endswith("_bias") else "weight"
        if kind in ("qkv", "qkv_bias"):
            keys, fused, rest = slab[0], slab[1], slab[2:]
            linear = "attention" if kind == "qkv" else None
            groups = fused - 2
            every = slice(None)
            return (
                Piece(f"{attention}.q_proj.{suffix}", (keys, groups, *rest),
                      (every, slice(0, groups)), linear),
                Piece(f"{attention}.k_proj.{suffix}", (keys, *rest), (every, groups), linear),
                Piece(f"{attention}.v_proj.{suffix}", (keys, *rest), (every, groups + 1), linear),
            )  # fmt: skip
        if kind in ("output", "output_bias"):
            linear = "attention" if kind == "output" else None
            return (Piece(f"{attention}.o_proj.{suffix}", slab, (), linear),)
        simple = {
            "attention_norm": f"{layer}.input_layernorm",
            "mlp_norm": f"{layer}.post_attention_layernorm",
            "query_norm": f"{attention}.q_norm",
            "key_norm": f"{attention}.k_norm",
        }
        if kind in simple:
            return (Piece(f"{simple[kind]}.weight", slab),)
        mlp, names = f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj")
        if config.architecture == "mixtral":
            mlp, names = f"{layer}.block_sparse_moe", ("w1", "w3", "w2")
        if kind == "router":
            return (Piece(f"{mlp}.gate.weight", slab),)
        if len(leading) == 2:
            mlp = f"{mlp}.experts.{leading[1]}"
        linear = "mlp" if suffix == "weight" else None
        if kind in ("down", "down_bias"):
            return (Piece(f"{mlp}.{names[2]}.{suffix}", slab, (), linear),)
        assert kind in ("gate_up", "gate_up_bias"), kind
        return (
            Piece(f"{mlp}.{names[0]}.{suffix}", slab[1:], (0,), linear),
            Piece(f"{mlp}.{names[1]}.{suffix}", slab[1:], (1,), linear),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every Hugging Face tensor of the model and its shape."""
        return {
            piece.name: hub_shape(piece, parameter)
            for parameter in self.parameters
            for leading in parameter.slabs()
            for piece in self.pieces(parameter, leading)
        }


def hub_shape(piece: Piece, parameter: Parameter) -> tuple[int, ...]:
    """The tensor's shape in the file: a matrix [out, in], or a vector."""
    if len(parameter.order) == 1 or parameter.kind.endswith("_bias"):
        return (math.prod(piece.split),)
    return (math.prod(piece.split[:-1]), piece.split[-1])
