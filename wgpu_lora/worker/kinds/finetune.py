"""The job `finetune`: the options of `wgpu-lora finetune`, and `recipe`; the result is the contents of run.json."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, closing
from typing import Unpack

from wgpu_lora.api.plain import plain
from wgpu_lora.chain.digests import code_digest
from wgpu_lora.data import given_rows
from wgpu_lora.train.ending import STOP_TEXT, exit_code
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.gather import gather
from wgpu_lora.train.options.idle import idle
from wgpu_lora.train.options.typed import TrainingOptions
from wgpu_lora.train.sharing import Sharing
from wgpu_lora.worker.child import Ended, Port
from wgpu_lora.worker.kinds.gradients import connected
from wgpu_lora.worker.requests import Asked


def run(
    port: Port,
    *,
    where: str,
    recipe: str | None = None,
    helpers: list[str] | None = None,
    requests: bool = False,
    **options: Unpack[TrainingOptions],
) -> Ended:
    """A run that fails or is interrupted has a result too; the exit code is that of the command.

    helpers: sockets over which other devices are asked for parts of the steps (see the job `gradients`).
    requests: answer `stop` and `end` while it runs, JSON lines on standard input, whose end kills the process at once.
    """
    asked = Asked()
    if requests:
        port.listen(asked.side())
    texts, rows = given_rows({name: plain(value, name, where) for name, value in options.items()})
    args, _ = gather(texts, recipe, where)
    for note in idle(texts, args):
        warnings.warn(note, stacklevel=1)
    with ExitStack() as stack:
        sharing = None
        if helpers:
            sharing = stack.enter_context(closing(Sharing([connected(link) for link in helpers], code_digest())))
        job = prepare_job(args, rows=rows, sharing=sharing)
        job.requests = asked
        record = job.train(port)
    return Ended(record.to_json(), exit_code(record.stop_reason, record.signal), STOP_TEXT[record.stop_reason])
