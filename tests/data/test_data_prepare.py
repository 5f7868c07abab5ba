"""Preparation of a file's rows, and the account of their outcomes."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rows.data import chat, small_tokenizer, write_jsonl

from wgpu_lora.data import batches, epoch_order, pack, tokenize_source
from wgpu_lora.data.packing import OPEN_BINS
from wgpu_lora.errors import UserError

TOKENS = [
    {"input_ids": [1, 2, 3]},
    {"input_ids": [1, 2, 3], "labels": [1, -100, -100]},  # nothing predicts the first token
    {"input_ids": list(range(10)), "labels": [-100] * 8 + [8, 9]},
    {"input_ids": list(range(10))},
    {"input_ids": [7]},
]


@pytest.fixture
def path(tmp_path):
    return write_jsonl(tmp_path / "train.jsonl", *TOKENS)


def test_rows_and_counts_when_long_rows_are_cut(path):
    prepared = tokenize_source(path, None, max_length=5)
    assert [row.index for row in prepared.rows] == [0, 3]
    assert [row.input_ids.tolist() for row in prepared.rows] == [[1, 2, 3], [0, 1, 2, 3, 4]]
    assert all(row.input_ids.dtype == row.labels.dtype == np.int32 for row in prepared.rows)
    account = prepared.account
    assert (account.examples, account.expanded, account.cut.count, account.too_long.count) == (5, 5, 1, 0)
    assert (account.untrained.count, account.truncated_away.count) == (3, 1)
    assert (prepared.trained_tokens, prepared.total_tokens) == (2 + 4, 3 + 5)
    assert prepared.lengths == [3, 5]
    assert prepared.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert prepared.summary() == (
        "train.jsonl: 5 examples, 2 rows, 1 truncated at 5 tokens (line 4), "
        "3 dropped with nothing to train on, 1 of them by truncation (lines 2, 3, 5); 6 of 8 tokens are trained on"
    )


def test_rows_and_counts_when_long_rows_are_dropped(path):
    prepared = tokenize_source(path, None, max_length=5, on_overflow="drop")
    assert [row.index for row in prepared.rows] == [0]
    account = prepared.account
    assert (account.cut.count, account.too_long.count, account.untrained.count, account.truncated_away.count) == (
        0,
        2,
        2,
        0,
    )
    assert "2 dropped as longer than 5 tokens" in prepared.summary()


def test_an_index_does_not_hang_on_the_length(path):
    everything = {row.index for row in tokenize_source(path, None, max_length=100).rows}
    assert everything == {0, 2, 3}
    assert {row.index for row in tokenize_source(path, None, max_length=5).rows} < everything


def test_mixed_formats_and_conversations_of_several_rows(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl", {"text": "The sky"}, {"messages": chat("a", "b", "c", "d")}, {"input_ids": [1, 2]}
    )
    prepared = tokenize_source(path, small_tokenizer("thinking"), max_length=500)
    assert (prepared.account.examples, prepared.account.expanded) == (3, 4)
    assert [row.index for row in prepared.rows] == [0, 1, 2, 3]
    one_row = tokenize_source(path, small_tokenizer("thinking"), max_length=500, completion_only_loss=False)
    assert one_row.account.expanded == 3
    assert one_row.trained_tokens == one_row.total_tokens - 3
    quiet = tokenize_source(
        path, small_tokenizer("thinking"), max_length=500, chat_template_kwargs={"enable_thinking": False}
    )
    assert quiet.trained_tokens < prepared.trained_tokens


@pytest.mark.parametrize(
    ("rows", "template", "options", "words"),
    [
        ([{"input_ids": [1, 2]}, {"input_ids": [1, 300]}], None, {"vocab_size": 300},
         r"a\.jsonl, line 2: token id 300 .*vocabulary of 300"),
        ([{"input_ids": [1, 2], "labels": [1, 300]}], None, {"vocab_size": 300}, "token id 300"),
        ([{"input_ids": [1, 9999]}], "chatml", {}, "another model"),
        ([{"input_ids": [1, 2]}, {"text": "a"}], None, {}, r"a\.jsonl, line 2: .*tokenizer"),
        ([{"text": "a"}, {"messages": chat("a", "b")[1:]}], "strict", {}, r"a\.jsonl, line 2: .*must alternate"),
        ([{"messages": chat("a")}, {"messages": chat("a", "b")}], "chatml", {"max_length": 4},
         r"nothing to train on: of 2 rows, 2 with no token to train on \(1 of them truncated"),
        ([{"messages": chat("a")}, {"messages": chat("a", "b")}], "chatml", {"max_length": 4, "on_overflow": "drop"},
         "1 of more than 4 tokens"),
        (TOKENS, None, {"max_length": 1}, "maximum length is 1"),
        (TOKENS, None, {"on_overflow": "wrap"}, r"on_overflow must be .* not 'wrap'"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, rows, template, options, words):
    tokenizer = small_tokenizer(template) if template else None
    with pytest.raises(UserError, match=words):
        tokenize_source(write_jsonl(tmp_path / "a.jsonl", *rows), tokenizer, **{"max_length": 5, **options})


def test_the_largest_token_of_a_vocabulary(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"input_ids": [1, 300]})
    assert len(tokenize_source(path, None, max_length=5, vocab_size=301).rows) == 1


# -- the order of an epoch and the filling of bins ---------------------------------------------------------------------

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
