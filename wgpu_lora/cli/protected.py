"""wgpu-lora finetune --protected JOB.toml: train on sealed data."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from wgpu_lora.cli.console import line
from wgpu_lora.cli.options import refuse_idle
from wgpu_lora.errors import UserError
from wgpu_lora.installed import program

if TYPE_CHECKING:
    from wgpu_lora.events import Events
    from wgpu_lora.train.finetune import FinetuneJob

NOT_OF_JOBS = ("recipe", "adapters", "adapters_config", "schedule", "batch_tokens")


def protected_instead(
    ctx: typer.Context, given: dict[str, Any], recipe: str | None, values: dict[str, Any]
) -> int | None:
    """Run the command with --protected; None without it."""
    path: Path | None = values.get("protected")
    if path is None:
        refuse_idle(ctx, ("nonce",), "without --protected")
        return None
    refuse_idle(ctx, NOT_OF_JOBS, "with --protected, whose file has all of that")
    from wgpu_lora.protect.extra import check_libraries

    check_libraries()
    from wgpu_lora.cli.finetune import report
    from wgpu_lora.protect.runs import job as jobs
    from wgpu_lora.protect.runs.run import finetune

    resume = bool(given.pop("resume", False))
    job = jobs.read(path)
    try:
        record = finetune(job, resume=resume, nonce=values.get("nonce"), watch=_watched, say=line, **given)
    except (UserError, OSError):
        raise
    except Exception as error:  # terminals are logged, too
        said = f"{type(error).__name__}: a fault of the program; its message may have something of the rows"
        typer.echo(
            "".join(traceback.format_tb(error.__traceback__)) + f"wgpu-lora: {said}, so it is left out", err=True
        )
        return 1
    begun = f"{program()} finetune --protected {shlex.quote(str(path))} --resume"
    code = report(record.run, begun, str(record.adapter))
    cleanup = record.cleanup
    wiped = "all that can be overwritten was" if cleanup["complete"] else f"not all: {cleanup['not_wiped'][0]}"
    line("cleanup", f"{wiped}; cleanup.json lists what was, and what cannot be")
    line("open", f"{program()} protect open {shlex.quote(str(record.adapter))} --key KEY -o ADAPTER", whole=True)
    where, key = shlex.quote(str(record.directory)), shlex.quote(str(job.broker_file))
    line("check", f"{program()} protect check {where} --broker-key {key}", whole=True)
    return code


@contextmanager
def _watched(job: FinetuneJob) -> Iterator[Events]:
    from wgpu_lora.cli.describing import describe
    from wgpu_lora.cli.finetune import Watcher

    describe(job)
    with Watcher(job) as watcher:
        yield watcher
