"""Answers over HTTP by the `openai` client: streams, choices, stop texts, seeds, log-probabilities, adapters."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from support.serving.serving import FakeEngine, Serving, demo_tokenizer, serving

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
GREEDY: dict[str, Any] = {"messages": ASK, "max_tokens": 12, "temperature": 0}
TOKENIZER = demo_tokenizer()


def saying(text: str) -> FakeEngine:
    """An engine that answers with this text."""
    return FakeEngine(script=lambda request: TOKENIZER.encode(text))


def test_a_stream_has_the_same_text_and_usage(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="base", **GREEDY)
    chunks = list(
        client.chat.completions.create(model="base", **GREEDY, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert not chunks[-1].choices
    assert chunks[-1].usage == whole.usage
    assert whole.usage
    assert whole.usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_stream_ends_with_done(server: Serving) -> None:
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: {") for line in lines[:-1])
    assert lines[-1] == "data: [DONE]"


def test_adapters_differ_and_are_listed(server: Serving, client: OpenAI) -> None:
    texts = {name: client.chat.completions.create(model=name, **GREEDY) for name in ("base", "tuned", "other")}
    assert len({answer.choices[0].message.content for answer in texts.values()}) == 3
    assert [(model.id, model.model_dump()["parent"]) for model in client.models.list()] == [
        ("base", None), ("tuned", "base"), ("other", "base"),
    ]  # fmt: skip
    by_number = client.chat.completions.create(model="base", **GREEDY, extra_body={"lora": [{"id": 1, "scale": 1}]})
    assert by_number.choices[0].message.content == texts["other"].choices[0].message.content
    off = client.chat.completions.create(model="base", **GREEDY, extra_body={"lora": [{"id": 1, "scale": 0}]})
    assert off.choices[0].message.content == texts["base"].choices[0].message.content
    with pytest.raises(NotFoundError, match="There is no model 'gone'"):
        client.chat.completions.create(model="gone", **GREEDY)


@pytest.mark.parametrize(
    "lora",
    [
        [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 1.0}],
        [{"id": 0, "scale": 0.5}],
        [{"id": 2}],
    ],
)
def test_sums_and_scales_of_adapters_are_refused(client: OpenAI, lora: list[Any]) -> None:
    with pytest.raises(BadRequestError):
        client.chat.completions.create(model="base", **GREEDY, extra_body={"lora": lora})


def test_seeds_repeat_answers_and_several_differ(client: OpenAI) -> None:
    def texts(**options: Any) -> list[str]:
        answer = client.completions.create(model="base", **{"prompt": "def", "max_tokens": 8, **options})
        return [choice.text for choice in answer.choices]

    assert texts(seed=5, n=3) == texts(seed=5, n=3)
    assert texts(seed=5, n=3)[1:] == [*texts(seed=6), *texts(seed=7)]
    assert len(set(texts(n=4))) == 4
    assert texts() != texts()
    assert len(set(texts(prompt=["def", "def"], n=2))) == 4
    assert texts(prompt=["def", "def"], n=2, seed=5) == texts(n=4, seed=5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_across_tokens(stream: bool) -> None:
    text = "one two three four five six"
    assert len(TOKENIZER.encode(" three")) > 1
    with serving(lambda: saying(text)) as server:
        response: Any = server.client.chat.completions.create(
            model="base", messages=ASK, stop=[" three", "never"], stream=stream
        )
        if stream:
            chunks = [chunk.choices[0] for chunk in response]
            answer, end = "".join(choice.delta.content or "" for choice in chunks), chunks[-1].finish_reason
        else:
            answer, end = response.choices[0].message.content, response.choices[0].finish_reason
    assert (answer, end) == ("one two", "stop")


def test_characters_of_several_tokens_come_whole() -> None:
    text = "größe → 日本 🎉"
    with serving(lambda: saying(text)) as server:
        chunks = list(server.client.chat.completions.create(model="base", messages=ASK, stream=True))
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_log_probabilities_are_those_of_the_engine(server: Serving, client: OpenAI) -> None:
    answer = client.chat.completions.create(model="base", **GREEDY, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    assert len(logprobs.content) == 12
    raw = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert raw.decode("utf-8", "replace") == answer.choices[0].message.content
    for token in logprobs.content:  # greedy
        assert token.top_logprobs[0].token == token.token
        assert [logprob.logprob for logprob in token.top_logprobs] == sorted(
            (o.logprob for o in token.top_logprobs), reverse=True
        )


def test_echo_begins_with_the_prompt_and_its_log_probabilities(client: OpenAI) -> None:
    prompt = "def add(a, b):"
    answer = client.completions.create(
        model="tuned", prompt=prompt, max_tokens=3, echo=True, logprobs=2, temperature=0, n=2
    )
    ids = TOKENIZER.encode(prompt)
    for choice in answer.choices:
        assert choice.text.startswith(prompt)
        values = choice.logprobs
        assert values
        assert values.tokens
        assert values.token_logprobs
        assert len(values.tokens) == len(ids) + 3
        assert values.token_logprobs[0] is None
        expected = FakeEngine._logprobs(FakeEngine.logits(ids[:2], "tuned"), ids[2], 0).logprob
        assert values.token_logprobs[2] == pytest.approx(expected)
        assert values.text_offset
        assert [choice.text[at : at + len(t)] for at, t in zip(values.text_offset, values.tokens, strict=True)] == (
            values.tokens
        )


def test_prompts_of_texts_and_tokens_are_the_same(client: OpenAI) -> None:
    texts = ["def f", "class A"]
    ids = [TOKENIZER.encode(text) for text in texts]
    answers = [
        [choice.text for choice in client.completions.create(
            model="base", prompt=prompt, max_tokens=5, temperature=0).choices]
        for prompt in (texts, ids)
    ]  # fmt: skip
    alone = [
        client.completions.create(model="base", prompt=p, max_tokens=5, temperature=0).choices[0].text for p in ids
    ]
    assert answers == [alone, alone]


def test_options_of_sampling_reach_the_engine() -> None:
    requests: list[Any] = []
    with serving(lambda: FakeEngine(script=lambda request: requests.append(request) or [])) as server:
        server.client.chat.completions.create(
            model="base", messages=ASK, temperature=0.5, top_p=0.9, presence_penalty=0.1, frequency_penalty=-0.2,
            logit_bias={"7": -100}, seed=3, max_completion_tokens=9,
            extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [8]},
        )  # fmt: skip
        server.client.chat.completions.create(model="base", messages=ASK)
    full, unset = requests
    sampler = full.sampling
    assert (sampler.temperature, sampler.top_p, sampler.top_k, sampler.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampler.repetition_penalty, sampler.presence_penalty, sampler.frequency_penalty) == (1.2, 0.1, -0.2)
    assert (sampler.logit_bias, sampler.seed, full.max_new_tokens) == ({7: -100.0}, 3, 9)
    assert set(full.stop_ids) == {8, *TOKENIZER.stop_ids}
    assert (unset.sampling.temperature, unset.sampling.top_k) == (1.0, 0)
    assert len(unset.prompt) + unset.max_new_tokens == 256  # as many as there is room for


def test_a_completion_without_max_tokens_gets_the_rest_of_a_small_server() -> None:
    with serving(lambda: FakeEngine(script=lambda request: [300] * 100, max_model_len=20)) as server:
        (choice,) = server.client.completions.create(model="base", prompt=[300] * 15).choices
        assert (choice.finish_reason, choice.text) == ("length", TOKENIZER.decode([300] * 5))


def test_tokens_and_back(server: Serving) -> None:
    def post(path: str, **body: Any) -> Any:
        return httpx.post(f"{server.url}{path}", json=body).json()

    text = "def add(a, b):\n    return a + b"
    result = post("/tokenize", prompt=text)
    assert result == {"tokens": TOKENIZER.encode(text), "count": len(result["tokens"]), "max_model_len": 256}
    assert post("/detokenize", tokens=result["tokens"]) == {"prompt": text}
    ids = post("/tokenize", messages=ASK)["tokens"]
    assert ids == TOKENIZER.encode(TOKENIZER.render(ASK, None, True))
    continued = post(
        "/tokenize", messages=[*ASK, {"role": "assistant", "content": "Well, "}], continue_final_message=True
    )
    assert TOKENIZER.decode(continued["tokens"], False) == f"{TOKENIZER.render(ASK, None, True)}Well,"
