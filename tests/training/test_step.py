import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4zoo.training.cross_entropy import token_losses
from fp4zoo.training.loss_scale import LossScaleConfig
from fp4zoo.training.optimizer import OptimizerConfig
from fp4zoo.training.step import gradient_names, gradient_squares


def run(trainer, batches):
    state, history = trainer.state, []
    for batch in batches:
        state, metrics = trainer.step(state, batch)
        history.append(jax.device_get(metrics))
    return state, history


def test_the_loss_falls(trainer, make_batch):
    _, history = run(trainer(), [make_batch()] * 10)
    losses = [metrics["loss"] for metrics in history]
    assert losses[0] == pytest.approx(np.log(64), rel=0.05)
    assert losses[-1] < losses[0] - 0.1


def test_loss_and_gradient_are_those_of_the_mean_over_counted_tokens(trainer, make_batch):
    made = trainer()
    batch = make_batch(lengths=[16, 3, 7, 1])
    _, (metrics,) = run(made, [batch])

    def mean_loss(parameters):
        model = nnx.merge(made.graphdef, parameters)
        flat = {name: array[0] for name, array in batch.items()}
        logits = model(flat["tokens"], flat["segment_ids"], flat["positions"])
        return jnp.sum(token_losses(logits, flat["targets"]) * flat["loss_mask"]) / 27

    value, gradients = jax.value_and_grad(mean_loss)(made.parameters)
    assert metrics["tokens"] == 27
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    np.testing.assert_allclose(
        metrics["gradient_squares"], gradient_squares(gradients), rtol=1e-4, atol=1e-12
    )


def test_accumulation_gives_the_same_gradient_with_ragged_token_counts(trainer, make_batch):
    # Adam divides by its second moment; the first moment after one step is 0.1 x the gradient.
    moments, losses = [], []
    for microbatches in (1, 4):
        made = trainer()
        batch = make_batch(rows=8, microbatches=microbatches, lengths=[16, 1, 9, 2, 16, 5, 11, 1])
        state, (metrics,) = run(made, [batch])
        moments.append(jax.tree.leaves(state.optimizer[0].mu))
        losses.append(metrics["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    for one, four in zip(*moments, strict=True):
        scale = float(jnp.max(jnp.abs(one)))
        np.testing.assert_allclose(one / scale, four / scale, atol=1e-6)


def test_accumulation_of_experts_averages_auxiliary_losses(trainer, make_batch, tiny_moe):
    _, (metrics,) = run(trainer(model=tiny_moe), [make_batch(rows=8, microbatches=4)])
    assert 1.0 <= metrics["load_balance_loss"] / tiny_moe.num_layers < 2.0
    assert metrics["expert_load"] >= 1.0
    assert metrics["dropped_fraction"] == 0.0


def test_auxiliary_losses_reach_the_router(trainer, make_batch, tiny_moe):
    made = trainer(model=tiny_moe)
    _, (metrics,) = run(made, [make_batch()])
    names = gradient_names(made.parameters)
    router = [i for i, name in enumerate(names) if "router" in name]
    assert len(router) == 2
    assert np.all(metrics["gradient_squares"][router] > 0)


@pytest.mark.parametrize("loss_scale", [LossScaleConfig(), LossScaleConfig(enabled=False)])
def test_a_non_finite_step_changes_nothing_but_the_counters(
    trainer, make_batch, poisoned, assert_trees_equal, loss_scale
):
    made = trainer(loss_scale=loss_scale)
    good = make_batch()
    before, _ = run(made, [good, good])
    after, metrics = made.step(before, poisoned(good))
    assert not metrics["finite"] and np.isnan(metrics["loss"])
    assert_trees_equal(after.parameters, before.parameters)
    assert_trees_equal(after.optimizer, before.optimizer)
    assert (int(before.step), int(after.step)) == (2, 3)
    assert (int(after.skipped_steps), int(after.consecutive_skips)) == (1, 1)
    factor = 0.5 if loss_scale.enabled else 1.0
    assert float(after.loss_scale.scale) == factor * float(before.loss_scale.scale)
    # And training goes on: nothing remembers the NaN.
    later, metrics = made.step(after, good)
    assert metrics["finite"] and np.isfinite(metrics["loss"])
    assert (int(later.skipped_steps), int(later.consecutive_skips)) == (1, 0)


def test_the_schedule_does_not_move_with_skipped_steps(trainer, make_batch, poisoned):
    good = make_batch()
    _, plain = run(trainer(), [good, good])
    _, skipped = run(trainer(), [good, poisoned(good), good])
    assert skipped[2]["learning_rate"] == plain[1]["learning_rate"]


def test_no_number_of_non_finite_steps_is_ever_applied(
    trainer, make_batch, poisoned, assert_trees_equal
):
    # optax.apply_if_finite gives in after its limit.
    made = trainer()
    bad = poisoned(make_batch())
    after, history = run(made, [bad] * 25)
    assert_trees_equal(after.parameters, made.parameters)
    assert history[-1]["consecutive_skips"] == 25
    assert float(after.loss_scale.scale) == 1.0


def test_overflowing_gradients_are_skipped_and_named(trainer, make_batch):
    made = trainer(loss_scale=LossScaleConfig(enabled=False))
    huge = jax.tree.map(lambda leaf: leaf, made.parameters)
    huge["output_head"]["kernel"] = huge["output_head"]["kernel"] * 1e30
    state = made.state.replace(parameters=huge)
    _, metrics = made.step(state, make_batch())
    assert np.isfinite(metrics["loss"]) and not metrics["finite"]
    assert not np.all(np.isfinite(metrics["gradient_squares"]))


@pytest.mark.parametrize("recipe", ["fp32", "nvfp4"])
def test_the_loss_scale_does_not_change_a_single_bit(
    trainer, make_batch, assert_trees_equal, recipe
):
    """numerics.md: a power of two is bit-identical after unscaling, for any number of steps."""
    states = []
    made = trainer(recipe=recipe)
    for scale in (1.0, 2.0**15):
        state = made.state
        loss_scale = dataclasses.replace(state.loss_scale, scale=jnp.float32(scale))
        state = state.replace(loss_scale=loss_scale)
        for seed in range(3):
            state, metrics = made.step(state, make_batch(seed=seed))
            assert metrics["loss_scale"] == scale
        states.append(state)
    assert_trees_equal(states[0].parameters, states[1].parameters)


def test_clipping_limits_the_norm(trainer, make_batch):
    options = {"warmup_steps": 0, "schedule": "constant", "b1": 0.0, "weight_decay": 0.0}
    norms = []
    for clip_norm in (None, 1e-3):
        made = trainer(optimizer=OptimizerConfig(clip_norm=clip_norm, **options))
        state, (metrics,) = run(made, [make_batch()])
        moments = jnp.sqrt(sum(jnp.sum(m**2) for m in jax.tree.leaves(state.optimizer[0].mu)))
        norms.append(float(moments))
        np.testing.assert_allclose(metrics["gradient_norm"], norms[0], rtol=1e-5)
    assert norms[0] > 0.1
    np.testing.assert_allclose(norms[1], 1e-3, rtol=1e-4)


def test_rounding_differs_by_step_and_microbatch_and_repeats_from_the_seed(trainer, make_batch):
    batch = make_batch(rows=4)
    squares = {}
    for seed in (0, 1):
        made = trainer(recipe="nvfp4", seed=seed)
        for step in (0, 1):
            state = dataclasses.replace(made.state, step=jnp.int32(step))
            _, metrics = made.step(state, batch)
            squares[seed, step] = np.asarray(metrics["gradient_squares"])
            _, again = made.step(state, batch)
            np.testing.assert_array_equal(again["gradient_squares"], squares[seed, step])
    assert not np.array_equal(squares[0, 0], squares[0, 1])
    assert not np.array_equal(squares[0, 0], squares[1, 0])

    # Twice the same microbatch: with the same bits the two gradients' mean would be the one's.
    twice = {name: jnp.concatenate([array, array]) for name, array in batch.items()}
    made = trainer(recipe="nvfp4")
    _, metrics = made.step(made.state, twice)
    assert not np.allclose(metrics["gradient_squares"], squares[0, 0], rtol=1e-5)


def test_gradients_have_a_name_for_every_layer(trainer, tiny):
    made = trainer()
    names = gradient_names(made.parameters)
    assert len(names) == gradient_squares(made.parameters).size
    assert "blocks.middle.mlp.down.kernel[1]" in names
    assert "embedding.embedding" in names
    assert sum("mlp.down.kernel" in name for name in names) == tiny.num_layers


def test_a_layer_without_gradient_shows_as_zero(trainer, make_batch):
    made = trainer()
    dead = jax.tree.map(lambda leaf: leaf, made.parameters)
    down = dead["blocks"]["middle"]["mlp"]["down"]
    down["kernel"] = down["kernel"].at[1].set(0)  # nothing flows back into layer 1's gate and up
    _, metrics = made.step(made.state.replace(parameters=dead), make_batch())
    names = gradient_names(made.parameters)
    zero = {names[index] for index in np.flatnonzero(metrics["gradient_squares"] == 0)}
    assert zero == {
        "blocks.middle.mlp.gate_up.kernel[1]",
        "blocks.middle.mlp_norm.scale[1]",
    }


def test_a_batch_without_targets_is_harmless(trainer, make_batch):
    _, (metrics,) = run(trainer(), [make_batch(lengths=[0, 0, 0, 0])])
    assert metrics["finite"] and metrics["loss"] == 0.0 and metrics["tokens"] == 0


def test_the_state_is_updated_in_place(trainer, make_batch):
    made = trainer()
    compiled = jax.jit(made.step, donate_argnums=0).lower(made.state, make_batch()).compile()
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(made.state))
    assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes
