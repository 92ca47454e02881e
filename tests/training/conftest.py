import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4zoo import models
from fp4zoo.models import ModelConfig, MoEConfig, PrecisionRules
from fp4zoo.training.loss_scale import LossScaleConfig
from fp4zoo.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from fp4zoo.training.state import TrainState, split_model
from fp4zoo.training.step import StepConfig, make_train_step

VOCABULARY = 64

TINY = ModelConfig(
    architecture="llama",
    vocab_size=VOCABULARY,
    num_layers=2,
    embed_dim=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    mlp_dim=48,
    max_positions=64,
)
TINY_MOE = dataclasses.replace(
    TINY, architecture="mixtral", moe=MoEConfig(num_experts=4, experts_per_token=2)
)


class Trainer:
    """A model and its jitted step, without configuration files or data pipeline."""

    def __init__(
        self,
        *,
        model=TINY,
        recipe="fp32",
        loss_scale=LossScaleConfig(),  # noqa: B008  frozen
        optimizer=OptimizerConfig(warmup_steps=2, clip_norm=None),  # noqa: B008  frozen
        seed=0,
    ):
        self.model = models.create(
            model,
            recipe=recipe,
            rules=PrecisionRules(first_blocks=0, last_blocks=0),
            rngs=nnx.Rngs(0),
        )
        self.graphdef, self.parameters = split_model(self.model)
        self.schedule = schedule = make_schedule(optimizer, max_steps=100)
        self.optimizer = make_optimizer(optimizer, schedule)
        self.state = TrainState.create(self.parameters, self.optimizer, loss_scale)
        weights = ()
        if model.moe is not None:
            weights = (("load_balance_loss", 0.01), ("router_z_loss", 0.001))
        config = StepConfig(seed=seed, clip_norm=optimizer.clip_norm, auxiliary_weights=weights)
        step = make_train_step(self.graphdef, self.optimizer, schedule, config)
        self.step = jax.jit(step)  # without donation: tests look at the old state


@pytest.fixture(scope="session")
def trainer():
    """Makes a Trainer with the options a test needs; equal ones are shared: they never change."""
    return functools.cache(Trainer)


@pytest.fixture
def tiny():
    return TINY


@pytest.fixture
def tiny_moe():
    return TINY_MOE


@pytest.fixture
def make_batch():
    """A batch [A, B, T] of random tokens; `lengths` gives each row's number of counted targets."""

    def make(*, rows=4, length=16, microbatches=1, lengths=None, seed=0):
        tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (rows, length + 1))
        mask = np.ones((rows, length), np.float32)
        for row, counted in enumerate(lengths or []):
            mask[row, counted:] = 0
        batch = {
            "tokens": tokens[:, :-1].astype(np.int32),
            "targets": tokens[:, 1:].astype(np.int32),
            "loss_mask": mask,
            "segment_ids": mask.astype(np.int32),
            "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        }
        return {
            name: jnp.asarray(array.reshape(microbatches, -1, length))
            for name, array in batch.items()
        }

    return make


@pytest.fixture
def poisoned():
    """The batch with one token outside the vocabulary, whose embedding is NaN."""

    def poison(batch):
        return {**batch, "tokens": batch["tokens"].at[0, 0, 0].set(VOCABULARY + 1)}

    return poison


@pytest.fixture
def assert_trees_equal():
    """Bit for bit, NaN equal to itself."""

    def check(left, right):
        assert jax.tree.structure(left) == jax.tree.structure(right)
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    return check
