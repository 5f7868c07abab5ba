"""An adapter of SmolLM2 in PEFT and in llama.cpp, over the very file that it was trained on; and its references."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from llama_cpp_helpers import loss, opened
from support.real_models import BASES, reference, smollm2, trained_adapter

import wgpu_lora
from scripts.golden import real_cases as cases


@pytest.fixture(scope="module")
def model() -> Iterator[wgpu_lora.Model]:
    model = wgpu_lora.load(smollm2(), base_dtype=BASES[-1])
    yield model
    model.unload()


@pytest.fixture(scope="module")
def trained(model: wgpu_lora.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_adapter(model, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def rows(model: wgpu_lora.Model) -> list[list[int]]:
    """A conversation that was trained and one that was not, as ids."""
    assert model.tokenizer is not None
    other = json.loads(json.dumps(cases.CHATS[0]["messages"]).replace("Borvo lamp", "Furn table"))
    return [model.tokenizer.encode(model.tokenizer.render(chat)) for chat in (cases.CHATS[1]["messages"], other)]


@pytest.fixture(scope="module")
def losses(model: wgpu_lora.Model, trained: Path, rows: list[list[int]]) -> list[float]:
    data = [[{"input_ids": ids}] for ids in rows]
    trained_losses = [wgpu_lora.evaluate(model, part, adapter=trained).loss for part in data]
    base = [wgpu_lora.evaluate(model, part).loss for part in data]
    assert all(mine < 0.9 * plain for mine, plain in zip(trained_losses, base, strict=True)), (trained_losses, base)
    return trained_losses


def test_peft_loads_it(trained: Path, rows: list[list[int]], losses: list[float]) -> None:
    file = smollm2()
    base = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, trained)
    with torch.no_grad():
        actual = [loss(theirs(torch.tensor([ids])).logits[0].numpy(), ids) for ids in rows]
    assert actual == pytest.approx(losses, rel=1e-4)


def test_llama_cpp_loads_it(
    model: wgpu_lora.Model, trained: Path, rows: list[list[int]], losses: list[float], tmp_path: Path
) -> None:
    model.export_gguf(tmp_path / "adapter.gguf", trained, lora=True)
    theirs = opened(smollm2(), lora_path=str(tmp_path / "adapter.gguf"))
    actual = []
    for ids in rows:
        theirs.reset()
        theirs.eval(ids)
        actual.append(loss(np.array(theirs.scores[: len(ids)]), ids))
    theirs.close()
    print(actual, losses)
    assert actual == pytest.approx(losses, rel=0.01)


def test_the_references_are_what_torch_says() -> None:
    """Two steps of each training, which take a minute."""
    from scripts.golden.real_models import references

    (values, arrays), (stored, stored_arrays) = references("smollm2", smollm2(), steps=2), reference("smollm2")
    assert values.keys() == stored.keys()
    for name, value in values.items():
        if name.endswith(("_losses", "_norms")):
            assert value == pytest.approx(stored[name][:2], rel=1e-4), name
        elif name != "answers":  # of the model after all steps
            assert value == (pytest.approx(stored[name], rel=1e-5) if name == "loss" else stored[name]), name
    np.testing.assert_allclose(
        arrays["logits"], stored_arrays["logits"], atol=1e-5 * np.abs(stored_arrays["logits"]).max()
    )
