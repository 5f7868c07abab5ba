"""Fields of requests: what they change, what is refused, and how an error names them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from support.rows.tool_templates import HERMES_TEMPLATE, TEMPLATES, TURNS
from support.serving.serving import FakeEngine, Serving, demo_tokenizer, serving

from wgpu_lora.infer.named_adapters import named_adapters
from wgpu_lora.infer.serve.app import Access
from wgpu_lora.infer.serve.choices import ReasoningParser

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
TOKENIZER = demo_tokenizer()
END = max(TOKENIZER.stop_ids)
THINKS = "{# <think></think> {{ reasoning_effort }} #}" + TURNS.replace("CALLS", "")
OPENS = THINKS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}}}  # fmt: skip


def saying(text: str, **options: Any) -> FakeEngine:
    return FakeEngine(script=lambda request: TOKENIZER.encode(text), **options)


@pytest.fixture(scope="module")
def posted(server: Serving) -> Iterator[Any]:
    with httpx.Client(base_url=server.url) as client:
        yield lambda path, **body: client.post(path, json=body)


@pytest.mark.parametrize(
    ("path", "body", "place", "part"),
    [
        ("completions", {"stream_options": {"include_usage": True}}, None, "'stream'"),
        ("chat/completions", {"stream_options": {"include_usage": True}}, None, "'stream'"),
        ("completions", {"seed": 2**64}, "seed", "less than"),
        ("completions", {"seed": -(2**63) - 1}, "seed", "greater than"),
        ("completions", {"prompt": [True, False]}, "prompt[0]", "boolean"),
        *[("completions", {"prompt": mix}, "prompt", "mixed") for mix in (["a", [1, 2]], [1, "a"], [[1], 2])],
        ("completions", {"prompt": [[1, "a"]]}, "prompt[0][1]", "integer"),
        ("completions", {"stop_token_ids": [True]}, "stop_token_ids[0]", "boolean"),
        ("completions", {"lora": [{"id": True}]}, "lora[0].id", "boolean"),
        ("completions", {"temperature": True}, "temperature", "boolean"),
        ("completions", {"logit_bias": {"5": True}}, "logit_bias.5", "boolean"),
        ("completions", {"repeat_penalty": 1.3}, None, "'repeat_penalty'"),
        ("completions", {"max_token": 3}, None, "'max_token'"),
        ("completions", {"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
        ("completions", {"allowed_token_ids": [9999]}, None, "4,099"),
        ("completions", {"allowed_token_ids": [5], "guided_regex": "a"}, None, "'allowed_token_ids'"),
        ("completions", {"min_tokens": 5, "max_tokens": 4}, "min_tokens", "lower"),
        ("completions", {"truncate_prompt_tokens": 0}, None, "at least 1"),
        *[
            ("chat/completions", {"response_format": {"type": kind, **fields}}, "response_format", next(iter(fields)))
            for kind, fields in (
                ("json_object", {"json_schema": {}}), ("json_schema", {"schema": {}, "json_schema": {}}),
                ("text", {"schema": True}), ("text", {"json_schema": {}}),
            )
        ],
        ("completions", {"structured_outputs": {"json": 5}}, "structured_outputs.json", "Input"),
        ("chat/completions", {"echo": True}, None, "'echo'"),
        ("chat/completions", {"messages": [5]}, "messages[0]", "object"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens", "greater than"),
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
         "response_format.json_schema.schema", "Input"),
        ("chat/completions", {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name",
         "required"),
        ("completions", {"model": "tuned", "lora": []}, "lora", "both"),
        ("completions", {"model": "tuned", "lora": [{"id": 0, "scale": 0}]}, "lora", "both"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_as_in_json(posted: Any, path: str, body: Any, place: str | None, part: str) -> None:
    own = {"prompt": "x"} if path == "completions" else {"messages": ASK}
    answer = posted(f"/v1/{path}", **{**own, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, place)
    assert part in error["message"]
    assert place is None or place.split(".")[0] in error["message"]


def test_fields_that_change_nothing_are_allowed(posted: Any) -> None:
    more = {"user": "u", "store": True, "metadata": {"a": "b"}, "best_of": 1, "repeat_penalty": 1.0, "unknown": None,
            "seed": 2**64 - 1, "stream_options": None, "lora": []}  # fmt: skip
    assert posted("/v1/completions", prompt="x", max_tokens=1, **more).status_code == 200
    tool = {"type": "function", "function": {"name": "f", "extra": 1}, "cache_control": {}}
    messages = [*ASK, {"role": "assistant"}, {"role": "assistant", "content": None, "refusal": None}, *ASK]
    with serving(template=HERMES_TEMPLATE) as server:
        body = {"messages": messages, "tools": [tool], "max_tokens": 1, "echo": False}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200


def test_fields_of_training_in_messages_are_ignored(posted: Any) -> None:
    plain = posted("/tokenize", messages=ASK).json()
    fields = {"weight": 0, "loss_mask": 1, "train": "no", "token_weights": [1, 0], "trainable": False}
    assert posted("/tokenize", messages=[{**ASK[0], **fields}]).json() == plain
    assert posted("/tokenize", messages=[{**ASK[0], "images": ["x"]}]).status_code == 400


def test_models_and_answers_have_their_fields(server: Serving, client: OpenAI) -> None:
    assert client.models.retrieve("tuned").model_dump()["parent"] == "base"
    assert httpx.get(f"{server.url}/v1/models/no/such").status_code == 404
    chat = client.chat.completions.create(model="base", messages=ASK, max_tokens=1)
    text = client.completions.create(model="base", prompt="x", max_tokens=1)
    assert chat.system_fingerprint == text.system_fingerprint
    assert (chat.system_fingerprint or "").startswith("fp_")
    wrong = httpx.get(f"{server.url}/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    description = httpx.get(f"{server.url}/openapi.json").json()
    schemas, paths = description["components"]["schemas"], description["paths"]
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert schemas["ChatRequest"]["properties"]["messages"]["items"]["required"] == ["role"]
    assert schemas["TokenizeRequest"]["oneOf"] == [{"required": ["prompt"]}, {"required": ["messages"]}]
    assert paths["/v1/models/{model}"]["get"]["parameters"][0]["required"]


def test_keys_and_addresses_are_read_as_http_has_them() -> None:
    with serving(access=Access("secret", ("127.0.0.1", "localhost", "::1"))) as server:

        def status(scheme: str = "Bearer", host: str = "localhost") -> int:
            headers = {"Authorization": f"{scheme} secret", "Host": host}
            return httpx.get(f"{server.url}/v1/models", headers=headers).status_code

        assert {status(scheme) for scheme in ("Bearer", "bearer", "BEARER")} == {200}
        assert status("Basic") == 401
        for host in ("localhost.", "LOCALHOST:80", "[::1]", "[::1]:8000", "127.0.0.1:1", "localhost.:80"):
            assert status(host=host) == 200, host
        for host in ("localhost.example", "::1.example", "[::2]", "a:b:80", "example.", "localhost..", "[::1].example"):
            assert status(host=host) == 403, host


def test_two_names_may_be_of_one_adapter(tmp_path: Path) -> None:
    assert named_adapters([f"a={tmp_path}", f"b={tmp_path}"], aliases=True) == {"a": tmp_path, "b": tmp_path}


# -- lengths and stops -------------------------------------------------------------------------------------------------


def test_an_answer_has_at_least_min_tokens() -> None:
    with serving(lambda: FakeEngine(max_model_len=512)) as server:

        def answer(**body: Any) -> Any:
            body = {"prompt": "x", "max_tokens": 60, "temperature": 2, "seed": 1, "return_token_ids": True, **body}
            return httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]

        bias = {str(END): 100}
        assert answer(logit_bias=bias)["token_ids"] == [END]
        ids = answer(logit_bias=bias, min_tokens=7)["token_ids"]
        assert (len(ids), ids[-1], END in ids[:-1]) == (8, END, False)
        assert len(answer(logit_bias=bias, min_tokens=7, guided_choice=["ab"])["text"]) == 2  # a grammar's end counts
        assert set(answer(allowed_token_ids=[300, 301], max_tokens=30)["token_ids"]) == {300, 301}
    with serving(lambda: saying("ab ab ab ab")) as server:
        size = len(TOKENIZER.encode("ab ab"))
        body = {"prompt": "x", "stop": "ab", "max_tokens": 60}
        assert httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"] == ""
        text = httpx.post(f"{server.url}/v1/completions", json={**body, "min_tokens": size}).json()["choices"][0][
            "text"
        ]
        assert text == "ab ab "


@pytest.mark.parametrize("stream", [False, True])
def test_stops_and_special_tokens_are_shown_if_asked_for(stream: bool) -> None:
    with serving(lambda: saying("a<|im_start|>b, c")) as server:

        def text(**body: Any) -> str:
            options: Any = {"model": "base", "prompt": "x", "max_tokens": 60, "extra_body": body, "stream": stream}
            answer = server.client.completions.create(**options)
            return "".join(chunk.choices[0].text for chunk in (answer if stream else [answer]))

        end = TOKENIZER.decode([END], False)
        assert text() == "ab, c"
        assert text(skip_special_tokens=False) == "a<|im_start|>b, c"
        assert text(include_stop_str_in_output=True) == "ab, c"
        assert text(include_stop_str_in_output=True, skip_special_tokens=False) == f"a<|im_start|>b, c{end}"
        assert text(include_stop_str_in_output=True, stop=[","]) == "ab,"
        assert text(stop=[","]) == "ab"


# -- reasoning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inside", "text", "expected"),
    [
        (False, "<think>\nWell.\n\n</think>\n\nYes\n", ("Well.", "Yes\n")),
        (False, "\n<think>a</think>b", ("a", "b")),
        (True, "\nWell.\n</think>\n\nYes", ("Well.", "Yes")),
        (True, "never ends", ("never ends", "")),
        (False, "No <think> here</think>", ("", "No <think> here</think>")),
        (False, " plain ", ("", " plain ")),
        (False, "<thin", ("", "<thin")),
        (False, "<think></think>x", ("", "x")),
        (True, "a\n\nb</thinking></think>c</think>", ("a\n\nb</thinking>", "c</think>")),
        (True, "</think>\n", ("", "")),
        (False, "", ("", "")),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_reasoning_is_the_same_in_any_pieces(inside: bool, text: str, expected: tuple[str, str], size: int) -> None:
    parser = ReasoningParser(("<think>", "</think>"), inside)
    pairs = [parser.push(text[at : at + size]) for at in range(0, len(text), size)] + [parser.push("", True)]
    assert ("".join(pair[0] for pair in pairs), "".join(pair[1] for pair in pairs)) == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("template", "text"), [(THINKS, "<think>\nHm.\n</think>\n\nYes"), (OPENS, "Hm.\n</think>\n\nYes")]
)
def test_reasoning_is_apart_where_the_template_marks_it(template: str, text: str, stream: bool) -> None:
    with serving(lambda: saying(text), template=template) as server:
        response: Any = server.client.chat.completions.create(model="base", messages=ASK, stream=stream)
        parts = [chunk.choices[0].delta for chunk in response] if stream else [response.choices[0].message]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(getattr(part, name, None) or "" for part in parts) == "Hm."
        assert "".join(part.content or "" for part in parts) == "Yes"
        if not stream:
            assert response.usage.completion_tokens_details.reasoning_tokens > 0
    with serving(lambda: saying(text)) as server:
        plain: Any = server.client.chat.completions.create(model="base", messages=ASK).choices[0].message
        assert (plain.content, hasattr(plain, "reasoning")) == (text, False)


def test_reasoning_that_the_template_opens_ends_before_a_grammar() -> None:
    prompts: list[str] = []
    with serving(
        lambda: FakeEngine(script=lambda r: prompts.append(TOKENIZER.decode(r.prompt, False))), template=OPENS
    ) as s:
        answer = s.client.chat.completions.create(model="base", messages=ASK, extra_body={"guided_choice": ["ab"]})
    assert answer.choices[0].message.content == "ab"
    assert prompts[0].endswith("<think>\n\n</think>\n\n")


def test_effort_and_verbosity_reach_the_template() -> None:
    template = "{{ reasoning_effort }},{{ enable_thinking }}" + TURNS.replace("CALLS", "")
    with serving(template=template) as server:

        def tokenize(**body: Any) -> str:
            ids = httpx.post(f"{server.url}/tokenize", json={"messages": ASK, **body}).json()["tokens"]
            return TOKENIZER.decode(ids, False).partition("<")[0]

        assert tokenize(reasoning_effort="high") == "high,"
        assert tokenize(reasoning_effort="none") == "none,False"
        assert tokenize(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) == "none,True"
        options: Any = {"model": "base", "messages": ASK, "max_tokens": 1, "reasoning_effort": "low"}
        create = server.client.chat.completions.with_raw_response.create
        assert "x-not-enforced" not in create(**options).headers
        assert create(**options, verbosity="low").headers["x-not-enforced"] == "verbosity"


# -- calls of tools ----------------------------------------------------------------------------------------------------


def call(city: str, name: str = "weather", key: str = "arguments") -> str:
    return json.dumps({"name": name, key: {"city": city}})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", ["hermes", "mistral"])
def test_a_forced_call_that_is_repeated_ends_the_answer(family: str, stream: bool) -> None:
    with serving(lambda: FakeEngine(max_model_len=2048), template=TEMPLATES[family]) as server:
        response: Any = server.client.chat.completions.create(
            model="base", messages=ASK, tools=[WEATHER], tool_choice="required", stream=stream, seed=3,
            logit_bias={str(END): -100},
        )  # fmt: skip
        if stream:
            chunks = [chunk.choices[0] for chunk in response]
            calls = [call for choice in chunks for call in choice.delta.tool_calls or []]
            reason = chunks[-1].finish_reason
        else:
            calls, reason = response.choices[0].message.tool_calls, response.choices[0].finish_reason
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Oslo"}]
        assert reason == "tool_calls"
        end = time.monotonic() + 10
        while server.fake.busy and time.monotonic() < end:
            time.sleep(0.01)
        assert not server.fake.busy


def test_calls_are_those_that_are_allowed() -> None:
    other = {"type": "function", "function": {"name": "clock"}}
    prompts: list[str] = []

    def script(request: Any) -> list[int]:
        prompts.append(TOKENIZER.decode(request.prompt, False))
        return TOKENIZER.encode(
            "".join(f"<tool_call>{call(*pair)}</tool_call>" for pair in (("a", "clock"), ("b",), ("c",)))
        )

    with serving(lambda: FakeEngine(script=script, max_model_len=1024), template=HERMES_TEMPLATE) as server:

        def names(**options: Any) -> list[str]:
            answer = server.client.chat.completions.create(
                model="base", messages=ASK, tools=[WEATHER, other], **options
            )
            calls: list[Any] = [*(answer.choices[0].message.tool_calls or [])]
            return [call.function.name + call.function.arguments[-3] for call in calls]

        assert names() == ["clocka", "weatherb", "weatherc"]
        assert names(parallel_tool_calls=False) == ["clocka"]
        allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "weather"}}]}}  # fmt: skip
        assert "clock" in prompts[-1]
        strict: Any = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
        raw = server.client.chat.completions.with_raw_response.create(model="base", messages=ASK, tools=[strict])
        assert raw.headers["x-not-enforced"] == "strict"
        assert names(tool_choice=allowed) == ["weatherb", "weatherc"]
        assert '"clock"' not in prompts[-1]
        allowed["allowed_tools"]["tools"][0]["function"]["name"] = "none"
        with pytest.raises(BadRequestError, match="no tool 'none'"):
            names(tool_choice=allowed)


def test_an_answer_with_a_schema_may_be_a_call() -> None:
    schema = {"properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    begin = TOKENIZER.encode("<tool_call>")[0]
    with serving(lambda: FakeEngine(max_model_len=1024), template=HERMES_TEMPLATE) as server:

        def message(**options: Any) -> Any:
            return server.client.chat.completions.create(
                model="base", messages=ASK, tools=[WEATHER], response_format=form, **options
            ).choices[0].message  # fmt: skip

        for bias in (-100, 100):
            answer = message(logit_bias={str(begin): bias}, parallel_tool_calls=False)
            assert bool(answer.tool_calls) is (bias > 0)
            assert bias > 0 or json.loads(answer.content)["n"] in (1, 2)
        assert message(tool_choice="required").tool_calls
