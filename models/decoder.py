"""The decoder that every architecture shares: embedding, stacked blocks under scan, norm, head.

Parameters of the blocks are stacked per segment, [layers_in_segment, ...], and each segment runs
under one `jax.lax.scan`, so that the program's size does not grow with depth.

Legend: B batch, T tokens, D embedding dimension, V vocabulary, L layers, E experts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..errors import UserError, check_choice
from ..layers.attention import Attention, AttentionFunction
from ..layers.embedding import Embedding, OutputHead
from ..layers.norm import RMSNorm
from ..layers.rope import RopeTables, rope_frequencies, rope_tables
from ..numerics import GEMM_NAME, QUANTIZED_NAME, Recipe
from ..numerics.partitioning import constrain
from ..numerics.platform import row_major
from .config import ModelConfig
from .precision_plan import (
    LinearShape,
    PrecisionRules,
    Segment,
    fit_backend,
    fit_rules,
    make_plan,
    make_segments,
)

ACTIVATION_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
REMAT_POLICIES = ("none", "save_quantized", "full")

Auxiliary = dict[str, jax.Array]


def kernel_init() -> jax.nn.initializers.Initializer:
    """Normal with standard deviation 0.02, as in Llama and GPT-2."""
    return jax.nn.initializers.normal(0.02)


def output_kernel_init(config: ModelConfig) -> jax.nn.initializers.Initializer:
    """For projections into the residual stream: normal, 0.02 / sqrt(2 · num_layers), as in GPT-2.

    There are 2 · num_layers of them, so the stream's variance does not grow with depth.
    """
    return jax.nn.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5)


def attention_of(
    config: ModelConfig,
    recipe: Recipe,
    backend: str,
    rngs: nnx.Rngs,
    *,
    output_bias: bool,
    kind: type[Attention] = Attention,
) -> Attention:
    """The attention that `config` describes; `attention_bias` is about q, k and v here."""
    return kind(
        config.embed_dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.resolved_head_dim,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        sliding_window=config.sliding_window,
        qkv_bias=config.attention_bias,
        output_bias=output_bias,
        qk_norm=config.qk_norm,
        norm_epsilon=config.norm_epsilon,
        kernel_init=kernel_init(),
        output_kernel_init=output_kernel_init(config),
        recipe=recipe,
        rounding="explicit",
        backend=backend,
        name="attention",
        rngs=rngs,
    )


RESIDUAL = ("batch", "residual_sequence", None)  # how the residual stream lies on a mesh


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the residual stream keeps x's dtype.

    Between its parts a sequence is split over the mesh axis tensor too, so norms and residual sums
    are not computed on every device. The parts gather it themselves where they need all of it.
    """

    def __init__(self, config: ModelConfig, attention: Attention, mlp: Any, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.attention = attention
        self.mlp_norm = RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.mlp = mlp

    def __call__(
        self,
        x: jax.Array,
        *,
        rope: RopeTables,
        segment_ids: jax.Array | None,
        rounding_keys: jax.Array | None,
        attend: AttentionFunction | None = None,
    ) -> tuple[jax.Array, Auxiliary]:
        """x [B, T, D] -> ([B, T, D], auxiliary). The first two rounding keys are attention's.

        `attend` is handed to the attention: generation and calibration run this very block.
        """
        attention_keys, mlp_keys = None, None
        if rounding_keys is not None:
            attention_keys, mlp_keys = rounding_keys[:2], rounding_keys[2:]
        y = self.attention(
            self.attention_norm(x),
            segment_ids=segment_ids,
            rope=rope,
            rounding_keys=attention_keys,
            attend=attend,
        )
        x = constrain(x + constrain(y, *RESIDUAL), *RESIDUAL)
        y, auxiliary = self.mlp(self.mlp_norm(x), segment_ids=segment_ids, rounding_keys=mlp_keys)
        return constrain(x + constrain(y, *RESIDUAL), *RESIDUAL), auxiliary


class Decoder(nnx.Module):
    """A decoder-only transformer. An architecture is a subclass that says what its feed-forward is,
    and, where it differs, what its attention and the block around both are.

    Use `models.create` rather than the constructor. Parameters are float32; activations and the
    residual stream have `activation_dtype`; norms, softmax and logits are float32.

    Paths of the parameters: embedding.embedding [V, D]; blocks.SEGMENT.attention_norm.scale [L, D]
    and so on for SEGMENT in prefix, middle, suffix (those that exist); final_norm.scale [D];
    output_head.kernel [D, V] unless the embeddings are tied.

    The initial parameters depend on the seed alone, not on recipe, rules or remat, so that runs in
    different precisions start at the same point.
    """

    # Rounding keys that the feed-forward uses per call.
    num_mlp_keys = 0

    def __init__(
        self,
        config: ModelConfig,
        *,
        recipe: Recipe | str,
        rules: PrecisionRules,
        remat: str,
        activation_dtype: str,
        backend: str,
        rngs: nnx.Rngs,
    ):
        check_choice("remat", remat, REMAT_POLICIES)
        check_choice("activation_dtype", activation_dtype, ACTIVATION_PRECISIONS)
        self.check(config)
        self.config = config
        self.remat = remat
        self.backend = backend
        attention, mlp = self.attention_linears(config), self.mlp_linears(config)
        in_tiles = config.moe is not None and config.moe.capacity_factor is None
        rules = fit_rules(rules, recipe, config)
        rules, self.backends = fit_backend(
            rules, recipe, backend, {"attention": attention, "mlp": mlp}, in_tiles
        )
        self.segments = make_segments(config.num_layers, recipe, rules)
        self.plan = make_plan(
            recipe,
            self.segments,
            attention,
            mlp,
            LinearShape("head", config.embed_dim, config.vocab_size),
            ACTIVATION_PRECISIONS[activation_dtype],
        )
        self.embedding = Embedding(
            config.vocab_size, config.embed_dim, dtype=activation_dtype, rngs=rngs
        )
        layer_keys = jax.random.split(rngs.params(), config.num_layers)
        self.blocks = nnx.Dict(
            {
                segment.name: self._stacked_blocks(
                    segment, layer_keys[segment.start : segment.stop]
                )
                for segment in self.segments
            }
        )
        self.final_norm = RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.output_head = (
            None
            if config.tie_embeddings
            else OutputHead(config.embed_dim, config.vocab_size, rngs=rngs)
        )

    # What an architecture provides.

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Raises a UserError for configuration keys that this architecture does not have."""
        raise NotImplementedError

    @classmethod
    def mlp_linears(cls, config: ModelConfig) -> tuple[LinearShape, ...]:
        """The feed-forward's matrices, for the precision plan."""
        raise NotImplementedError

    @classmethod
    def make_mlp(cls, config: ModelConfig, recipe: Recipe, backend: str, rngs: nnx.Rngs) -> Any:
        """One block's feed-forward: mlp(x, *, segment_ids, rounding_keys) -> (y, auxiliary)."""
        raise NotImplementedError

    # What an architecture may change.

    block: type[Block] = Block  # where its norms and residual sums are

    @classmethod
    def attention_linears(cls, config: ModelConfig) -> tuple[LinearShape, ...]:
        """The attention's matrices, for the precision plan."""
        heads = config.num_heads * config.resolved_head_dim
        key_value = 2 * config.num_kv_heads * config.resolved_head_dim
        return (
            LinearShape("qkv", config.embed_dim, heads + key_value),
            LinearShape("output", heads, config.embed_dim),
        )

    @classmethod
    def make_attention(
        cls, config: ModelConfig, recipe: Recipe, backend: str, rngs: nnx.Rngs
    ) -> Attention:
        """One block's attention; Llama's `attention_bias` puts a bias on all four projections."""
        return attention_of(config, recipe, backend, rngs, output_bias=config.attention_bias)

    # What all of them do.

    def _stacked_blocks(self, segment: Segment, layer_keys: jax.Array) -> Block:
        """One Block whose parameters have a leading axis over the segment's layers."""

        @nnx.vmap
        def create(key: jax.Array) -> Block:
            rngs = nnx.Rngs(params=key)
            attention = self.make_attention(self.config, segment.attention, self.backend, rngs)
            mlp = self.make_mlp(self.config, segment.mlp, self.backend, rngs)
            return self.block(self.config, attention, mlp, rngs)

        return create(layer_keys)

    def hidden(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        rounding_key: jax.Array | None = None,
    ) -> tuple[jax.Array, Auxiliary]:
        """The last hidden states, normalised, and what the feed-forwards report.

        tokens: int32 [B, T]. segment_ids: int32 [B, T], equal ids see each other, 0 is padding.
        positions: int32 [B or 1, T], restarting per document where wanted; 0 … T-1 when absent.
        rounding_key: a PRNG key, needed to differentiate an FP4 recipe with stochastic rounding.

        Returns:
          hidden [B, T, D] in the activation dtype, and {} or, for mixtures of experts,
          load_balance_loss and router_z_loss summed over layers, tokens_per_expert [L, E] and
          dropped_fraction averaged over layers, all float32.

        Raises:
          UserError: T exceeds the model's max_positions.
        """
        config = self.config
        length = tokens.shape[1]
        if length > config.max_positions:
            raise UserError(
                f"sequence of {length} tokens exceeds model.max_positions={config.max_positions}; "
                "shorten it or raise model.max_positions"
            )
        if positions is None:
            positions = jnp.arange(length)[None]
        frequencies = rope_frequencies(
            config.resolved_head_dim, config.rope_theta, config.rope_scaling
        )
        rope = rope_tables(positions, frequencies)
        keys = self._rounding_keys(rounding_key)
        x = constrain(self.embedding(tokens), *RESIDUAL)
        reports = []
        for segment in self.segments:
            segment_keys = None if keys is None else keys[segment.start : segment.stop]
            x, report = self._run(self.blocks[segment.name], x, rope, segment_ids, segment_keys)
            reports.append(report)
        layers = jax.tree.map(lambda *parts: jnp.concatenate(parts), *reports)  # leaves [L, ...]
        hidden = constrain(self.final_norm(x), "batch", "sequence", None)
        return hidden, self._auxiliary(layers)

    def _rounding_keys(self, rounding_key: jax.Array | None) -> jax.Array | None:
        """One key per layer and linear, [L, linears]; None where nothing rounds stochastically."""
        recipes = [
            recipe for segment in self.segments for recipe in (segment.attention, segment.mlp)
        ]
        if rounding_key is None or not any(r.uses_stochastic_rounding for r in recipes):
            return None
        return jax.random.split(rounding_key, (self.config.num_layers, 2 + self.num_mlp_keys))

    def _run(self, block, x, rope, segment_ids, rounding_keys) -> tuple[jax.Array, Auxiliary]:
        """Runs x through one segment; auxiliary values come back stacked over its layers."""
        graph, parameters = nnx.split(block)

        # The parameters are scanned over. Only the arrays that all layers share are closed over,
        # which makes them constants of the loop instead of a carry that is saved per layer.
        def body(x, layer):
            layer_parameters, layer_keys = layer
            return nnx.merge(graph, layer_parameters)(
                row_major(x), rope=rope, segment_ids=segment_ids, rounding_keys=layer_keys
            )

        if self.remat == "save_quantized":
            policy = jax.checkpoint_policies.save_only_these_names(QUANTIZED_NAME, GEMM_NAME)
            body = jax.checkpoint(body, policy=policy, prevent_cse=False)
        elif self.remat == "full":
            body = jax.checkpoint(body, prevent_cse=False)
        return jax.lax.scan(body, x, (parameters, rounding_keys))

    def _auxiliary(self, layers: Auxiliary) -> Auxiliary:
        """Reduces what the layers report, [L] or [L, E], as `hidden` documents."""
        reductions = {
            "load_balance_loss": jnp.sum,
            "router_z_loss": jnp.sum,
            "dropped_fraction": jnp.mean,
        }
        return {
            name: reductions[name](values) if name in reductions else values
            for name, values in layers.items()
        }

    def head(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] -> logits float32 [..., V]; never FP4."""
        head = self.embedding.attend if self.output_head is None else self.output_head
        logits = head(hidden)
        return constrain(logits, "batch", "sequence", "vocabulary") if logits.ndim == 3 else logits

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """tokens int32 [B, T] -> logits float32 [B, T, V]; see `hidden`. Call it under jit."""
        hidden, _ = self.hidden(tokens, segment_ids, positions)
        return self.head(hidden)
