"""Log-probabilities for programs that score with them: end tokens, names of tokens, offsets, scored prompts."""

from __future__ import annotations

import json
from operator import itemgetter
from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from support.serving.serving import FakeEngine, Serving, demo_tokenizer, serving
from test_serve_command import process

from wgpu_lora.files.assets import DEMO_MODEL

TOKENIZER = demo_tokenizer()
EMOJI = "a 🎉é日 b"
END = max(TOKENIZER.stop_ids)


def complete(server: Serving, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}/v1/completions", json={"max_tokens": 4, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def bytes_of(name: str) -> bytes:
    """Of a token's name in log-probabilities."""
    return bytes.fromhex(name[6:].replace("\\x", "")) if name.startswith("bytes:") else name.encode()


def saying(text: str) -> FakeEngine:
    return FakeEngine(script=lambda request: TOKENIZER.encode(text))


@pytest.mark.parametrize("stream", [False, True])
def test_an_end_token_is_counted_and_scored(stream: bool) -> None:
    with serving(lambda: saying("ab")) as server:
        ids = [*TOKENIZER.encode("ab"), END]
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        body = {"prompt": "x", "logprobs": 0, "return_token_ids": True, **options}
        if stream:
            text = httpx.post(f"{server.url}/v1/completions", json=body).text
            events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
            choices = [choice for event in events for choice in event["choices"]]
            tokens = [token for choice in choices for token in (choice["logprobs"] or {"tokens": []})["tokens"]]
            token_ids, usage = [token for choice in choices for token in choice["token_ids"]], events[-1]["usage"]
            answer = "".join(choice["text"] for choice in choices)
        else:
            whole = complete(server, **body)
            (choice,), usage = whole["choices"], whole["usage"]
            tokens, token_ids, answer = choice["logprobs"]["tokens"], choice["token_ids"], choice["text"]
            assert choice["finish_reason"] == "stop"
            assert choice["prompt_token_ids"] == TOKENIZER.encode("x")
        assert token_ids == ids
        assert "".join(tokens) == "ab" + TOKENIZER.decode([END], False)
        assert answer == "ab"
        assert usage["completion_tokens"] == len(ids)
        chat = server.client.chat.completions.create(
            model="base", messages=[{"role": "user", "content": "x"}], logprobs=True
        )
        assert chat.choices[0].message.content == "ab"
        assert chat.choices[0].logprobs
        assert len(chat.choices[0].logprobs.content or []) == len(ids)


def test_no_name_of_a_token_is_that_of_another(server: Serving) -> None:
    for prompt in ("x", "🎉", "日本"):
        logprobs = complete(server, prompt=prompt, logprobs=20, max_tokens=30)["choices"][0]["logprobs"]
        assert {len(top) for top in logprobs["top_logprobs"]} == {20}
    names = complete(server, prompt=EMOJI, echo=True, logprobs=1)["choices"][0]["logprobs"]["tokens"]
    assert b"".join(bytes_of(name) for name in names[: len(TOKENIZER.encode(EMOJI))]).decode() == EMOJI
    assert any(name.startswith("bytes:\\x") for name in names)
    ids = complete(server, prompt=EMOJI, echo=True, logprobs=1, return_tokens_as_token_ids=True)["choices"][0]
    assert ids["logprobs"]["tokens"][:4] == [f"token_id:{token}" for token in TOKENIZER.encode(EMOJI)[:4]]
    assert all(name.startswith("token_id:") for top in ids["logprobs"]["top_logprobs"][1:] for name in top)


def test_the_token_itself_is_among_the_most_likely() -> None:
    with serving(lambda: saying("zq")) as server:  # which the fake's own distribution would not choose
        logprobs = complete(server, prompt="x", logprobs=2)["choices"][0]["logprobs"]
        for name, logprob, top in zip(*itemgetter("tokens", "token_logprobs", "top_logprobs")(logprobs), strict=True):
            assert len(top) == 3
            assert top[name] == logprob == min(top.values())
        chat = server.client.chat.completions.create(
            model="base", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2
        )
        assert chat.choices[0].logprobs
        for token in chat.choices[0].logprobs.content or []:
            assert token.token in [top.token for top in token.top_logprobs]


@pytest.mark.parametrize("end", ["", "<|im_end|>\n<|im_start|>", " 🎉é日 b"])
def test_offsets_count_characters_of_a_text_with_special_tokens(end: str) -> None:
    prompt = "<|im_start|>ä 🎉" + end
    with serving(lambda: saying("日 🎉 c")) as server:
        for value in (prompt, TOKENIZER.encode(prompt)):
            choice = complete(server, prompt=value, echo=True, logprobs=0, max_tokens=40)["choices"][0]
            text, logprobs = choice["text"], choice["logprobs"]
            assert text == prompt + "日 🎉 c"
            pairs = list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[:-1]  # the last one ends it
            for name, offset in pairs:
                assert bytes_of(name) in text[offset : offset + len(name)].encode()
            assert logprobs["text_offset"][-1] == len(text)


def test_prompts_are_scored_without_an_answer(server: Serving, client: OpenAI) -> None:
    ids = TOKENIZER.encode("def add(a, b):")
    choice = complete(server, prompt=ids, echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("def add(a, b):", "length")
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    expected = [FakeEngine._logprobs(FakeEngine.logits(ids[:n], None), ids[n], 0).logprob for n in range(1, len(ids))]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([None, *expected])
    whole = complete(server, prompt=ids, max_tokens=0, prompt_logprobs=2)
    assert whole["usage"]["completion_tokens"] == 0
    first, *others = whole["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [entries[str(token)]["logprob"] for token, entries in zip(ids[1:], others, strict=True)] == pytest.approx(
        expected
    )
    assert all(entries[min(entries, key=lambda key: -entries[key]["logprob"])]["rank"] == 1 for entries in others)
    assert complete(server, prompt=[300] * 256, max_tokens=0, echo=True)["choices"][0][
        "text"
    ]  # all that there is room for
    empty = complete(server, prompt=ids, max_tokens=0, logprobs=1)["choices"][0]["logprobs"]
    assert empty == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    with pytest.raises(BadRequestError, match="streamed"):
        client.completions.create(model="base", prompt="x", stream=True, extra_body={"prompt_logprobs": 1})


def test_a_prompt_may_be_cut_to_its_last_tokens(server: Serving) -> None:
    ids = TOKENIZER.encode("def add(a, b):")
    body = {"prompt": ids, "echo": True, "return_token_ids": True}
    assert complete(server, **body, truncate_prompt_tokens=3)["choices"][0]["prompt_token_ids"] == ids[-3:]
    long = complete(server, **{**body, "prompt": [300] * 1000}, truncate_prompt_tokens=-1)
    assert long["usage"] | {"prompt_tokens": 0} != long["usage"]
    assert long["usage"]["prompt_tokens"] == 256 - 4
    for most, room in ((None, 16), (0, 1)):
        usage = complete(server, prompt=[300] * 1000, truncate_prompt_tokens=-1, max_tokens=most)["usage"]
        assert usage["prompt_tokens"] == 256 - room
    bias = {str(END): -100}  # goes on as long as it may
    chat = server.client.chat.completions.create(
        model="base", messages=[{"role": "user", "content": "ab " * 500}], logit_bias=bias,
        extra_body={"truncate_prompt_tokens": -1},
    ).usage  # fmt: skip
    assert chat is not None
    assert (chat.prompt_tokens, chat.completion_tokens) == (192, 64)


@pytest.mark.reference
def test_choices_that_end_are_scored_as_by_lm_eval() -> None:
    """The requests, and the cuts of their answers, of lm-eval's local-completions, beside what its backend hf sums."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    answers = {"add": "adds two numbers", "even": "tells whether a number is even", "text": "reverses a text"}
    items: list[tuple[list[int], list[int]]] = []
    with process("--max-model-len", "512", "--max-num-seqs", "4", "--base-dtype", "f32") as server:
        for name, what in answers.items():
            question = [{"role": "user", "content": f"Write a function that {what}."}]
            context = TOKENIZER.encode(TOKENIZER.render(question, None, True))
            own = server.text("demo", question[0]["content"], max_tokens=200)
            choices = [own, *(f"def {name}({arguments}):" for arguments in ("a, b", "text")), "x"]
            items += [(context, TOKENIZER.encode(choice)) for choice in choices]
        ends = 0
        for context, choice in items:
            ids = context + choice
            body = {
                "model": "demo", "prompt": [ids], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
                "echo": True,
            }  # fmt: skip
            logprobs = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["logprobs"]
            scores = logprobs["token_logprobs"][len(context) : -1]
            tops = [max(top.values()) for top in logprobs["top_logprobs"][len(context) : -1]]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, len(context) - 1 :].log_softmax(-1).numpy()
            expected = logits[np.arange(len(choice)), choice]
            assert scores == pytest.approx(expected.tolist(), abs=2e-3)
            assert [*map(float.__eq__, scores, tops)] == (expected == logits[:-1].max(-1)).tolist()
            ends += int(logits[-1].argmax()) in TOKENIZER.stop_ids
        assert ends >= len(answers)
