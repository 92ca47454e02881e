"""Where a layer's stochastic rounding gets its random bits from."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from ..numerics import Recipe

_SALT = 0x5EED  # tells a rounding key from the parameter keys of the same stream


class RoundingStream(nnx.Module):
    """A layer's own stream of rounding keys, advanced by each call like that of `nnx.Dropout`.

    A call under a plain JAX transform that closes over the module cannot advance the stream, and a
    pure training loop that does not carry the stream's count does not. Both would reuse their bits
    at every step, which biases the weights; so the bits of the incoming gradient are mixed into the
    key as well.
    """

    def __init__(self, key: jax.Array, stacked: tuple[int, ...] = ()):
        """stacked: leading axes of stacked parameters (nnx.vmap), with a stream for each."""
        keys = jax.random.split(key, stacked) if stacked else key
        self.key = nnx.RngKey(keys, tag="stochastic_rounding")
        self.count = nnx.RngCount(jnp.zeros(stacked, jnp.uint32), tag="stochastic_rounding")

    @classmethod
    def create(
        cls, rounding: Literal["stream", "explicit"], recipe: Recipe, rngs: nnx.Rngs
    ) -> "RoundingStream | None":
        """The stream of a layer that needs one, or None. Call it after the parameters are drawn.

        Raises ValueError for an unknown `rounding`.
        """
        if rounding not in ("stream", "explicit"):
            raise ValueError(f'rounding={rounding!r}: use "stream" or "explicit"')
        if rounding == "explicit" or not recipe.uses_stochastic_rounding:
            return None
        return cls(_layer_key(rngs))

    def draw(self, key: jax.Array | None) -> tuple[jax.Array, bool]:
        """(the caller's key or the stream's next, whether to mix in the gradient's bits)."""
        if key is not None:
            return key, False
        key = jax.random.fold_in(self.key[...], self.count[...])
        if self.count._can_update:
            self.count[...] += 1
        return key, True


def _layer_key(rngs: nnx.Rngs) -> jax.Array:
    """A key from the caller's `stochastic_rounding` stream; else derived from the `params` stream.

    The latter is not advanced, so that a seed gives the same initial parameters in every recipe.
    """
    if "stochastic_rounding" in rngs:
        return rngs.stochastic_rounding()
    params = rngs.params
    return jax.random.fold_in(jax.random.fold_in(params.key[...], params.count[...]), _SALT)
