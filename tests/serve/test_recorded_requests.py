"""Requests that clients made by themselves, recorded between them and this server, and sent again as they are.

The clients were litellm, and Vercel's AI SDK with its providers openai and openai-compatible: answers and streams of
text, a call of a tool with its result, and objects by a schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support import FIXTURES
from support.rows.tool_templates import HERMES_TEMPLATE
from support.serving.serving import FakeEngine, Serving, demo_tokenizer, serving

LINES = (FIXTURES / "serve" / "requests.jsonl").read_text().splitlines()
TOKENIZER = demo_tokenizer()
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def script(request: Any) -> list[int] | None:
    """A call of the tool if there is one without a result, an object if there is a grammar, else a sentence."""
    prompt = TOKENIZER.decode(request.prompt, False)
    calls = "<tool_call></tool_call>" in prompt and "<|im_start|>tool" not in prompt
    return None if request.grammar else TOKENIZER.encode(CALL if calls else "It is warm.")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(lambda: FakeEngine(script=script, max_model_len=2000), template=HERMES_TEMPLATE) as running:
        yield running


@pytest.mark.parametrize("line", LINES, ids=[f"{i}-{json.loads(line)['client']}" for i, line in enumerate(LINES)])
def test_a_recorded_request_is_answered(server: Serving, line: str) -> None:
    recorded = json.loads(line)
    body = recorded["body"]
    answer = httpx.post(server.url + recorded["path"], json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        content = "".join(choice["delta"].get("content") or "" for choice in choices)
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    else:
        choice = answer.json()["choices"][0]
        message = choice.get("message") or {"content": choice["text"]}
        content, calls = message["content"], message.get("tool_calls", [])
    if body.get("response_format"):
        assert set(json.loads(content)) == {"n", "ok"}
    elif body.get("tools") and all(message["role"] != "tool" for message in body["messages"]):
        assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Oslo"}
    else:
        assert content == "It is warm."
