"""SmolLM2-135M-Instruct, as its GGUF file has it, beside transformers, PEFT and TRL on the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.events import hearing
from support.models import full_logits, relative_error
from support.real_models import TRAINING, matrices, reference, save_start, start_of
from support.serving.chat import at_once, say

import wgpu_lora
from scripts.golden import real_cases as cases
from wgpu_lora.formats.peft_adapter import WEIGHTS
from wgpu_lora.infer.chat import Chat
from wgpu_lora.infer.generation_options import GenerationOptions
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.train.run.training_log import LOG, read_log

Model = wgpu_lora.Model
VALUES, ARRAYS = reference("smollm2")


def assert_same_training(model: Model, run: Path, case: str) -> None:
    """Losses and norms are within 1e-3 of the reference's, and what became of the weights within 1e-3 of the change."""
    log, (first, second) = read_log(run / LOG), (VALUES[f"{case}_losses"], VALUES[f"{case}_norms"])
    assert [line["loss"] for line in log] == pytest.approx(first, rel=1e-3)
    assert [line["grad_norm"] for line in log] == pytest.approx(second, rel=1e-3)
    start = start_of(model.config)
    summary = cases.adapter_summary(matrices(run), start)
    expected = {key.removeprefix(f"{case}."): value for key, value in ARRAYS.items() if key.startswith(f"{case}.")}
    np.testing.assert_allclose(summary["moved"], expected.pop("moved"), rtol=1e-3)
    for name, value in expected.items():
        error = np.linalg.norm(summary[name] - value) / np.linalg.norm(value - start[name])
        assert error < 1e-3, name


def test_token_ids(model: Model) -> None:
    assert model.tokenizer is not None
    for text, ids in zip(cases.ODD_TEXTS, VALUES["token_ids"], strict=True):
        assert model.tokenizer.encode(text) == ids, text
        assert model.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chat_template(model: Model) -> None:
    assert model.tokenizer is not None
    assert [model.tokenizer.render(row["messages"]) for row in cases.CHATS] == VALUES["rendered"]
    prompt = [{"role": "user", "content": cases.PROMPTS[VALUES["prompt"]]}]
    assert model.tokenizer.render(prompt, add_generation_prompt=True) == VALUES["rendered_prompt"]


def test_logits(any_model: Model) -> None:
    (actual,) = full_logits(any_model, [Segment(np.array(VALUES["text_ids"][: cases.LOGIT_ROWS]))])
    assert relative_error(actual[:, :: cases.LOGIT_STRIDE], ARRAYS["logits"]) < 1e-4


def test_loss(any_model: Model) -> None:
    result = wgpu_lora.evaluate(any_model, [{"input_ids": VALUES["text_ids"]}])
    assert result.tokens == len(VALUES["text_ids"]) - 1
    assert result.loss == pytest.approx(VALUES["loss"], rel=1e-4)


def test_greedy_tokens(any_model: Model) -> None:
    prompt = [{"role": "user", "content": cases.PROMPTS[VALUES["prompt"]]}]
    (answer,) = wgpu_lora.answer(any_model, [prompt], max_new_tokens=len(VALUES["greedy"]))
    assert answer.token_ids == VALUES["greedy"]


def test_training_is_pefts(model: Model, trained: Path) -> None:
    assert_same_training(model, trained, "sft")


def test_answers_and_losses_after_training(model: Model, trained: Path) -> None:
    data = cases.CHATS[:1]
    before, after = (wgpu_lora.evaluate(model, data, adapter=adapter) for adapter in (None, trained))
    assert before.loss == pytest.approx(VALUES["sft_losses"][0], rel=1e-4)
    assert after.loss < 0.8 * before.loss
    prompts = [row["messages"][:-1] for row in cases.CHATS[: cases.ANSWERS]]
    answers = wgpu_lora.generate(model, prompts, adapter=trained, max_new_tokens=cases.ANSWER_TOKENS)
    assert answers == VALUES["answers"]


def test_a_stopped_run_resumes_byte_for_byte(model: Model, tmp_path: Path) -> None:
    options = {**TRAINING, "data": cases.CHATS, "max_steps": 2, "save_steps": 1, "lora_dropout": 0.1}

    def train(place: str, stop_after: int = 0, **more: Any) -> bytes:
        events = hearing(step=lambda result: result.step == stop_after)
        wgpu_lora.finetune(model, output=tmp_path / place, events=events, **options, **more)
        return (tmp_path / place / WEIGHTS).read_bytes()

    whole = train("whole")
    assert train("stopped", stop_after=1) != whole
    assert train("stopped", resume=True) == whole


def test_dpo_is_trls(model: Model, tmp_path: Path) -> None:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    rows = [{f"{key}_ids": tokenizer.encode(text) for key, text in pair.items()} for pair in cases.PAIRS]
    own = {"learning_rate": cases.PREFERENCE_LEARNING_RATE, "max_length": 16}
    wgpu_lora.finetune(
        model, data=rows, output=tmp_path / "run", init_adapter=save_start(model.config, tmp_path / "start"),
        objective="dpo", beta=cases.BETA, max_steps=cases.PREFERENCE_STEPS, **{**TRAINING, **own},
    )  # fmt: skip
    assert_same_training(model, tmp_path / "run", "dpo")


def test_adapters_together_are_as_alone(model: Model, tmp_path: Path) -> None:
    """Of different ranks and modules, in shared batches. Within 1e-4 of the change, by Frobenius norm."""
    own: dict[str, dict[str, Any]] = {"a": {}, "b": {"rank": 2, "target_modules": "q_proj,v_proj"}}
    tasks = [{"data": cases.CHATS[i:], "checkpoint": tmp_path / name, **own[name]} for i, name in enumerate(own)]
    steps = {**TRAINING, "max_steps": 2, "adam_epsilon": 1e-3}  # which rounding moves less
    wgpu_lora.MultiAdapterPipeline(tasks, model, output=tmp_path / "pipeline", **steps).train()
    for i, (name, values) in enumerate(own.items()):
        alone = tmp_path / "alone" / name
        renamed = {"lora_r" if key == "rank" else key: value for key, value in values.items()}
        wgpu_lora.finetune(model, data=cases.CHATS[i:], output=alone, **{**steps, **renamed})
        actual, expected = load_file(tmp_path / name / WEIGHTS), load_file(alone / WEIGHTS)
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            if "lora_B" in key:  # which was zero
                assert np.linalg.norm(actual[key] - value) < 1e-4 * np.linalg.norm(value), f"{name} {key}"


def test_chat(model: Model, trained: Path) -> None:
    """Every turn says what the whole conversation asked at once would, with the adapter and without."""
    settings = GenerationOptions(max_new_tokens=cases.ANSWER_TOKENS, system=cases.SYSTEM["content"])
    chat = Chat(model, {"catalogue": trained}, ("base", "catalogue"), settings)
    try:
        replies = say(chat, cases.CHATS[1]["messages"][1]["content"])
        assert replies["catalogue"] == VALUES["answers"][1] != replies["base"]
        replies = say(chat, "And the rug?")
        for name, adapter in (("base", None), ("catalogue", trained)):
            messages = [cases.SYSTEM, *chat.lanes[name].messages[:-1]]
            assert replies[name] == at_once(model, messages, adapter, max_new_tokens=cases.ANSWER_TOKENS)
    finally:
        chat.close()
