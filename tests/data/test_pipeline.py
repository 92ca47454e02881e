import dataclasses
import json
import threading
import time

import numpy as np
import pytest

from fp4zoo.data import (
    ByteTokenizer,
    DataConfig,
    count_rows,
    load_corpus,
    load_tokenizer,
    make_train_iterator,
    make_validation_batches,
    unigram_loss,
)
from fp4zoo.data.unigram import mean_loss
from fp4zoo.errors import UserError

SHAPE = {"batch_size": 4, "sequence_length": 32}


def train_iterator(config, seed=0, **options):
    return make_train_iterator(config, ByteTokenizer(), seed=seed, **(SHAPE | options))


def take(iterator, number):
    return [next(iterator) for _ in range(number)]


def assert_equal(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])


def rows(batches):
    """Each row as something hashable, in order."""
    return [row.tobytes() for batch in batches for row in batch["targets"]]


def test_an_epoch_trains_on_every_token_once(byte_config):
    iterator = train_iterator(byte_config, batch_size=1)
    batches = take(iterator, iterator.rows_per_epoch)
    targets = np.concatenate([batch["targets"][batch["loss_mask"] > 0] for batch in batches])
    expected = iterator.corpus.train.tokens
    np.testing.assert_array_equal(np.sort(targets), np.sort(expected))
    assert len(set(rows(batches))) == len(batches)
    assert iterator.epoch == 1.0


def test_epochs_and_seeds_differ_in_order_only(byte_config):
    iterator = train_iterator(byte_config, batch_size=1)
    number = iterator.rows_per_epoch
    first, second = rows(take(iterator, number)), rows(take(iterator, number))
    other = rows(take(train_iterator(byte_config, seed=1, batch_size=1), number))
    in_order = dataclasses.replace(byte_config, shuffle=False)
    ordered = rows(take(train_iterator(in_order, batch_size=1), number))
    assert len({tuple(order) for order in (first, second, other, ordered)}) == 4
    assert sorted(first) == sorted(second) == sorted(other) == sorted(ordered)


def test_unshuffled_rows_are_the_corpus(byte_config):
    iterator = train_iterator(dataclasses.replace(byte_config, shuffle=False))
    targets = np.concatenate([batch["targets"].ravel() for batch in take(iterator, 3)])
    np.testing.assert_array_equal(targets, iterator.corpus.train.tokens[: len(targets)])


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_workers_change_nothing(byte_config, num_workers):
    expected = take(train_iterator(byte_config), 60)
    iterator = train_iterator(dataclasses.replace(byte_config, num_workers=num_workers))
    assert_equal(take(iterator, 60), expected)
    iterator.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_restored_iterator_goes_on_with_the_same_batches(byte_config, num_workers):
    config = dataclasses.replace(byte_config, num_workers=num_workers)
    iterator = train_iterator(config)
    take(iterator, 7)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = take(iterator, 50)
    fresh = train_iterator(config)
    take(fresh, 3)
    fresh.set_state(state)
    assert fresh.get_state() == state
    assert_equal(take(fresh, 50), expected)
    iterator.set_state(state)
    assert_equal(take(iterator, 50), expected)


def test_state_is_small_and_set_at_once_at_a_million_steps(byte_config):
    iterator = train_iterator(byte_config)
    state = iterator.get_state() | {"rows_read": 4 * 1_000_000}
    assert len(json.dumps(state)) < 250
    began = time.perf_counter()
    iterator.set_state(state)
    batch = next(iterator)
    assert time.perf_counter() - began < 0.2
    order = [1_000_000 * 4 + row for row in range(4)]
    alone = train_iterator(byte_config, batch_size=1)
    for row, place in enumerate(order):
        alone.set_state(state | {"rows_read": place})
        np.testing.assert_array_equal(next(alone)["tokens"][0], batch["tokens"][row])


def test_processes_share_the_same_global_batch(byte_config):
    expected = take(train_iterator(byte_config), 30)
    for count in (2, 4):
        parts = [
            take(train_iterator(byte_config, rows=rows), 30)
            for rows in np.array_split(np.arange(4), count)
        ]
        together = [
            {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
            for batches in zip(*parts, strict=True)
        ]
        assert_equal(together, expected)


def test_another_batch_size_goes_on_where_the_first_stopped(byte_config):
    expected = rows(take(train_iterator(byte_config), 10))
    iterator = train_iterator(byte_config)
    seen = rows(take(iterator, 4))
    other = train_iterator(byte_config, batch_size=6)
    other.set_state(iterator.get_state())
    assert seen + rows(take(other, 4)) == expected


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"sequence_length": 16}, r"sequence_length=32 but this run has sequence_length=16"),
        ({}, {"seed": 5}, r"seed=0 but this run has seed=5"),
        ({"shuffle": False}, {}, r"shuffle=True but this run has shuffle=False"),
        ({"validation_fraction": 0.5}, {}, r"corpus=\w+ but this run has corpus=\w+"),
    ],
)
def test_a_state_of_other_data_is_refused(byte_config, change, options, message):
    state = train_iterator(byte_config).get_state()
    other = train_iterator(dataclasses.replace(byte_config, **change), **options)
    with pytest.raises(UserError, match=message + ".*restore the data settings"):
        other.set_state(state)


def test_an_error_in_a_worker_reaches_the_consumer_at_once(byte_config, monkeypatch):
    iterator = train_iterator(dataclasses.replace(byte_config, num_workers=2))

    def fail(*_):
        raise MemoryError("no room for a batch")

    monkeypatch.setattr("fp4zoo.data.packing.Concatenated.pack", fail)
    began = time.perf_counter()
    with pytest.raises(MemoryError, match="no room for a batch"):
        next(iterator)
    assert time.perf_counter() - began < 5


def test_close_ends_the_workers(byte_config):
    before = set(threading.enumerate())
    iterator = train_iterator(dataclasses.replace(byte_config, num_workers=3))
    take(iterator, 5)
    workers = set(threading.enumerate()) - before
    assert workers
    iterator.close()
    for worker in workers:
        worker.join(timeout=5)
        assert not worker.is_alive()


def test_a_corpus_smaller_than_a_batch(byte_config):
    with pytest.raises(UserError, match=r"gives \d+ rows of 32 tokens, fewer than batch_size=4096"):
        train_iterator(byte_config, batch_size=4096)


def test_validation_scores_every_held_out_token_once(byte_config):
    tokenizer = ByteTokenizer()
    corpus = load_corpus(byte_config, tokenizer)
    batches = make_validation_batches(byte_config, tokenizer, **SHAPE)
    assert all(batch["tokens"].shape == (4, 32) for batch in batches)
    assert len(batches) == -(-count_rows(corpus.validation, 32) // 4)
    targets = np.concatenate([batch["targets"][batch["loss_mask"] > 0] for batch in batches])
    np.testing.assert_array_equal(np.sort(targets), np.sort(corpus.validation.tokens))


def test_validation_batches_are_fixed_and_nested(byte_config):
    tokenizer = ByteTokenizer()
    batches = make_validation_batches(byte_config, tokenizer, **SHAPE)
    assert len(batches) > 2
    two = make_validation_batches(byte_config, tokenizer, **SHAPE, max_batches=2)
    assert_equal(two, batches[:2])


def test_without_a_validation_split_there_are_no_batches(byte_config):
    config = dataclasses.replace(byte_config, validation_fraction=0.0)
    assert make_validation_batches(config, ByteTokenizer(), **SHAPE) == []
    assert np.isnan(unigram_loss(config, ByteTokenizer(), **SHAPE))


def test_unigram_loss_is_that_of_counted_frequencies(byte_config):
    tokenizer = ByteTokenizer()
    corpus = load_corpus(byte_config, tokenizer)
    counts = np.bincount(corpus.train.tokens, minlength=259) + 1.0
    nats = -np.log(counts / counts.sum())
    expected = nats[corpus.validation.tokens].mean()
    assert unigram_loss(byte_config, tokenizer, **SHAPE) == pytest.approx(expected, rel=1e-12)
    part = make_validation_batches(byte_config, tokenizer, **SHAPE, max_batches=1)
    assert unigram_loss(byte_config, tokenizer, **SHAPE, max_batches=1) == pytest.approx(
        nats[part[0]["targets"]].mean(), rel=1e-6
    )


def test_mean_loss_leaves_padding_out():
    batch = {"targets": np.array([[0, 1, 1]]), "loss_mask": np.array([[1.0, 1.0, 0.0]])}
    assert mean_loss(np.array([2.0, 4.0]), [batch]) == 3.0


@pytest.mark.slow
def test_the_default_corpus_from_nothing(cache_home):
    """Nothing but this Python: tokenizer, tokens and batches in a minute, exact to the byte."""
    began = time.perf_counter()
    config = DataConfig()
    tokenizer = load_tokenizer(config, 4096)
    batch = next(make_train_iterator(config, tokenizer, batch_size=8, sequence_length=256, seed=0))
    assert time.perf_counter() - began < 60
    assert batch["tokens"].shape == (8, 256) and tokenizer.vocab_size == 4096
    corpus = load_corpus(config, tokenizer)
    lengths = tokenizer.token_byte_lengths()
    for split in ("train", "validation"):
        tokens = getattr(corpus, split).tokens
        assert lengths[tokens].sum() == corpus.manifest[split]["bytes"]
    shape = {"batch_size": 8, "sequence_length": 256}
    assert 5 < unigram_loss(config, tokenizer, **shape, max_batches=32) < np.log(4096)


def test_walking_and_jumping_to_step_a_million_agree(byte_config, tmp_path):
    """A mixture, best-fit packed: every batch on the way is made in one, none in the other."""
    lines = [json.dumps({"text": f"CAPITAL {number}"}) for number in range(300)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    sources = (
        {"path": byte_config.path, "weight": 2.5},
        {"path": str(tmp_path / "b.jsonl"), "weight": 1},
    )
    config = dataclasses.replace(byte_config, path=None, sources=sources, packing="best_fit")
    shape = {"batch_size": 1, "sequence_length": 8}
    walked = train_iterator(config, **shape)
    for _ in range(1_000_000):
        next(walked)
    state = walked.get_state()
    assert state["rows_read"] == 1_000_000 and len(json.dumps(state)) < 250
    expected = take(walked, 20)
    for num_workers, count in ((0, 1), (2, 1), (0, 4)):
        jumped = train_iterator(
            dataclasses.replace(config, num_workers=num_workers),
            **(shape | {"batch_size": count}),
        )
        began = time.perf_counter()
        jumped.set_state(state)
        got = take(jumped, 20 // count)
        assert time.perf_counter() - began < 1
        assert rows(got) == rows(expected)
        jumped.close()
