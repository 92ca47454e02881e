"""Whose turn it is: which source and row is at a place of an endless sequence."""

import numpy as np

from .shuffle import permute

_CYCLE = 1 << 16
_SEED_STEP = 1 << 64  # seeds of different sources are this far apart


class Mixture:
    """Maps a place of the endless sequence to a source and one of its rows.

    By weight: places come in cycles of 65536, in each of which every source has its share of places
    (to 1/65536; at least one), spread evenly. A source goes through all its rows, in a new random
    order each time, before any comes again. By epochs: a pass has every row of a source `epochs`
    times, exactly, in one random order; a fraction goes on with other rows in the next pass.
    """

    def __init__(
        self,
        num_rows: list[int],
        *,
        weights: list[float] | None = None,
        epochs: list[float] | None = None,
        seed: int | None,
    ):
        """Takes each source's number of rows, and one of `weights` and `epochs` (each [S]).

        `seed` None: nothing is shuffled, and sources by epochs follow one another.
        """
        self._num_rows, self._seed = np.array(num_rows, np.int64), seed
        self._shuffled_pass = epochs is not None
        if epochs is not None:
            counts = np.round(np.array(epochs) * self._num_rows).astype(np.int64)
            self._counts = np.maximum(counts, 1)
            self._ends = np.cumsum(self._counts)
            self._length = int(self._ends[-1])
        else:
            assert weights is not None
            shares = np.array(weights, np.float64) / sum(weights)
            self._order, self._before = _spread(_apportion(shares, _CYCLE))
            self._counts = np.bincount(self._order, minlength=len(num_rows))
            self._length = _CYCLE

    @property
    def rows_per_pass(self) -> int:
        """By epochs: places of a pass. By weight: rows of all sources together."""
        return self._length if self._shuffled_pass else int(self._num_rows.sum())

    @property
    def shares(self) -> list[float]:
        """Each source's share of the places."""
        return (self._counts / self._length).tolist()

    def at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sources [N] and their rows [N] at places [N]."""
        passes, offsets = np.divmod(places, self._length)
        if not self._shuffled_pass:
            sources = self._order[offsets]
            ordinals = passes * self._counts[sources] + self._before[offsets]
        else:
            offsets = self._permuted(passes, offsets, self._length, -1)
            sources = np.searchsorted(self._ends, offsets, "right")
            within = offsets - (self._ends - self._counts)[sources]
            ordinals = passes * self._counts[sources] + within
        rows = np.empty(len(places), np.int64)
        for source in np.unique(sources).tolist():
            here = sources == source
            number = int(self._num_rows[source])
            epochs, own = np.divmod(ordinals[here], number)
            rows[here] = self._permuted(epochs, own, number, source)
        return sources, rows

    def _permuted(
        self, epochs: np.ndarray, values: np.ndarray, number: int, source: int
    ) -> np.ndarray:
        if self._seed is None:
            return values
        values = values.copy()
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            values[here] = permute(values[here], number, self._seed + source * _SEED_STEP, epoch)
        return values


def _apportion(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers near shares x total that add up to it (largest remainders), each at least 1."""
    exact = shares * total
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while counts.sum() < total:
        counts[np.argmax(exact - counts)] += 1
    while counts.sum() > total:
        counts[np.argmax(np.where(counts > 1, counts - exact, -np.inf))] -= 1
    return counts


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each source's places evenly over the cycle: the source of each place, and how many of its
    places came before."""
    sources = np.repeat(np.arange(len(counts)), counts)
    before = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((before + 0.5) / counts[sources], kind="stable")
    return sources[order], before[order]
