"""The job `finetune`: the options of `wgpu-lora finetune`, and `recipe`; the result is the contents of run.json."""

from __future__ import annotations

import warnings
from typing import Unpack

from wgpu_lora.api.plain import plain
from wgpu_lora.data import given_rows
from wgpu_lora.train.ending import STOP_TEXT, exit_code
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.gather import gather
from wgpu_lora.train.options.idle import idle
from wgpu_lora.train.options.typed import TrainingOptions
from wgpu_lora.worker.child import Ended, Port


def run(port: Port, *, where: str, recipe: str | None = None, **options: Unpack[TrainingOptions]) -> Ended:
    """A run that fails or is interrupted has a result too; the exit code is that of the command."""
    texts, rows = given_rows({name: plain(value, name, where) for name, value in options.items()})
    args, _ = gather(texts, recipe, where)
    for note in idle(texts, args):
        warnings.warn(note, stacklevel=1)
    record = prepare_job(args, rows=rows).train(port)
    return Ended(record.to_json(), exit_code(record.stop_reason, record.signal), STOP_TEXT[record.stop_reason])
