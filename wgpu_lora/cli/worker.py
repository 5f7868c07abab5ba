"""wgpu-lora worker: any job as a child of another program."""

from __future__ import annotations

from typing import Annotated

import typer


def worker(
    job: Annotated[str, typer.Argument(help="JSON file with a job, or - to read it from standard input.")],
) -> int:
    """Run a job for another program, with JSON lines as output.

    A job is {"job": KIND, "options": {...}}: finetune, evaluate, generate, import, bench, bench-training or step, with
    their options by name. Each event is an object on a line of standard output; the last is 'result' or 'error'.
    """
    from wgpu_lora.worker.child import work

    return work(job)
