"""Several adapters on one frozen base model, from Python."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wgpu_lora.api.call_arguments import Callback, listeners, path_as_text
from wgpu_lora.api.notebook_progress import Bars
from wgpu_lora.data import Source, split_python_rows
from wgpu_lora.data.json_values import kind_of
from wgpu_lora.errors import TrainingWarning, UserError
from wgpu_lora.events import EventForwarder, Events
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.train.adapter_tasks import AdapterTask, task_of
from wgpu_lora.train.memory import MemoryPlan
from wgpu_lora.train.prepare_job import prepare_multi_adapter_job
from wgpu_lora.train.resolve_options import resolve_options
from wgpu_lora.train.run.records import PipelineRecord


def adapter_task(values: Any, where: str, shared: Mapping[str, Source]) -> AdapterTask:
    """An adapter whose data may be rows; `shared` are the data of adapters without their own."""
    if isinstance(values, AdapterTask):
        return values
    if not isinstance(values, Mapping):
        raise UserError(f"{where} is {kind_of(values)}, but must be a dict with 'data' and 'checkpoint'.")
    plain, rows = split_python_rows(values)
    defaults = {name: source for name, source in shared.items() if name not in values}
    return replace(task_of(plain, where), rows={**defaults, **rows})


class MultiAdapterPipeline:
    """Train several LoRA adapters together on one frozen base model.

        pipeline = MultiAdapterPipeline(
            [{"data": "a.jsonl", "checkpoint": "out/a", "rank": 8}, {"data": "b.jsonl", "checkpoint": "out/b"}],
            model="models/qwen", schedule="synchronized", output="out/pipeline", num_train_epochs=3,
        )
        record = pipeline.train(callback=lambda result: print(result.adapter, result.loss))

    Each adapter matches what training it alone would give, up to floating-point rounding.

    Args:
        adapters: for each, an AdapterTask or a dict with the keys of an [[adapter]] table; its data may be rows.
        model: a directory, a GGUF file, a hub id, `demo`, or a loaded model.
        schedule: synchronized, round-robin or priority-val-loss.
        batch_tokens: see `prepare_multi_adapter_job`.
        options: as in `wgpu-lora finetune`, with underscores, for adapters that do not set their own.

    Raises:
        UserError: the adapters, an option, the data, the model or the device is unsuitable.
    """

    def __init__(
        self,
        adapters: Sequence[AdapterTask | Mapping[str, Any]],
        model: LoadedModel | str | Path | None = None,
        *,
        schedule: str = "synchronized",
        batch_tokens: int | None = None,
        **options: Any,
    ):
        options, shared = split_python_rows(options)
        if isinstance(adapters, str | Mapping) or not isinstance(adapters, Iterable):
            raise UserError(
                f"The adapters must be a list of dicts with 'data' and 'checkpoint', not {adapters!r:.100}."
            )
        tasks = [adapter_task(task, f"Adapter {number}", shared) for number, task in enumerate(adapters, 1)]
        explicit = {name: path_as_text(value, name, "MultiAdapterPipeline()") for name, value in options.items()}
        opened = model if isinstance(model, LoadedModel) else None
        if opened:
            explicit |= {"model": opened.name, "base_dtype": opened.decoder.base_dtype}
        elif model is not None:
            explicit["model"] = path_as_text(str(model), "model", "MultiAdapterPipeline()")
        first = tasks[0].checkpoint if tasks else None
        args, _ = resolve_options(explicit, None, "MultiAdapterPipeline()", demo=False, checkpoint=first)
        self.job = prepare_multi_adapter_job(args, tasks, schedule, batch_tokens, opened)

    def memory(self) -> MemoryPlan:
        """The memory that training allocates, to the byte."""
        return self.job.session.memory()

    def train(
        self,
        callback: Callback | None = None,
        *,
        events: Events | None = None,
        progress_bar: bool | None = None,
        **before: Any,
    ) -> PipelineRecord:
        """Train to the end; returns the contents of pipeline.json.

        Args:
            callback: called with a StepResult after every step of every adapter; if it returns True, the run ends.
            events: receives all progress events of the run.
            progress_bar: whether to show progress; by default, on a terminal and in a notebook.

        Raises:
            UserError: the memory is not available, a directory is in use, or the disk is full.
        """
        receivers = listeners("train()", events, before, callback)
        if before:
            raise TypeError(f"train() got an unexpected keyword argument {next(iter(before))!r}")
        start = {f"{run.name}: {text}" for run in self.job.runs for text in run.start_warnings}
        with Bars(progress_bar) as bars:
            record = self.job.train(EventForwarder(bars, *receivers))
        for text in record.warnings:
            if text not in start:
                warnings.warn(text, TrainingWarning, stacklevel=2)
        return record
