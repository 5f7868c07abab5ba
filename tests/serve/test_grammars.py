"""Answers that follow a schema, a regex or a grammar, and hostile ones, which end in bounded time."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import date
from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from support.rows.tool_templates import HERMES_TEMPLATE
from support.serving.serving import VOCAB, accepts, demo_tokenizer, serving

from wgpu_lora.errors import UserError
from wgpu_lora.infer.serve.grammars import MAX_TEXT, Vocabulary, answer_form, choice_grammar
from wgpu_lora.infer.serve.json_schemas import MAX_CHECKS, SchemaChecker, grammar_from, grammar_schema
from wgpu_lora.infer.serve.schema import CompletionRequest

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["a", "b"]},
        "sizes": {"type": "array", "items": {"$ref": "#/$defs/size"}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
    "$defs": {"size": {"type": "integer", "minimum": 0, "maximum": 99}},
}


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_follows_its_schema(client: OpenAI, seed: int) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model="base", messages=ASK, response_format=form, seed=seed, temperature=1.5, n=2
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content or "")
        assert list(value) == ["name", "kind", "sizes"]
        assert len(value["name"]) <= 8
        assert value["kind"] in ("a", "b")
        assert all(0 <= size <= 99 for size in value["sizes"])
        assert len(value["sizes"]) <= 3


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"guided_regex": r"[a-c]{3}-\d{2,4}"}, r"[a-c]{3}-\d{2,4}"),
        ({"structured_outputs": {"regex": "(yes|no)!"}}, "(yes|no)!"),
        ({"guided_choice": ["red", "gr\"een\n", "→"]}, 'red|gr"een\n|→'),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"guided_grammar": 'start: "a" b+\nb: "b" | "c"'}, "a[bc]+"),
        ({"guided_json": {"enum": [1, "x", None]}}, '1|"x"|null'),
        ({"guided_json": '{"const": {"a": [1, 2]}}'}, r'\{"a": \[1, 2\]\}'),
    ],
)  # fmt: skip
def test_answers_follow_every_form(client: OpenAI, body: dict[str, Any], expected: str) -> None:
    for seed in range(3):
        answer = client.completions.create(model="base", prompt="x", seed=seed, max_tokens=200, extra_body=body)
        if answer.choices[0].finish_reason == "stop":
            assert re.fullmatch(expected, answer.choices[0].text)
        else:
            assert expected == "a[bc]+"
            assert re.fullmatch(expected, answer.choices[0].text)


def test_json_objects(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="base", messages=ASK, response_format={"type": "json_object"}, seed=0, max_tokens=200
    )
    assert (answer.choices[0].message.content or "").startswith("{")
    if answer.choices[0].finish_reason == "stop":
        json.loads(answer.choices[0].message.content or "")


def nested(depth: int) -> Any:
    return {"type": "array", "items": nested(depth - 1)} if depth else {}


HOSTILE: dict[str, dict[str, Any]] = {
    "text": {"guided_regex": "a" * (MAX_TEXT + 1)},
    "parentheses": {"guided_regex": "(" * 9000 + ")" * 9000},
    "no regex": {"guided_regex": "("},
    "backreference": {"guided_regex": r"(a)\1"},
    "unknown rule": {"guided_grammar": "start: other"},
    "no grammar": {"guided_grammar": "\0"},
    "types": {"guided_json": {"type": "nothing"}},
    "nothing": {"guided_json": False},
    "no list": {"guided_json": {"allOf": 5}},
    "names": {
        "guided_json": {
            "$defs": {"a": {"properties": {f"k{i}": {} for i in range(2000)}}},
            "anyOf": [{"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}] * 1000,
        }
    },
    "no json": {"guided_json": "{"},
    "dangling": {"guided_json": {"$ref": "#/$defs/none"}},
    "remote": {"guided_json": {"$ref": "https://example.org/schema.json"}},
    "products": {
        "guided_json": {
            "allOf": [
                {"anyOf": [{"properties": {f"k{i}{k}": {"type": "string"}}} for k in range(6)]} for i in range(14)
            ]
        }
    },
    "several": {"guided_regex": "a", "guided_json": {}},
    "no choice": {"guided_choice": []},
    "no schema": {"response_format": {"type": "json_schema"}},
    "of words": {"structured_outputs": {"structural_tag": "x"}},
    "ignored end": {"guided_regex": "a", "ignore_eos": True},
}
# Wasteful, but allowed: they may end with an answer or an error.
WASTEFUL: dict[str, dict[str, Any]] = {
    "repeats": {"guided_regex": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"},
    "states": {"guided_regex": "(.*a.{12}|.*b.{13}|.*c.{14}){20}"},
    "far": {"guided_regex": ".*a.{200}b"},
    "both": {"guided_regex": "(x+x+)+y"},
    "ambiguous": {"guided_grammar": 'start: a\na: a a a | a a | "x" | "x" "x"'},
    "items": {"guided_json": {"type": "array", "minItems": 1_000_000, "items": {"type": "string"}}},
    "length": {"guided_json": {"type": "string", "minLength": 10_000_000}},
    "itself": {"guided_json": {"$ref": "#"}},
    "depth": {"guided_json": nested(60)},
    "enum": {"guided_json": {"enum": [f"{i:08}" for i in range(10_000)]}},
    "properties": {"guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}},
    "pattern": {"guided_json": {"type": "string", "pattern": "^(([a-z]+)*[0-9]?)*$"}},
    "unicode": {"guided_regex": r"[\w\p{L}\p{N}]{5000}"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_and_hostile_grammars_are_refused(client: OpenAI, name: str) -> None:
    begin = time.monotonic()
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model="base", prompt="x", extra_body=HOSTILE[name])
    assert time.monotonic() - begin < 5
    body: Any = caught.value.body
    assert body["type"] == "invalid_request_error"
    assert len(body["message"]) < 500


@pytest.mark.parametrize("name", WASTEFUL)
def test_wasteful_grammars_end_in_bounded_time(client: OpenAI, name: str) -> None:
    begin = time.monotonic()
    with suppress(BadRequestError):
        client.completions.create(model="base", prompt="x", max_tokens=40, seed=1, extra_body=WASTEFUL[name])
    assert time.monotonic() - begin < 20


def test_a_grammar_beyond_its_limits_allows_the_end_alone_and_says_so() -> None:
    tokenizer = demo_tokenizer()
    grammar = Vocabulary(tokenizer, VOCAB).compile(
        answer_form(CompletionRequest(prompt="", guided_regex="ab")).source or ""
    )
    words = np.zeros((VOCAB + 31) // 32, np.uint32)
    wrong = tokenizer.encode("z")[0]
    grammar.accept(wrong)
    grammar.fill_mask(words)
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert set(allowed) == set(tokenizer.stop_ids)
    assert grammar.error


def test_masks_allow_exactly_the_tokens_that_continue() -> None:
    tokenizer = demo_tokenizer()
    vocabulary = Vocabulary(tokenizer, VOCAB)
    source = answer_form(CompletionRequest(prompt="", guided_choice=["abc", "abd"])).source
    grammar = vocabulary.compile(source or "")
    words = np.zeros((VOCAB + 31) // 32, np.uint32)
    grammar.fill_mask(words)
    allowed = set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")))
    texts = {token: vocabulary.bytes_of(token) for token in range(VOCAB) if token not in tokenizer.special_ids}
    assert allowed == {t for t, text in texts.items() if text and (b"abc".startswith(text) or b"abd".startswith(text))}


def test_texts_of_choices_may_be_anything() -> None:
    with pytest.raises(UserError, match="no text to choose"):
        choice_grammar([])


# -- closed objects, and what no grammar holds -------------------------------------------------------------------------

OPEN: Any = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": True}
INHERITED: Any = {
    "$defs": {"base": {"type": "object", "properties": {"a": {"enum": [1]}, "me": {"$ref": "#/$defs/base"}}}},
    "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"enum": [2]}}, "required": ["b"]}],
    "required": ["a"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "strict", "valid", "invalid"),
    [
        (SCHEMA["properties"], False, {"x": 1}, None),  # no keyword that it knows
        ({"properties": {"a": {}}}, False, {"a": [1]}, {"a": 1, "z": 1}),
        ({"properties": {"a": {"properties": {"b": {}}}}}, False, {"a": {"b": 1}}, {"a": {"z": 1}}),
        (OPEN, False, {"a": 1, "z": 2}, {"a": 2}),
        (OPEN, True, {"a": 1}, {"a": 1, "z": 2}),
        ({"type": "object"}, False, {"z": {"y": 1}}, 5),
        ({"type": "object"}, True, {}, {"z": 1}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, True, {"z": 1}, {"z": "x"}),
        ({"type": "object", "properties": {}, "required": ["z"]}, False, {"z": 1}, {"z": 1, "y": 1}),
        (INHERITED, False, {"a": 1, "b": 2}, {"a": 1, "b": 2, "z": 3}),
        (INHERITED, False, {"a": 1, "me": {"a": 1}, "b": 2}, {"a": 1, "me": {"z": 1}, "b": 2}),
        ({"anyOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}, "required": ["b"]}]}, False,
         {"b": 1}, {"b": 1, "z": 1}),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"properties": {"b": {}}, "required": ["b"]}]}, False,
         {"a": 1, "b": 1}, {"z": 1}),
        ({"type": ["object", "null"], "properties": {"a": {}}}, False, None, {"z": 1}),
        ({"type": "array", "items": {"properties": {"a": {}}}}, False, [{"a": 1}], [{"z": 1}]),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, False, {"a": 1}, {"z": 1}),
        ({"properties": {"k": {}}, "if": {}, "then": {"properties": {"v": {}}, "required": ["v"]}}, False,
         {"k": 1, "v": 2}, {"z": 1}),
        (True, False, [{"z": 1}], None),
        ({}, True, "x", None),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, False, 1.5, "x"),
        ({"not": {"type": "string"}, "enum": [1, "x"]}, False, 1, 2),
        ({"type": "string", "format": "binary"}, False, "x", 1),
        ({"type": "string", "pattern": "^(?!x)[a-z]+$"}, False, "x", 1),
        ({"type": "object", "patternProperties": {"^(?=a)": {"type": "integer"}, "^b$": {"type": "integer"}}}, False,
         {"b": 1}, {"b": "x"}),
    ],
)  # fmt: skip
def test_objects_have_what_their_schemas_name(schema: Any, strict: bool, valid: Any, invalid: Any) -> None:
    body = CompletionRequest.model_validate(
        {"prompt": "", "response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}}
    )
    source = answer_form(body).source
    assert accepts(source, json.dumps(valid))
    assert invalid is None or not accepts(source, json.dumps(invalid))


TO_ITSELF: Any = {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        *[({key: 5}, f"'{key}' must be") for key in ("properties", "$defs", "allOf", "anyOf", "then", "$ref")],
        *[({"items": {key: [[5]]}}, f"'{key}' must be") for key in ("oneOf", "required", "prefixItems")],
        ({"$ref": "#/$defs/a", "properties": {}, "$defs": {"a": {"properties": {"b": 5}}}}, "'properties' must be"),
        ("[1]", "must be an object"),
        ({"$ref": "#"}, "to itself"),
        ({"properties": {"x": {"$ref": "#/properties/x"}}}, "to itself"),
        (TO_ITSELF, "to itself"),
        ({"properties": {"x": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}}, None),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}, None),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_schema_is_named(schema: Any, part: str | None) -> None:
    body = CompletionRequest.model_validate({"prompt": "", "guided_json": schema})
    with pytest.raises(UserError, match=re.escape(part)) if part else nullcontext():
        answer_form(body)


def test_a_json_object_follows_its_schema(client: OpenAI) -> None:
    form: Any = {"type": "json_object", "schema": {"properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}}
    answer = client.chat.completions.create(model="base", messages=ASK, response_format=form)
    assert json.loads(answer.choices[0].message.content or "") in ({"n": 1}, {"n": 2})


@pytest.mark.parametrize("pattern", [{}, {"pattern": "[0-9]"}])
@pytest.mark.parametrize("year", ["0000", "0001", "0100", "0400", "1900", "2000", "2023", "2024", "6245", "9996"])
def test_dates_and_times_are_those_of_the_calendar(year: str, pattern: dict[str, str]) -> None:
    def follows(name: str, text: str) -> bool:
        return accepts(
            grammar_from(grammar_schema({"type": "string", "format": name, **pattern}, True)[0]), f'"{text}"'
        )

    for day in ("01-31", "02-01", "02-28", "02-29", "02-30", "04-31", "10-01", "12-31"):
        try:
            exists = bool(date.fromisoformat(f"{year}-{day}"))
        except ValueError:
            exists = False
        assert follows("date", f"{year}-{day}") == exists
        assert follows("date-time", f"{year}-{day}T23:59:59.5+01:00") == exists
    assert [follows("time", text) for text in ("23:59:59Z", "23:59:60Z")] == [True, False]
    assert [follows("duration", text) for text in ("P1Y2M3DT300H4M5S", "P2W", "P1234567Y")] == [True, True, False]


UNHELD: dict[str, tuple[Any, str, Any]] = {
    "unique": ({"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2, "uniqueItems": True},
               "uniqueItems", False),
    "not": ({"enum": [1], "not": {"type": "string"}}, "not", True),
    "held format": ({"enum": ["2020-01-01"], "format": "date"}, "", None),
    "other format": ({"enum": ["x"], "anyOf": [{"type": "string", "format": "color"}]}, "format", True),
    "overlap": ({"oneOf": [{"enum": [1]}, {"type": "integer"}], "enum": [1]}, "oneOf", False),
    "condition": ({"enum": [1], "if": {"type": "integer"}, "then": {"minimum": 2}}, "if, then", False),
    "pattern": ({"enum": ["ab"], "allOf": [{"type": "string", "pattern": "^(?!a)"}]}, "pattern", False),
    "slow pattern": ({"enum": ["a" * 40 + "b"], "not": {"pattern": "^(a+)+$"}}, "not", None),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", UNHELD)
def test_what_a_grammar_leaves_out_is_named_and_checked(client: OpenAI, name: str, stream: bool) -> None:
    schema, names, valid = UNHELD[name]
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    raw = client.chat.completions.with_raw_response.create(
        model="base", messages=ASK, **options,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )  # fmt: skip
    assert raw.headers.get("x-not-enforced", "") == names
    parsed: Any = raw.parse()
    last = list(parsed)[-1] if stream else parsed
    checks = last.model_dump().get("schema_check")
    if not names:
        assert checks is None
    else:
        (check,) = checks
        assert (check["index"], check["valid"], check["error"] is None) == (0, valid, valid is True)


def test_arguments_of_forced_calls_are_checked_too() -> None:
    parameters = {"properties": {"a": UNHELD["unique"][0]}, "required": ["a"]}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with serving(template=HERMES_TEMPLATE) as server:
        raw = server.client.chat.completions.with_raw_response.create(
            model="base", messages=ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False
        )
        empty: Any = {"type": "function", "function": {"name": "g"}}
        (call,) = server.client.chat.completions.create(
            model="base", messages=ASK, tools=[empty], tool_choice="required", parallel_tool_calls=False
        ).choices[0].message.tool_calls or []  # fmt: skip
    assert raw.headers["x-not-enforced"] == "uniqueItems"
    check = raw.parse().model_dump()["schema_check"]
    assert [entry["valid"] for entry in check] == [False]
    assert json.loads(call.function.arguments) == {}  # type: ignore[union-attr]


def test_checks_that_wait_are_few_stop_nothing_else_and_end_with_their_client(monkeypatch: pytest.MonkeyPatch) -> None:
    release, asked = threading.Event(), list[int]()

    def wait(_: Any, choices: Any) -> list[tuple[bool, None]]:
        asked.append(len(choices))
        release.wait(60)
        return [(True, None)] * len(choices)

    monkeypatch.setattr(SchemaChecker, "_ask", wait)
    body: dict[str, Any] = {"prompt": "x", "guided_json": UNHELD["unique"][0], "max_tokens": 1}
    with serving() as server, ThreadPoolExecutor(60) as pool:
        checker, url = server.service._checker, f"{server.url}/v1/completions"

        def until(condition: Callable[[], bool]) -> None:
            end = time.monotonic() + 30
            while not condition() and time.monotonic() < end:
                time.sleep(0.01)
            assert condition()

        def post(timeout: float = 60, **more: Any) -> Any:
            return httpx.post(url, json={**body, **more}, timeout=timeout).json().get("schema_check")

        try:
            first = pool.submit(post, n=3)
            until(lambda: checker._count == 1)
            for stream in (False, True):
                with pytest.raises(httpx.TimeoutException):
                    post(0.5, stream=stream)
                until(lambda: checker._count == 1)
            checks = [pool.submit(post) for _ in range(50)]
            until(lambda: sum(check.done() for check in checks) == 50 - MAX_CHECKS)
            assert httpx.post(url, json={"prompt": "x", "guided_regex": "ab"}, timeout=20).json()["choices"]
        finally:
            release.set()
        assert [check["valid"] for check in first.result()] == [True] * 3
        values = [check.result()[0]["valid"] for check in checks]
        assert sorted(values, key=str) == [None] * (50 - MAX_CHECKS) + [True] * MAX_CHECKS
        assert asked == [3] + [1] * MAX_CHECKS
