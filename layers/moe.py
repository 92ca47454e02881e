"""NVFP4MoE: a mixture of gated feed-forward experts whose GEMMs follow a precision recipe.

Legend: B sequences, T tokens, K choices a token, E experts, D embed_dim, F mlp_dim.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ..errors import UserError, check_sizes
from ..numerics import LinearSizes, Recipe, grouped_linear
from .dense import resolve_recipe
from .expert_parallel import Mixture, Routed, Rows
from .rounding import RoundingStream

Initializer = jax.nn.initializers.Initializer
_default_init = nnx.initializers.lecun_normal(batch_axis=0)
_GATE_UP_AXES = ("experts", "embed", None, "mlp")  # names in numerics/partitioning.py
_DOWN_AXES = ("experts", "mlp", "embed")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEAuxiliary:
    """What a mixture reports besides its output; float32."""

    load_balance_loss: jax.Array  # scalar, 1 when the choices are spread evenly
    router_z_loss: jax.Array  # scalar
    tokens_per_expert: jax.Array  # [E], before any is dropped
    dropped_fraction: jax.Array  # scalar, of the choices


class NVFP4MoE(nnx.Module):
    """Top-k of E SwiGLU experts, routed as in Mixtral (arXiv 2401.04088).

    Softmax over all experts in float32, top-k, renormalise.
    Every expert is a GEMM of its own under the recipe: own amax, blocks that never mix experts. The
    router is float32 always. Dropless by default: no choice is dropped whatever the routing. With
    `capacity_factor` an expert takes of every group of M tokens at most capacity_factor * M * K / E
    choices (rounded up to 16), the first ones. How a mesh splits the layer: expert_parallel.py.

    router: [D, E]; gate_up: [E, D, 2, F] (gate, then up); down: [E, F, D].
    """

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        num_experts: int,
        experts_per_token: int,
        *,
        capacity_factor: float | None = None,
        group_size: int | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        router_init: Initializer = nnx.initializers.normal(0.02),
        gate_up_init: Initializer = _default_init,
        down_init: Initializer = _default_init,
        recipe: str | Recipe = "nvfp4",
        rounding: Literal["stream", "explicit"] = "stream",
        on_unsupported: Literal["error", "bf16"] = "error",
        backend: str = "auto",
        name: str = "NVFP4MoE",
        rngs: nnx.Rngs,
    ):
        """
        capacity_factor: None for dropless. group_size: tokens a group, None for whole sequences
        (dropless: several together, up to 1024 tokens): FP4 blocks along the rows of
        an expert, and its capacity, are of one group. dtype: of the
        activations (None: x's own). rounding, on_unsupported, backend: see NVFP4Dense; the
        hardware backends need a capacity_factor.

        Raises ValueError for dimensions that blocks of 16 do not divide (FP4 recipes), for
        experts_per_token outside 1 .. num_experts and for a capacity_factor that is not positive.
        """
        check_sizes(
            name,
            embed_dim=embed_dim,
            mlp_dim=mlp_dim,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
        )
        if experts_per_token > num_experts:
            raise ValueError(
                f"{name}: experts_per_token={experts_per_token} must lie between 1 and "
                f"num_experts={num_experts}"
            )
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(
                f"{name}: capacity_factor={capacity_factor} must be positive, or None for dropless"
            )
        in_tiles = capacity_factor is None
        self.recipe, self.backend = resolve_recipe(
            recipe,
            name,
            on_unsupported,
            backend,
            LinearSizes(embed_dim, mlp_dim, in_tiles, num_experts),
            embed_dim=embed_dim,
            mlp_dim=mlp_dim,
        )
        self.embed_dim, self.mlp_dim = embed_dim, mlp_dim
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.capacity_factor, self.group_size = capacity_factor, group_size
        self._mixture = Mixture(
            num_experts,
            experts_per_token,
            capacity_factor,
            group_size,
            uses_fp4=self.recipe.uses_fp4,
            needs_row_ids=self.recipe.uses_stochastic_rounding,
            name=name,
        )
        self.dtype = dtype
        self.name = name
        self.router = nnx.Param(router_init(rngs.params(), (embed_dim, num_experts), jnp.float32))
        gate_up = gate_up_init(rngs.params(), (num_experts, embed_dim, 2 * mlp_dim), param_dtype)
        self.gate_up = nnx.Param(gate_up.reshape(num_experts, embed_dim, 2, mlp_dim))
        self.down = nnx.Param(
            down_init(rngs.params(), (num_experts, mlp_dim, embed_dim), param_dtype)
        )
        self.rounding = nnx.data(RoundingStream.create(rounding, self.recipe, rngs))

    def __call__(
        self,
        x: jax.Array,
        *,
        token_mask: jax.Array | None = None,
        rounding_key: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEAuxiliary]:
        """x [..., D] -> (y [..., D] in x's dtype, MoEAuxiliary).

        token_mask: bool [...], False for padding, which is routed nowhere, counted nowhere and
        gives 0.
        rounding_key: a JAX PRNG key for the stochastic rounding of this call's gradients; without
        it the layer's stream gives one.
        """
        if x.shape[-1] != self.embed_dim:
            raise UserError(
                f"{self.name}: x has {x.shape[-1]} features and embed_dim is {self.embed_dim}"
            )
        x = x if self.dtype is None else x.astype(self.dtype)
        sequences = x.reshape(-1, x.shape[-2] if x.ndim > 1 else 1, x.shape[-1])  # [B, T, D]
        mask = jnp.ones(sequences.shape[:2], bool)
        mask = mask if token_mask is None else token_mask.reshape(mask.shape)
        if not x.size:
            zero = jnp.zeros((), jnp.float32)
            return x, MoEAuxiliary(zero, zero, jnp.zeros(self.num_experts, jnp.float32), zero)
        logits = jnp.dot(
            sequences.astype(jnp.float32), self.router[...], precision=jax.lax.Precision.HIGHEST
        )
        key, content_seeded = (
            self.rounding.draw(rounding_key)
            if self.rounding
            else (rounding_key, rounding_key is None)
        )
        routed = self._mixture.run(
            sequences,
            logits,
            mask,
            self.gate_up[...],
            self.down[...],
            None if key is None else jax.random.split(key),
            functools.partial(self._experts, content_seeded, x.dtype),
        )
        return routed.y.reshape(x.shape), self._auxiliary(logits, mask, routed)

    def _experts(self, content_seeded, dtype, rows: Rows, gate_up, down, keys) -> jax.Array:
        """Rows [tiles, rows, D] through their experts."""

        def product(x, kernel, axes, index: int) -> jax.Array:
            return grouped_linear(
                x,
                kernel,
                rows.tile_expert,
                row_ids=rows.row_ids,
                shard=rows.shards[index],
                recipe=self.recipe,
                key=None if keys is None else keys[index],
                content_seeded=content_seeded,
                backend=self.backend,
                kernel_axes=axes,
            )

        hidden = product(rows.x, gate_up, _GATE_UP_AXES, 0).astype(dtype)
        activated = jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :]  # [tiles, rows, F]
        return product(activated, down, _DOWN_AXES, 1)

    def _auxiliary(self, logits, mask, routed: Routed) -> MoEAuxiliary:
        num_tokens = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1)
        chosen = routed.experts[..., None] == jnp.arange(self.num_experts)  # [B, T, K, E]
        tokens_per_expert = jnp.sum(chosen.astype(jnp.float32), axis=(0, 1, 2))
        share = tokens_per_expert / (num_tokens * self.experts_per_token)
        probabilities = jnp.where(mask[..., None], jax.nn.softmax(logits), 0)
        probability = jnp.sum(probabilities, axis=(0, 1)) / num_tokens
        log_z = jax.nn.logsumexp(logits, axis=-1)
        dropped = jnp.sum(~routed.is_kept & mask[..., None])
        return MoEAuxiliary(
            # Switch Transformer (arXiv 2101.03961) eq. 4, with the share of all K choices.
            load_balance_loss=self.num_experts * jnp.sum(share * probability),
            # ST-MoE (arXiv 2202.08906) eq. 5.
            router_z_loss=jnp.sum(jnp.where(mask, log_z**2, 0)) / num_tokens,
            tokens_per_expert=tokens_per_expert,
            dropped_fraction=dropped / (num_tokens * self.experts_per_token),
        )
