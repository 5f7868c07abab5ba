"""wgpu-lora worker: run a job as a child process of another program."""

from __future__ import annotations

from typing import Annotated

import typer


def worker(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="JSON file with a job, or - to read it from standard input.")
    ],
) -> int:
    """Run a job for another program, with JSON lines as output.

    A job is {"job": KIND, "options": {...}}: finetune, pipeline, plan, evaluate, generate, import, bench,
    bench-training or speed, each with its options by name. Each event is a JSON object on a line of standard
    output; the last one is 'result' or 'error'.
    """
    from wgpu_lora.cluster.worker.job_process import work

    return work(job)
