"""The job `pipeline`: several adapters on one base; the result is the contents of pipeline.json."""

from __future__ import annotations

from typing import Any, Unpack

from wgpu_lora.api.multi_adapter import adapter_task
from wgpu_lora.api.plain import plain
from wgpu_lora.data import given_rows
from wgpu_lora.train.ending import STOP_TEXT, exit_code
from wgpu_lora.train.gather import gather
from wgpu_lora.train.options.typed import TrainingOptions
from wgpu_lora.train.pipeline import prepare_pipeline
from wgpu_lora.train.tasks import named_apart
from wgpu_lora.worker.child import Ended, Port
from wgpu_lora.worker.requests import Asked


def run(
    port: Port,
    *,
    where: str,
    adapters: list[dict[str, Any]],
    schedule: str = "synchronized",
    batch_tokens: int | None = None,
    requests: bool = False,
    **options: Unpack[TrainingOptions],
) -> Ended:
    """adapters: tables as in an adapters file; `options` are those of adapters without their own. requests: as for
    `finetune`. The exit code is the highest of the adapters'."""
    texts, shared = given_rows({name: plain(value, name, where) for name, value in options.items()})
    tasks = [adapter_task(values, f"{where}: adapter {number}", shared) for number, values in enumerate(adapters, 1)]
    tasks = named_apart(tasks)
    asked = Asked([task.name for task in tasks])
    if requests:
        port.listen(asked.side())
    args, _ = gather(texts, None, where, demo=False, beside=tasks[0].checkpoint)
    job = prepare_pipeline(args, tasks, schedule, batch_tokens)
    job.requests = asked
    record = job.train(port)
    codes = [exit_code(adapter.stop_reason, record.signal) for adapter in record.adapters]
    said = "; ".join(f"{adapter.name}: {STOP_TEXT[adapter.stop_reason]}" for adapter in record.adapters)
    return Ended(record.to_json(), max(codes), said)
