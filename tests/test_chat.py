"""A chat: every turn says what the whole conversation asked at once would, and its commands do what they say."""

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
from cli_helpers import share_device
from data_helpers import small_tokenizer
from model_helpers import save_golden_adapter, words_model

import wgpu_lora
from wgpu_lora.cli import main
from wgpu_lora.cli.chat import Talk
from wgpu_lora.cli.chat_commands import Commands
from wgpu_lora.data import prepare
from wgpu_lora.errors import NoRoomError, UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.infer.chat import Chat
from wgpu_lora.infer.conversation import Lane
from wgpu_lora.infer.reply import Reply
from wgpu_lora.infer.settings import Settings
from wgpu_lora.models.loaded import LoadedModel

# A word before every message, by role: the whole conversation is what it looks like.
TEMPLATE = (
    "{%- for m in messages -%}{%- if m.role == 'user' -%}w1 {% elif m.role == 'system' -%}w3 {% else -%}w2 {% endif -%}"
    "{{- m.content + ' ' -}}{%- endfor -%}{%- if add_generation_prompt -%}w2 {%- endif -%}"
)
TOKENS = 4
ASK = ["--base-dtype", "f32", "--max-new-tokens", TOKENS]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat")
    words_model(directory / "model", TEMPLATE)
    words_model(directory / "plain")
    save_golden_adapter("mistral", directory / "a", base_model_name_or_path=str(directory / "model"))
    save_golden_adapter("mistral", directory / "b", -2.0, rank=2, base_model_name_or_path=str(directory / "model"))
    return directory


@pytest.fixture(scope="module")
def model(made: Path, device: Device) -> LoadedModel:
    return wgpu_lora.load(made / "model", base_dtype="f32", device=device)


@pytest.fixture
def talk(model: LoadedModel, made: Path) -> Iterator[Callable[..., Chat]]:
    opened: list[Chat] = []

    def start(*names: str, max_length: int | None = None, **settings: Any) -> Chat:
        adapters = {name: made / name for name in names if name != "base"}
        chosen = Settings(**{"max_new_tokens": TOKENS, **settings})
        opened.append(Chat(model, adapters, names or ("base",), chosen, max_length))
        return opened[-1]

    yield start
    for chat in opened:
        chat.close()


@pytest.fixture
def run(
    device: Device, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command with this on its stdin."""
    share_device(device, monkeypatch)
    monkeypatch.chdir(made)

    def call(text: str, *arguments: Any) -> tuple[int, str, str]:
        pipe(monkeypatch, text)
        code = main(["chat", *map(str, [*ASK, *arguments])])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def tell(
    talk: Any, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """The same of a model that is loaded already; mistakes are raised."""
    monkeypatch.chdir(made)

    def call(text: str, *names: str, chat: Chat | None = None) -> tuple[str, str]:
        pipe(monkeypatch, text)
        capsys.readouterr()
        assert Talk(chat or talk(*names)).run() == 0
        return capsys.readouterr()

    return call


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


def say(chat: Chat, text: str) -> dict[str, str]:
    heard = dict.fromkeys(chat.lanes, "")
    for name, piece in chat.ask(text):
        heard[name] += piece
    return heard


def at_once(model: LoadedModel, messages: list[dict[str, Any]], adapter: Path | None = None, **options: Any) -> str:
    return wgpu_lora.generate(model, messages, adapter=adapter, **{"max_new_tokens": TOKENS, **options})


# -- turns -----------------------------------------------------------------------------------------------------------


def test_every_turn_is_what_the_whole_conversation_asks_for(model: LoadedModel, talk: Any, made: Path):
    chat = talk("base", "a", "b", system="w9 w8")
    for text in ("w7 w11", "w5", "w20 w21"):
        heard = say(chat, text)
        assert len(set(heard.values())) > 1
        for name, lane in chat.lanes.items():
            *before, asked, said = lane.messages
            assert (asked["content"], said["content"]) == (text, heard[name])
            system = [{"role": "system", "content": "w9 w8"}]
            directory = None if name == "base" else made / name
            assert heard[name] == at_once(model, [*system, *before, asked], directory)


def test_taking_back_and_asking_again(model: LoadedModel, talk: Any):
    chat = talk("a", temperature=1.5)
    first, second = say(chat, "w7 w11"), say(chat, "w5")
    assert chat.undo() == "w5"
    assert say(chat, "w5") == second
    draws = {second["a"]}
    for _ in range(3):
        list(chat.retry())
        draws.add(chat.lanes["a"].messages[-1]["content"])
    assert len(draws) > 1
    assert [m["content"] for m in chat.lanes["a"].messages[:3]] == ["w7 w11", first["a"], "w5"]
    chat.reset()
    assert say(chat, "w7 w11") == first
    chat.undo()
    with pytest.raises(UserError, match="Nothing has been said"):
        chat.undo()


def test_who_answers_can_change(model: LoadedModel, talk: Any, made: Path):
    chat = talk("a")
    heard = say(chat, "w7 w11")["a"]
    chat.add("b", made / "b")
    chat.select(["b", "base"])
    conversation = [*chat.lanes["b"].messages, {"role": "user", "content": "w5"}]
    assert conversation[1]["content"] == heard
    answers = say(chat, "w5")
    assert answers == {"b": at_once(model, conversation, made / "b"), "base": at_once(model, conversation)}
    chat.select(["base"])
    assert [m["content"] for m in chat.lanes["base"].messages] == ["w7 w11", heard, "w5", answers["base"]]
    for name, directory, message in (("b", made / "a", "already"), ("base", made / "a", "named 'base'")):
        with pytest.raises(UserError, match=message):
            chat.add(name, directory)
    with pytest.raises(UserError, match="is not a directory"):
        chat.add("c", made / "nowhere")
    assert say(chat, "w6")


def test_the_model_alone_stays_on_the_device(model: LoadedModel, talk: Any, made: Path):
    model.load_weights()
    before = model.device.allocated
    with talk("a") as chat:
        say(chat, "w7")
        chat.add("b", made / "b")
        chat.select(["a", "b", "base"])
        say(chat, "w5")
        assert model.device.allocated > before
    assert model.device.allocated == before


def test_an_answer_that_is_stopped_keeps_what_came(talk: Any):
    chat = talk("a")
    say(chat, "w7 w11")
    count = 0

    def two() -> bool:
        nonlocal count
        count += 1
        return count > 2

    (whole,) = say(talk("a"), "w7 w11").values()
    chat.reset()
    pieces = "".join(piece for _, piece in chat.ask("w7 w11", two))
    assert pieces
    assert whole.startswith(pieces)
    assert chat.lanes["a"].messages[-1]["content"] == pieces != whole
    assert not list(chat.ask("w9", lambda: True))  # before anything came: as if it had not been asked
    assert not chat.remembered
    assert chat.lanes["a"].messages[-2]["content"] == "w7 w11"
    assert not list(chat.retry(lambda: True))
    assert chat.lanes["a"].messages[-1]["content"] == pieces


def test_the_oldest_turns_make_room(model: LoadedModel, talk: Any):
    chat = talk("base", max_length=24)
    for number in range(4):
        say(chat, f"w{number} w11")
    assert chat.left_out == {"base": 1}
    lane = chat.lanes["base"]
    assert (len(lane.messages), lane.first) == (8, 2)
    assert lane.messages[-1]["content"] == at_once(model, lane.messages[2:-1])
    before = [*lane.messages]
    with pytest.raises(UserError, match="takes 42 tokens, but the conversation holds 24"):
        say(chat, "w7 " * 40)
    assert (lane.messages, lane.first) == (before, 2)
    chat.undo()
    assert lane.first == 0


def test_a_conversation_takes_no_more_than_there_is(talk: Any, model: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    from wgpu_lora.infer import chat as module

    sizes = []
    whole = module.Generator

    def small(model: LoadedModel, adapters: Any, capacity: int, *rest: Any, **more: Any) -> Any:
        sizes.append(capacity)
        if capacity > 40:
            raise NoRoomError("too large")
        return whole(model, adapters, capacity, *rest, **more)

    monkeypatch.setattr(module, "Generator", small)
    monkeypatch.setattr(module, "LEAST", 8)
    chat = talk("base")
    assert say(chat, "w7")
    assert (sizes, chat.capacity) == ([128, 64, 32], 32)
    with pytest.raises(UserError, match="too large"):
        talk("base", max_length=100).open()
    with pytest.raises(UserError, match="--max-length must be from 2 to 128"):
        talk("base", max_length=129)


def test_whoever_has_no_room_does_not_join(talk: Any, monkeypatch: pytest.MonkeyPatch):
    from wgpu_lora.infer import chat as module

    whole = module.Generator

    def narrow(model: LoadedModel, adapters: Any, capacity: int, batch: int, **more: Any) -> Any:
        if batch > 1:
            raise NoRoomError("too many")
        return whole(model, adapters, capacity, batch, **more)

    monkeypatch.setattr(module, "Generator", narrow)
    chat = talk("a", max_length=64)
    heard = say(chat, "w7")
    with pytest.raises(UserError, match="too many"):
        chat.select(["a", "base"])
    assert list(chat.lanes) == ["a"]
    chat.undo()
    assert say(chat, "w7") == heard


def test_stop_strings_are_cut_off_wherever_tokens_part():
    tokenizer = small_tokenizer()
    text = "The sky is blue, and the sea is blue too."
    ids = tokenizer.encode(text)
    for stops, expected in (
        ((), text),
        (("blue",), "The sky is "),
        (("too", "and the s"), "The sky is blue, "),
        (("blue, and the moon", "zork", "."), text[:-1]),
        (("T",), ""),
    ):
        reply, shown = Reply(tokenizer, 1, stops), ""
        for token in ids:
            reply.generation.token_ids.append(token)
            shown += reply.push(token)
            assert expected.startswith(shown)
            if reply.generation.stop_reason:
                break
        shown += reply.finish()
        assert shown == reply.text == expected
        assert reply.generation.stop_reason == ("stop" if expected != text else None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be a whole number"),
        ({"max_new_tokens": 0}, "ask for at least one"),
        ({"stop": ""}, "A stop string is empty"),
        ({"stop": ["a", 5]}, "The stop string must be text"),
        ({"enable_thinking": 1}, "enable_thinking must be true or false"),
        ({"temprature": 1}, "unknown option 'temprature': did you mean 'temperature'"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        wgpu_lora.generate("demo", "a", **options)


def test_lanes_of_other_templates():
    tokenizer = small_tokenizer("strict")  # user and assistant in turn, or it refuses
    lane = Lane("base")
    for _ in range(5):
        lane.add("What is the colour of the sky?", "The sky is blue.")
    ids, left_out = lane.prompt(tokenizer, "Is it?", Settings(max_new_tokens=8), 120)
    assert 0 < left_out < 5
    assert len(ids) <= 112
    assert tokenizer.decode(ids, skip_special_tokens=False).count("What is the colour") == 5 - left_out


# -- the command -----------------------------------------------------------------------------------------------------


def test_lines_are_turns(run: Any, model: LoadedModel, made: Path):
    user = [{"role": "user", "content": text} for text in ("w7 w11", "w5\nw6", "w8\n w9")]
    first = at_once(model, user[:1], made / "a")
    second = at_once(model, [user[0], {"role": "assistant", "content": first}, user[1]], made / "a")
    code, out, err = run('w7 w11\n\nw5\\\nw6\n/reset\n"""w8\n w9"""\n', "--adapter", "a")
    third = at_once(model, user[2:], made / "a")
    assert (code, out) == (0, f"{first}\n{second}\n{third}\n")
    assert err.count("cut off after 4 tokens") == 3
    assert "the conversation is forgotten" in err


def test_side_by_side(run: Any, tell: Any, model: LoadedModel, made: Path):
    expected = wgpu_lora.compare(model, "w7", {"x": made / "a", "b": made / "b"}, max_new_tokens=TOKENS)
    blocks = [f"== {name} ==\n{answer.text}" for name, answer in expected.items()]
    assert run("w7\n", "--adapter", "x=a", "--adapter", "b", "--compare")[1] == "\n\n".join(blocks) + "\n"
    out, err = tell("/adapter a none\n/adapters\nw7\n/exit\nw7\n")
    assert "a and base answer from now on" in err
    assert "* a  a\n" in err
    assert out == "\n\n".join([blocks[1].replace("x", "a"), blocks[0]]) + "\n"


def test_what_is_saved_can_be_trained_on_and_loaded(tell: Any, talk: Any, model: LoadedModel, tmp_path: Path):
    path, other = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    tell(f"/system w9 w8\nw7\n/save {path}\nw5\n/save '{path}'\n/adapter a b\nw6\n/save {other}\n")
    (row,), both = ([json.loads(line) for line in file.read_text().splitlines()] for file in (path, other))
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert [one["adapter"] for one in both] == ["a", "b"]
    assert both[0]["messages"][:5] == both[1]["messages"][:5] == row["messages"]
    prepared = prepare(other, model.tokenizer, max_length=64, vocab_size=model.config.vocab_size)
    assert [len(row.input_ids) for row in prepared.rows] == [len(row.labels) for row in prepared.rows]
    assert sum(int((row.labels != -100).sum()) for row in prepared.rows) >= 2 * 3 * TOKENS
    again, _ = tell(f"/load {other} 2\n/undo\nw6\n", "b")
    assert again.strip() == both[1]["messages"][-1]["content"]
    # Nothing that is there already is lost, not even to the conversation that follows its own.
    kept, new = path.read_bytes(), tmp_path / "new"
    for text in (f"w7\n/save {path}\n", f"w7\n/save {new}\n/reset\nw5\n/save {new}\n"):
        with pytest.raises(UserError, match="exists already"):
            tell(text)
    assert path.read_bytes() == kept
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new", "one.jsonl", "two.jsonl"]


def test_a_model_without_a_template(run: Any, model: LoadedModel, made: Path, tmp_path: Path):
    _, out, err = run(f"w7 w11\nw5\n/save {tmp_path / 'rows'}\n", "--model", "plain", "--adapter", "a")
    assert err.count("The model has no chat template: every message is a text") == 1
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["w7 w11", "w5"]
    assert out == "".join(f"{row['completion']}\n" for row in rows)
    plain = wgpu_lora.load(made / "plain", base_dtype="f32")
    found = wgpu_lora.generate(plain, ["w7 w11", "w5"], adapter=made / "a", max_new_tokens=TOKENS)
    assert found == [row["completion"] for row in rows]
    assert run("w1\n", "--model", "plain", "--system", "w1")[0] == 2
    with Chat(plain, {}, ["base"], Settings()) as chat:
        for line in ("/system w1", f"/load {tmp_path / 'rows'}"):
            with pytest.raises(UserError, match="has no chat template"):
                Commands(chat, print).run(line)


def test_settings_are_shown_and_set(tell: Any):
    _, err = tell(
        '/set temperature 0.5\n/set --top-p 0.9\n/set stop "w1 "\n/set\n/help\n/system w1\n/system\n/system none\n'
    )
    for line in ("temperature = 0.5", "top_p = 0.9", "stop = ('w1 ',)", "/save FILE", "system: w1"):
        assert line in err


REFUSED = [
    ("/zork", "There is no command /zork"),
    ("/set zork 1", "unknown option 'zork'"),
    ("/set temperature hot", "temperature must be a number"),
    ("/set temperature nan", "temperature must be a finite number"),
    ("/set top_p 7", "A top-p of 7.0"),
    ("/adapter zork", "There is no adapter 'zork'"),
    ("/adapter 'a", "has no end"),
    ("/undo", "Nothing has been said"),
    ("/retry", "Nothing has been said"),
    ("/save x", "nothing to save"),
    ("/load nowhere", "nowhere"),
    ("/reset now", "/reset takes nothing after it"),
    ("w5\n/save a b", "/save FILE takes one file"),
    ("/save nowhere/x", "nowhere/x cannot be written"),
    ('"""w1', "has no end"),
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
    monkeypatch.setattr("wgpu_lora.cli.reading.is_terminal", lambda stream: True)
    monkeypatch.setattr("wgpu_lora.cli.reading._readline", lambda: None)  # nobody's history
    monkeypatch.setattr("builtins.input", Keyboard(*typed))
    return Talk(chat).run()


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
    whole, asked = Chat.ask, []

    def pressed(self: Chat, text: str, stopped: Any) -> Any:
        for number, event in enumerate(whole(self, text, stopped)):
            asked.append(event)
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield event

    monkeypatch.setattr(Chat, "ask", pressed)
    assert at_keyboard(chat, monkeypatch, "w5") == 0
    assert len(asked) == 3
    assert chat.lanes["base"].messages[-1]["content"] == "".join(piece for _, piece in asked)
    assert "[stopped]" in capsys.readouterr().err


def test_a_terminal_is_not_told_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    from wgpu_lora.cli import answering

    assert answering.for_stdout("a\x1b[2J\n") == "a\x1b[2J\n"
    monkeypatch.setattr(answering, "is_terminal", lambda stream: True)
    assert answering.for_stdout("a\x1b[2J\n") == "a\\x1b[2J\n"
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=False)
    with answering.SideBySide(console, ["a", "[b]"]) as shown:
        shown.add("a", "one\x1b[2J")
        shown.add("[b]", "two")
    text = out.getvalue()
    assert "\x1b[2J" not in text
    assert "one\\x1b[2J" in text
    assert text.index(" a ") < text.index(" [b] ")
