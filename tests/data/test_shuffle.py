import numpy as np
import pytest

from fp4zoo.data.shuffle import permute


@pytest.mark.parametrize("number", [*range(1, 40), 255, 256, 257, 1000, 99_991])
def test_it_is_a_permutation(number):
    rows = permute(np.arange(number), number, seed=3, epoch=1)
    np.testing.assert_array_equal(np.sort(rows), np.arange(number))


def test_a_place_does_not_depend_on_its_company():
    together = permute(np.arange(1000), 1000, seed=0, epoch=0)
    places = np.array([999, 3, 500])
    np.testing.assert_array_equal(permute(places, 1000, seed=0, epoch=0), together[places])


def test_orders_stay_what_they_are():
    """A resumed run depends on it."""
    assert permute(np.arange(10), 10, seed=0, epoch=0).tolist() == [5, 2, 0, 6, 7, 4, 3, 8, 9, 1]
    large = permute(np.array([0, 10**12]), 2 * 10**12, seed=-7, epoch=10**9)
    assert large.tolist() == [1167945461095, 1827601136636]


def test_every_place_goes_everywhere_equally_often():
    """Chi-square over 4000 seeds: 7 x 7 counts with 36 degrees of freedom."""
    orders = np.stack([permute(np.arange(7), 7, seed, epoch=0) for seed in range(4000)])
    counts = np.stack([np.bincount(orders[:, place], minlength=7) for place in range(7)])
    expected = 4000 / 7
    assert ((counts - expected) ** 2 / expected).sum() < 68  # exceeded once in a thousand


def test_neighbours_are_separated():
    rows = permute(np.arange(100_000), 100_000, seed=1, epoch=0)
    steps = np.abs(np.diff(rows))
    assert (steps == 1).mean() < 1e-3
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.015


def test_seeds_and_epochs_are_unlike_each_other():
    orders = [permute(np.arange(1000), 1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for index, one in enumerate(orders):
        for other in orders[:index]:
            assert (one == other).sum() < 10
