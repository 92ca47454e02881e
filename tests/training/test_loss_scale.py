import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4zoo.errors import UserError
from fp4zoo.training.loss_scale import DynamicLossScale, LossScaleConfig


def run(state, finite):
    """The scale after each of a sequence of steps, under jit and scan as in training."""

    def step(state, is_finite):
        state = state.update(is_finite)
        return state, state.scale

    return jax.jit(lambda s, f: jax.lax.scan(step, s, f))(state, jnp.asarray(finite))


def test_starts_at_two_to_the_fifteenth():
    assert float(DynamicLossScale.create(LossScaleConfig()).scale) == 2.0**15


def test_doubles_after_the_2000th_finite_step_exactly():
    # Flax doubles on the 2001st.
    _, scales = run(DynamicLossScale.create(LossScaleConfig()), np.ones(4001, bool))
    assert scales[1998] == 2.0**15
    assert scales[1999] == 2.0**16
    assert scales[3998] == 2.0**16
    assert scales[3999] == 2.0**17


def test_a_non_finite_step_halves_and_restarts_the_count():
    state = DynamicLossScale.create(LossScaleConfig(interval=3))
    _, scales = run(state, [True, True, False, True, True, True, True])
    expected = [2.0**15, 2.0**15, 2.0**14, 2.0**14, 2.0**14, 2.0**15, 2.0**15]
    np.testing.assert_array_equal(scales, expected)


def test_growth_restarts_the_count():
    _, scales = run(DynamicLossScale.create(LossScaleConfig(interval=2)), np.ones(6, bool))
    np.testing.assert_array_equal(scales, [2.0**15, *[2.0**16] * 2, *[2.0**17] * 2, 2.0**18])


def test_never_below_the_floor_through_jit():
    # jmp loses its minimum when its state passes through jit.
    state, scales = run(DynamicLossScale.create(LossScaleConfig(floor=4.0)), np.zeros(60, bool))
    assert scales[-1] == 4.0
    assert state.config.floor == 4.0
    assert jax.tree.map(lambda leaf: leaf, state).config.floor == 4.0


def test_never_above_the_ceiling():
    config = LossScaleConfig(interval=1, ceiling=2.0**18)
    _, scales = run(DynamicLossScale.create(config), np.ones(10, bool))
    assert scales[-1] == 2.0**18


def test_always_a_power_of_two():
    finite = np.random.default_rng(0).random(500) > 0.2
    _, scales = run(DynamicLossScale.create(LossScaleConfig(interval=2)), finite)
    mantissas, _ = np.frexp(np.asarray(scales))
    np.testing.assert_array_equal(mantissas, 0.5)


def test_disabled_stays_at_one():
    state = DynamicLossScale.create(LossScaleConfig(enabled=False, interval=1))
    _, scales = run(state, [True, False, True, True])
    np.testing.assert_array_equal(scales, 1.0)


def test_unscaling_is_exact_and_in_float32():
    state = DynamicLossScale.create(LossScaleConfig())
    values = {"a": jnp.asarray([1.0, -3.141592, 1e-20], jnp.float32)}
    scaled = jax.tree.map(state.scale_loss, values)
    np.testing.assert_array_equal(state.unscale(scaled)["a"], values["a"])
    half = state.unscale({"a": jnp.asarray([2.0], jnp.bfloat16)})
    assert half["a"].dtype == jnp.float32
    assert half["a"][0] == 2.0**-14


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 1000.0}, "precision.loss_scale.initial=1000.0 is not a power of two"),
        ({"initial": 0.0}, "precision.loss_scale.initial=0.0 is not a power of two"),
        ({"floor": -1.0}, "precision.loss_scale.floor=-1.0 is not a power of two"),
        ({"ceiling": float("inf")}, "precision.loss_scale.ceiling=inf is not a power of two"),
        ({"initial": 2.0**25}, "lies outside floor=1 .. ceiling=1.67772e\\+07"),
        ({"interval": 0}, "precision.loss_scale.interval=0 must be at least 1"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips=0 must be at least 1"),
    ],
)
def test_impossible_settings_are_named(options, message):
    with pytest.raises(UserError, match=message):
        LossScaleConfig(**options)
