"""Several adapters at once: every answer and loss is that of the adapter alone, under its name."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from support.cli import Run, commands, write_rows
from support.events import hearing
from support.models import save_golden_adapter, words_and_adapters

import wgpu_lora
from wgpu_lora.gpu.device import Device
from wgpu_lora.infer.generator import Generator
from wgpu_lora.infer.named_adapters import model_of, named_adapters
from wgpu_lora.models.loaded_model import LoadedModel

PROMPT, TOKENS = "w7 w3 w11 w5", 6
ONE_ANSWER = {"prompt", "text", "token_ids", "stop_reason", "tokens_per_second"}
ONE_LOSS = {
    *("loss", "perplexity", "tokens", "rows", "seconds"),
    *("data", "max_length", "objective", "metrics", "comparisons"),
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of words and two adapters of it, whose ranks differ."""
    directory = tmp_path_factory.mktemp("several")
    write_rows(directory / "rows.jsonl")
    return words_and_adapters(directory)


@pytest.fixture(scope="module")
def model(workspace: Path, device: Device) -> LoadedModel:
    return wgpu_lora.load(workspace / "model", base_dtype="f32", device=device)


@pytest.fixture
def run(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(workspace)
    return commands(capsys)


def ask(*more: Any) -> list[Any]:
    return ["generate", "--base-dtype", "f32", "--max-new-tokens", TOKENS, *more]


def alone(model: LoadedModel, adapter: Path | None, **options: Any) -> list[int]:
    (answer,) = wgpu_lora.answer(model, [PROMPT], adapter=adapter, max_new_tokens=TOKENS, **options)
    return answer.token_ids


# -- from Python -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 5}], ids=["greedy", "drawn"])
def test_a_single_batch_says_what_each_says_alone(
    model: LoadedModel, workspace: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
):
    batches = []
    whole = Generator.tokens

    def spy(self: Generator, prompts: Any, slots: Any, *arguments: Any, **more: Any) -> Any:
        batches.append((self.batch, slots))
        return whole(self, prompts, slots, *arguments, **more)

    model.load_weights()
    before = model.device.allocated
    with monkeypatch.context() as patch:
        patch.setattr(Generator, "tokens", spy)
        adapters = {"first": workspace / "a", "second": str(workspace / "b")}
        counts: list[int] = []
        events = hearing(answering=lambda count, total, tokens: counts.append(tokens))
        answers = wgpu_lora.compare(model, PROMPT, adapters, max_new_tokens=TOKENS, events=events, **options)
    assert batches == [(3, [None, 0, 1])]
    assert model.device.allocated == before
    assert list(answers) == ["base", "first", "second"]
    for name, directory in (("base", None), ("first", workspace / "a"), ("second", workspace / "b")):
        assert answers[name].token_ids == alone(model, directory, **options)
        assert (answers[name].prompt, answers[name].stop_reason) == (PROMPT, "length")
    assert len({answer.text for answer in answers.values()}) == 3
    assert counts == list(range(1, 3 * TOKENS + 1))


def test_losses_equal_those_of_each_alone(model: LoadedModel, workspace: Path):
    data = workspace / "rows.jsonl"
    model.load_weights()
    before = model.device.allocated
    results = wgpu_lora.evaluate_several(model, data, {"b": workspace / "b", "a": workspace / "a"}, max_length=16)
    assert model.device.allocated == before
    assert list(results) == ["base", "b", "a"]
    for name, result in results.items():
        expected = wgpu_lora.evaluate(model, data, adapter=None if name == "base" else workspace / name, max_length=16)
        assert result.loss == pytest.approx(expected.loss, rel=1e-6)
        assert (result.tokens, result.rows) == (expected.tokens, expected.rows)
    assert len({round(result.loss, 4) for result in results.values()}) == 3


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ({}, "no adapter to compare"),
        (["a"], "must be a dict of directories by name"),
        ({"base": "a"}, "named 'base', which is the model without"),
        ({" ": "a"}, "' ' is not a name for an adapter"),
        ({"a": "nowhere"}, "nowhere is not a directory"),
    ],
)
def test_adapters_that_cannot_be_compared(model: LoadedModel, workspace: Path, adapters: Any, message: str):
    with pytest.raises(wgpu_lora.UserError, match=message):
        wgpu_lora.compare(model, PROMPT, adapters)
    with pytest.raises(wgpu_lora.UserError, match=message):
        wgpu_lora.evaluate_several(model, workspace / "rows.jsonl", adapters, max_length=16)


# -- what --adapter names --------------------------------------------------------------------------------------------


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs" / "lr=1").mkdir(parents=True)
    (tmp_path / "x=y").mkdir()
    named = {
        "runs/lr=1": ("lr=1", "runs/lr=1"),
        "x=y": ("x=y", "x=y"),
        "a=runs/lr=1/": ("a", "runs/lr=1"),
        "a=x=y": ("a", "x=y"),
        "missing/lr=2": ("lr=2", "missing/lr=2"),
        "missing": ("missing", "missing"),
        "runs/": ("runs", "runs"),
        ".": (tmp_path.name, "."),
        "a=~/runs": ("a", str(tmp_path / "runs")),
    }
    assert {text: named_adapters([text]) for text in named} == {
        text: {name: Path(directory)} for text, (name, directory) in named.items()
    }
    assert list(named_adapters(["z=runs", "x=y", "b=missing"])) == ["z", "x=y", "b"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a=x", "a=y"], "two adapters the name 'a' .x and y."),
        (["x/out", "y/out"], "two adapters the name 'out'"),
        (["a=x", "b=./x"], "lists x twice, as 'a' and as 'b'"),
        (["=x"], "=x is not NAME=DIR"),
        (["a="], "a= is not NAME=DIR"),
        ([" "], "adapter is empty"),
    ],
)
def test_names_that_are_refused(texts: list[str], message: str):
    with pytest.raises(wgpu_lora.UserError, match=message):
        named_adapters(texts)


def test_the_model_that_adapters_name(workspace: Path, tmp_path: Path):
    other = save_golden_adapter("mistral", tmp_path / "other", base_model_name_or_path="hub/other")
    silent = save_golden_adapter("mistral", tmp_path / "silent")
    again = save_golden_adapter("mistral", tmp_path / "again", base_model_name_or_path=f"{workspace}/./model")
    named = str(workspace / "model")
    assert model_of({"silent": silent, "a": workspace / "a", "again": again}) == named
    assert model_of({"silent": silent}) == model_of({}) == "demo"
    with pytest.raises(wgpu_lora.UserError, match=r"a and other have different base models, .*: choose one with model"):
        model_of({"a": workspace / "a", "other": other})
    assert model_of({"a": workspace / "a", "other": other}, "chosen") == "chosen"
    with pytest.raises(wgpu_lora.UserError, match="nowhere is not a directory"):
        model_of({"a": Path("nowhere")}, "chosen")


# -- from the command line -------------------------------------------------------------------------------------------


def test_compare_prints_a_block_for_each(
    run: Any, model: LoadedModel, workspace: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = wgpu_lora.compare(model, PROMPT, {"x": workspace / "a", "b": workspace / "b"}, max_new_tokens=TOKENS)
    blocks = [f"== {name} ==\n{answer.text}" for name, answer in expected.items()]
    code, out, _ = run(*ask("--adapter", "x=a", "--adapter", "b", "--compare", "--prompt", PROMPT))
    assert (code, out) == (0, "\n\n".join(blocks) + "\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{PROMPT}\n".encode()), encoding="utf-8"))
    assert run(*ask("--adapter", "x=a", "--adapter", "b"))[1] == "\n\n".join(blocks[1:]) + "\n"


def test_answers_as_json(run: Any, model: LoadedModel, workspace: Path):
    _, out, _ = run(*ask("--adapter", "x=a", "--adapter", "b", "--compare", "--prompt", PROMPT, "--json"))
    report = json.loads(out)
    assert [(row["name"], row["adapter"]) for row in report] == [("base", None), ("x", "a"), ("b", "b")]
    assert [row["token_ids"] for row in report] == [
        alone(model, workspace / d if d else None) for d in (None, "a", "b")
    ]
    assert all(row.keys() == ONE_ANSWER | {"name", "adapter"} for row in report)
    _, out, _ = run(*ask("--adapter", "x=a", "--prompt", PROMPT, "--json"))
    assert json.loads(out) == {name: report[1][name] for name in ONE_ANSWER} | {"tokens_per_second": ANY}


def test_evaluate_prints_a_table(run: Any, model: LoadedModel, workspace: Path):
    options = ["evaluate", "--base-dtype", "f32", "--data", "rows.jsonl", "--max-length", "16", "--adapter", "x=a"]
    both_options = [*options, "--adapter", "b"]
    expected = wgpu_lora.evaluate_several(
        model, workspace / "rows.jsonl", {"x": workspace / "a", "b": workspace / "b"}, max_length=16
    )
    head, *lines, over, data = run(*both_options, "--compare")[1].splitlines()
    assert data.split()[:3] == ["data", "rows.jsonl:", "8"]
    assert head.split() == ["name", "loss", "perplexity", "accuracy", "tokens"]
    cells = [
        [name, f"{e.loss:.6f}", f"{e.perplexity:.4f}", f"{e.metrics['mean_token_accuracy']:.4f}", f"{e.tokens:,}"]
        for name, e in expected.items()
    ]
    assert [line.split() for line in lines] == cells
    assert over.startswith("over      8 rows in ")
    report = json.loads(run(*both_options, "--json")[1])
    assert [(row["name"], row["adapter"]) for row in report] == [("x", "a"), ("b", "b")]
    assert report[1]["loss"] == pytest.approx(expected["b"].loss, rel=1e-6)
    assert report[0].keys() == ONE_LOSS | {"name", "adapter"}
    assert json.loads(run(*options, "--json")[1]).keys() == ONE_LOSS | {"device"}
    assert run(*options)[1].startswith(f"loss      {expected['x'].loss:.6f}, perplexity ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare"], "There is no adapter to compare"),
        (["--compare", "--adapter", "base=a"], "An adapter is named 'base'"),
        (["--adapter", "a", "--adapter", "a"], "two adapters the name 'a'"),
        (["--adapter", "a", "--adapter", "zork"], "zork is not a directory"),
        (["--adapter", "a", "--adapter", ""], "--adapter is empty"),
        (["--adapter", "a", "--adapter", "other"], "different base models"),
    ],
)
def test_refusals(run: Any, workspace: Path, arguments: list[str], message: str):
    if "other" in arguments:
        save_golden_adapter("mistral", workspace / "other", base_model_name_or_path="hub/other")
    for command in (["generate", "--prompt", PROMPT], ["evaluate", "--data", "rows.jsonl"]):
        code, _, err = run(*command, *arguments)
        assert code == 2
        (line,) = err.splitlines()
        assert message in line


def test_compare_on_a_terminal(run: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("wgpu_lora.cli.inference.generate.is_terminal", lambda stream: True)
    _, out, _ = run(*ask("--adapter", "[bold]=a", "--compare", "--prompt", PROMPT))
    assert out.index(" base ") < out.index(" [bold] ")
    assert out.count(f"{TOKENS} tokens, length") == 2
