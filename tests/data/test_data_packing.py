"""The order of an epoch and the filling of bins."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wgpu_lora.data import batches, epoch_order, pack
from wgpu_lora.data.packing import OPEN_BINS

LENGTHS = st.lists(st.integers(1, 40), max_size=120)
quick = settings(max_examples=60, deadline=None, derandomize=True)


@quick
@given(LENGTHS, st.integers(40, 100), st.integers(0, 2**32))
def test_every_row_is_in_one_bin_and_no_bin_is_too_full(lengths, budget, seed):
    order = epoch_order(len(lengths), seed, 0)
    bins = pack(lengths, order, budget)
    assert sorted(row for bin in bins for row in bin) == list(range(len(lengths)))
    assert all(0 < sum(lengths[row] for row in bin) <= budget for bin in bins)
    place = {int(row): i for i, row in enumerate(order)}
    assert [place[bin[0]] for bin in bins] == sorted(place[bin[0]] for bin in bins)
    assert all([place[row] for row in bin] == sorted(place[row] for row in bin) for bin in bins)


@quick
@given(LENGTHS, st.integers(40, 100))
def test_packing_hangs_on_its_arguments_alone(lengths, budget):
    order = list(range(len(lengths)))
    first = pack(lengths, order, budget)
    np.random.seed(len(lengths))
    assert pack(np.array(lengths, dtype=np.int32).tolist(), np.array(order, dtype=np.int64), budget) == first
    # Rows that are not in the order are not looked at.
    assert pack([*lengths, 7, 7], order, budget) == first


def test_first_fit_on_a_small_case():
    assert pack([6, 5, 4, 5, 1], [0, 1, 2, 3, 4], 10) == [[0, 2], [1, 3], [4]]
    assert pack([6, 5, 4, 5, 1], [4, 3, 2, 1, 0], 10) == [[4, 3, 2], [1], [0]]


def test_open_bins_are_bounded_and_the_fullest_is_closed():
    lengths = [6] * (OPEN_BINS - 1) + [7] + [6] + [3] + [4]
    bins = pack(lengths, range(len(lengths)), 10)
    full, late, three, four = OPEN_BINS - 1, OPEN_BINS, OPEN_BINS + 1, OPEN_BINS + 2
    assert bins[full] == [full], "the bin of 7 was closed when one too many was opened, or it would hold the 3"
    assert three in bins[0]
    assert four in bins[1]
    assert bins[-1] == [late]


def test_packing_is_good_enough():
    lengths = np.random.Generator(np.random.Philox(3)).integers(20, 1000, 2000).tolist()
    bins = pack(lengths, epoch_order(2000, 0, 0), 4096)
    assert sum(lengths) / (len(bins) * 4096) > 0.97


def test_a_row_beyond_the_budget_is_a_mistake():
    with pytest.raises(ValueError, match="row 1 has 11 tokens"):
        pack([3, 11], [0, 1], 10)


def test_batches_without_packing_are_slices():
    assert batches([1] * 5, [4, 3, 2, 1, 0], batch_size=2, max_length=8, packing=False) == [[4, 3], [2, 1], [0]]


def test_batches_with_packing_fill_the_same_tokens():
    assert batches([8, 8, 8], [0, 1, 2], batch_size=2, max_length=8, packing=True) == [[0, 1], [2]]


def test_epoch_order_is_fixed_for_ever():
    assert epoch_order(8, seed=7, epoch=1).tolist() == [3, 1, 6, 2, 5, 4, 0, 7]
    assert epoch_order(5, seed=7, epoch=1, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@quick
@given(st.integers(0, 200), st.integers(-5, 2**63), st.integers(0, 50))
def test_epoch_order_is_a_permutation(count, seed, epoch):
    order = epoch_order(count, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(count))


def test_epochs_and_seeds_differ():
    orders = {tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
