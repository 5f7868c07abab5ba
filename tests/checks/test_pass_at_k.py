"""pass@k: the estimator, rows with checks, the code in answers, and the command."""

from __future__ import annotations

import json
from fractions import Fraction
from math import comb
from pathlib import Path
from typing import Any

import pytest
from support.cli import Run
from support.models import words_and_adapters
from support.processes.confinement import confined
from support.rows.data import write_jsonl
from support.serving.chat import TEMPLATE

from wgpu_lora.data.row_files import file_source
from wgpu_lora.errors import UserError
from wgpu_lora.infer.answers import Answer
from wgpu_lora.infer.generation_options import GenerationOptions
from wgpu_lora.train.checks import pass_at_k as samples
from wgpu_lora.train.checks.coding_problems import AssertProblem, HumanEval, code_of, read_problems
from wgpu_lora.train.checks.pass_at_k import measure, parse_ks, pass_at_k, seed_of
from wgpu_lora.train.track.run_log import RunLog

HUMAN = {"task_id": "T/0", "prompt": "def f(x):\n", "test": "def check(c):\n    assert c(1) == 2", "entry_point": "f",
         "canonical_solution": "    return x + 1"}  # fmt: skip
OWN = {"messages": [{"role": "user", "content": "w5"}], "check": "assert f(1) == 2"}


def test_the_estimator_is_that_of_binomials() -> None:
    for n, c, k in [
        (1, 0, 1),
        (1, 1, 1),
        (5, 2, 1),
        (5, 2, 5),
        (10, 3, 4),
        (10, 0, 10),
        (200, 3, 100),
        (10_000, 7, 999),
    ]:
        exact = 1 - Fraction(comb(n - c, k), comb(n, k))
        assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-12), (n, c, k)


def test_values_of_k() -> None:
    assert parse_ks("5, 1,1", 5) == [1, 5]
    assert parse_ks(2, 2) == [2]
    for text, count, words in (
        ("1,5", 4, "needs at least 5 samples per row"),
        ("0", 4, "must be numbers from 1"),
        ("a", 4, "must be numbers such as 1,5"),
        ("", 4, "must be numbers such as 1,5"),
        ("1", 0, "must be from 1 to 10,000"),
    ):
        with pytest.raises(UserError, match=words):
            parse_ks(text, count)


def test_rows(tmp_path: Path) -> None:
    chat = {"messages": [*OWN["messages"], {"role": "assistant", "content": "x"}], "check": OWN["check"]}
    rows = write_jsonl(
        tmp_path / "a.jsonl", HUMAN, OWN, chat, {"prompt": "w1", "check": "assert f(2) == 2", "task_id": 7}
    )
    human, own, again, plain = read_problems(file_source(rows))
    assert isinstance(human, HumanEval)
    assert isinstance(own, AssertProblem)
    assert [p.name for p in (human, own, again, plain)] == ["T/0", "line 2", "line 3", "7"]
    assert own.prompt == again.prompt == OWN["messages"]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "w1", "completion": "x"}, "the row has no check"),
        ({**HUMAN, "test": None}, "the row has no check"),
        ({**HUMAN, "test": "def check(c): pass"}, "has no assert"),
        ({**HUMAN, "test": "assert 1"}, "does not define check"),
        ({**HUMAN, "test": "def ("}, "cannot be parsed"),
        ({**HUMAN, "entry_point": "f()"}, "must be the name of a function"),
        ({**HUMAN, "prompt": "def f(:"}, "is not Python code"),
        ({**OWN, "check": "print(1)"}, "is not an assert"),
    ]
    for row, words in bad:
        with pytest.raises(UserError, match=words) as caught:
            read_problems(file_source(write_jsonl(tmp_path / "b.jsonl", OWN, row)))
        assert "b.jsonl, line 2" in str(caught.value)


def test_the_code_in_an_answer() -> None:
    block = "Here:\n```python\nimport math\n```\nand\n```py\ndef f(x):\n    return 1\n```\nbye"
    for text, names, code in (
        (block, {"f"}, "def f(x):\n    return 1\n"),
        (block, {"g"}, "import math\n"),
        ("```\ndef f(): 1\n", {"f"}, "def f(): 1\n"),
        ("<think>```\nx\n```</think>def f(): 1", {"f"}, "def f(): 1"),
    ):
        assert code_of(text, names) == code
    human = HumanEval("", "import math\ndef g(): 3\ndef f(x):\n    'doc'", "", "f")
    for text, completion, program in (
        ("\n    return 1", True, "\n    return 1"),
        ("```\ndef f(x):\n    return g()\n```", False, "\n\ndef f(x):\n    return g()\n"),
        ("```\n    return 1\n```", False, "\n    return 1\n"),
        ("return 1", False, "\n    return 1"),
    ):
        assert human.program(text, completion) == human.prompt + program
    assert "```python\nimport math" in str(human.model_prompt(False))


@confined
def test_samples_are_checked_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of answers that are given here: two samples of two rows, before and after."""
    texts = {"base": ["def f(x): return 2", "def f(x): return 3", "    return x", "    import os; os._exit(0)"],
             "a": ["```\ndef f(x): return x + 1\n```", "def f(x):", "    return x + 1", "    return 2"]}  # fmt: skip
    requests: list[Any] = []

    def answer(
        model: Any,
        prompts: Any,
        directories: Any,
        slots: Any,
        settings: Any,
        *,
        names: Any,
        seeds: Any,
        events: Any,
        **_: Any,
    ) -> None:
        plain = settings.prompt_format == "text"
        requests.append((plain, seeds))
        for number in range(len(prompts)):
            of, who = divmod(number, len(names))
            text = texts[names[who]][of + 2 * plain]
            events.answered(of, names[who], Answer(prompts[number], text, [1], "stop", 1.0))
            events.answering(number, len(prompts), number)

    class Tokens:
        has_chat_template = False

    monkeypatch.setattr(samples, "answer_slots", answer)
    monkeypatch.setattr(samples, "tokenizer_of", lambda model, adapter: Tokens())
    problems = read_problems(file_source(write_jsonl(tmp_path / "rows.jsonl", OWN, HUMAN)))
    warm = GenerationOptions(temperature=1.0, seed=3)
    slots = {"base": None, "a": 0}
    result = measure(None, problems, [1, 2], 2, warm, {"a": tmp_path}, slots)  # type: ignore[arg-type]
    assert result.completion
    assert result.rates["base"].pass_at_k == {1: 0.25, 2: 0.5}
    assert result.rates["a"].pass_at_k == {1: 0.75, 2: 1.0}
    assert result.rates["base"].outcomes == {"passed": 1, "failed": 2, "timeout": 0, "error": 1}
    assert [(sample.row, sample.sample, sample.adapter) for sample in result.samples][:3] == [
        (0, 0, "base"),
        (0, 0, "a"),
        (0, 1, "base"),
    ]
    seeds = [seed_of(3, 0, s) for s in (0, 0, 1, 1)], [seed_of(3, 1, s) for s in (0, 0, 1, 1)]
    assert sorted(requests) == [(False, seeds[0]), (True, seeds[1])]
    assert len({sample.seed for sample in result.samples}) == 4


@confined
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    directory = words_and_adapters(tmp_path, TEMPLATE)
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "data"))
    rows = write_jsonl(tmp_path / "rows.jsonl", {**HUMAN, "prompt": "def w5(x):\n", "entry_point": "w5"}, OWN)
    ask = ["evaluate", "--data", rows, "--adapter", directory / "a", "--compare", "--samples", 2, "--max-new-tokens", 3]
    outputs = []
    for number in range(2):
        output = tmp_path / f"{number}.jsonl"
        code, out, err = run(*ask, "--pass-at-k", "1,2", "--seed", 5, "--json", "--output", output)
        assert code == 0, err
        outputs.append(output.read_text())
    assert outputs[0] == outputs[1]
    base, adapted = RunLog().read().entries[-2:]
    assert (base.adapter, adapted.adapter) == (None, "a")
    for logged in (base, adapted):
        assert (logged.status, logged.objective, logged.outputs) == ("finished", "pass-at-k", [str(output)])
        assert logged.results == {
            "pass@1": 0.0,
            "pass@2": 0.0,
            "rows": 2,
            "passed": 0,
            "failed": 4,
            "timeout": 0,
            "error": 0,
        }
    answers = [json.loads(row) for row in outputs[0].splitlines()]
    assert [(a["adapter"], a["sample"]) for a in answers[:4]] == [("base", 0), ("a", 0), ("base", 1), ("a", 1)]
    assert {a["outcome"] for a in answers} == {"failed"}
    assert len({a["response"] for a in answers}) > 4
    report = json.loads(out)
    assert [(r["name"], r["pass_at_k"]) for r in report["results"]] == [
        ("base", {"1": 0, "2": 0}),
        ("a", {"1": 0, "2": 0}),
    ]
    assert report["settings"]["temperature"] == 0.8
    assert report["confinement"]["not_enforced"] == []
    for more, words in (
        (["--pass-at-k", "3"], "needs at least 3 samples per row"),
        (["--pass-at-k", "1", "--temperature", "0"], "all 2 samples of a row are equal"),
        (["--pass-at-k", "1", "--max-length", "9"], "--max-length does nothing"),
        ([], "--samples and --max-new-tokens do nothing"),
        (["--pass-at-k", "1", "--timeout", "0"], "--timeout must be"),
        (["--pass-at-k", "1", "--output", rows], "exists already"),
    ):
        code, _, err = run(*ask, *more)
        assert (code, err.count("\n"), words in err) == (2, 1, True), err
