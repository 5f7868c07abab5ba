"""The job `finetune`: the options of `wgpu-lora finetune`, and `recipe`; the result is the contents of run.json."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from wgpu_lora.api.call_arguments import path_as_text
from wgpu_lora.api.multi_adapter import adapter_task
from wgpu_lora.cluster.worker.job_process import EventWriter, JobResult, TrainingRequests
from wgpu_lora.data import split_python_rows
from wgpu_lora.events import Events
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.names.typed_options import TrainingOptions
from wgpu_lora.train.adapter_tasks import uniquely_named
from wgpu_lora.train.data_parallel.leader import DataParallelLeader
from wgpu_lora.train.job import Job
from wgpu_lora.train.options.unused_options import unused_options
from wgpu_lora.train.prepare_job import prepare_job, prepare_multi_adapter_job, with_demo_data, with_stored_dtype
from wgpu_lora.train.prepare_run import prepare_run
from wgpu_lora.train.resolve_options import resolve_options
from wgpu_lora.train.run.records import PipelineRecord, RunRecord
from wgpu_lora.train.run.stop_reasons import STOP_TEXT, exit_code
from wgpu_lora.train.run.teacher_setup import write_caches


def run_finetune(
    port: EventWriter,
    *,
    where: str,
    recipe: str | None = None,
    requests: bool = False,
    **options: Unpack[TrainingOptions],
) -> JobResult:
    """A run that fails or is interrupted has a result too; the exit code is that of the command.

    requests: answer `stop` and `end` while it runs, JSON lines on standard input, whose end kills the process at once.
    """
    training_requests = TrainingRequests()
    if requests:
        port.listen(training_requests.side())
    job, text = prepare_finetune(dict(options), where, recipe)
    job.requests = training_requests
    record = job.train(port)
    return JobResult(record.to_json(), exit_code(record.stop_reason, record.signal), text(record))


def prepare_finetune(
    options: dict[str, Any], where: str, recipe: str | None = None, leader: DataParallelLeader | None = None
) -> tuple[Job[RunRecord], Callable[[RunRecord], str]]:
    """A job of options as JSON has them, and why its run ended, in words. leader: shares its steps with other devices.

    Raises:
        UserError: an option, the data, the model or the device is unsuitable.
    """
    texts, rows = split_python_rows({name: path_as_text(value, name, where) for name, value in options.items()})
    args, _ = resolve_options(texts, recipe, where)
    for note in unused_options(texts, args):
        warnings.warn(note, stacklevel=1)
    return prepare_job(args, rows=rows, sharing=leader), lambda record: STOP_TEXT[record.stop_reason]


def run_multi_adapter(
    port: EventWriter,
    *,
    where: str,
    adapters: list[dict[str, Any]],
    schedule: str = "synchronized",
    batch_tokens: int | None = None,
    requests: bool = False,
    **options: Unpack[TrainingOptions],
) -> JobResult:
    """adapters: tables as in an adapters file; `options` are those of adapters without their own. requests: as for
    `finetune`. The exit code is the highest of the adapters'."""
    training_requests = TrainingRequests([name for table in adapters if (name := table.get("name"))])
    if requests:
        port.listen(training_requests.side())
    job, text = prepare_adapters(dict(options), adapters, where, schedule, batch_tokens)
    job.requests = training_requests
    record = job.train(port)
    codes = [exit_code(adapter.stop_reason, record.signal) for adapter in record.adapters]
    return JobResult(record.to_json(), max(codes), text(record))


def prepare_adapters(
    options: dict[str, Any],
    adapters: list[dict[str, Any]],
    where: str,
    schedule: str = "synchronized",
    batch_tokens: int | None = None,
) -> tuple[Job[PipelineRecord], Callable[[PipelineRecord], str]]:
    """A pipeline of options as JSON has them, and why its adapters ended, in words. Raises UserError."""
    texts, shared = split_python_rows({name: path_as_text(value, name, where) for name, value in options.items()})
    tasks = [adapter_task(values, f"{where}: adapter {number}", shared) for number, values in enumerate(adapters, 1)]
    tasks = uniquely_named(tasks)
    args, _ = resolve_options(texts, None, where, demo=False, checkpoint=tasks[0].checkpoint)

    def text(record: PipelineRecord) -> str:
        return "; ".join(f"{adapter.name}: {STOP_TEXT[adapter.stop_reason]}" for adapter in record.adapters)

    return prepare_multi_adapter_job(args, tasks, schedule, batch_tokens), text


def run_teacher_cache(
    port: EventWriter,
    *,
    where: str,
    training: dict[str, Any],
    output: str,
    device: str | int | None = None,
    requests: bool = False,
) -> dict[str, str]:
    """The directories below `output` by the options that name them, `teacher_cache` and `eval_teacher_cache`. If it is
    interrupted at any point, the same job continues.

    training: options of the job `finetune`, with a teacher. requests: as in that job.
    """
    if requests:
        port.listen(TrainingRequests().side())
    return make_teacher_caches(training, where, device, Path(output), port)


def make_teacher_caches(
    training: dict[str, Any], where: str, device: str | int | None, output: Path, events: Events
) -> dict[str, str]:
    """As `run_teacher_cache`. Raises UserError if an option, the data, a model or the device is unsuitable."""
    texts, rows = split_python_rows({name: path_as_text(value, name, where) for name, value in training.items()})
    args = with_demo_data(resolve_options(texts, None, where)[0])
    student = open_model(args.model or "demo", device, args.base_dtype)
    run = prepare_run(with_stored_dtype(replace(args, resume=False), student), student, rows=rows)
    return write_caches(run, student, output, events)
