"""Clients as they come: openai, litellm, instructor and langchain-openai over pydantic's schemas, and npm's AI SDK."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from datetime import date, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from uuid import UUID

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field
from support.rows.tool_templates import HERMES_TEMPLATE
from support.serving.serving import VOCAB, FakeEngine, Serving, demo_tokenizer, serving

ROOT = Path(__file__).parents[2]
TOKENIZER = demo_tokenizer()
TEMPLATE = HERMES_TEMPLATE + "{# <think></think> #}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ASK: list[Any] = [{"role": "user", "content": "x"}]
CLOSERS = np.array([token for token in range(4096) if set(TOKENIZER.decode([token])) & set('"]}')])


class Color(Enum):
    RED, GREEN = "red", "green"


class Point(BaseModel):
    x: Annotated[int, Field(ge=0, le=9)]
    y: float


class Circle(BaseModel):
    kind: Literal["circle"]
    center: Point


class Square(BaseModel):
    kind: Literal["square"]
    side: Annotated[float, Field(gt=0, lt=100)]


class Node(BaseModel):
    name: Annotated[str, Field(max_length=3)]
    children: Annotated[list[Node], Field(max_length=1)]


class Plain(BaseModel):
    text: str
    whole: int
    number: float
    flag: bool


class Optionals(BaseModel):
    one: int | None
    color: Color
    default: Literal[1, "two", None] = None
    nested: Point | None = None


class Unions(BaseModel):
    shape: Annotated[Circle | Square, Field(discriminator="kind")]
    loose: int | str | list[int]


class Collections(BaseModel):
    items: Annotated[list[Point], Field(min_length=1, max_length=2)]
    pair: tuple[int, bool]
    unique: Annotated[set[Literal[1, 2, 3]], Field(max_length=2)]
    table: dict[str, int]


class Formats(BaseModel):
    day: date
    moment: datetime
    id: UUID
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}-\d{3}$")]


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    value: Annotated[int, Field(multiple_of=5, ge=0, le=50)]


MODELS = (Plain, Optionals, Unions, Collections, Formats, Closed, Node)


class Drawing(FakeEngine):
    """Draws tokens of grammars at random, but ends texts and lists soon."""

    bias: ClassVar[float] = 8.0

    @staticmethod
    def logits(tokens: list[int], adapter: str | None) -> np.ndarray:
        result = np.random.default_rng(tokens[-2:]).standard_normal(VOCAB).astype(np.float32)
        result[CLOSERS] += Drawing.bias
        result[4096:] = -np.inf
        return result


def script(request: Any) -> list[int] | None:
    """A call of the tool if there is one without a result, what a grammar allows, else a sentence."""
    prompt = TOKENIZER.decode(request.prompt, False)
    calls = "<tool_call></tool_call>" in prompt and "<|im_start|>tool" not in prompt
    return None if request.grammar else TOKENIZER.encode(CALL if calls else "<think>\nHm.\n</think>\n\nIt is warm.")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(lambda: Drawing(script=script, max_model_len=4000), template=TEMPLATE) as running:
        yield running


@pytest.mark.parametrize("model", MODELS)
def test_openai(server: Serving, model: type[BaseModel]) -> None:
    client = server.client
    chat = client.chat.completions.parse(model="base", messages=ASK, response_format=model)
    assert isinstance(chat.choices[0].message.parsed, model)
    assert isinstance(client.responses.parse(model="base", input="x", text_format=model).output_parsed, model)
    with client.chat.completions.stream(model="base", messages=ASK, response_format=model) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, model)


@pytest.mark.parametrize("model", MODELS)
def test_instructor(server: Serving, model: type[BaseModel]) -> None:
    instructor = pytest.importorskip("instructor")
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
        client = instructor.from_openai(server.client, mode=getattr(instructor.Mode, mode))
        call = client.responses.create if mode == "RESPONSES_TOOLS" else client.chat.completions.create
        question: Any = {"input": "x"} if mode == "RESPONSES_TOOLS" else {"messages": ASK}
        assert isinstance(call(model="base", response_model=model, max_retries=0, **question), model), mode


@pytest.mark.parametrize("model", MODELS)
def test_langchain(server: Serving, model: type[BaseModel]) -> None:
    chat_model = pytest.importorskip("langchain_openai").ChatOpenAI
    for responses in (False, True):
        client = chat_model(
            model="base", base_url=f"{server.url}/v1", api_key="none", max_retries=0, use_responses_api=responses
        )
        # The library's tools leave out what a recursive model refers to.
        for method in ("json_schema", *(["function_calling"] if model is not Node else [])):
            assert isinstance(client.with_structured_output(model, method=method).invoke("x"), model), method
        assert client.invoke("x").text == "".join(piece.text for piece in client.stream("x")) == "It is warm."


@pytest.mark.parametrize("model", MODELS)
def test_litellm(server: Serving, model: type[BaseModel]) -> None:
    litellm = pytest.importorskip("litellm")
    options = {"model": "openai/base", "api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0}
    answer = litellm.completion(messages=ASK, response_format=model, **options)
    assert isinstance(model.model_validate_json(answer.choices[0].message.content), model)
    plain = litellm.completion(messages=ASK, **options).choices[0].message
    assert (plain.content, plain.reasoning_content) == ("It is warm.", "Hm.")
    streamed = [chunk.choices[0].delta for chunk in litellm.completion(messages=ASK, stream=True, **options)]
    assert "".join(delta.content or "" for delta in streamed) == "It is warm."
    assert litellm.text_completion(prompt="x", max_tokens=3, **options).choices[0].text


def test_ai_sdk(server: Serving) -> None:
    modules = ROOT / ".clients" / "node_modules"
    if not shutil.which("node") or not modules.is_dir():
        pytest.skip("node and the AI SDK are not installed: run scripts/install_clients.sh")
    command = ["node", str(Path(__file__).with_name("ai_sdk.mjs")), str(modules), server.url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    tokens = len(TOKENIZER.encode("<think>\nHm.\n</think>\n\nIt is warm.")) + 1
    for name, result in json.loads(run.stdout).items():
        assert result["texts"] == result["ends"] == ["It is warm."] * 2, name
        assert result["usage"] == [tokens] * 2, name
        assert result["reasoning"] == ([""] * 2 if name == "chat" else ["Hm."] * 2), name  # openai.chat reads none
        assert result["calls"] == [[{"city": "Oslo", "degrees": 21}]] * 2, name
        assert len(result["objects"]) == 2, name
