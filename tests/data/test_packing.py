import numpy as np
import pytest

from fp4zoo.data import TokenStream, count_rows, pack_rows

LENGTHS = (1, 2, 7, 8, 16, 64, 500)


def all_rows(stream, sequence_length):
    rows = np.arange(count_rows(stream, sequence_length))
    return pack_rows(stream, rows, sequence_length)


def segments(batch):
    """(inputs, targets, positions) of every segment, row by row."""
    for row in range(len(batch["tokens"])):
        ids = batch["segment_ids"][row]
        for segment in range(1, ids.max() + 1):
            here = ids == segment
            yield tuple(batch[key][row][here] for key in ("tokens", "targets", "positions"))


@pytest.mark.parametrize("sequence_length", LENGTHS)
def test_every_token_and_end_is_a_target_once_in_order(stream, sequence_length):
    stream, _ = stream
    batch = all_rows(stream, sequence_length)
    counted = batch["loss_mask"] > 0
    np.testing.assert_array_equal(batch["targets"][counted], stream.tokens)
    assert counted.sum() == len(stream.tokens)


@pytest.mark.parametrize("sequence_length", LENGTHS)
def test_a_segment_is_a_run_of_one_document(stream, sequence_length):
    """Put together, the segments are the documents again: nothing mixed, lost or repeated."""
    stream, documents = stream
    pairs = []
    for inputs, targets, positions in segments(all_rows(stream, sequence_length)):
        np.testing.assert_array_equal(inputs[1:], targets[:-1])
        np.testing.assert_array_equal(positions, np.arange(len(inputs)))
        assert 2 not in inputs and 2 not in targets[:-1]
        if inputs[0] == 1:
            pairs.append(([], []))
        pairs[-1][0].extend(inputs)
        pairs[-1][1].extend(targets)
    assert len(pairs) == len(documents)
    for (inputs, targets), document in zip(pairs, documents, strict=True):
        assert inputs == [1, *document]
        assert targets == [*document, 2]


def test_segment_ids_are_unique_and_contiguous_in_a_row(stream):
    stream, _ = stream
    for ids in all_rows(stream, 16)["segment_ids"]:
        steps = np.diff(ids[ids > 0])
        assert ids[0] == 1 and set(steps) <= {0, 1}


def test_example_by_hand():
    stream = TokenStream(np.array([11, 12, 2, 21, 2, 31, 32, 33, 2]), np.array([0, 3, 5, 9]), 1, 0)
    batch = pack_rows(stream, np.array([0, 1, 2]), 6)
    assert batch["tokens"].tolist() == [[1, 11, 12, 1, 21, 1], [31, 32, 33, 0, 0, 0], [0] * 6]
    assert batch["targets"].tolist() == [[11, 12, 2, 21, 2, 31], [32, 33, 2, 0, 0, 0], [0] * 6]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 3], [1, 1, 1, 0, 0, 0], [0] * 6]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 0, 0, 0], [0] * 6]
    assert batch["loss_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0], [0] * 6]
    assert {key: value.dtype for key, value in batch.items()} == {
        "tokens": np.int32,
        "targets": np.int32,
        "loss_mask": np.float32,
        "segment_ids": np.int32,
        "positions": np.int32,
    }


def test_rows_do_not_depend_on_their_company(stream):
    stream, _ = stream
    together = all_rows(stream, 16)
    order = np.array([5, 0, 3])
    for key, value in pack_rows(stream, order, 16).items():
        np.testing.assert_array_equal(value, together[key][order])
