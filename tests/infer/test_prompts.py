"""Many prompts at once: from the command line, from files, and into them."""

from __future__ import annotations

import gzip
import json
import os
import pty
import sys
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from support.cli import Run, commands, flags
from support.models import words_and_adapters

import wgpu_lora
from wgpu_lora.errors import NoRoomError, UserError
from wgpu_lora.formats.tokenizer.examples import Alpaca, Completion
from wgpu_lora.gpu.device import Device
from wgpu_lora.infer import answers as answering
from wgpu_lora.infer.prompt_file import read_requests
from wgpu_lora.models.loaded_model import LoadedModel

TEMPLATE = (
    "{%- for m in messages -%}{{- 'w1 ' + m.content + ' ' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}w2{%- endif -%}"
)
TOKENS = 4
PROMPTS = ["w7 w3", "w11 w5 w2", "w9"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return words_and_adapters(tmp_path_factory.mktemp("prompts"), TEMPLATE)


@pytest.fixture(scope="module")
def model(workspace: Path, device: Device) -> LoadedModel:
    return wgpu_lora.load(workspace / "model", base_dtype="f32", device=device)


@pytest.fixture(scope="module")
def alone(model: LoadedModel, workspace: Path) -> dict[str, list[str]]:
    """Every prompt's answer by itself, by adapter."""
    return {
        name: [
            wgpu_lora.generate(model, prompt, adapter=workspace / name if name else None, max_new_tokens=TOKENS)
            for prompt in PROMPTS
        ]
        for name in ("", "a", "b")
    }


@pytest.fixture
def run(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(workspace)
    options = {"base_dtype": "f32", "max_new_tokens": TOKENS, "model": "model"}
    return commands(capsys, "generate", *flags(**options))


def prompt_flags(*prompts: str) -> list[str]:
    return [part for prompt in prompts for part in ("--prompt", prompt)]


# -- from Python -----------------------------------------------------------------------------------------------------


def test_a_list_gives_a_list(model: LoadedModel, workspace: Path, alone: dict[str, list[str]]):
    for batch in (None, 2):
        texts = wgpu_lora.generate(model, PROMPTS, adapter=workspace / "a", max_new_tokens=TOKENS, batch=batch)
        assert texts == alone["a"]
    messages = [{"role": "user", "content": PROMPTS[0]}]
    assert wgpu_lora.generate(model, messages, max_new_tokens=TOKENS) == alone[""][0]
    assert wgpu_lora.generate(model, [messages, PROMPTS[1]], max_new_tokens=TOKENS) == alone[""][:2]
    assert wgpu_lora.generate(model, []) == []
    with pytest.raises(UserError, match="A batch of 0"):
        wgpu_lora.generate(model, PROMPTS, batch=0)
    with pytest.raises(UserError, match="last message is the assistant's"):
        wgpu_lora.generate(model, [{"role": "assistant", "content": "w1"}])


def test_an_answer_streams(model: LoadedModel, workspace: Path, alone: dict[str, list[str]]):
    model.load_weights()
    before = model.device.allocated
    pieces = wgpu_lora.generate(model, PROMPTS[0], adapter=workspace / "a", max_new_tokens=TOKENS, stream=True)
    assert model.device.allocated == before  # nothing happens before the first piece is asked for
    first = next(pieces)
    assert model.device.allocated > before
    tail = list(pieces)
    assert len(tail) >= 2
    assert first + "".join(tail) == alone["a"][0]
    for piece in wgpu_lora.generate(model, PROMPTS[0], stream=True):
        assert piece
        break
    del pieces
    assert model.device.allocated == before
    for prompt, message in ((PROMPTS, "a single prompt"), (5, "must be text")):
        with pytest.raises(UserError, match=message):
            wgpu_lora.generate(model, prompt, stream=True)


def test_a_stop_string_ends_an_answer_and_not_its_neighbours(model: LoadedModel, alone: dict[str, list[str]]):
    stop = alone[""][0].split()[1]
    answers = wgpu_lora.answer(model, PROMPTS, max_new_tokens=TOKENS, stop=[f" {stop} "])
    assert answers[0].text == alone[""][0].split(f" {stop} ")[0]
    assert answers[0].stop_reason == "stop"
    assert f" {stop} " not in alone[""][1]
    assert [answer.text for answer in answers[1:]] == alone[""][1:]


def test_the_batch_is_what_there_is_room_for(model: LoadedModel, monkeypatch: pytest.MonkeyPatch, alone: Any):
    whole, sizes = answering.Generator, []

    def small(model: LoadedModel, adapters: Any, capacity: int, batch: int, **more: Any) -> Any:
        sizes.append(batch)
        if batch > 1:
            raise NoRoomError("too large")
        return whole(model, adapters, capacity, batch, **more)

    monkeypatch.setattr(answering, "Generator", small)
    assert wgpu_lora.generate(model, PROMPTS, max_new_tokens=TOKENS) == alone[""]
    assert sizes == [3, 2, 1]
    with pytest.raises(UserError, match="too large"):
        wgpu_lora.generate(model, PROMPTS, batch=2)


# -- several on the command line -------------------------------------------------------------------------------------


def test_several_prompts_are_all_answered(run: Any, alone: dict[str, list[str]]):
    texts = enumerate(zip(PROMPTS, alone[""], strict=True), 1)
    blocks = [f"== {number}. {prompt} ==\n{text}" for number, (prompt, text) in texts]
    assert run(*prompt_flags(*PROMPTS)) == (0, "\n\n".join(blocks) + "\n", "")
    _, out, _ = run(*prompt_flags(*PROMPTS[:2]), "--json", "--adapter", "a", "--adapter", "b")
    answers = [(row["name"], row["prompt"], row["text"]) for row in json.loads(out)]
    assert answers == [(name, PROMPTS[i], alone[name][i]) for i in (0, 1) for name in ("a", "b")]
    out = run(*prompt_flags(*PROMPTS[:2]), "--adapter", "a", "--compare")[1]
    assert out.startswith(f"== 1. {PROMPTS[0]} (base) ==\n{alone[''][0]}\n\n== 1. {PROMPTS[0]} (a) ==\n")


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_file_of_prompts_becomes_a_file_of_answers(run: Any, alone: dict[str, list[str]], tmp_path: Path):
    rows = [
        {"id": 7, "prompt": PROMPTS[0], "note": "w3"},
        {"messages": [{"role": "user", "content": PROMPTS[1]}]},
        {"messages": [{"role": "user", "content": PROMPTS[2]}, {"role": "assistant", "content": "w1"}]},
    ]
    source, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    code, out, err = run("--prompts", source, "--output", target, "--batch-size", 2)
    assert (code, out) == (0, "")
    assert "a row ends with an assistant's message, which is left out and answered anew" in err
    assert f"3 answers written to {target}" in err
    ends = ["length" if len(text.split()) == TOKENS else "stop" for text in alone[""]]
    assert set(ends) == {"length", "stop"}
    answers = [
        {"response": text, "tokens": len(text.split()), "stop_reason": end}
        for text, end in zip(alone[""], ends, strict=True)
    ]
    expected = [{**row, **answer} for row, answer in zip(rows, answers, strict=True)]
    assert [json.loads(line) for line in target.read_text().splitlines()] == expected
    # again, with what came out as what goes in, to stdout, and nothing overwritten
    code, out, _ = run("--prompts", target, "--adapter", "a", "--adapter", "b")
    outputs = [json.loads(line) for line in out.splitlines()]
    assert [row["adapter"] for row in outputs] == ["a", "b"] * 3
    assert [row["response"] for row in outputs] == [alone[name][i] for i in range(3) for name in ("a", "b")]
    before = target.read_bytes()
    code, _, err = run("--prompts", source, "--output", target)
    assert (code, target.read_bytes()) == (2, before)
    assert "exists already: give --output another name" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "prompts.jsonl"]


ASKED = [{"role": "user", "content": "w1"}]
ALPACA = {"instruction": "w1", "input": "w2", "output": "w3", "system": "w4"}
TURNS = {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a", b'\n [\n{"prompt": "w1"}, {"prompt": "w2"}]', [("w1", False), ("w2", False)]),
        ("a.csv", b'n,prompt\n1,"w1, w2"\n2,w3\n', [("w1, w2", False), ("w3", False)]),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "w1"}', mtime=0), [("w1", False)]),
        ("a.txt", b"[INST] w1\n[1]", [("[INST] w1", False), ("[1]", False)]),
        ("a.txt", b"\xef\xbb\xbfw7 w3\r\n\r\nw9", [("w7 w3", False), ("w9", False)]),
        ("a.txt", b'  {"prompt": "w1"}\n', [("w1", False)]),
        ("a.json", json.dumps(ALPACA).encode(), [(Alpaca("w1", "w2", "", "w4"), False)]),
        ("a.json", b'{"prompt": "w1", "completion": "w2"}', [(Completion("w1", "w2"), False)]),
        ("a.jsonl", json.dumps(TURNS).encode(), [(ASKED, True)]),
    ],
)
def test_prompts_in_the_formats_of_rows(tmp_path: Path, name: str, content: bytes, expected: list[Any]):
    (tmp_path / name).write_bytes(content)
    assert [(request.prompt, request.answered) for request in read_requests(tmp_path / name)] == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"a\xff", "not valid UTF-8 (byte 2)"),
        (
            b'{"prompt": "w1"}\n{"text": "w1"}',
            "line 2: the row fits no format: its keys are 'text', but the formats need messages; ",
        ),
        (b'{"prompt": 5}', "line 1: The prompt must be text"),
        (b'{"prompt": " "}', "line 1: the prompt is empty"),
        (b'{"prompt": "w1"}\n{"prompt"', "line 2: not JSON"),
        (b'{"messages": []}', "line 1: 'messages' is an empty list"),
        (b'{"messages": "w1"}', "line 1: 'messages' is a string, but must be a list"),
        (b'{"messages": [{"role": "x", "content": "w1"}]}', "line 1: 'messages[0]' has the role 'x'"),
        (b'{"messages": [{"role": "assistant", "content": "w1"}]}', "line 1: The last message is the assistant's"),
        (b'{"prompt": "w1", "tools": [{}]}', "line 1: the row has 'tools'"),
        (b'[{"prompt": "w1"}, {"text": "w1"}, {"prompt": ""}]', "has 2 rows that cannot be used; fix them"),
        (b'{"prompt": "w1"}\n{"instruction": 5}', "line 2: 'instruction' is a number"),
        (b'{"question": "w1"}', "rename 'question' to 'prompt'."),
    ],
)
def test_prompts_that_are_refused(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "prompts"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_requests(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "nowhere"], "nowhere does not exist"),
        (["--prompts", "."], "is not a regular file"),
        (["--prompts", "x", "--prompt", "w1"], "--prompt and --prompts cannot be combined"),
        (["--prompt", "w1", "--output", "nowhere/x"], "The directory nowhere of --output does not exist"),
        (["--prompt", "w1", "--output", "x", "--json"], "--json does nothing with --output"),
        (["--prompt", "w1", "--prompt", ""], "The prompt is empty"),
        (["--prompt", "w1", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["--prompt", "w1", "--stop", ""], "A stop string is empty"),
        (["--prompt", "w1", "--repetition-penalty", "0"], "A repetition penalty of 0.0"),
        (["--prompt", "w1", "--min-p", "0.1"], "--min-p does nothing at --temperature 0"),
        (["--prompt", "w1", "--min-p", "2", "--temperature", "1"], "A min-p of 2.0"),
    ],
)
def test_mistakes(run: Any, arguments: list[str], message: str):
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not Path("x").exists()


def test_what_was_answered_before_an_end_is_kept(
    run: Any, tmp_path: Path, alone: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
):
    source, target = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    source.write_text("\n".join(PROMPTS))
    (tmp_path / "answers.jsonl.part").write_text("of an earlier one")
    answers = Mock(wraps=answering.answer_of, side_effect=[DEFAULT, DEFAULT, KeyboardInterrupt])
    monkeypatch.setattr(answering, "answer_of", answers)
    code, _, err = run("--prompts", source, "--output", target, "--batch-size", 1)
    part = tmp_path / "answers.jsonl.part-2"
    assert (code, f"2 answers so far: {part}" in err) == (130, True)
    assert [json.loads(line)["response"] for line in part.read_text().splitlines()] == alone[""][:2]
    assert not target.exists()


# -- without a prompt ------------------------------------------------------------------------------------------------


def test_without_a_prompt_it_chats_on_a_terminal(run: Any, monkeypatch: pytest.MonkeyPatch):
    chats = Mock(return_value=0)
    monkeypatch.setattr(sys.modules["wgpu_lora.cli.inference.chat"], "run_chat", chats)
    master, slave = pty.openpty()
    with open(slave, encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        for arguments in ([], ["--json"]):  # stdout is no terminal, or JSON is asked for
            code, _, err = run(*arguments)
            assert (code, chats.called, "--prompt is missing" in err) == (2, False, True)
        monkeypatch.setattr(sys.modules["wgpu_lora.cli.inference.generate"], "is_terminal", lambda stream: True)
        assert run("--adapter", "a", "--temperature", "0.5")[0] == 0
    model, adapters, base, settings, *_ = chats.call_args.args
    assert (model, adapters, base, settings["temperature"]) == ("model", ["a"], False, 0.5)
    os.close(master)
