"""NVFP4MoE: a mixture of gated feed-forward experts whose GEMMs follow a precision recipe.

Legend: M tokens, K choices a token, E experts, D embed_dim, F mlp_dim.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ..errors import UserError, check_sizes
from ..numerics import LinearSizes, Recipe, grouped_linear
from .dense import resolve_recipe
from .dispatch import from_experts, plan_dispatch, to_experts
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
    `capacity_factor` an expert takes at most capacity_factor * M * K / E choices (rounded up to
    16), the first ones.

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
        capacity_factor: None for dropless. dtype: of the activations (None: x's own). rounding,
        on_unsupported, backend: see NVFP4Dense; the hardware backends need a capacity_factor.

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
            LinearSizes(embed_dim, mlp_dim, in_tiles),
            embed_dim=embed_dim,
            mlp_dim=mlp_dim,
        )
        self.embed_dim, self.mlp_dim = embed_dim, mlp_dim
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.capacity_factor = capacity_factor
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
        tokens = x.reshape(-1, x.shape[-1])  # [M, D]
        mask = jnp.ones(tokens.shape[0], bool) if token_mask is None else token_mask.reshape(-1)
        logits = jnp.dot(
            tokens.astype(jnp.float32), self.router[...], precision=jax.lax.Precision.HIGHEST
        )
        probabilities = jax.nn.softmax(logits)  # [M, E]
        top, experts = jax.lax.top_k(probabilities, self.experts_per_token)  # [M, K]
        weights = top / jnp.sum(top, axis=-1, keepdims=True)
        experts = jnp.where(mask[:, None], experts, self.num_experts)

        dispatch = plan_dispatch(experts, self.num_experts, self.capacity_factor)
        key, content_seeded = (
            self.rounding.draw(rounding_key)
            if self.rounding
            else (rounding_key, rounding_key is None)
        )
        keys = (None, None) if key is None else jax.random.split(key)
        gate_up = self._linear(
            to_experts(tokens, dispatch),
            self.gate_up,
            _GATE_UP_AXES,
            dispatch,
            keys[0],
            content_seeded,
        )
        activated = jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]  # [tiles, rows, F]
        rows = self._linear(activated, self.down, _DOWN_AXES, dispatch, keys[1], content_seeded)
        y = from_experts(rows, weights, dispatch)
        return y.reshape(x.shape), self._auxiliary(logits, probabilities, experts, mask, dispatch)

    def _linear(self, x, kernel, kernel_axes, dispatch, key, content_seeded) -> jax.Array:
        # With a capacity every expert has one tile.
        tiles = (dispatch.tile_expert, dispatch.num_tiles) if self.capacity_factor is None else ()
        return grouped_linear(
            x,
            kernel[...],
            *tiles,
            recipe=self.recipe,
            key=key,
            content_seeded=content_seeded,
            backend=self.backend,
            kernel_axes=kernel_axes,
        )

    def _auxiliary(self, logits, probabilities, experts, mask, dispatch) -> MoEAuxiliary:
        num_tokens = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1)
        tokens_per_expert = jnp.bincount(experts.reshape(-1), length=self.num_experts).astype(
            jnp.float32
        )
        share = tokens_per_expert / (num_tokens * self.experts_per_token)
        probability = jnp.sum(jnp.where(mask[:, None], probabilities, 0), axis=0) / num_tokens
        log_z = jax.nn.logsumexp(logits, axis=-1)
        dropped = jnp.sum((dispatch.row_of_choice == dispatch.num_rows) & mask[:, None])
        return MoEAuxiliary(
            # Switch Transformer (arXiv 2101.03961) eq. 4, with the share of all K choices.
            load_balance_loss=self.num_experts * jnp.sum(share * probability),
            # ST-MoE (arXiv 2202.08906) eq. 5.
            router_z_loss=jnp.sum(jnp.where(mask, log_z**2, 0)) / num_tokens,
            tokens_per_expert=tokens_per_expert,
            dropped_fraction=dropped / (num_tokens * self.experts_per_token),
        )
