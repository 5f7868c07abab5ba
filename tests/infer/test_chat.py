"""A chat: every turn says what the whole conversation asked at once would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.rows.data import small_tokenizer
from support.serving.chat import at_once, chats, make_models, say

import wgpu_lora
from wgpu_lora.errors import NoRoomError, UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.infer import chat as module
from wgpu_lora.infer.answers import StreamedAnswer
from wgpu_lora.infer.chat import Chat, ChatHistory
from wgpu_lora.infer.generation_options import GenerationOptions
from wgpu_lora.models.loaded_model import LoadedModel


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


def test_every_turn_is_what_the_whole_conversation_asks_for(model: LoadedModel, talk: Any, workspace: Path):
    chat = talk("base", "a", "b", system="w9 w8")
    for text in ("w7 w11", "w5", "w20 w21"):
        replies = say(chat, text)
        assert len(set(replies.values())) > 1
        for name, lane in chat.lanes.items():
            *before, question, reply = lane.messages
            assert (question["content"], reply["content"]) == (text, replies[name])
            system = [{"role": "system", "content": "w9 w8"}]
            directory = None if name == "base" else workspace / name
            assert replies[name] == at_once(model, [*system, *before, question], directory)


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
    with pytest.raises(UserError, match="No message has been sent"):
        chat.undo()


def test_who_answers_can_change(model: LoadedModel, talk: Any, workspace: Path):
    chat = talk("a")
    reply = say(chat, "w7 w11")["a"]
    chat.add("b", workspace / "b")
    chat.select(["b", "base"])
    conversation = [*chat.lanes["b"].messages, {"role": "user", "content": "w5"}]
    assert conversation[1]["content"] == reply
    answers = say(chat, "w5")
    assert answers == {"b": at_once(model, conversation, workspace / "b"), "base": at_once(model, conversation)}
    chat.select(["base"])
    assert [m["content"] for m in chat.lanes["base"].messages] == ["w7 w11", reply, "w5", answers["base"]]


@pytest.mark.parametrize(
    ("name", "adapter", "message"),
    [("b", "a", "already"), ("base", "a", "named 'base'"), ("c", "nowhere", "is not a directory")],
)
def test_adapters_that_cannot_join(talk: Any, workspace: Path, name: str, adapter: str, message: str):
    chat = talk("a", "b")
    with pytest.raises(UserError, match=message):
        chat.add(name, workspace / adapter)
    assert say(chat, "w6")


def test_an_answer_that_is_stopped_keeps_what_came(talk: Any):
    (whole,) = say(talk("a"), "w7 w11").values()
    chat, stops = talk("a"), iter([False, False, True])
    pieces = "".join(piece for _, piece in chat.ask("w7 w11", lambda: next(stops, True)))
    assert pieces
    assert whole.startswith(pieces)
    assert chat.lanes["a"].messages[-1]["content"] == pieces != whole
    assert not list(chat.ask("w9", lambda: True))  # before anything came: as if it had not been asked
    assert not chat.remembered
    assert [message["content"] for message in chat.lanes["a"].messages] == ["w7 w11", pieces]
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


def test_a_conversation_takes_no_more_than_there_is(talk: Any, monkeypatch: pytest.MonkeyPatch):
    whole, sizes = module.Generator, []

    def small(model: LoadedModel, adapters: Any, capacity: int, batch: int, **more: Any) -> Any:
        sizes.append(capacity)
        if capacity > 40 or batch > 1:
            raise NoRoomError("too large")
        return whole(model, adapters, capacity, batch, **more)

    monkeypatch.setattr(module, "Generator", small)
    monkeypatch.setattr(module, "LEAST", 8)
    chat = talk("base")
    replies = say(chat, "w7")
    assert (sizes, chat.capacity) == ([128, 64, 32], 32)
    with pytest.raises(UserError, match="too large"):  # for a second one
        chat.select(["a", "base"])
    assert list(chat.lanes) == ["base"]
    chat.undo()
    assert say(chat, "w7") == replies
    with pytest.raises(UserError, match="too large"):
        talk("base", max_length=100).open()
    with pytest.raises(UserError, match=r"^max_length must be from 2 to 128"):
        talk("base", max_length=129)


SKY = "The sky is blue, and the sea is blue too."


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ((), SKY),
        (("blue",), "The sky is "),
        (("too", "and the s"), "The sky is blue, "),
        (("blue, and the moon", "zork", "."), SKY[:-1]),
        (("T",), ""),
    ],
)
def test_stop_strings_are_cut_off_wherever_tokens_part(stops: tuple[str, ...], expected: str):
    tokenizer = small_tokenizer()
    reply, shown = StreamedAnswer(tokenizer, 1, stops), ""
    for token in tokenizer.encode(SKY):
        reply.generation.token_ids.append(token)
        shown += reply.push(token)
        assert expected.startswith(shown)
        if reply.generation.stop_reason:
            break
    assert shown + reply.finish() == reply.text == expected
    assert reply.generation.stop_reason == ("stop" if expected != SKY else None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be a whole number"),
        ({"max_new_tokens": 0}, "use at least one"),
        ({"stop": ""}, "A stop string is empty"),
        ({"stop": ["a", 5]}, "The stop string must be text"),
        ({"enable_thinking": 1}, "enable_thinking must be true or false"),
        ({"temprature": 1}, "unknown option 'temprature': did you mean temperature"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        wgpu_lora.generate("demo", "a", **options)


def test_lanes_of_other_templates():
    tokenizer = small_tokenizer("strict")  # user and assistant in turn, or it refuses
    lane = ChatHistory("base")
    for _ in range(5):
        lane.add("What is the colour of the sky?", "The sky is blue.")
    ids, left_out = lane.prompt(tokenizer, "Is it?", GenerationOptions(max_new_tokens=8), 120)
    assert 0 < left_out < 5
    assert len(ids) <= 112
    assert tokenizer.decode(ids, skip_special_tokens=False).count("What is the colour") == 5 - left_out
