"""The job `finetune`: the options of `wgpu-lora finetune`, and `recipe`; the result is the contents of run.json."""

from __future__ import annotations

from typing import Any

from wgpu_lora.api import finetune
from wgpu_lora.train.arguments import named
from wgpu_lora.train.ending import STOP_TEXT, exit_code
from wgpu_lora.worker.child import Ended, Port


def run(port: Port, *, where: str, recipe: str | None = None, **options: Any) -> Ended:
    """A run that fails or is interrupted has a result too; the exit code is that of the command."""
    record = finetune(events=port, progress_bar=False, recipe=recipe, **named(options, where))
    return Ended(record.to_json(), exit_code(record.stop_reason, record.signal), STOP_TEXT[record.stop_reason])
