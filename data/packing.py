"""Packing a token stream into rows of equal length, none of whose documents sees another.

A document of n tokens gives n + 1 pairs of input and target:

    inputs    start  t1  t2 ... tn          start = beginning-of-document (else end-of-document)
    targets   t1     t2  t3 ... end

So every token and the end is a target exactly once, no target belongs to another document than its
input, and nothing is masked but padding. The end is never an input: nothing follows it. Pairs are
laid one behind the other and cut every `sequence_length`; a document cut there goes on in another
row as a segment of its own, at position 0 and without sight of its first part. The last row is
padded.
"""

import numpy as np

from .corpus import TokenStream

Batch = dict[str, np.ndarray]


def count_rows(stream: TokenStream, sequence_length: int) -> int:
    """Rows that hold all of `stream`, the last one padded."""
    return -(-len(stream.tokens) // sequence_length)


def pack_rows(stream: TokenStream, rows: np.ndarray, sequence_length: int) -> Batch:
    """The rows of these numbers.

    Args:
      stream: the tokens.
      rows: int [B] row numbers; one at or beyond `count_rows` gives a row of padding.
      sequence_length: T.

    Returns:
      Arrays [B, T]: `tokens` and `targets` int32, `loss_mask` float32 (1 where the target counts),
      `segment_ids` int32 (1, 2, ... by document; 0 for padding), `positions` int32 (from 0 in every
      segment).
    """
    num_rows, num_tokens = len(rows), len(stream.tokens)
    begins = np.minimum(np.asarray(rows, np.int64) * sequence_length, num_tokens)
    ends = np.minimum(begins + sequence_length, num_tokens)

    padded = np.flatnonzero(ends - begins < sequence_length)
    targets = np.empty((num_rows, sequence_length), np.int32)
    inputs = np.empty((num_rows, sequence_length), np.int32)
    for row, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        targets[row, : end - begin] = stream.tokens[begin:end]
        inputs[row, 0] = stream.tokens[max(begin, 1) - 1]
    inputs[:, 1:] = targets[:, :-1]

    # Documents that begin within a row, all rows at once: [B] ranges of `starts`, laid end to end.
    first = np.searchsorted(stream.starts[:-1], begins)
    counts = np.searchsorted(stream.starts[:-1], ends) - first
    row_of_start = np.repeat(np.arange(num_rows), counts)
    within = np.arange(len(row_of_start)) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = stream.starts[first[row_of_start] + within] - begins[row_of_start]
    inputs[row_of_start, columns] = stream.start_id

    begins_segment = np.zeros((num_rows, sequence_length), np.int32)
    begins_segment[row_of_start, columns] = 1
    begins_segment[:, 0] = 1  # what goes on from another row is a segment too
    segment_ids = np.cumsum(begins_segment, axis=1, dtype=np.int32)
    column = np.arange(sequence_length, dtype=np.int32)
    positions = column - np.maximum.accumulate(begins_segment * column, axis=1)
    loss_mask = np.ones((num_rows, sequence_length), np.float32)

    for row in padded:
        padding = np.s_[row, ends[row] - begins[row] :]
        targets[padding] = stream.pad_id
        inputs[padding] = stream.pad_id
        segment_ids[padding] = 0
        positions[padding] = 0
        loss_mask[padding] = 0.0
    return {
        "tokens": inputs,
        "targets": targets,
        "loss_mask": loss_mask,
        "segment_ids": segment_ids,
        "positions": positions,
    }
