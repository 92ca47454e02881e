"""Packing a token stream into rows of equal length, none of whose documents sees another.

A document of n tokens gives n + 1 pairs of input and target (n where no end is put behind it, one
less where nothing is put before it: see `data.document_start` and `data.document_end`):

    inputs    start  t1  t2 ... tn          start = beginning-of-document (else end-of-document)
    targets   t1     t2  t3 ... end

So every token and the end is a target exactly once and no target belongs to another document than
its input. The end is never an input: nothing follows it. A document that is cut goes on in another
row as a segment of its own, at position 0 and without sight of its first part.

"concatenate" lays the pairs one behind the other and cuts every `sequence_length`; only the last
row is padded. "best_fit" cuts only documents longer than a row, and puts every piece, the longest
first, into the row that it leaves the least room in (Ding et al., "Fewer Truncations Improve
Language Modeling", 2024).
"""

import abc
import bisect
from dataclasses import dataclass

import numpy as np

from .streams import TokenStream

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class PackingReport:
    """How well a stream fits into rows.

    Attributes:
      rows: number of rows.
      efficiency: share of their places that hold a target.
      documents: number of documents.
      cut: share of the documents that are in more than one row.
    """

    rows: int
    efficiency: float
    documents: int
    cut: float

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows, {self.efficiency:.2%} filled; {self.cut:.1%} of "
            f"{self.documents:,} documents cut"
        )


class Packing(abc.ABC):
    """The rows of one stream, each by its number."""

    num_rows: int

    def __init__(self, stream: TokenStream, sequence_length: int):
        self.stream, self.sequence_length = stream, sequence_length

    @abc.abstractmethod
    def pack(self, rows: np.ndarray) -> Batch:
        """The rows of these numbers.

        Args:
          rows: int [B] row numbers; one at or beyond `num_rows` gives a row of padding.

        Returns:
          Arrays [B, T]: `tokens` and `targets` int32, `loss_mask` float32 (1 where the target
          counts), `segment_ids` int32 (1, 2, ... by document; 0 for padding), `positions` int32
          (from 0 in every segment).
        """

    @abc.abstractmethod
    def _count_cut(self) -> int:
        """Documents in more than one row."""

    def report(self) -> PackingReport:
        """How full the rows are, and how many documents are cut."""
        places = self.num_rows * self.sequence_length
        documents = len(self.stream.starts) - 1
        efficiency = len(self.stream.tokens) / places if places else 1.0
        cut = self._count_cut() / max(1, documents)
        return PackingReport(self.num_rows, efficiency, documents, cut)

    def _start_inputs(self, documents: np.ndarray) -> np.ndarray | int:
        """What these documents begin with."""
        return self.stream.start_id if self.stream.first is None else self.stream.first[documents]

    def _finish(
        self,
        inputs: np.ndarray,
        targets: np.ndarray,
        loss_mask: np.ndarray,
        begins_segment: np.ndarray,
        filled: np.ndarray,
    ) -> Batch:
        """Adds segments and positions, and pads row r from column filled[r] on."""
        length = self.sequence_length
        segment_ids = np.cumsum(begins_segment, axis=1, dtype=np.int32)
        column = np.arange(length, dtype=np.int32)
        positions = column - np.maximum.accumulate(begins_segment * column, axis=1)
        for row in np.flatnonzero(filled < length):
            padding = np.s_[row, filled[row] :]
            targets[padding] = self.stream.pad_id
            inputs[padding] = self.stream.pad_id
            segment_ids[padding] = 0
            positions[padding] = 0
            loss_mask[padding] = 0.0
        self.stream.check(targets)  # the inputs are the same tokens, but for the first ones
        self.stream.check(inputs[:, 0])
        return {
            "tokens": inputs,
            "targets": targets,
            "loss_mask": loss_mask,
            "segment_ids": segment_ids,
            "positions": positions,
        }


class Concatenated(Packing):
    """Documents one after the other, cut every `sequence_length`."""

    def __init__(self, stream: TokenStream, sequence_length: int):
        super().__init__(stream, sequence_length)
        self.num_rows = -(-len(stream.tokens) // sequence_length)

    def pack(self, rows: np.ndarray) -> Batch:
        """See `Packing.pack`."""
        stream, length = self.stream, self.sequence_length
        num_rows, num_tokens = len(rows), len(stream.tokens)
        begins = np.minimum(np.asarray(rows, np.int64) * length, num_tokens)
        ends = np.minimum(begins + length, num_tokens)

        targets = np.empty((num_rows, length), np.int32)
        inputs = np.empty((num_rows, length), np.int32)
        loss_mask = np.ones((num_rows, length), np.float32)
        for row, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            targets[row, : end - begin] = stream.tokens[begin:end]
            if begin < end:
                inputs[row, 0] = stream.tokens[max(begin, 1) - 1]
            if stream.mask is not None:
                loss_mask[row, : end - begin] = stream.mask[begin:end]
        inputs[:, 1:] = targets[:, :-1]

        # Documents that begin within a row, all rows at once: [B] ranges of `starts`, end to end.
        first = np.searchsorted(stream.starts[:-1], begins)
        counts = np.searchsorted(stream.starts[:-1], ends) - first
        row_of_start = np.repeat(np.arange(num_rows), counts)
        within = np.arange(len(row_of_start)) - np.repeat(np.cumsum(counts) - counts, counts)
        documents = first[row_of_start] + within
        columns = stream.starts[documents] - begins[row_of_start]
        inputs[row_of_start, columns] = self._start_inputs(documents)

        begins_segment = np.zeros((num_rows, length), np.int32)
        begins_segment[row_of_start, columns] = 1
        begins_segment[:, 0] = 1  # what goes on from another row is a segment too
        return self._finish(inputs, targets, loss_mask, begins_segment, ends - begins)

    def _count_cut(self) -> int:
        starts, length = self.stream.starts, self.sequence_length
        return int((starts[:-1] // length != (starts[1:] - 1) // length).sum())


class BestFit(Packing):
    """Pieces of at most `sequence_length`, each in the fullest row that it fits in.

    Attributes of the plan, for the pieces in the order of their rows: where it begins in the
    stream, its length, its column, its document; and where each row's pieces begin among them. Rows
    are numbered in the order of their earliest pieces.
    """

    def __init__(self, stream: TokenStream, sequence_length: int):
        super().__init__(stream, sequence_length)
        lengths = np.diff(stream.starts)
        counts = -(-lengths // sequence_length)
        self._num_cut = int((counts > 1).sum())
        documents = np.repeat(np.arange(len(lengths)), counts)
        within = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = stream.starts[documents] + within * sequence_length
        pieces = np.minimum(stream.starts[documents + 1] - begins, sequence_length)
        rows = best_fit(pieces, sequence_length)
        _, earliest, rows = np.unique(rows, return_index=True, return_inverse=True)
        self.num_rows = len(earliest)
        rank = np.empty(self.num_rows, np.int64)
        rank[np.argsort(earliest)] = np.arange(self.num_rows)
        rows = rank[rows]
        order = np.argsort(rows, kind="stable")
        self._begins, self._pieces = begins[order], pieces[order].astype(np.int32)
        self._is_start = within[order] == 0
        self._documents = documents[order].astype(np.int32)
        self._row_starts = np.append(0, np.cumsum(np.bincount(rows, minlength=self.num_rows)))
        ends = np.append(0, np.cumsum(self._pieces, dtype=np.int64))
        self._columns = ends[:-1] - np.repeat(
            ends[self._row_starts[:-1]], np.diff(self._row_starts)
        )

    def pack(self, rows: np.ndarray) -> Batch:
        """See `Packing.pack`."""
        stream, length = self.stream, self.sequence_length
        targets = np.empty((len(rows), length), np.int32)
        inputs = np.empty((len(rows), length), np.int32)
        loss_mask = np.ones((len(rows), length), np.float32)
        begins_segment = np.zeros((len(rows), length), np.int32)
        filled = np.zeros(len(rows), np.int64)
        known = np.minimum(np.asarray(rows, np.int64), self.num_rows)
        firsts = self._row_starts[known]
        lasts = self._row_starts[np.minimum(known + 1, self.num_rows)]
        pieces = np.concatenate(
            [np.arange(first, last) for first, last in zip(firsts, lasts, strict=True)]
        ).astype(np.int64)
        row_of_piece = np.repeat(np.arange(len(rows)), lasts - firsts)
        columns, begins = self._columns[pieces], self._begins[pieces]
        ends = begins + self._pieces[pieces]
        for row, column, begin, end in zip(
            row_of_piece.tolist(), columns.tolist(), begins.tolist(), ends.tolist(), strict=True
        ):
            there = slice(column, column + end - begin)
            targets[row, there] = stream.tokens[begin:end]
            if stream.mask is not None:
                loss_mask[row, there] = stream.mask[begin:end]
        inputs[:, 1:] = targets[:, :-1]
        begins_segment[row_of_piece, columns] = 1
        np.maximum.at(filled, row_of_piece, columns + ends - begins)
        is_start = self._is_start[pieces]
        inputs[row_of_piece[is_start], columns[is_start]] = self._start_inputs(
            self._documents[pieces[is_start]]
        )
        for row, column, begin in zip(
            *(values[~is_start].tolist() for values in (row_of_piece, columns, begins)), strict=True
        ):
            inputs[row, column] = stream.tokens[begin - 1]
        return self._finish(inputs, targets, loss_mask, begins_segment, filled)

    def _count_cut(self) -> int:
        return self._num_cut


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing: the row of each piece.

    Pieces of one length and rows with the same room are alike, so they are placed many at a time.

    Args:
      lengths: int [N], each in [1, capacity].
      capacity: of a row.

    Returns:
      int64 [N] row numbers from 0.
    """
    rows_of = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    borders = np.flatnonzero(np.diff(lengths[by_length])) + 1
    num_rows = 0
    levels: list[int] = []  # the amounts of room that some rows have left, ascending
    with_room: dict[int, list[np.ndarray]] = {}

    def put_back(rows: np.ndarray, room: int) -> None:
        if len(rows) and room:
            if room not in with_room:
                with_room[room] = []
                bisect.insort(levels, room)
            with_room[room].append(rows)

    for group in np.split(by_length, borders) if len(lengths) else []:
        length = int(lengths[group[0]])
        while len(group):
            level = bisect.bisect_left(levels, length)
            if level < len(levels):
                room = levels[level]
                rows = with_room[room].pop()
                if not with_room[room]:
                    del with_room[room], levels[level]
            else:
                room = capacity
                rows = np.arange(num_rows, num_rows - (-len(group) // (capacity // length)))
                num_rows += len(rows)
            each = room // length
            used = min(len(rows), -(-len(group) // each))
            number = min(len(group), used * each)
            rows_of[group[:number]] = np.repeat(rows[:used], each)[:number]
            in_last = number - (used - 1) * each
            put_back(rows[used:], room)
            put_back(rows[: used - 1], room - each * length)
            put_back(rows[used - 1 : used], room - in_last * length)
            group = group[number:]
    return rows_of


def make_packing(stream: TokenStream, sequence_length: int, kind: str) -> Packing:
    """The rows of `stream`; `kind` is `data.packing`."""
    return {"concatenate": Concatenated, "best_fit": BestFit}[kind](stream, sequence_length)


def count_rows(stream: TokenStream, sequence_length: int) -> int:
    """Rows of "concatenate" that hold all of `stream`, the last one padded."""
    return Concatenated(stream, sequence_length).num_rows


def pack_rows(stream: TokenStream, rows: np.ndarray, sequence_length: int) -> Batch:
    """These rows of "concatenate", see `Packing.pack`."""
    return Concatenated(stream, sequence_length).pack(rows)
