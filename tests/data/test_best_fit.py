"""Packing pieces whole: every token once, documents apart, rows nearly full."""

import time

import numpy as np
import pytest

from fp4zoo.data import TokenStream, make_packing
from fp4zoo.data.packing import BestFit, Concatenated, best_fit
from fp4zoo.data.streams import Joined, join_streams

LENGTHS = (1, 2, 7, 8, 16, 64, 500)


def segments(batch):
    """(inputs, targets, positions) of every segment, row by row."""
    for row in range(len(batch["tokens"])):
        ids = batch["segment_ids"][row]
        for segment in range(1, ids.max() + 1):
            here = ids == segment
            yield tuple(
                batch[key][row][here].tolist() for key in ("tokens", "targets", "positions")
            )


def plain_best_fit(lengths, capacity):
    """The textbook's: pieces from the longest, each into the fullest row with room; room left."""
    room = []
    for length in sorted(lengths, reverse=True):
        fitting = [left for left in room if left >= length]
        if fitting:
            room[room.index(min(fitting))] -= length
        else:
            room.append(capacity - length)
    return sorted(room)


@pytest.mark.parametrize("capacity", [10, 64, 257])
def test_rows_are_as_full_as_best_fit_decreasing_makes_them(capacity):
    generator = np.random.default_rng(capacity)
    for _ in range(20):
        lengths = generator.integers(1, capacity + 1, generator.integers(1, 120))
        rows = best_fit(lengths, capacity)
        filled = np.bincount(rows, weights=lengths)
        assert sorted(capacity - filled) == plain_best_fit(lengths.tolist(), capacity)


def test_nothing_to_fit():
    assert best_fit(np.zeros(0, np.int64), 8).shape == (0,)


@pytest.mark.parametrize("sequence_length", LENGTHS)
def test_documents_are_put_together_again_from_their_segments(stream, sequence_length):
    stream, documents = stream
    packing = BestFit(stream, sequence_length)
    batch = packing.pack(np.arange(packing.num_rows))
    pieces = []
    for inputs, targets, positions in segments(batch):
        assert positions == list(range(len(inputs)))
        assert inputs[1:] == targets[:-1] and 2 not in inputs
        pieces.append((inputs, targets))
    for document in documents:
        whole = [*document.tolist(), 2]
        expected = [1, *document.tolist()]
        for begin in range(0, len(whole), sequence_length):
            part = slice(begin, begin + sequence_length)
            pieces.remove((expected[part], whole[part]))
    assert not pieces
    assert batch["loss_mask"].sum() == len(stream.tokens)
    assert (batch["loss_mask"] == (batch["segment_ids"] > 0)).all()


def test_documents_shorter_than_a_row_are_never_cut(stream):
    stream, documents = stream
    report = BestFit(stream, 41).report()
    assert report.cut == 0.0 and report.documents == len(documents)
    assert Concatenated(stream, 41).report().cut > 0
    assert report.efficiency == len(stream.tokens) / (report.rows * 41)


def test_rows_do_not_depend_on_their_company_and_padding_is_padding(stream):
    stream, _ = stream
    packing = BestFit(stream, 16)
    together = packing.pack(np.arange(packing.num_rows))
    order = np.array([3, packing.num_rows, 0])
    some = packing.pack(order)
    for key, values in some.items():
        np.testing.assert_array_equal(values[[0, 2]], together[key][order[[0, 2]]])
        assert not values[1].any()  # pad_id is 0 here


def test_rows_come_in_the_order_of_their_earliest_documents():
    lengths = [7, 7, 1, 7, 1]
    tokens = np.concatenate([np.full(length, index) for index, length in enumerate(lengths)])
    stream = TokenStream(tokens, np.cumsum([0, *lengths]), 9, 9)
    targets = BestFit(stream, 8).pack(np.arange(3))["targets"]
    earliest = targets.min(axis=1)
    assert earliest.tolist() == sorted(earliest) and earliest[:2].tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["concatenate", "best_fit"])
@pytest.mark.parametrize("cuts", [[30], [1, 2, 50], list(range(1, 124))])
def test_shards_end_to_end_are_the_whole(stream, kind, cuts):
    stream, _ = stream
    mask = (np.arange(len(stream.tokens)) % 3 > 0).astype(np.uint8)
    first = np.arange(len(stream.starts) - 1, dtype=np.int32) + 500
    whole = TokenStream(stream.tokens, stream.starts, 1, 0, mask, first)
    parts = TokenStream(
        Joined(np.split(stream.tokens, cuts)),
        stream.starts,
        1,
        0,
        Joined(np.split(mask, cuts)),
        first,
    )
    for length in (7, 50, 200):
        one, other = make_packing(whole, length, kind), make_packing(parts, length, kind)
        rows = np.arange(one.num_rows)
        for key, values in one.pack(rows).items():
            np.testing.assert_array_equal(other.pack(rows)[key], values)


@pytest.mark.parametrize("kind", ["concatenate", "best_fit"])
def test_mask_and_first_tokens_reach_the_batch(stream, kind):
    """The mask belongs to the targets; a first token is an input alone."""
    stream, documents = stream
    mask = (stream.tokens % 2).astype(np.uint8)
    first = np.arange(len(documents), dtype=np.int32) + 5000
    packing = make_packing(TokenStream(stream.tokens, stream.starts, 1, 0, mask, first), 64, kind)
    batch = packing.pack(np.arange(packing.num_rows))
    real = batch["segment_ids"] > 0
    np.testing.assert_array_equal(batch["loss_mask"][real], batch["targets"][real] % 2)
    inputs = batch["tokens"][real]
    assert sorted(inputs[inputs >= 5000].tolist()) == first.tolist()
    for tokens, targets, _ in segments(batch):
        if tokens[0] >= 5000:
            document = documents[tokens[0] - 5000].tolist() + [2]
            assert document[: len(targets)] == targets


def test_joined_arrays_are_sliced_as_one():
    parts = [np.arange(5), np.arange(5, 6), np.arange(6, 20)]
    joined, whole = Joined(parts), np.arange(20)
    assert len(joined) == 20 and joined[7] == 7 and joined[-1] == 19
    for begin in range(-3, 21):
        for end in range(21):
            np.testing.assert_array_equal(joined[begin:end], whole[begin:end])
    np.testing.assert_array_equal(np.asarray(joined), whole)


def test_streams_end_to_end(stream):
    stream, _ = stream
    empty = TokenStream(stream.tokens[:0], np.zeros(1, np.int64), 1, 0)
    assert join_streams([empty, stream]) is stream
    assert len(join_streams([empty, empty]).tokens) == 0
    masked = TokenStream(stream.tokens, stream.starts, 1, 0, np.zeros(len(stream.tokens), np.uint8))
    both = join_streams([stream, masked])
    assert both.mask[0] == 1 and both.mask[-1] == 0
    np.testing.assert_array_equal(both.starts[11:], stream.starts[1:] + len(stream.tokens))


def test_a_million_documents_are_planned_in_seconds():
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.lognormal(5.5, 1.2, 1_000_000).astype(np.int64) + 1, 50_000)
    starts = np.append(0, np.cumsum(lengths))
    tokens = np.broadcast_to(np.uint16(7), starts[-1])
    began = time.perf_counter()
    report = BestFit(TokenStream(tokens, starts, 1, 0), 2048).report()
    assert time.perf_counter() - began < 15
    assert report.efficiency > 0.995 and report.cut < 0.06
