"""The job `evaluate`: the loss on data, with or without an adapter."""

from __future__ import annotations

import math
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, Unpack

from wgpu_lora.api import answer, evaluate, load
from wgpu_lora.cluster.worker.job_process import EventWriter, JobResult
from wgpu_lora.infer.generation_options import generation_options
from wgpu_lora.names.typed_options import AnswerOptions
from wgpu_lora.weights.base_formats import AUTO


def run_evaluate(
    port: EventWriter,
    *,
    data: str | list[dict[str, Any]],
    model: str = "demo",
    adapter: str | None = None,
    device: str | int | None = None,
    base_dtype: str = AUTO,
    split: str | None = None,
    dataset_config: str | None = None,
    skip_bad_rows: bool = False,
    max_length: int | None = None,
    on_overflow: str | None = None,
    completion_only_loss: bool | None = None,
    enable_thinking: bool | None = None,
    objective: str | None = None,
    teacher: str | None = None,
    teacher_adapter: str | None = None,
    teacher_cache: str | None = None,
    turns: bool = False,
) -> JobResult:
    """The result includes the device's facts. The exit code is 1 if the loss is not finite.

    turns: wait for requests (`prepare`, `evaluate`) as JSON lines on standard input, any number of them.
    """
    opened = load(model, device=device, base_dtype=base_dtype)

    def measure() -> dict[str, Any]:
        value = evaluate(
            opened,
            data,
            split=split,
            dataset_config=dataset_config,
            skip_bad_rows=skip_bad_rows,
            adapter=adapter,
            max_length=max_length,
            on_overflow=on_overflow,
            completion_only_loss=completion_only_loss,
            enable_thinking=enable_thinking,
            objective=objective,
            teacher=teacher,
            teacher_adapter=teacher_adapter,
            teacher_cache=teacher_cache,
            events=port,
            progress_bar=False,
        )
        info = opened.device.info
        return asdict(value) | {"device": {"name": info.name, "driver": info.driver, "backend": info.backend}}

    def prepare() -> dict[str, Any]:
        opened.load_weights(port)
        return {}

    if turns:
        port.answer(SimpleNamespace(prepare=prepare, evaluate=measure))
        return JobResult({}, 0, "")
    result = measure()
    finite = math.isfinite(result["loss"])
    return JobResult(result, int(not finite), "" if finite else "the loss is not finite")


def run_generate(
    port: EventWriter,
    *,
    prompts: list[Any],
    model: str = "demo",
    adapter: str | None = None,
    device: str | int | None = None,
    base_dtype: str = AUTO,
    batch: int | None = None,
    where: str,
    **options: Unpack[AnswerOptions],
) -> list[dict[str, Any]]:
    """prompts: texts or conversations. The other options are those of `wgpu_lora.answer`."""
    generation_options(options, where)
    opened = load(model, device=device, base_dtype=base_dtype)
    result = answer(opened, prompts, adapter=adapter, batch=batch, events=port, progress_bar=False, **options)
    return [completion.as_dict() for completion in result]
