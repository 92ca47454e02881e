import math

import jax
import numpy as np
import pytest

from fp4zoo.training.evaluate import Validation


def batches_of(make_batch, lengths):
    return [
        {name: np.asarray(array[0]) for name, array in make_batch(lengths=each, seed=seed).items()}
        for seed, each in enumerate(lengths)
    ]


def test_the_mean_is_over_all_counted_targets(trainer, make_batch):
    made = trainer()
    batches = batches_of(make_batch, [[16, 2, 0, 0], [5, 0, 0, 0]])
    byte_lengths = np.arange(64)
    result = Validation(batches, byte_lengths, jax.device_put).evaluate(
        made.graphdef, made.parameters
    )
    nats, num_bytes = 0.0, 0
    for batch in batches:
        logits = made.model(batch["tokens"], batch["segment_ids"], batch["positions"])
        scores = jax.nn.log_softmax(logits)
        for row, column in zip(*np.nonzero(batch["loss_mask"]), strict=True):
            target = batch["targets"][row, column]
            nats -= float(scores[row, column, target])
            num_bytes += int(byte_lengths[target])
    assert result.tokens == 23
    assert result.loss == pytest.approx(nats / 23, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


def test_a_token_without_bytes_gives_no_bits_per_byte(trainer, make_batch):
    made = trainer()
    batches = batches_of(make_batch, [[16, 2, 0, 0]])
    result = Validation(batches, np.zeros(64, int), jax.device_put).evaluate(
        made.graphdef, made.parameters
    )
    assert math.isnan(result.bits_per_byte) and math.isfinite(result.loss)


def test_nothing_to_score_is_an_error(trainer):
    made = trainer()
    with pytest.raises(ValueError, match="hold no targets"):
        Validation([], np.ones(64, int), jax.device_put).evaluate(made.graphdef, made.parameters)
