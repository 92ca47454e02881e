"""Batches: an endless resumable iterator for training, a fixed list for validation.

Batch k is a function of the corpus, the seed and k alone. Row r of batch k is row
k * batch_size + r of an endless sequence that goes through all rows once an epoch, in a new global
random order each; of a mixture, see mixture.py. So the state is one number, and setting it is
instant at any step.
"""

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from ..errors import UserError
from .config import DataConfig
from .corpus import Corpus, load_corpus
from .mixture import Mixture
from .packing import Batch, Packing, make_packing
from .progress import note
from .shuffle import permute
from .tokenizer import Tokenizer

_ENDLESS = 2**62
_GROUPS_AHEAD_PER_WORKER = 2
_TOKENS_PER_GROUP = 1 << 16


class _BatchGroups:
    """Random access to one process's rows of the batches, some batches at a time: what Grain reads.

    Small batches are packed several at once, because the cost of a call is that of thousands of
    tokens.
    """

    def __init__(
        self,
        packings: list[Packing],
        mixture: Mixture,
        *,
        first_row: int,
        batch_size: int,
        rows: np.ndarray,
        sequence_length: int,
    ):
        self._packings, self._mixture = packings, mixture
        self._first_row, self._batch_size, self._rows = first_row, batch_size, rows
        tokens_per_batch = len(rows) * sequence_length
        self.batches_per_group = max(1, _TOKENS_PER_GROUP // tokens_per_batch)

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: Any) -> Batch:
        group_rows = self.batches_per_group * self._batch_size
        begin = self._first_row + int(index) * group_rows
        places = np.arange(begin, begin + group_rows).reshape(-1, self._batch_size)
        sources, rows = self._mixture.at(places[:, self._rows].ravel())
        if len(self._packings) == 1:
            return self._packings[0].pack(rows)
        group: Batch = {}
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)
            for key, values in self._packings[source].pack(rows[here]).items():
                group.setdefault(key, np.empty((len(rows), values.shape[1]), values.dtype))
                group[key][here] = values
        return group


class TrainIterator(Iterator[Batch]):
    """Endless training batches with a state that fits in a line of JSON.

    Attributes:
      corpus: the token streams and the manifest.
      packings: the rows of each source, with a `report()` of how full they are.
      rows_per_epoch: rows after which every token has been a target once more; of a mixture by
        epochs, those of a pass; of one by weight, the rows of all sources together.
    """

    def __init__(
        self,
        corpus: Corpus,
        packings: list[Packing],
        mixture: Mixture,
        *,
        batch_size: int,
        sequence_length: int,
        seed: int,
        packing: str,
        shuffle: bool,
        num_workers: int,
        rows: np.ndarray,
    ):
        """`rows` are the numbers of the rows of each batch that this process gets."""
        self.corpus, self.packings, self._mixture = corpus, packings, mixture
        single = len(packings) == 1
        self.rows_per_epoch = packings[0].num_rows if single else mixture.rows_per_pass
        self._batch_size, self._sequence_length, self._rows = batch_size, sequence_length, rows
        self._options = grain.ReadOptions(
            num_threads=num_workers, prefetch_buffer_size=_GROUPS_AHEAD_PER_WORKER * num_workers
        )
        self._determines = {
            "corpus": corpus.digest,
            "sequence_length": sequence_length,
            "packing": packing,
            "shuffle": shuffle,
            "seed": seed,
            "start_id": corpus.train.start_id,
        }
        self._rows_read = 0
        self._groups, self._batches = self._start()

    def __iter__(self) -> "TrainIterator":
        return self

    def __next__(self) -> Batch:
        """This process's rows of the next batch; see `pack_rows` for the arrays."""
        batch = next(self._batches, None)
        if batch is None:
            self._batches = self._split(next(self._groups))
            batch = next(self._batches)
        self._rows_read += self._batch_size
        return batch

    @property
    def epoch(self) -> float:
        """Times that the training split has been read."""
        return self._rows_read / self.rows_per_epoch

    @property
    def shares(self) -> list[float]:
        """Each source's share of the rows."""
        return self._mixture.shares

    def get_state(self) -> dict[str, Any]:
        """JSON-able: the rows read by all processes together, and what determines their order."""
        return {"rows_read": self._rows_read, **self._determines}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on behind the batch after which `state` was taken. Another batch size or number of
        processes or workers may go on from it: no row is lost or read twice.

        Raises:
          UserError: the state is of other data, so that going on would mix two orders.
        """
        for key, value in self._determines.items():
            if state.get(key) != value:
                raise UserError(
                    f"the checkpoint's data position is for {key}={state.get(key)} but this run "
                    f"has {key}={value}: restore the data settings of that run, or start a new "
                    "one from its weights (checkpoint=FOLDER and another output_dir)"
                )
        self._groups.close()
        self._rows_read = int(state["rows_read"])
        self._groups, self._batches = self._start()

    def close(self) -> None:
        """Ends the worker threads."""
        self._groups.close()

    def _split(self, group: Batch) -> Iterator[Batch]:
        """The batches of a group, as views of its arrays."""
        share = len(self._rows)
        for begin in range(0, len(group["tokens"]), share):
            yield {key: value[begin : begin + share] for key, value in group.items()}

    def _start(self) -> tuple[grain.DatasetIterator, Iterator[Batch]]:
        """Groups from `rows_read` on, and the batches left of the current group: none."""
        groups = _BatchGroups(
            self.packings,
            self._mixture,
            first_row=self._rows_read,
            batch_size=self._batch_size,
            rows=self._rows,
            sequence_length=self._sequence_length,
        )
        # Threads, not processes: packing is a few array operations per batch, far faster than a
        # step, and a thread needs no shared memory, cannot be killed alone, starts at once, and
        # raises its error in the consumer.
        dataset = grain.MapDataset.source(groups).to_iter_dataset(self._options)
        return iter(dataset), iter(())


def make_train_iterator(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    sequence_length: int,
    seed: int,
    rows: np.ndarray | None = None,
) -> TrainIterator:
    """Endless training batches; tokenises the corpus first if it is not in the cache.

    Args:
      config, tokenizer: what to read and how.
      batch_size: rows of the global batch.
      sequence_length: tokens in a row.
      seed: of the order of rows; any integer.
      rows: numbers of the rows of each global batch that this process gets, ascending; None: all.
        Row r of batch k is the same whoever reads it, so it does not depend on the number of
        processes, and a process packs no others.

    Returns:
      An iterator over dicts of [len(rows), sequence_length] arrays.

    Raises:
      UserError: the corpus cannot be read or is smaller than one batch.
    """
    corpus = load_corpus(config, tokenizer)
    packings = [
        make_packing(source.train, sequence_length, config.packing)
        for source in corpus.parts or (corpus,)
    ]
    num_rows = sum(packing.num_rows for packing in packings)
    if num_rows < batch_size:
        raise UserError(
            f"{corpus.description} gives {num_rows} rows of {sequence_length} tokens, fewer than "
            f"batch_size={batch_size}: add text or reduce batch_size or sequence_length"
        )
    for source, packing in zip(corpus.parts or (corpus,), packings, strict=True):
        if not packing.num_rows:
            raise UserError(f"{source.description} gives no row to train on: remove the source")
        if config.packing != "concatenate":
            note(f"data: packed {source.description} by {config.packing}: {packing.report()}")
    return TrainIterator(
        corpus,
        packings,
        _mixture(config, packings, seed),
        batch_size=batch_size,
        sequence_length=sequence_length,
        seed=seed,
        packing=config.packing,
        shuffle=config.shuffle,
        num_workers=config.num_workers,
        rows=np.arange(batch_size) if rows is None else rows,
    )


def make_validation_batches(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    sequence_length: int,
    max_batches: int | None = None,
) -> list[Batch]:
    """The fixed validation batches: the same for every seed, run and batch of training.

    Rows come in one fixed random order, so that a few batches sample all held-out documents. With
    `max_batches` None every held-out token is a target once; the last batch is filled with rows of
    padding. Empty when `validation_fraction` is 0.

    Raises:
      UserError: as `make_train_iterator`.
    """
    corpus = load_corpus(config, tokenizer)
    packing = make_packing(corpus.validation, sequence_length, config.packing)
    num_rows = packing.num_rows
    if not num_rows:
        return []
    num_batches = -(-num_rows // batch_size)
    if max_batches is not None:
        num_batches = min(num_batches, max_batches)
    order = permute(np.arange(num_rows), num_rows, seed=0, epoch=0)
    padding = np.full(-num_rows % batch_size, num_rows)  # rows behind the last are padding
    return [
        packing.pack(rows)
        for rows in np.append(order, padding).reshape(-1, batch_size)[:num_batches]
    ]


def _mixture(config: DataConfig, packings: list[Packing], seed: int) -> Mixture:
    num_rows = [packing.num_rows for packing in packings]
    used_seed = seed if config.shuffle else None
    if config.sources and config.sources[0].epochs is not None:
        epochs = [source.epochs or 0.0 for source in config.sources]
        return Mixture(num_rows, epochs=epochs, seed=used_seed)
    weights = [source.weight or 0.0 for source in config.sources or ()] or [1.0]
    return Mixture(num_rows, weights=weights, seed=used_seed)
