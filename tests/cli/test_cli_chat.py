"""`wgpu-lora chat` on a pipe and at a keyboard: its commands do what they say."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import Result, Run, commands
from support.serving.chat import TOKENS, at_once, chats, make_models, say

import wgpu_lora
from wgpu_lora.cli.inference.chat import ChatSession
from wgpu_lora.cli.inference.slash_commands import SlashCommands
from wgpu_lora.data import tokenize_source
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.infer.chat import Chat
from wgpu_lora.infer.generation_options import GenerationOptions
from wgpu_lora.models.loaded_model import LoadedModel

ASK = ["--base-dtype", "f32", "--max-new-tokens", TOKENS]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def model(workspace: Path, device: Device) -> LoadedModel:
    return wgpu_lora.load(workspace / "model", base_dtype="f32", device=device)


@pytest.fixture
def talk(model: LoadedModel, workspace: Path) -> Iterator[Callable[..., Chat]]:
    with chats(model, workspace) as start:
        yield start


@pytest.fixture
def run(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command with this on its stdin."""
    monkeypatch.chdir(workspace)
    run = commands(capsys, "chat", *ASK)

    def call(text: str, *arguments: Any) -> Result:
        pipe(monkeypatch, text)
        return run(*arguments)

    return call


@pytest.fixture
def tell(
    talk: Any, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """The same of a model that is loaded already; mistakes are raised."""
    monkeypatch.chdir(workspace)

    def call(text: str, *names: str, chat: Chat | None = None) -> tuple[str, str]:
        pipe(monkeypatch, text)
        capsys.readouterr()
        assert ChatSession(chat or talk(*names)).run() == 0
        return capsys.readouterr()

    return call


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


def test_lines_are_turns(run: Any, model: LoadedModel, workspace: Path):
    user = [{"role": "user", "content": text} for text in ("w7 w11", "w5\nw6", "w8\n w9")]
    first = at_once(model, user[:1], workspace / "a")
    second = at_once(model, [user[0], {"role": "assistant", "content": first}, user[1]], workspace / "a")
    code, out, err = run('w7 w11\n\nw5\\\nw6\n/reset\n"""w8\n w9"""\n', "--adapter", "a")
    third = at_once(model, user[2:], workspace / "a")
    assert (code, out) == (0, f"{first}\n{second}\n{third}\n")
    assert err.count("cut off after 4 tokens") == 3
    assert "started a new conversation" in err


def test_side_by_side(run: Any, tell: Any, model: LoadedModel, workspace: Path):
    expected = wgpu_lora.compare(model, "w7", {"x": workspace / "a", "b": workspace / "b"}, max_new_tokens=TOKENS)
    blocks = [f"== {name} ==\n{answer.text}" for name, answer in expected.items()]
    assert run("w7\n", "--adapter", "x=a", "--adapter", "b", "--compare")[1] == "\n\n".join(blocks) + "\n"
    out, err = tell("/adapter a none\n/adapters\nw7\n/exit\nw7\n")
    assert "a and base answer from now on" in err
    assert "* a  a\n" in err
    assert out == "\n\n".join([blocks[1].replace("x", "a"), blocks[0]]) + "\n"


def test_what_is_saved_can_be_trained_on_and_loaded(tell: Any, talk: Any, model: LoadedModel, tmp_path: Path):
    path, other = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    tell(f"/system w9 w8\nw7\n/save {path}\nw5\n/save '{path}'\n/adapter a b\nw6\n/save {other}\n")
    (row,), conversations = ([json.loads(line) for line in file.read_text().splitlines()] for file in (path, other))
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert [conversation["adapter"] for conversation in conversations] == ["a", "b"]
    assert conversations[0]["messages"][:5] == conversations[1]["messages"][:5] == row["messages"]
    prepared = tokenize_source(other, model.tokenizer, max_length=64, vocab_size=model.config.vocab_size)
    assert [len(row.input_ids) for row in prepared.rows] == [len(row.labels) for row in prepared.rows]
    assert sum(int((row.labels != -100).sum()) for row in prepared.rows) >= 2 * 3 * TOKENS
    again, _ = tell(f"/load {other} 2\n/undo\nw6\n", "b")
    assert again.strip() == conversations[1]["messages"][-1]["content"]
    # Nothing that is there already is lost, not even to the conversation that follows its own.
    content, new = path.read_bytes(), tmp_path / "new"
    for text in (f"w7\n/save {path}\n", f"w7\n/save {new}\n/reset\nw5\n/save {new}\n"):
        with pytest.raises(UserError, match="exists already"):
            tell(text)
    assert path.read_bytes() == content
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new", "one.jsonl", "two.jsonl"]


def test_a_model_without_a_template(run: Any, model: LoadedModel, workspace: Path, tmp_path: Path):
    _, out, err = run(f"w7 w11\nw5\n/save {tmp_path / 'rows'}\n", "--model", "plain", "--adapter", "a")
    assert err.count("The model has no chat template: it gets every message as plain text") == 1
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["w7 w11", "w5"]
    assert out == "".join(f"{row['completion']}\n" for row in rows)
    plain = wgpu_lora.load(workspace / "plain", base_dtype="f32")
    completions = wgpu_lora.generate(plain, ["w7 w11", "w5"], adapter=workspace / "a", max_new_tokens=TOKENS)
    assert completions == [row["completion"] for row in rows]
    assert run("w1\n", "--model", "plain", "--system", "w1")[0] == 2
    with Chat(plain, {}, ["base"], GenerationOptions()) as chat:
        for line in ("/system w1", f"/load {tmp_path / 'rows'}"):
            with pytest.raises(UserError, match="has no chat template"):
                SlashCommands(chat, print).run(line)


def test_settings_are_shown_and_set(tell: Any):
    settings = "/set temperature 0.5\n/set --top-p 0.9\n/set max-tokens 7\n"
    _, err = tell(settings + '/set stop "w1 "\n/set\n/help\n/system w1\n/system\n/system none\n')
    shown = ("temperature = 0.5", "top_p = 0.9", "max_new_tokens = 7", 'stop = ["w1 "]', "/save FILE", "system: w1")
    for line in shown:
        assert line in err


REFUSED = [
    ("/zork", "There is no command /zork"),
    ("/set zork 1", "unknown option 'zork'"),
    ("/set temperature hot", "temperature must be a number"),
    ("/set temperature nan", "temperature must be a finite number"),
    ("/set top_p 7", "A top-p of 7.0"),
    ("/adapter zork", "There is no adapter 'zork'"),
    ("/adapter 'a", "is not closed"),
    ("/undo", "No message has been sent"),
    ("/retry", "No message has been sent"),
    ("/save x", "nothing to save"),
    ("/load nowhere", "nowhere"),
    ("/reset now", "/reset takes no argument"),
    ("w5\n/save a b", "/save FILE takes one file"),
    ("/save nowhere/x", "The directory nowhere of"),
    ('"""w1', "is not closed"),
    ("w7 " * 200, "takes 202 tokens"),
]


def test_a_mistake_ends_a_script(run: Any, tell: Any, talk: Any):
    code, out, err = run("/zork\nw5\n", "--model", "model")
    assert (code, out, err.count("\n")) == (2, "", 1)
    chat = talk("base", max_length=64)
    for text, message in REFUSED:
        with pytest.raises(UserError, match=re.escape(message)):
            tell(f"{text}\nw5\n", chat=chat)


def test_a_slash_of_ones_own(tell: Any, model: LoadedModel):
    assert tell("//w7\n")[0].strip() == at_once(model, [{"role": "user", "content": "/w7"}])


# -- at a keyboard ---------------------------------------------------------------------------------------------------


class Keyboard:
    """Stands for a terminal: lines, or what is to be raised."""

    def __init__(self, *typed: str | type[BaseException]):
        self.typed = list(typed)

    def __call__(self, prompt: str = "") -> str:
        if not self.typed:
            raise EOFError
        entry = self.typed.pop(0)
        if isinstance(entry, str):
            return entry
        raise entry


def at_keyboard(chat: Chat, monkeypatch: pytest.MonkeyPatch, *typed: str | type[BaseException]) -> int:
    monkeypatch.setattr("wgpu_lora.cli.inference.line_reader.is_terminal", lambda stream: True)
    monkeypatch.setattr("wgpu_lora.cli.inference.line_reader._readline", lambda: None)  # nobody's history
    monkeypatch.setattr("builtins.input", Keyboard(*typed))
    return ChatSession(chat).run()


def test_mistakes_do_not_end_what_is_typed(talk: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    chat = talk("base")
    assert at_keyboard(chat, monkeypatch, "/zork", "w7\\", KeyboardInterrupt, "w7", "/exit", "w8") == 0
    _, err = capsys.readouterr()
    assert "There is no command /zork" in err
    assert [m["content"] for m in chat.lanes["base"].messages[::2]] == ["w7"]
    assert at_keyboard(chat, monkeypatch, KeyboardInterrupt, "w8") == 0  # at an empty line, it leaves
    assert len(chat.lanes["base"].messages) == 2


def test_ctrl_c_stops_an_answer_and_not_the_chat(talk: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    chat = talk("base", max_new_tokens=50)
    say(chat, "w7")
    whole, events = Chat.ask, []

    def pressed(self: Chat, text: str, stopped: Any) -> Any:
        for number, event in enumerate(whole(self, text, stopped)):
            events.append(event)
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield event

    monkeypatch.setattr(Chat, "ask", pressed)
    assert at_keyboard(chat, monkeypatch, "w5") == 0
    assert len(events) == 3
    assert chat.lanes["base"].messages[-1]["content"] == "".join(piece for _, piece in events)
    assert "[stopped]" in capsys.readouterr().err


def test_a_terminal_is_not_told_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    from wgpu_lora.cli.inference import sampling_options

    assert sampling_options.for_stdout("a\x1b[2J\n") == "a\x1b[2J\n"
    monkeypatch.setattr(sampling_options, "is_terminal", lambda stream: True)
    assert sampling_options.for_stdout("a\x1b[2J\n") == "a\\x1b[2J\n"
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=False)
    with sampling_options.SideBySide(console, ["a", "[b]"]) as shown:
        shown.add("a", "one\x1b[2J")
        shown.add("[b]", "two")
    text = out.getvalue()
    assert "\x1b[2J" not in text
    assert "one\\x1b[2J" in text
    assert text.index(" a ") < text.index(" [b] ")
