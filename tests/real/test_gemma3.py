"""Gemma 3 270M from a GGUF file of mixed types, where it is present, beside transformers on the same values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.models import full_logits, relative_error
from support.real_models import BASES, gemma3, reference

import wgpu_lora
from scripts.golden import real_cases as cases
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.batch_inputs import Segment

VALUES, ARRAYS = reference("gemma3")


@pytest.fixture(scope="module", params=BASES)
def gemma(request: pytest.FixtureRequest, device: Device) -> Iterator[wgpu_lora.Model]:
    opened = wgpu_lora.load(gemma3(), device=device, base_dtype=request.param)
    opened.load_weights()
    yield opened
    opened.unload()


def test_token_ids(gemma: wgpu_lora.Model) -> None:
    assert gemma.tokenizer is not None
    for text, ids in zip(cases.ODD_TEXTS, VALUES["token_ids"], strict=True):
        assert gemma.tokenizer.encode(text) == ids, text


def test_logits(gemma: wgpu_lora.Model) -> None:
    (actual,) = full_logits(gemma, [Segment(np.array(VALUES["text_ids"][: cases.LOGIT_ROWS]))])
    assert relative_error(actual[:, :: cases.LOGIT_STRIDE], ARRAYS["logits"]) < 1e-4


def test_loss(gemma: wgpu_lora.Model) -> None:
    result = wgpu_lora.evaluate(gemma, [{"input_ids": VALUES["text_ids"]}])
    assert result.tokens == len(VALUES["text_ids"]) - 1
    assert result.loss == pytest.approx(VALUES["loss"], rel=1e-4)
