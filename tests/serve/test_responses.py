"""OpenAI's Responses by the `openai` client: texts, streams, tools with their results, schemas, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai import BadRequestError
from pydantic import BaseModel
from support.rows.tool_templates import HERMES_TEMPLATE
from support.serving.serving import FakeEngine, Serving, demo_tokenizer, serving

from wgpu_lora.infer.serve import responses
from wgpu_lora.infer.serve.responses import ResponseStore

TOKENIZER = demo_tokenizer()
TEMPLATE = HERMES_TEMPLATE + "{# <think></think> #}"
WEATHER: Any = {
    "type": "function", "name": "weather", "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"]},
}  # fmt: skip
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nWhere is it?\n</think>\n\nI look.\n"


class Thing(BaseModel):
    kind: Literal["a", "b"]
    counts: list[Literal[1, 2]]


def script(request: Any) -> list[int] | None:
    prompt = TOKENIZER.decode(request.prompt, False)
    calls = "<tool_call></tool_call>" in prompt and "<|im_start|>tool" not in prompt
    return None if request.grammar else TOKENIZER.encode(THOUGHT + CALL if calls else "It is warm.")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(lambda: FakeEngine(script=script, max_model_len=1024), template=TEMPLATE) as running:
        yield running


def prompt_of(server: Serving, **body: Any) -> str:
    """What a request makes the model read."""
    prompts: dict[str, None] = {}

    def remember(request: Any) -> list[int]:
        prompts[TOKENIZER.decode(request.prompt, False)] = None
        return TOKENIZER.encode("Yes.")

    server.fake.script = remember
    try:
        assert server.client.responses.create(model="base", **body).output_text == "Yes."
    finally:
        server.fake.script = script
    (prompt,) = prompts
    return prompt


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_text_and_calls_are_items(server: Serving, stream: bool) -> None:
    response: Any = server.client.responses.create(model="base", input="Hi", tools=[WEATHER], stream=stream)
    if stream:
        events = list(response)
        assert [event.sequence_number for event in events] == [*range(len(events))]
        for kind in ("reasoning_summary_text", "output_text"):
            deltas = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
            (done,) = [event.text for event in events if event.type == f"response.{kind}.done"]
            assert deltas == done != ""
        added, closed = (
            [event.item.id for event in events if event.type == f"response.output_item.{kind}"]
            for kind in ("added", "done")
        )
        response = events[-1].response
        assert added == closed == [item.id for item in response.output]
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1].type == "response.completed"
    reasoning, message, call = response.output
    assert reasoning.summary[0].text == "Where is it?"
    assert message.content[0].text.strip() == response.output_text.strip() == "I look."
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    assert response.status == "completed"
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    # The result, after the whole conversation, after the items that it refers to, and after the response.
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    items = [item.model_dump(exclude_none=True) for item in response.output]
    references = [{"type": "item_reference", "id": item.id} for item in response.output]
    question: Any = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    prompts = {
        prompt_of(server, input=[question, *items, result], tools=[WEATHER]),
        prompt_of(server, input=[question, *references, result], tools=[WEATHER]),
        prompt_of(server, input=[result], previous_response_id=response.id, tools=[WEATHER]),
    }
    (prompt,) = prompts
    assert '"arguments": {"city": "Oslo"}' in prompt
    assert prompt.count("<|im_start|>") == 4  # of the user, of the assistant, of the tool, and of the answer


def test_instructions_and_roles_are_one_system_message(server: Serving) -> None:
    turns: Any = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    prompt = prompt_of(server, input=turns, instructions="Be short.")
    assert prompt == TOKENIZER.decode(
        TOKENIZER.encode(
            "<|im_start|>system\nBe short.\n\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
        False,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_schemas_are_followed(server: Serving, stream: bool) -> None:
    options: Any = {"model": "base", "input": "x", "text_format": Thing, "temperature": 1.5, "max_output_tokens": 400}
    options["extra_body"] = {"seed": 1}  # whose lists end
    if stream:
        with server.client.responses.stream(**options) as events:
            assert sum(event.type == "response.output_text.delta" for event in events) > 3
            response = events.get_final_response()
    else:
        response = server.client.responses.parse(**options)
    assert isinstance(response.output_parsed, Thing)


def test_a_json_object_may_have_a_schema(server: Serving) -> None:
    form: Any = {"type": "json_object", "schema": {"properties": {"n": {"enum": [1]}}, "required": ["n"]}}
    assert server.client.responses.create(model="base", input="x", text={"format": form}).output_text == '{"n": 1}'


def test_calls_are_forced_and_allowed_by_name(server: Serving) -> None:
    other = {**WEATHER, "name": "clock"}
    for choice in (
        "required",
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ):
        response = server.client.responses.create(
            model="base", input="x", tools=[WEATHER, other], tool_choice=choice, parallel_tool_calls=False
        )
        (call,) = response.output
        assert call.type == "function_call"
        assert call.name == "weather" or choice == "required"
        assert len(json.loads(call.arguments)["city"]) <= 4


def test_an_answer_that_is_cut_off_is_incomplete(server: Serving) -> None:
    options: Any = {"model": "base", "input": "x", "max_output_tokens": 2, "top_logprobs": 3}
    response = server.client.responses.create(include=["message.output_text.logprobs"], **options)
    streamed = list(server.client.responses.create(stream=True, **options))
    (item,) = [event.item for event in streamed if event.type == "response.output_item.done"]
    assert item.status == "incomplete"
    assert (response.status, response.incomplete_details and response.incomplete_details.reason) == (
        "incomplete", "max_output_tokens",
    )  # fmt: skip
    part: Any = response.output[0]
    assert part.status == "incomplete"
    assert len(part.content[0].logprobs) == 2
    assert len(part.content[0].logprobs[0].top_logprobs) >= 3


ITEMS: list[dict[str, str]] = [
    {"role": "user", "content": "x"}, {"type": "item_reference", "id": "x"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": "x", "previous_response_id": "resp_none"}, "no 'resp_none'"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "no 'msg_none'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, r"input\[0\]"),
        ({"input": [{"type": "computer_call"}]}, r"input\[0\]"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ({"input": "x", "conversation": "c"}, "'conversation'"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        *[
            ({"input": [ITEMS[0], {key: item[key] for key in item if key != name}]}, rf"input\[1\]: .*'{name}'")
            for item in ITEMS for name in item if name != "type"
        ],
        ({"text": {"format": {"type": "text", "schema": {}}}}, "'schema'"),
        ({"text": {"format": {"type": "json_object", "strict": True}}}, "'strict'"),
        ({"text": {"format": {"type": "json_object", "json_schema": {"schema": True}}}}, "'json_schema'"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused(server: Serving, body: Any, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        server.client.responses.create(model="base", **{"input": "x", **body})


def test_responses_that_are_not_to_be_stored_are_not(server: Serving) -> None:
    response = server.client.responses.create(model="base", input="x", store=False)
    with pytest.raises(BadRequestError, match="There is no"):
        server.client.responses.create(model="base", input="x", previous_response_id=response.id)


def test_the_newest_responses_are_stored_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_STORED", 1000)
    store = ResponseStore()
    for number in range(50):
        store.add({"id": f"r{number}", "output": [{"id": f"m{number}", "text": "x" * 50}]}, [])
    assert store.find("m49", "input")[0]["text"] == "x" * 50
    assert sum(size for size, _ in store._items.values()) <= 1000
    with pytest.raises(Exception, match="There is no 'r0'"):
        store.find("r0", "input")
