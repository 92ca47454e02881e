"""Where a layer's stochastic rounding gets its random bits from."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from ..numerics import Recipe


class RoundingStream(nnx.Module):
    """A layer's own stream of rounding keys, advanced by each call like that of `nnx.Dropout`.

    A call under a plain JAX transform that closes over the module cannot advance the stream, and a
    pure training loop that does not carry the stream's count does not. Both would reuse their bits
    at every step, which biases the weights; so the bits of the incoming gradient are mixed into the
    key as well.
    """

    def __init__(self, rngs: nnx.Rngs, stacked: tuple[int, ...] = ()):
        """stacked: leading axes of stacked parameters (nnx.vmap), with a stream for each."""
        key = rngs.stochastic_rounding()
        self.key = nnx.RngKey(
            jax.random.split(key, stacked) if stacked else key, tag="stochastic_rounding"
        )
        self.count = nnx.RngCount(jnp.zeros(stacked, jnp.uint32), tag="stochastic_rounding")

    @classmethod
    def create(
        cls,
        rounding: Literal["stream", "explicit"],
        recipe: Recipe,
        rngs: nnx.Rngs,
        stacked: tuple[int, ...] = (),
    ) -> "RoundingStream | None":
        """The stream of a layer that needs one, or None.

        Raises ValueError for an unknown `rounding`.
        """
        if rounding not in ("stream", "explicit"):
            raise ValueError(f'rounding={rounding!r}: use "stream" or "explicit"')
        return (
            cls(rngs, stacked) if rounding == "stream" and recipe.uses_stochastic_rounding else None
        )

    def draw(self, key: jax.Array | None) -> tuple[jax.Array, bool]:
        """(the caller's key or the stream's next, whether to mix in the gradient's bits)."""
        if key is not None:
            return key, False
        key = jax.random.fold_in(self.key[...], self.count[...])
        if self.count._can_update:
            self.count[...] += 1
        return key, True
