"""Shares of sources in the endless sequence of rows, and mixtures end to end."""

import dataclasses
import json

import numpy as np
import pytest

from fp4zoo.data import (
    ByteTokenizer,
    DataConfig,
    SourceConfig,
    load_corpus,
    load_tokenizer,
    make_train_iterator,
    make_validation_batches,
    unigram_loss,
)
from fp4zoo.data.mixture import Mixture
from fp4zoo.errors import UserError

SHAPE = {"batch_size": 4, "sequence_length": 32}


def test_one_source_is_that_source():
    mixture = Mixture([1000], weights=[3.0], seed=None)
    places = np.array([0, 999, 1000, 70_000, 10**12 + 7])
    sources, rows = mixture.at(places)
    assert not sources.any()
    np.testing.assert_array_equal(rows, places % 1000)


@pytest.mark.parametrize("seed", [None, 0])
def test_weights_are_shares_everywhere(seed):
    mixture = Mixture([50, 1000, 7], weights=[1, 5, 0.25], seed=seed)
    sources, _ = mixture.at(np.arange(100_000))
    np.testing.assert_allclose(mixture.shares, np.array([1, 5, 0.25]) / 6.25, atol=1e-4)
    for begin in range(0, 99_000, 997):  # in every stretch of a thousand, too
        counts = np.bincount(sources[begin : begin + 1000], minlength=3)
        np.testing.assert_allclose(counts, np.array([160, 800, 40]), atol=3)


@pytest.mark.parametrize("seed", [None, 3])
def test_by_weight_a_source_goes_through_all_rows_before_any_comes_again(seed):
    number = [31, 64, 500]
    sources, rows = Mixture(number, weights=[1, 2, 3], seed=seed).at(np.arange(100_000))
    for source in range(3):
        own = rows[sources == source]
        epochs = own[: len(own) // number[source] * number[source]].reshape(-1, number[source])
        assert len(epochs) > 20
        assert (np.sort(epochs, axis=1) == np.arange(number[source])).all()
        assert (epochs[0] != epochs[1]).any() == (seed is not None)


def test_a_pass_has_every_row_of_a_source_as_often_as_its_epochs():
    mixture = Mixture([40, 10], epochs=[1, 3], seed=0)
    assert mixture.rows_per_pass == 70 and mixture.shares == [40 / 70, 30 / 70]
    for begin in (0, 70, 140):
        sources, rows = mixture.at(np.arange(begin, begin + 70))
        assert sorted(rows[sources == 0]) == list(range(40))
        assert sorted(rows[sources == 1]) == sorted(list(range(10)) * 3)
        assert (np.diff(sources) != 0).sum() > 20  # and they are shuffled together


def test_parts_of_an_epoch_go_on_in_the_next_pass():
    mixture = Mixture([40, 10], epochs=[0.5, 1], seed=0)
    sources, rows = mixture.at(np.arange(2 * mixture.rows_per_pass))
    assert sorted(rows[sources == 0]) == list(range(40))
    assert sorted(rows[sources == 1]) == sorted(list(range(10)) * 2)


def test_a_place_does_not_depend_on_its_company():
    mixture = Mixture([31, 64], weights=[1, 2], seed=5)
    together = mixture.at(np.arange(100_000))
    alone = mixture.at(np.array([99_999, 3]))
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one[[99_999, 3]], other)


@pytest.fixture
def mixed(cache_home, text_directory, tmp_path):
    """The text directory and a JSONL file of capital letters, with weights 1 and 3."""
    path = tmp_path / "capitals.jsonl"
    lines = [json.dumps({"body": f"CAPITAL {number} " * 9}) for number in range(200)]
    path.write_text("\n".join(lines))
    sources = (
        SourceConfig(path=str(text_directory), weight=1),
        SourceConfig(path=str(path), weight=3, field="body"),
    )
    return DataConfig(sources=sources, tokenizer="bytes", validation_fraction=0.2)


def capitals(batches):
    """Which rows hold capital letters."""
    rows = np.concatenate([batch["targets"] for batch in batches])
    return ((rows >= ord("A")) & (rows <= ord("Z"))).any(axis=1)


def test_batches_hold_each_source_by_its_weight(mixed):
    iterator = make_train_iterator(mixed, ByteTokenizer(), seed=0, **SHAPE)
    batches = [next(iterator) for _ in range(400)]
    assert capitals(batches).mean() == pytest.approx(0.75, abs=0.01)
    assert iterator.shares == [0.25, 0.75]
    assert iterator.corpus.description.startswith("a mixture of ")
    manifest = iterator.corpus.manifest
    tokens = sum(source["train"]["tokens"] for source in manifest["sources"])
    assert manifest["train"]["tokens"] == len(iterator.corpus.train.tokens) == tokens


def test_epochs_end_to_end(mixed):
    sources = tuple(
        dataclasses.replace(source, weight=None, epochs=epochs)
        for source, epochs in zip(mixed.sources, (2, 1), strict=True)
    )
    config = dataclasses.replace(mixed, sources=sources, packing="best_fit")
    iterator = make_train_iterator(config, ByteTokenizer(), seed=0, **(SHAPE | {"batch_size": 1}))
    first, second = (packing.num_rows for packing in iterator.packings)
    assert iterator.rows_per_epoch == 2 * first + second
    batches = [next(iterator) for _ in range(iterator.rows_per_epoch)]
    assert second - 5 <= capitals(batches).sum() <= second  # some short pieces have no letter
    rows = [batch["targets"].tobytes() for batch in batches]
    assert len(set(rows)) <= first + second


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_mixtures_resume_and_share_among_processes(mixed, count, num_workers):
    plain = make_train_iterator(mixed, ByteTokenizer(), seed=1, **SHAPE)
    expected = [next(plain)["tokens"] for _ in range(60)]
    config = dataclasses.replace(mixed, num_workers=num_workers)
    state = plain.get_state() | {"rows_read": 4 * 37}
    parts = []
    for rows in np.array_split(np.arange(SHAPE["batch_size"]), count):
        part = make_train_iterator(config, ByteTokenizer(), seed=1, rows=rows, **SHAPE)
        part.set_state(state)
        parts.append([next(part)["tokens"] for _ in range(23)])
        part.close()
    got = [np.concatenate(batches) for batches in zip(*parts, strict=True)]
    np.testing.assert_array_equal(got, expected[37:])


def test_other_weights_are_other_data(mixed):
    state = make_train_iterator(mixed, ByteTokenizer(), seed=0, **SHAPE).get_state()
    sources = (mixed.sources[0], dataclasses.replace(mixed.sources[1], weight=2))
    other = dataclasses.replace(mixed, sources=sources)
    iterator = make_train_iterator(other, ByteTokenizer(), seed=0, **SHAPE)
    with pytest.raises(UserError, match="corpus="):
        iterator.set_state(state)


def test_validation_has_all_held_out_tokens_of_all_sources(mixed):
    tokenizer = ByteTokenizer()
    corpus = load_corpus(mixed, tokenizer)
    batches = make_validation_batches(mixed, tokenizer, **SHAPE)
    targets = np.concatenate([batch["targets"][batch["loss_mask"] > 0] for batch in batches])
    held_out = [np.asarray(part.validation.tokens) for part in corpus.parts]
    assert all(len(tokens) for tokens in held_out)
    np.testing.assert_array_equal(np.sort(targets), np.sort(np.concatenate(held_out)))
    assert 0 < unigram_loss(mixed, tokenizer, **SHAPE) < np.log(259)


def test_a_text_of_training_that_another_source_holds_out_is_counted(mixed, tmp_path):
    corpus = load_corpus(mixed, ByteTokenizer())
    assert corpus.manifest["duplicates"]["across_splits"] == 0
    name = (corpus.parts[0].directory / "validation.names").read_text().splitlines()[0]
    text = open(json.loads(name)).read()
    path = tmp_path / "copies.jsonl"
    copies = [text.replace("\n", "\n" * number) for number in range(1, 40)]
    path.write_text("\n".join(json.dumps({"body": copy}) for copy in copies))
    source = dataclasses.replace(mixed.sources[1], path=str(path))
    config = dataclasses.replace(mixed, sources=(mixed.sources[0], source))
    duplicates = load_corpus(config, ByteTokenizer()).manifest["duplicates"]
    assert duplicates["repeated"] >= 1 and 20 < duplicates["across_splits"] < 39


def test_a_tokenizer_is_trained_on_all_sources(mixed):
    tokenizer = load_tokenizer(dataclasses.replace(mixed, tokenizer=None), 4096)
    assert len(tokenizer.encode("CAPITAL")) < 4 and len(tokenizer.encode("word")) < 3


def test_a_source_without_rows_is_named(mixed, tmp_path):
    path = tmp_path / "missing.txt"
    sources = (*mixed.sources, SourceConfig(path=str(path), weight=1))
    with pytest.raises(UserError, match=r"data\.path=.*missing\.txt does not exist"):
        load_corpus(dataclasses.replace(mixed, sources=sources), ByteTokenizer())
