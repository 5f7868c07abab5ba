"""`finetune --validation-split`: rows of --data are held out, the same when a run is resumed and by `data prepare`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import QWEN2, SMALL, Run, flags
from support.rows.data import chat, small_tokenizer, write_jsonl
from support.rows.preferences import Labelled, Preferences
from support.rows.sources import refused, write_source

from wgpu_lora.cli.app import main
from wgpu_lora.data import Source, python_source, split_validation, tokenize_source
from wgpu_lora.data.curation import Preparation, prepare_files
from wgpu_lora.data.memory_rows import SealedRows
from wgpu_lora.data.preference_formats import PAIRS
from wgpu_lora.errors import UserError
from wgpu_lora.train.objectives import OBJECTIVES, formats_of
from wgpu_lora.train.objectives.objective import Objective
from wgpu_lora.train.objectives.sft import SFT

ROWS: list[dict[str, Any]] = [{"input_ids": [i % 40 + 1, i // 40 + 1, 3, 4, i % 7 + 1]} for i in range(50)]
TEXTS = [{"prompt": f"{i}", "completion": f"{i} {i}"} for i in range(50)]


def options(tmp_path: Path, **changes: Any) -> list[str]:
    data = write_jsonl(tmp_path / "rows.jsonl", *ROWS)
    return flags(**SMALL | {"model": QWEN2, "data": data, "output": tmp_path / "out", "tune": False} | changes)


def test_a_run_keeps_its_best_adapter_and_its_split(run: Run, tmp_path: Path) -> None:
    arguments = options(tmp_path, validation_split=0.2, max_steps=3, eval_steps=1, learning_rate=1e-3)
    output = run("finetune", *arguments).output()
    assert "rows.jsonl: 50 examples, 40 rows; " in output
    assert "10 of 50 rows are held out (--validation-split 0.2)" in output
    assert "held out  rows.jsonl: 10 examples, 10 rows; " in output
    assert (tmp_path / "out" / "best" / "adapter_model.safetensors").is_file()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (
        "10 of 50 rows are held out"
        in run("finetune", "--output", tmp_path / "out", "--resume", "--max-steps", 4).output()
    )
    assert json.loads((tmp_path / "out" / "run.json").read_text())["eval_data"] == record["eval_data"]
    assert (
        "--validation-split was 0.2, not 0.1"
        in run("finetune", "--output", tmp_path / "out", "--resume", "--validation-split", 0.1).refusal()
    )
    assert (
        "both hold rows out: leave one of them out."
        in run("finetune", "--output", tmp_path / "out", "--resume", "--eval-data", tmp_path / "rows.jsonl").refusal()
    )


def test_adapters_of_a_pipeline(run: Run, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", *ROWS)
    tables = [
        f'[[adapter]]\ndata = "{data}"\ncheckpoint = "{tmp_path / name}"\n{own}\n'
        for name, own in (("a", ""), ("b", "validation_split = 5"), ("c", f'eval_data = "{data}"'))
    ]
    (tmp_path / "adapters.toml").write_text("".join(tables))
    config = flags(**SMALL | {"model": QWEN2, "tune": False, "adapters_config": tmp_path / "adapters.toml"})
    output = run("plan", *config, "--validation-split", "0.2").output()
    for words in ("a: rows.jsonl: 10 examples, 10 rows", "b: rows.jsonl: 5 examples", "c: rows.jsonl: 50 examples"):
        assert f"held out  {words}" in output


def test_what_cannot_be_combined(run: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    for more, words in (
        ({"validation_split": 0.1, "eval_data": rows}, "--validation-split and --eval-data both hold rows out"),
        ({"validation_split": 0.1, "eval_split": "test"}, "--validation-split and --eval-split both hold rows out"),
        ({"validation_split": 0}, "--validation-split 0 is neither a share of the rows"),
        ({"validation_split": 1.5}, "--validation-split 1.5 is neither a share of the rows"),
        ({"validation_split": 50}, "--validation-split 50 leaves no rows to train on, of 50 rows"),
        ({"val_set_size": "0.1", "eval_data": rows}, "--validation-split and --eval-data both hold rows out"),
    ):
        code, _, err = run("plan", *options(tmp_path, **more))
        assert (code, words in err.replace(".0 ", " ")) == (2, True), err
    write_jsonl(tmp_path / "train.jsonl", *ROWS)
    write_jsonl(tmp_path / "valid.jsonl", *ROWS)
    assert (
        "has held-out rows of its own, valid.jsonl: leave --validation-split out"
        in run("plan", *options(tmp_path, data=tmp_path, validation_split=0.1)).refusal()
    )


def test_the_split_is_that_of_data_prepare(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", *TEXTS)
    prepare_files([str(path)], tmp_path / "out", Preparation(validation_split=0.2, seed=7))
    expected = tokenize_source(tmp_path / "out" / "valid.jsonl", small_tokenizer("chatml"), max_length=64)
    _, heldout = split_validation(tokenize_source(path, small_tokenizer("chatml"), max_length=64), 0.2, 7)
    assert [row.input_ids.tolist() for row in heldout.rows] == [row.input_ids.tolist() for row in expected.rows]


def test_rows_that_belong_together_stay_together(tmp_path: Path) -> None:
    """Equal rows, the rows of the turns of a conversation, and the two answers of a pair."""
    turns = [{"messages": chat(f"{i}", "a", "b", "c")} for i in range(4)]
    data = tokenize_source(
        write_jsonl(tmp_path / "a.jsonl", *turns, *turns), small_tokenizer("thinking"), max_length=64
    )
    train, heldout = split_validation(data, 4, 1)
    assert len(heldout.rows) == 4
    assert not {*heldout.keys} & {*train.keys}
    pairs = [{"prompt": "a", "chosen": f"{i}", "rejected": "b"} for i in range(5)]
    path = write_jsonl(tmp_path / "b.jsonl", *pairs)
    data = tokenize_source(path, small_tokenizer("chatml"), max_length=64, formats=PAIRS, parts=2)
    train, heldout = split_validation(data, 0.4, 1)
    assert (len(train.samples), len(heldout.samples)) == (3, 2)
    assert all(len(rows) == 2 for rows in heldout.samples)
    assert {row.index for row in [*train.rows, *heldout.rows]} == set(range(10))
    with pytest.raises(UserError, match="leaves no rows to train on, of 1 row"):
        split_validation(
            tokenize_source(write_jsonl(tmp_path / "c.jsonl", TEXTS[0]), small_tokenizer("chatml"), max_length=64),
            0.5,
            1,
        )


def test_the_digest_of_held_out_rows_tells_nothing_of_sealed_ones() -> None:
    """Else whoever guesses a row could find out, from run.json, whether it is there."""
    digests = set()
    for first, sealed in ((1, "a"), (2, "a"), (2, "b")):
        text = "".join(json.dumps({"input_ids": [first + n, 2, 3]}) + "\n" for n in range(4))
        source = SealedRows(bytearray(text.encode()), "rows.jsonl.age", sealed)
        digests.add(
            (sealed, split_validation(tokenize_source(source, None, max_length=8, vocab_size=40), 1, 1)[1].digest)
        )
    assert len(digests) == 2


# -- rows that an objective does not read ------------------------------------------------------------------------------

FILES = ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz"]
PAIRS_OF_TEXTS: list[dict[str, Any]] = [
    {"prompt": f"[{i}] is", "chosen": f"a, {i}", "rejected": "b", "weight": i + 0.5, "id": i} for i in range(3)
]
LABELS: list[dict[str, Any]] = [{"prompt": "a", "completion": "b", "label": good} for good in (True, False, True)]


def refusal(data: Source | Path, objective: Objective) -> str:
    return refused(data, formats=formats_of(objective), parts=objective.rows_per_sample)


PAIRWISE = ("dpo", "orpo", "cpo")
NEEDED = "but the formats need prompt_ids, chosen_ids, rejected_ids and weight; prompt, chosen and rejected"


@pytest.mark.parametrize("name", FILES)
def test_what_is_missing_is_named_with_the_formats(tmp_path: Path, name: str) -> None:
    path = write_source(tmp_path / name, [{"question": "a", "completion": "b", "label": "true"}])
    named = "'question', 'completion', 'label', but the format needs prompt, completion and label"
    assert f"{named}; rename 'question' to 'prompt'." in refusal(path, Labelled())
    path = write_source(path, [{"question": "a", "chosen": "b", "rejected": "c"}])
    readers = " or ".join(f"objective='{name}'" for name in PAIRWISE)
    assert f"'chosen', 'rejected', {NEEDED}; rename 'question' to 'prompt'." in refusal(path, Preferences())
    path = write_source(path, [{"chosen": "a b", "rejected": "a c"}])
    assert f"'chosen', 'rejected', {NEEDED}; use {readers} for such rows." in refusal(path, Preferences())
    message = refusal(write_source(path, [{"prompt": "a", "label": "true"}]), Labelled())
    assert "'prompt', 'label', but the format needs prompt, completion and label." in message.replace(
        "; rename them", ""
    )


@pytest.fixture
def registered() -> Iterator[None]:
    OBJECTIVES.update({"preferences": Preferences, "labelled": Labelled})
    yield
    del OBJECTIVES["preferences"], OBJECTIVES["labelled"]


def test_rows_of_another_objective(tmp_path: Path, registered: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the objectives that read them, as the caller would give the option."""
    rows = [{name: value for name, value in row.items() if name != "weight"} for row in PAIRS_OF_TEXTS]
    path = write_source(tmp_path / "a.parquet", rows)
    readers = [*PAIRWISE, "preferences"]
    objectives_text = " or ".join(f"objective='{name}'" for name in readers)
    assert f"; use {objectives_text} for such rows." in refusal(path, SFT())
    objectives = "objective='kto' or objective='labelled'"  # sft would train on undesirable answers
    assert f"; use {objectives} for such rows." in refusal(python_source(LABELS), Preferences())
    path = write_source(tmp_path / "a.csv", rows)
    assert main(["plan", "--model", "tests/fixtures/models/qwen2", "--data", str(path)]) == 2
    objectives_text = " or ".join(f"--objective {name}" for name in readers)
    assert f"; use {objectives_text} for such rows." in capsys.readouterr().err
