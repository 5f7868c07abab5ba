"""Preparation of a file's rows, and the account of their outcomes."""

import hashlib

import numpy as np
import pytest
from support.data import chat, small_tokenizer, write_jsonl

from wgpu_lora.data import tokenize_source
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
    assert (account.untrained.count, account.lost_by_cut.count) == (3, 1)
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
    assert (account.cut.count, account.too_long.count, account.untrained.count, account.lost_by_cut.count) == (
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


def test_tokens_outside_of_the_vocabulary(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"input_ids": [1, 2]}, {"input_ids": [1, 300]})
    assert len(tokenize_source(path, None, max_length=5).rows) == 2
    assert len(tokenize_source(path, None, max_length=5, vocab_size=301).rows) == 2
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: token id 300 .*vocabulary of 300"):
        tokenize_source(path, None, max_length=5, vocab_size=300)
    labels = write_jsonl(tmp_path / "b.jsonl", {"input_ids": [1, 2], "labels": [1, 300]})
    with pytest.raises(UserError, match="token id 300"):
        tokenize_source(labels, None, max_length=5, vocab_size=300)
    with pytest.raises(UserError, match="another model"):
        tokenize_source(write_jsonl(tmp_path / "c.jsonl", {"input_ids": [1, 9999]}), small_tokenizer(), max_length=5)


def test_mistakes_in_a_row_name_the_line(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"input_ids": [1, 2]}, {"text": "a"})
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: .*tokenizer"):
        tokenize_source(path, None, max_length=5)
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "a"}, {"messages": chat("a", "b")[1:]})
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: .*must alternate"):
        tokenize_source(path, small_tokenizer("strict"), max_length=5)


def test_a_file_in_which_nothing_is_learnt(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"messages": chat("a")}, {"messages": chat("a", "b")})
    with pytest.raises(
        UserError, match=r"nothing to train on: of 2 rows, 2 with no token to train on \(1 of them truncated"
    ):
        tokenize_source(path, small_tokenizer("chatml"), max_length=4)
    with pytest.raises(UserError, match="1 of more than 4 tokens"):
        tokenize_source(path, small_tokenizer("chatml"), max_length=4, on_overflow="drop")


def test_bad_settings(path):
    with pytest.raises(UserError, match="maximum length is 1"):
        tokenize_source(path, None, max_length=1)
    with pytest.raises(UserError, match=r"on_overflow must be .* not 'wrap'"):
        tokenize_source(path, None, max_length=5, on_overflow="wrap")  # type: ignore[arg-type]
