"""Columns that a format does not read: each is read as its origin means it, named, or ends the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.rows.data import chat, write_jsonl
from support.rows.sources import ids_of, prepared, write_source

from wgpu_lora.data import parse_example
from wgpu_lora.data.example_formats import EXAMPLES, PROMPTS
from wgpu_lora.data.preference_formats import LABELLED, PAIRS
from wgpu_lora.data.row_formats import RowFormats
from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.examples import Conversation, Tokens
from wgpu_lora.train.objectives import OBJECTIVES, formats_of

TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
SFT: dict[str, dict[str, Any]] = {
    "tokens": {"input_ids": [1, 2, 3]},
    "messages": {"messages": chat("q", "a")},
    "conversations": {"conversations": TURNS},
    "texts": {"prompt": "q", "completion": "a"},
    "chats": {"prompt": chat("q"), "completion": [{"role": "assistant", "content": "a"}]},
    "alpaca": {"instruction": "q", "output": "a"},
    "text": {"text": "q a"},
}
PAIR: dict[str, dict[str, Any]] = {
    "pair": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "implicit": {"chosen": chat("q", "a"), "rejected": chat("q", "b")},
    "ranking": {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "b"}},
}
LABEL: dict[str, dict[str, Any]] = {
    "label": {"prompt": "q", "completion": "a", "label": True},
    "label of messages": {"messages": chat("q", "a"), "label": False},
}
FORMATS = [
    *(pytest.param(EXAMPLES, row, id=name) for name, row in SFT.items()),
    *(pytest.param(PAIRS, row, id=name) for name, row in PAIR.items()),
    *(pytest.param(LABELLED, row, id=name) for name, row in LABEL.items()),
]
# Values that change what is trained on, by the names that other programs give them.
MEANINGFUL: dict[str, Any] = {
    "loss_mask": [0, 1, 1], "assistant_masks": [0, 0, 1], "completion_mask": [0, 1, 1], "lossMask": [0, 1, 1],
    "train_mask": [0, 1], "mask": [1, 0], "weight": 0.5, "weights": [1, 0], "sample_weight": 0.2, "loss_weight": 2,
    "train": False, "trainable": 0, "train_on_inputs": True, "mask_prompt": 1, "masked": True, "mask_history": False,
    "prompt_length": 1, "images": ["a.png"], "image": {"bytes": "x"}, "videos": ["v"],
    "audio": "a.wav", "position_ids": [0, 1, 0], "seq_lengths": [1, 2], "history": [["q", "a"]],
}  # fmt: skip
NAMED_ONLY: dict[str, Any] = {"explanation": "because", "thinking": "hm", "refusal": "no", "persona": {"name": "Ann"}}
HARMLESS: dict[str, Any] = {
    "id": 3, "prompt_id": "x", "source": "web", "score": 0.5, "score_chosen": 8.0, "metadata": {"a": 1}, "lang": "en",
    "__index_level_0__": 4, "Unnamed: 0": 4, "conversation_id": "c", "num_turns": 2, "created_at": "2026", "url": "u",
    "weight": 1, "sample_weight": "1.0", "train": True, "masked": 0, "train_split": "a",
    "loss_mask": [1, 1, 1], "history": [], "images": [], "label": None, "context": "",
}  # fmt: skip


def outcome(formats: RowFormats[Any], row: dict[str, Any]) -> tuple[Any, list[str]] | str:
    """What a row is and its notes, or why it cannot be read."""
    try:
        return formats.read_with_notes(row)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(("formats", "row"), FORMATS)
def test_every_column_is_read_or_named_or_ends_the_run(formats: RowFormats[Any], row: dict[str, Any]) -> None:
    plain = outcome(formats, row)
    assert not isinstance(plain, str)
    assert not plain[1]
    for name, value in {**MEANINGFUL, **NAMED_ONLY}.items():
        result = outcome(formats, {**row, name: value})
        if isinstance(result, str):
            assert f"'{name}'" in result
            assert name in MEANINGFUL
        elif result[0] == plain[0]:
            assert [f"the column '{name}' is not used" in note for note in result[1]] == [True]
            assert name in NAMED_ONLY
        else:
            assert name in MEANINGFUL
            assert not result[1]
    for name, value in HARMLESS.items():
        if name not in row:
            assert outcome(formats, {**row, name: value}) == plain, name


@pytest.mark.parametrize("name", ["messages", "conversations", "texts", "chats", "alpaca"])
@pytest.mark.parametrize(("column", "value"), [("label", False), ("kto_tag", True), ("context", "c")])
def test_labels_and_contexts_beside_an_answer_end_the_run(name: str, column: str, value: Any) -> None:
    """An undesirable answer is not sent to SFT."""
    result = outcome(EXAMPLES, {**SFT[name], column: value})
    assert isinstance(result, str)
    assert f"'{column}'" in result


@pytest.mark.parametrize(
    ("columns", "trained"),
    [
        ({"loss_mask": [0, 1, 1]}, [-100, 2, 3]),
        ({"loss_mask": [False, True, True]}, [-100, 2, 3]),
        ({"completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}, [-100, 2, -100]),
        ({"prompt_length": 2}, [-100, -100, 3]),
        ({"labels": [-100, 9, 3], "loss_mask": [1, 1, 0]}, [-100, 9, -100]),
    ],
)
def test_masks_of_tokens_are_read(columns: dict[str, Any], trained: list[int]) -> None:
    example = parse_example({"input_ids": [1, 2, 3], **columns})
    assert example == Tokens([1, 2, 3], trained)


def test_history_is_earlier_turns_as_in_llama_factory(tmp_path: Path) -> None:
    """Whose answers are trained on, too; in every kind of file."""
    row = {"instruction": "and now?", "input": "", "output": "two", "history": [["first?", "one"]]}
    example = parse_example(row)
    assert example == Conversation(chat("first?", "one", "and now?", "two"), frozenset({1, 3}))
    expected = ids_of(prepared(write_jsonl(tmp_path / "a.jsonl", row), template="chatml"))
    for name in ("a.json", "a.parquet"):
        assert ids_of(prepared(write_source(tmp_path / name, [row]), template="chatml")) == expected
    cells = {**row, "history": json.dumps(row["history"])}
    assert ids_of(prepared(write_source(tmp_path / "a.csv", [cells]), template="chatml")) == expected


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_every_kind_of_file_has_all_columns(tmp_path: Path, name: str) -> None:
    path = write_source(tmp_path / name, [{"prompt": "q", "completion": "a", "explanation": "e", "id": "1"}])
    summary = prepared(path).summary()
    assert "the column 'explanation' is not used" in summary
    assert "'id'" not in summary
    path = write_source(path, [{"prompt": "q", "completion": "a", "images": "x"}])
    with pytest.raises(UserError, match="'images' is not supported"):
        prepared(path)


def test_a_note_names_what_would_use_a_column() -> None:
    formats = formats_of(OBJECTIVES["sft"]())
    _, notes = formats.read_with_notes({"prompt": "q", "completion": "a", "rejected": "b", "tools": [{"name": "f"}]})
    [rejected, tools] = notes
    assert "the column 'rejected' is not used (objective='dpo'" in rejected
    assert tools == "the column 'tools' is not used (rows of messages use it)"


def test_prompts_keep_columns_for_rewards() -> None:
    row = {"prompt": chat("q"), "answer": "4", "weight": 0.5, "label": 0}
    assert outcome(PROMPTS, row)[1] == []
    assert "'image'" in str(outcome(PROMPTS, {**row, "image": "x"}))
    assert "'history'" in str(outcome(PROMPTS, {**row, "history": [["a", "b"]]}))
    sample, notes = PROMPTS.read_with_notes({"messages": chat("q"), "system": "Be kind."})
    assert (sample.examples[0].prompt[0]["content"], notes) == ("Be kind.", [])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"loss_weight": 0.5}, "'loss_weight' is a number"),
        ({"training_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, "'training_detail' is a list"),
        ({"masked": True}, "'masked' is a boolean"),
        ({"loss_mask": 0, "weight": 1}, "contradict each other"),
        ({"images": ["a.png"]}, "'images' is not supported"),
        ({"content": [{"type": "text", "text": "a", "weight": 0}]}, "a content part with 'weight'"),
        ({"content": [{"type": "thinking", "thinking": "hm"}]}, "a content part that is not .*, but 'thinking'"),
        ({"content": [{"type": "text", "text": "a", "thinking": "hm"}]}, "a content part with 'thinking'"),
    ],
)
def test_keys_of_messages_and_parts_that_would_be_lost(message: dict[str, Any], words: str) -> None:
    row = {"messages": [*chat("q"), {"role": "assistant", "content": "a", **message}]}
    with pytest.raises(UserError, match=words):
        parse_example(row)


def test_a_loss_mask_of_a_message_is_a_weight() -> None:
    messages = [*chat("q"), {"role": "assistant", "content": "a", "loss_mask": 0}, *chat("q", "b")]
    example = parse_example({"messages": messages})
    assert isinstance(example, Conversation)
    assert example.trained == {3}


# -- advice is tried on the row ----------------------------------------------------------------------------------------

ADVICE: list[tuple[str, dict[str, Any], str | None]] = [
    (
        "sft",
        {"instruction": "q", "context": "c", "response": "r"},
        "rename 'response' to 'output' and 'context' to 'input'",
    ),
    ("sft", {"question": "q", "answer": "r", "explanation": "e"}, None),
    ("sft", {"question": "q", "answer": "r", "id": 3}, "rename 'question' to 'prompt' and 'answer' to 'completion'"),
    ("sft", {"data": [{"text": "a"}]}, "its rows seem to be the list 'data'"),
    ("sft", {"data": [{"chosen": "a", "rejected": "b"}]}, None),
    ("sft", {"dialog": [{"speaker": "a", "line": "b"}]}, None),
    ("dpo", {"messages": chat("q", "a"), "label": False}, "use objective='kto' for such rows"),
    ("kto", {"messages": chat("q", "a")}, "use objective='sft' for such rows"),
    ("dpo", {"question": "q", "chosen": 3, "rejected": "b"}, None),
]


@pytest.mark.parametrize(("objective", "row", "advice"), ADVICE, ids=range(len(ADVICE)))
def test_advice_works_if_it_is_followed(objective: str, row: dict[str, Any], advice: str | None) -> None:
    result = outcome(formats_of(OBJECTIVES[objective]()), row)
    assert isinstance(result, str)
    if advice is not None:
        assert result.endswith(
            f"; {advice}." if not advice.startswith("its") else f"{advice}: write only that list to the file."
        )
    else:
        assert not any(word in result for word in ("rename", "use objective", "write only"))


PREFERENCES: dict[str, tuple[RowFormats[Any], dict[str, Any]]] = {
    "UltraFeedback": (
        PAIRS,
        {"prompt": "q", "chosen": chat("q", "good"), "rejected": chat("q", "bad"), "score_chosen": 8.0},
    ),
    "answers alone": (
        PAIRS,
        {"prompt": "q", "chosen": chat("q", "good")[1:], "rejected": chat("q", "bad")[1:]},
    ),
    "LLaMA-Factory": (
        PAIRS,
        {
            "conversations": TURNS[:1],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
    ),
    "LLaMA-Factory, OpenAI's names": (
        PAIRS,
        {"messages": chat("q"), "chosen": chat("", "good")[1], "rejected": chat("", "bad")[1]},
    ),
    "OpenAI": (
        PAIRS,
        {
            "input": {"messages": chat("q"), "tools": [], "parallel_tool_calls": True},
            "preferred_output": chat("", "good")[1:],
            "non_preferred_output": chat("", "bad")[1:],
        },
    ),
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_common_shapes_of_preferences_are_read(name: str) -> None:
    formats, row = PREFERENCES[name]
    sample, notes = formats.read_with_notes(row)
    assert not notes
    assert [example.messages for example in sample.examples] == [chat("q", "good"), chat("q", "bad")]
    assert [example.trained for example in sample.examples] == [{1}, {1}]


@pytest.mark.parametrize("label", ["label", "kto_tag"])
@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_labels_of_conversations_are_about_their_last_answers(name: str, label: str) -> None:
    turns = [*chat("q", "a"), *chat("r", "b")] if name == "messages" else [*TURNS, *TURNS]
    sample = LABELLED.read({name: turns, label: False})
    assert (sample.value, sample.examples[0].trained) == (-1.0, {3})
    with pytest.raises(UserError, match="does not end with an answer"):
        LABELLED.read({name: turns[:-1], label: True})
    assert LABELLED.read({"instruction": "q", "output": "a", label: True}).value == 1.0


def test_alpaca_pairs_are_read() -> None:
    row = {"instruction": "q", "input": "i", "chosen": "good", "rejected": "bad", "system": "s"}
    good, bad = PAIRS.read(row).examples
    assert (good.output, bad.output, good.input, good.system) == ("good", "bad", "i", "s")
    assert "'history'" in str(outcome(PAIRS, {**row, "history": [["a", "b"]]}))


def test_a_field_of_openais_input_that_is_not_read_is_refused() -> None:
    row = {**PREFERENCES["OpenAI"][1]}
    row["input"] = {**row["input"], "loss_weight": 2}
    assert "'input' has 'loss_weight', which is not read" in str(outcome(PAIRS, row))


def test_advice_about_nested_rows_ends_at_once() -> None:
    """Rows within rows are tried once each, however many formats they might have."""
    row: Any = {"question": "a", "answer": "b"}
    for _ in range(40):
        row = {"question": [row] * 4, "answer": [row] * 4}
    assert isinstance(outcome(formats_of(OBJECTIVES["sft"]()), row), str)
