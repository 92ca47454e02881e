import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp4zoo import models
from fp4zoo.models import PrecisionRules
from fp4zoo.training.stacking import restack
from fp4zoo.training.state import split_model


def stack(depths):
    """Parameters whose layer n is filled with n."""
    segments, layer = {}, 0
    for name, depth in depths.items():
        segments[name] = {"kernel": jnp.arange(layer, layer + depth, dtype=jnp.float32)[:, None]}
        layer += depth
    return {"embedding": jnp.ones(2), "blocks": segments}


def test_layers_keep_their_order():
    restacked = restack(stack({"middle": 5}), stack({"prefix": 1, "middle": 3, "suffix": 1}))
    layers = [restacked["blocks"][name]["kernel"][:, 0] for name in ("prefix", "middle", "suffix")]
    assert [part.tolist() for part in layers] == [[0], [1, 2, 3], [4]]
    back = restack(restacked, stack({"middle": 5}))
    assert back["blocks"]["middle"]["kernel"][:, 0].tolist() == [0, 1, 2, 3, 4]


def test_another_number_of_layers_is_left_for_the_comparison_of_shapes():
    source = stack({"middle": 5})
    assert restack(source, stack({"middle": 4})) is source


def test_a_bf16_model_s_parameters_give_the_same_logits_in_another_plan(tiny):
    def create(rules):
        rngs = nnx.Rngs(0)
        return models.create(tiny, recipe="nvfp4", rules=rules, rngs=rngs)

    one = create(PrecisionRules(first_blocks=2, last_blocks=0))  # all BF16, one segment
    _, parameters = split_model(one)
    graphdef, other = split_model(create(PrecisionRules(first_blocks=1, last_blocks=1)))
    assert jax.tree.structure(parameters) != jax.tree.structure(other)
    two = nnx.merge(graphdef, restack(parameters, other))
    tokens = jnp.arange(16)[None]
    np.testing.assert_array_equal(nnx.jit(one)(tokens), nnx.jit(two)(tokens))
