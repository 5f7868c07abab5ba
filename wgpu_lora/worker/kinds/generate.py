"""The job `generate`: answers to prompts, each independent."""

from __future__ import annotations

from typing import Any, Unpack

from wgpu_lora.api import answer, load
from wgpu_lora.infer.settings import AnswerOptions, settings_of
from wgpu_lora.weights.registry import DEFAULT_FORMAT
from wgpu_lora.worker.child import Port


def run(
    port: Port,
    *,
    prompts: list[Any],
    model: str = "demo",
    adapter: str | None = None,
    device: str | int | None = None,
    base_dtype: str = DEFAULT_FORMAT,
    batch: int | None = None,
    where: str,
    **options: Unpack[AnswerOptions],
) -> list[dict[str, Any]]:
    """prompts: texts or conversations. The other options are those of `wgpu_lora.answer`."""
    settings_of(options, where)
    opened = load(model, device=device, base_dtype=base_dtype)
    found = answer(opened, prompts, adapter=adapter, batch=batch, events=port, progress_bar=False, **options)
    return [one.as_dict() for one in found]
