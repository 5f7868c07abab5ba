"""Calls of tools: parsed back from what families of models write, in any pieces, and forced by grammars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai import BadRequestError
from support.rows.tool_templates import TEMPLATES, TURNS
from support.serving.serving import FakeEngine, accepts, demo_tokenizer, serving

from wgpu_lora.infer.serve.grammars import answer_form, call_form
from wgpu_lora.infer.serve.schema import CompletionRequest, Tool
from wgpu_lora.infer.tool_calls import CALLS, FORMATS, HERMES, LLAMA, MISTRAL, ToolCallParser, ToolFormat

ASK: list[Any] = [{"role": "user", "content": "How warm is it in Oslo?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"$ref": "#/$defs/unit"}},
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["C", "F"]}},
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'
Calls = Sequence[tuple[str, Any]]
CASES: list[tuple[ToolFormat, str, str, Calls]] = [
    (HERMES, f"<tool_call>\n{OSLO}\n</tool_call>", "", [("weather", {"city": "Oslo"})]),
    (HERMES, f"Well.\n<tool_call>{OSLO}</tool_call>\n<tool_call>{OSLO}</tool_call>", "Well.\n",
     [("weather", {"city": "Oslo"})] * 2),
    (HERMES, "a <tool_call that is none", "a <tool_call that is none", []),
    (HERMES, "<tool_call>{broken</tool_call> b", "<tool_call>{broken</tool_call> b", []),
    (HERMES, f"<tool_call>{OSLO}", "", [("weather", {"city": "Oslo"})]),
    (MISTRAL, f"[TOOL_CALLS][{OSLO}, {OSLO}]", "", [("weather", {"city": "Oslo"})] * 2),
    (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', "", [("weather", {"city": "Oslo"})]),
    (MISTRAL, '[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{"x": 1}', "", [("a", {}), ("b", {"x": 1})]),
    (MISTRAL, "[TOOL", "[TOOL", []),
    (MISTRAL, "[TOOL_CALLS]a[ARGS][TOOL_CALLS]b[CALL_ID]12345[ARGS]null", "", [("a", {}), ("b", {})]),
    *[
        (form, begin + json.dumps({"name": "a", **call}) + end, "", [("a", arguments)])
        for form, begin, end in ((HERMES, "<tool_call>", "</tool_call>"), (MISTRAL, CALLS, ""), (LLAMA, "", ""))
        for call, arguments in [
            ({"arguments": {"x": 1}}, {"x": 1}), ({"parameters": {"x": 1}}, {"x": 1}), ({"arguments": None}, {}),
            ({"arguments": " ", "parameters": {"x": 1}}, {"x": 1}), ({"parameters": ""}, {}), ({}, {}),
        ]
    ],
    (LLAMA, '{"name": "weather", "parameters": {"city": "Oslo"}}', "", [("weather", {"city": "Oslo"})]),
    (LLAMA, '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', "",
     [("a", {}), ("b", {})]),
    (LLAMA, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA, '{"name": "a", "age": 3}', '{"name": "a", "age": 3}', []),
    (LLAMA, 'It is {"name": "a", "parameters": {}}', 'It is {"name": "a", "parameters": {}}', []),
    (LLAMA, '{"name": 5, "parameters": {}}', '{"name": 5, "parameters": {}}', []),
    (LLAMA, '{"name": "a", "parameters": {"x": NaN}}', '{"name": "a", "parameters": {"x": NaN}}', []),
    (LLAMA, r'{"name": "a", "parameters": {"x": "\ud83d"}}', r'{"name": "a", "parameters": {"x": "\ud83d"}}', []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_calls_are_the_same_in_any_pieces(form: ToolFormat, text: str, content: str, calls: Calls, size: int) -> None:
    parser = ToolCallParser(form)
    pieces = [parser.push(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(parser.push("", last=True))
    assert "".join(piece for piece, _ in pieces).strip() == content.strip()
    tool_calls = [call for _, some in pieces for call in some]
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in tool_calls] == calls
    assert len({call["id"] for call in tool_calls}) == len(tool_calls)


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_calls_a_tool_and_hears_its_result(stream: bool) -> None:
    text = f"I look.\n<tool_call>\n{OSLO}\n</tool_call>"
    prompts: dict[str, None] = {}
    tokenizer = demo_tokenizer()

    def script(request: Any) -> list[int]:
        prompts[tokenizer.decode(request.prompt, False)] = None
        return tokenizer.encode(text if len(prompts) == 1 else "It is warm.")

    with serving(lambda: FakeEngine(script=script, max_model_len=1024), template=TEMPLATES["hermes"]) as server:
        create = server.client.chat.completions.create
        response: Any = create(model="base", messages=ASK, tools=[WEATHER], stream=stream)
        if stream:
            deltas = [chunk.choices[0].delta for chunk in response]
            content = "".join(delta.content or "" for delta in deltas)
            calls = [call for delta in deltas for call in delta.tool_calls or []]
            assert [call.index for call in calls] == [0]
        else:
            assert response.choices[0].finish_reason == "tool_calls"
            content, calls = response.choices[0].message.content, response.choices[0].message.tool_calls
        assert content.strip() == "I look."
        assert (calls[0].function.name, calls[0].function.arguments) == ("weather", '{"city": "Oslo"}')
        call = {"id": calls[0].id, "type": "function", "function": calls[0].function.model_dump()}
        history = [
            *ASK,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": calls[0].id, "content": "21"},
        ]
        final = create(model="base", messages=history, tools=[WEATHER])
    assert final.choices[0].message.content == "It is warm."
    # As rows of training have them: tools as they came, arguments as an object.
    first, second = prompts
    assert json.dumps(WEATHER) in first
    assert '"arguments": {"city": "Oslo"}' in second


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_can_be_forced(name: str, choice: Any) -> None:
    with serving(lambda: FakeEngine(max_model_len=1024), template=TEMPLATES[name]) as server:
        for seed in range(3):
            answer = server.client.chat.completions.create(
                model="base", messages=ASK, tools=[CLOCK, WEATHER], tool_choice=choice, seed=seed,
                parallel_tool_calls=False, max_tokens=300,
            )  # fmt: skip
            message: Any = answer.choices[0].message
            assert answer.choices[0].finish_reason in ("tool_calls", "length")
            if answer.choices[0].finish_reason == "length":  # arguments of the clock, which may be any
                continue
            assert message.content is None
            (call,) = message.tool_calls
            arguments = json.loads(call.function.arguments)
            if call.function.name == "weather":
                assert arguments["unit"] in ("C", "F")
                assert len(arguments["city"]) <= 6
            else:
                assert choice == "required"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("parallel", [False, True])
def test_a_grammar_of_calls_or_an_answer_accepts_both(form: ToolFormat, parallel: bool) -> None:
    schema = {"properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}
    body = {"prompt": "", "response_format": {"type": "json_object", "schema": schema}}
    answer = answer_form(CompletionRequest.model_validate(body))
    city = {"properties": {"city": {"$ref": "#/$defs/city"}, "near": {"$ref": "#"}}, "required": ["city"]}
    function = {"name": "weather", "parameters": {**city, "$defs": {"city": {"enum": ["Oslo"]}}}}
    tools = [Tool.model_validate(tool) for tool in (CLOCK, {"function": function})]
    source = call_form(form, tools, parallel, demo_tokenizer(), answer).source
    begin, end = {HERMES: ("<tool_call>\n", "\n</tool_call>"), MISTRAL: ("[TOOL_CALLS][", "]"), LLAMA: ("", "")}[form]
    call = lambda arguments: f'{begin}{{"name": "weather", "{form.arguments}": {arguments}}}{end}'  # noqa: E731
    assert accepts(source, '{"name": "weather", "age": 3}')
    assert accepts(source, '{"name": "Bob", "age": 3}')
    assert accepts(source, call('{"city": "Oslo", "near": {"city": "Oslo"}}'))
    assert accepts(source, call("{}").replace("weather", "clock"))
    assert not accepts(source, '{"name": "Bob"}')
    assert not accepts(source, call('{"city": "Bern"}'))
    assert not accepts(source, call('{"city": "Oslo"}').replace("weather", "Bob"))


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ('{"name": "Bob", "age": 3}', False),
        ('{"name": "weather", "age": 3}', False),
        ('{"name": "weather", "parameters": {"city": "Oslo", "unit": "C"}}', True),
    ],
)
def test_an_answer_with_a_name_is_no_call(text: str, called: bool) -> None:
    tokens = demo_tokenizer().encode(text)
    form: Any = {"type": "json_object"}
    with serving(lambda: FakeEngine(lambda request: tokens, max_model_len=1024), template=TEMPLATES["llama"]) as server:
        for options in ({}, {"response_format": form}):
            message = server.client.chat.completions.create(
                model="base", messages=ASK, tools=[WEATHER], temperature=0, **options
            ).choices[0].message  # fmt: skip
            assert bool(message.tool_calls) is called
            assert message.content == (None if called else text)


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (None, {"tools": [WEATHER]}, "no tools"),
        ("{{ tools }}" + TURNS, {"tools": [WEATHER]}, "not known here"),
        (TEMPLATES["hermes"], {"tool_choice": "required"}, "no 'tools'"),
        (TEMPLATES["hermes"], {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "There is no tool 'x'"),
        (TEMPLATES["hermes"], {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        (TEMPLATES["hermes"], {"tools": [{"type": "web_search"}]}, "tools"),
        (TEMPLATES["hermes"],
         {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "none"}}}],
          "tool_choice": "required"}, "cannot be used"),
        (TEMPLATES["hermes"], {"functions": [{"name": "f"}]}, "'functions' is not supported"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_used_are_refused(template: str | None, options: dict[str, Any], message: str) -> None:
    with serving(template=template) as server, pytest.raises(BadRequestError, match=message):
        server.client.chat.completions.create(model="base", messages=ASK, extra_body=options)
