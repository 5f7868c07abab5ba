"""Requests that nobody thought of: no fault of the server, and no hang.

WGPU_LORA_REQUESTS: how many are sent, by default 300.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.rows.tool_templates import HERMES_TEMPLATE
from support.serving.serving import FakeEngine, Serving, serving

from wgpu_lora.infer.serve import schema

COUNT = int(os.environ.get("WGPU_LORA_REQUESTS", "300"))
PATHS = {
    "/v1/chat/completions": schema.ChatRequest,
    "/v1/completions": schema.CompletionRequest,
    "/v1/responses": schema.ResponsesRequest,
    "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest,
    "/v1/load_lora_adapter": schema.LoadAdapter,
    "/v1/unload_lora_adapter": schema.UnloadAdapter,
}
TEXT = st.one_of(st.text(max_size=20), st.sampled_from(["base", "tuned", "x", "[TOOL_CALLS]", "<tool_call>", "(a|b)+"]))
SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 30),
    st.integers(),
    st.floats(),
    TEXT,
    st.sampled_from([2**31, 2**63, -(2**70)]),
)
ANY = st.recursive(
    SCALAR, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)), max_leaves=6
)
SCHEMA = st.recursive(
    st.sampled_from(
        [{}, True, {"type": "string"}, {"type": "integer"}, {"enum": [1, "a"]}, {"$ref": "#"}, {"type": 5}]
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.integers(-1, 3)}),
        st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(TEXT, inner, max_size=3)}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, max_size=3), "not": inner}, optional={"properties": ANY}),
        st.fixed_dictionaries({"oneOf": ANY}, optional={"pattern": ANY, "patternProperties": ANY, "required": ANY}),
    ),
    max_leaves=5,
)
CALL = st.fixed_dictionaries({"id": TEXT, "function": st.fixed_dictionaries({"name": TEXT, "arguments": ANY})})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "other"])},
    optional={
        "content": st.one_of(TEXT, st.none(), st.just([{"type": "text", "text": "a"}]), ANY),
        "tool_calls": st.lists(CALL, max_size=2),
        "reasoning_content": TEXT,
    },
)
TOOL = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": st.sampled_from(["f", "g", "a b"])},
                                                                    optional={"parameters": SCHEMA})}
)  # fmt: skip
ITEM = st.one_of(
    MESSAGE,
    st.fixed_dictionaries(
        {"type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "item_reference"])},
        optional={"id": ANY, "call_id": ANY, "name": ANY, "arguments": ANY, "output": ANY, "role": ANY, "content": ANY,
                  "summary": ANY},
    ),
)  # fmt: skip
# Values that are often right; any other may come instead.
RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(MESSAGE, min_size=1, max_size=3),
    "prompt": st.one_of(TEXT, st.lists(TEXT, max_size=3), st.lists(st.integers(0, 4200), max_size=5)),
    "tokens": st.lists(st.integers(0, 4200), max_size=5),
    "model": st.sampled_from(["base", "tuned", None]),
    "n": st.integers(1, 3),
    "input": st.one_of(TEXT, st.lists(ITEM, min_size=1, max_size=4)),
    "max_output_tokens": st.integers(1, 12),
    "text": st.builds(lambda s: {"format": {"type": "json_schema", "name": "x", "schema": s}}, SCHEMA),
    "max_tokens": st.integers(1, 12),
    "max_completion_tokens": st.integers(1, 12),
    "tools": st.lists(TOOL, max_size=2),
    "tool_choice": st.sampled_from(["auto", "none", "required", {"function": {"name": "f"}}]),
    "response_format": st.one_of(
        st.just({"type": "json_object"}),
        st.builds(lambda s: {"type": "json_schema", "json_schema": {"schema": s}}, SCHEMA),
    ),
    "structured_outputs": st.one_of(st.builds(lambda s: {"json": s}, SCHEMA), st.just({"regex": "a+"})),
    "guided_json": SCHEMA,
    "guided_regex": st.one_of(TEXT, st.from_regex(r"[a-c(|)*+?\[\]{}0-9]{1,12}")),
    "guided_choice": st.lists(TEXT, max_size=3),
    "guided_grammar": st.one_of(TEXT, st.just('start: "a" start | "b"')),
    "lora": st.lists(st.fixed_dictionaries({"id": st.integers(0, 3)}), max_size=2),
    "logprobs": st.one_of(st.booleans(), st.integers(0, 5)),
    "temperature": st.floats(0, 2),
    "stop": st.one_of(TEXT, st.lists(TEXT, max_size=2)),
    "stream_options": st.just({"include_usage": True}),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["enable_thinking", "template_date", "x"]), ANY, max_size=2
    ),
    "logit_bias": st.dictionaries(st.integers(0, 4200).map(str), st.floats(-100, 100), max_size=2),
    "lora_name": st.sampled_from(["tuned", "gone"]),
    "lora_path": st.sampled_from(["/", ".", "\0", "none"]),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(list(PATHS)))
    fields = {info.alias or name: info.is_required() for name, info in PATHS[path].model_fields.items()}
    body: dict[str, Any] = {}
    optional = draw(st.sets(st.sampled_from([*fields, *schema.NEUTRAL]), max_size=5))
    for name in {*optional, *(name for name, required in fields.items() if required)}:
        right = RIGHT.get(name, SCALAR)
        body[name] = draw(right if draw(st.integers(0, 9)) else ANY)
    if "completions" in path and draw(st.integers(0, 9)) != 0:
        body["max_tokens"] = draw(RIGHT["max_tokens"])
    return path, body


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(lambda: FakeEngine(max_model_len=600), template=HERMES_TEMPLATE, allow_runtime_lora=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@settings(max_examples=COUNT, deadline=None, suppress_health_check=list(HealthCheck), derandomize="CI" in os.environ)
@given(requests())
def test_no_request_is_a_fault(server: Serving, client: httpx.Client, request: tuple[str, dict[str, Any]]) -> None:
    path, body = request
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    assert "a fault of its own" not in answer.text
    assert client.get("/health").status_code == 200
