"""The job `teacher-cache`: caches that a run with a live teacher can be trained with instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from wgpu_lora.api.plain import plain
from wgpu_lora.data import given_rows
from wgpu_lora.models.loaded import open_model
from wgpu_lora.train.caching import write_caches
from wgpu_lora.train.finetune import as_stored, read_run, with_demo_data
from wgpu_lora.train.gather import gather
from wgpu_lora.worker.child import Port
from wgpu_lora.worker.requests import Asked


def run(
    port: Port,
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
        port.listen(Asked().side())
    texts, rows = given_rows({name: plain(value, name, where) for name, value in training.items()})
    args = with_demo_data(gather(texts, None, where)[0])
    student = open_model(args.model or "demo", device, args.base_dtype)
    found = read_run(as_stored(replace(args, resume=False), student), student, rows=rows)
    return write_caches(found, student, Path(output), port)
