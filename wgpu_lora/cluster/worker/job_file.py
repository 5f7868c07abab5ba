"""A job file: {"schema": 1, "job": KIND, "options": {...}}, with the names and types that its kind takes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import MAX_JSON_BYTES, parse_object
from wgpu_lora.files.paths import open_file
from wgpu_lora.files.typed_json import read_as, typed
from wgpu_lora.names.aliases import real_names
from wgpu_lora.names.registry import Registry
from wgpu_lora.names.text import join_words

Kind = Callable[..., Any]  # of an `EventWriter`, and of its options by name; returns the job's result
KINDS: Registry[Kind] = Registry(
    {
        "finetune": "wgpu_lora.cluster.worker.kinds.training_jobs:run_finetune",
        "pipeline": "wgpu_lora.cluster.worker.kinds.training_jobs:run_multi_adapter",
        "plan": "wgpu_lora.cluster.worker.kinds.model_jobs:run_plan",
        "evaluate": "wgpu_lora.cluster.worker.kinds.inference_jobs:run_evaluate",
        "generate": "wgpu_lora.cluster.worker.kinds.inference_jobs:run_generate",
        "import": "wgpu_lora.cluster.worker.kinds.model_jobs:run_import",
        "bench": "wgpu_lora.cluster.worker.kinds.bench_jobs:run_bench",
        "bench-training": "wgpu_lora.cluster.worker.kinds.bench_jobs:run_bench_training",
        "speed": "wgpu_lora.cluster.worker.kinds.bench_jobs:run_speed",
        "teacher-cache": "wgpu_lora.cluster.worker.kinds.training_jobs:run_teacher_cache",
    }
)
SCHEMA = 1  # of jobs and of events
MANY = 30  # options that a message does not list


@dataclass(frozen=True)
class JobFile:
    job: str
    schema: int = SCHEMA
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A job and its options; `where` is its source, which begins error messages."""

    kind: str
    options: dict[str, Any]
    where: str


def read_job(source: str) -> Job:
    """Read a job from a file, or from standard input if `source` is '-'.

    Raises:
        UserError: it cannot be read, its kind is unknown, or it is from a newer version.
    """
    where = "The job on standard input" if source == "-" else f"The job {source}"
    file = read_as(JobFile, parse_object(_bytes(source, where), where, cure="fix the job"), where)
    if not 1 <= file.schema <= SCHEMA:
        raise UserError(f"{where} has the schema {file.schema}, but this version supports {SCHEMA}: update wgpu-lora.")
    if file.job not in KINDS:
        raise UserError(f"{where} has an unknown kind {file.job!r:.60}: choose one of {', '.join(KINDS)}.")
    return Job(file.job, file.options, where)


def _bytes(source: str, where: str) -> bytes:
    if source == "-":
        if sys.stdin is None:
            raise UserError("There is no standard input to read a job from: give a file.")
        return sys.stdin.buffer.read(MAX_JSON_BYTES + 1)
    try:
        with open_file(source) as file:
            return file.read(MAX_JSON_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{where} cannot be read ({getattr(error, 'strerror', None) or error}).") from None


def arguments(run: Kind, job: Job) -> dict[str, Any]:
    """A job's options as arguments of its kind's function, which checks its **options itself, and is passed `where` for
    its messages if it has that parameter.

    Raises:
        UserError: an option is unknown (the nearest one is suggested), missing, of the wrong type, or empty or not
            positive (see `checked`).
    """
    port, *parameters = inspect.signature(run).parameters.values()
    by_name = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "where"}
    hints = get_type_hints(run)
    names = [*by_name]
    for options in (hints[p.name] for p in parameters if p.kind is p.VAR_KEYWORD):
        unchecked = job.options.keys() - {port.name, "where"}  # by names; the function does that
        names += unchecked if options is Any else get_type_hints(*get_args(options))
    many = f"{', '.join(by_name)} and the options in 'wgpu-lora {job.kind} --help-all'"
    takes = ", ".join(names) if len(names) <= MANY else many
    values = real_names(job.options, names, job.where, otherwise=f"the job {job.kind!r} takes {takes}.")
    missing = [name for name, p in by_name.items() if p.default is p.empty and name not in values]
    if missing:
        raise UserError(
            f"{job.where} lacks {join_words([repr(name) for name in missing])}: the job {job.kind!r} requires it."
        )
    for name in values.keys() & by_name.keys():
        try:
            values[name] = checked(by_name[name], hints[name], values[name])
        except ValueError as error:
            raise UserError(f"{job.where}: {error}.") from None
    return {**values, "where": job.where} if "where" in hints else values


def checked(parameter: inspect.Parameter, hint: Any, value: Any) -> Any:
    """A JSON value as a parameter's type. Numbers of jobs are counts or seconds, except a device's index: none may be 0
    or less, unless it is the default. Text and lists must not be empty.

    Raises:
        ValueError: the value is not allowed; the message is part of a sentence.
    """
    name = f"'{parameter.name}'"
    value = typed(hint, value, name)
    if value == [] or (isinstance(value, str) and not value.strip()):
        omitting = "" if parameter.default is parameter.empty else ", or leave it out"
        raise ValueError(f"{name} is empty: give it a value{omitting}")
    kinds = get_args(hint) or (hint,)
    counts = parameter.name != "device" and value != parameter.default
    if counts and type(value) in (int, float) and value <= 0:
        raise ValueError(f"{name} must be {'greater than 0' if float in kinds else 'at least 1'}, not {value}")
    return value
