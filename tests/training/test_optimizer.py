import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4zoo.errors import UserError
from fp4zoo.training.optimizer import (
    OptimizerConfig,
    decay_mask,
    make_optimizer,
    make_schedule,
)


def rates(config, max_steps):
    return np.asarray(jax.vmap(make_schedule(config, max_steps))(jnp.arange(max_steps + 1)))


def test_cosine_warms_up_to_the_peak_and_falls_to_the_final_rate():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_fraction=0.1)
    values = rates(config, 104)
    np.testing.assert_allclose(values[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(values[54], 0.55, rtol=1e-6)  # half way
    np.testing.assert_allclose(values[104], 0.1, rtol=1e-6)
    assert np.all(np.diff(values[4:]) < 0)


def test_wsd_is_stable_until_the_last_part():
    config = OptimizerConfig(
        learning_rate=2.0, schedule="wsd", warmup_steps=10, decay_fraction=0.2, final_fraction=0.0
    )
    values = rates(config, 100)
    np.testing.assert_allclose(values[9:81], 2.0)
    np.testing.assert_allclose(values[90], 1.0, rtol=1e-6)
    np.testing.assert_allclose(values[100], 0.0, atol=1e-6)


def test_a_warmup_longer_than_the_run_only_rises():
    values = rates(OptimizerConfig(learning_rate=1.0, warmup_steps=20), 5)
    np.testing.assert_allclose(values, np.arange(1, 7) / 20, rtol=1e-6)


def test_biases_and_norm_scales_do_not_decay_even_when_stacked():
    parameters = {
        "embedding": {"embedding": jnp.ones((8, 4))},
        "blocks": {
            "middle": {
                "attention": {
                    "qkv": {"kernel": jnp.ones((2, 4, 1, 3, 4)), "bias": jnp.ones((2, 1, 3, 4))}
                },
                "attention_norm": {"scale": jnp.ones((2, 4))},
                "mlp": {"moe": {"router": jnp.ones((2, 4, 3))}},
            }
        },
    }
    mask = decay_mask(parameters)
    middle = mask["blocks"]["middle"]
    assert mask["embedding"]["embedding"] and middle["mlp"]["moe"]["router"]
    assert middle["attention"]["qkv"]["kernel"]
    assert not middle["attention"]["qkv"]["bias"]
    assert not middle["attention_norm"]["scale"]


def test_one_update_is_adamw():
    config = OptimizerConfig(
        learning_rate=0.1, warmup_steps=0, weight_decay=0.5, schedule="constant"
    )
    optimizer = make_optimizer(config, make_schedule(config, 10))
    parameters = {"kernel": jnp.asarray([2.0]), "bias": jnp.asarray([2.0])}
    gradients = {"kernel": jnp.asarray([3.0]), "bias": jnp.asarray([3.0])}
    updates, state = optimizer.update(gradients, optimizer.init(parameters), parameters)
    # Adam's first step is the sign of the gradient.
    np.testing.assert_allclose(updates["kernel"], [-0.1 * (1 + 0.5 * 2.0)], rtol=1e-5)
    np.testing.assert_allclose(updates["bias"], [-0.1], rtol=1e-5)
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -1.0}, "optimizer.learning_rate=-1.0 must lie between"),
        ({"b2": 1.5}, "optimizer.b2=1.5 must lie between"),
        ({"clip_norm": 0.0}, "optimizer.clip_norm=0.0 must be positive"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps=-1 must not be negative"),
    ],
)
def test_impossible_settings_are_named(options, message):
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**options)
