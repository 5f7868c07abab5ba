"""The job `import`: a model quantised to NF4 and saved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from wgpu_lora.api.call_arguments import path_as_text
from wgpu_lora.api.multi_adapter import adapter_task
from wgpu_lora.cluster.worker.job_process import EventWriter
from wgpu_lora.data import Source, split_python_rows
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import check_new
from wgpu_lora.files.json_files import to_json
from wgpu_lora.files.typed_json import typed
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.export.quantized_model import write_packed
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.names.spelling import flag
from wgpu_lora.train.adapter_tasks import split_options
from wgpu_lora.train.data_parallel.leader import check_shared
from wgpu_lora.train.job import Job
from wgpu_lora.train.memory import RunRequirements
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job, prepare_multi_adapter_job
from wgpu_lora.train.prepare_session import prepare_session
from wgpu_lora.train.resolve_options import resolve_options
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.run.teacher_setup import cache_plans, caches_digest
from wgpu_lora.train.session.data_stream import DataStream
from wgpu_lora.train.track.trackers import check_libraries


def run_import(port: EventWriter, *, model: str, output: str, device: str | int | None = None) -> dict[str, Any]:
    """output: a directory that does not exist yet."""
    check_new(output, flag("output"), directory=True)  # before the model may be downloaded
    write_packed(open_model(model, device, "nf4"), Path(output), events=port)
    nbytes = sum(path.stat().st_size for path in Path(output).glob("*.safetensors"))
    return {"output": output, "bytes": nbytes}


Given = TypeVar("Given")
# Options that change neither bytes nor steps, so that a sweep over them is planned once.
RATES = {
    "learning_rate", "loraplus_lr_ratio", "lr_scheduler_type", "lr_scheduler_min", "warmup_ratio", "warmup_steps",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "lora_alpha", "output",
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A run to plan. options: those of the job `finetune`, without `output`, `device` and `resume`."""

    name: str
    options: dict[str, Any]


def run_plan(
    port: EventWriter,
    *,
    where: str,
    tasks: list[dict[str, Any]],
    joined: list[list[str]] | None = None,
    shared: bool = False,
    cached: bool = False,
    device: str | int | None = None,
) -> dict[str, Any]:
    """What each of `tasks` needs by its name, and what the pipelines of the tasks named in `joined` need, in order. A
    task that is refused has the reason instead. Models are opened once.

    shared: each task is trained by several devices together; the bytes are those of each. cached: those with a live
    teacher are also in `taught`, with the `digest` of caches that would replace it and what they `need` with these.
    """
    try:
        result = [typed(Task, task) for task in tasks]
    except ValueError as error:
        raise UserError(f"{where}: a task must have a 'name' and 'options' ({error}).") from None
    by_name = {task.name: task for task in result}
    if len(by_name) < len(result):
        raise UserError(f"{where}: two tasks have the same name: give each its own.")
    unknown = [name for names in joined or [] for name in names if name not in by_name]
    if unknown:
        raise UserError(f"{where}: 'joined' names {unknown[0]!r:.60}, which is not a task.")
    planner = _Planner(Device(device), shared, cached)
    return {
        "tasks": {task.name: asdict(planner.alone(task)) for task in result},
        "joined": [asdict(planner.together([by_name[name] for name in names])) for names in joined or []],
        "taught": planner.cached_teachers,
    }


@dataclass
class _Planner:
    device: Device
    shared: bool = False
    cached: bool = False
    cached_teachers: dict[str, dict[str, Any]] = field(default_factory=dict)  # by task
    _models: dict[tuple[str, str], LoadedModel] = field(default_factory=dict)
    _plans: dict[str, RunRequirements] = field(default_factory=dict)  # by the options that matter
    _caches: dict[str, tuple[str, RunRequirements]] = field(default_factory=dict)  # likewise

    def alone(self, task: Task) -> RunRequirements:
        return _unless_refused(self._alone, task)

    def together(self, tasks: list[Task]) -> RunRequirements:
        return _unless_refused(self._together, tasks)

    def _alone(self, task: Task) -> RunRequirements:
        args, rows = self._read(task)
        check_libraries(args.report_to)
        model = self._model(args)
        base = base_key(model, args, task.name)
        key = json.dumps({name: value for name, value in args.as_dict().items() if name not in RATES})
        if rows or key not in self._plans:  # rows have no name
            job = prepare_job(args, model, planning=True, rows=rows)
            run, batch_tokens = job.run, job.run.stream.buckets()[-1] if self.shared else None
            if self.shared:
                check_shared(args)
                job.session = prepare_session(model, [run], batch_tokens=batch_tokens)
            self._plans[key] = needs_of(job, base)
            if self.cached and run.teacher:
                digest = caches_digest(run, cache_plans(run, model))
                job.session = prepare_session(model, [replace(run, teacher=None)], batch_tokens=batch_tokens)
                self._caches[key] = digest, needs_of(job, base)
        if key in self._caches:
            digest, needs = self._caches[key]
            self.cached_teachers[task.name] = {"digest": digest, "needs": asdict(replace(needs, base=base))}
        return replace(self._plans[key], base=base)

    def _together(self, tasks: list[Task]) -> RunRequirements:
        read = [self._read(task)[0] for task in tasks]
        keys = [base_key(self._model(args), args, task.name) for task, args in zip(tasks, read, strict=True)]
        for task, key in zip(tasks, keys, strict=True):
            if key != keys[0]:
                raise UserError(
                    f"Task '{task.name}' cannot be in a pipeline with '{tasks[0].name}': their base models, or options "
                    "that adapters share, differ."
                )
        first = tasks[0]
        args, rows = self._read(Task(first.name, split_options(first.options)[1]), demo=False)
        adapters = [
            adapter_task(
                {**split_options(task.options)[0], "name": task.name, "checkpoint": f"adapters/{task.name}"},
                _where(task),
                rows,
            )
            for task in tasks
        ]
        job = prepare_multi_adapter_job(args, adapters, model=self._model(args), planning=True)
        return needs_of(job, keys[0])

    def _read(self, task: Task, demo: bool = True) -> tuple[TrainingArguments, dict[str, Source]]:
        where = _where(task)
        texts, rows = split_python_rows(
            {name: path_as_text(value, name, where) for name, value in task.options.items()}
        )
        return resolve_options(texts, None, where, demo)[0], rows

    def _model(self, args: TrainingArguments) -> LoadedModel:
        key = args.model or "demo", args.base_dtype
        if key not in self._models:
            self._models[key] = open_model(key[0], self.device, key[1])
        return self._models[key]


def _where(task: Task) -> str:
    return f"Task '{task.name}'"


def _unless_refused(plan: Callable[[Given], RunRequirements], argument: Given) -> RunRequirements:
    try:
        return plan(argument)
    except UserError as error:
        return RunRequirements(refused=str(error))
    except OSError as error:
        return RunRequirements(refused=f"{error.strerror or error}: {error.filename or 'a file of the task'}.")


# Where a run is, and what digests cover.
PLACES = {"output", "resume", "overwrite", "device", "model", "base_dtype", "save_steps"}


def needs_of(job: Job[Any], base: str) -> RunRequirements:
    """The requirements of the runs of a job together. Raises UserError if a tensor is larger than the limits of the
    device."""
    plan, runs = job.session.memory(), job.runs
    timed = any(run.args.target_seconds for run in runs)
    rows = [stream.rows_digest() for run in runs for stream in _streams(run)]
    return RunRequirements(
        needed=plan.peak_device_bytes,
        base_bytes=plan.groups["base"],
        base=base,
        data=list(dict.fromkeys(rows)),
        work=0 if timed else sum(processed_tokens(run.stream) for run in runs),
        steps=0 if timed else max(run.stream.total_steps() for run in runs),
        heldout=any(run.heldout for run in runs),
    )


def _streams(run: AdapterRun) -> list[DataStream]:
    return [run.stream, *([DataStream(run.heldout, run.args)] if run.heldout else [])]


def processed_tokens(stream: DataStream) -> int:
    """Tokens of all steps of a run, prompts included; of --max-steps, by the mean step of the first epoch."""
    tokens = sum(stream.lengths)
    if stream.args.max_steps > 0:
        return round(stream.args.max_steps / len(stream.epoch(0)) * tokens)
    return round(stream.args.num_train_epochs * tokens)


def base_key(model: LoadedModel, args: TrainingArguments, name: str) -> str:
    """Two digests: of the base model, and of the options that adapters of one pipeline share. The second is unique for
    a run of this name that cannot be in a pipeline."""
    tokenizer = model.tokenizer.digest if model.tokenizer else None
    base = [model.checkpoint.digest(), model.config.digest(), model.decoder.base_dtype, tokenizer]
    _, shared = split_options(args.as_dict())
    shared = {option: value for option, value in shared.items() if option not in PLACES}
    alone = {"name": name} if args.target_seconds or args.train == "quant-scales" else {}
    return f"{_digest(base)}-{_digest({**shared, **alone})}"


def _digest(value: Mapping[str, Any] | list[Any]) -> str:
    return hashlib.sha256(to_json(value, sort_keys=True).encode()).hexdigest()[:16]
