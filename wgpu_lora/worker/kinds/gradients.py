"""The job `gradients`: a helper of a data-parallel run, which computes parts of its steps for the leader."""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from typing import Any, Unpack

from wgpu_lora.api.plain import plain
from wgpu_lora.chain.digests import code_digest
from wgpu_lora.data import given_rows
from wgpu_lora.errors import UserError
from wgpu_lora.train.exchange import message
from wgpu_lora.train.gather import gather
from wgpu_lora.train.helping import helping, prepare_helper
from wgpu_lora.train.options.typed import TrainingOptions
from wgpu_lora.worker.child import Port

HUNG_UP = 10.0  # seconds in which a helper without a leader ends by itself, before it is ended


def run(port: Port, *, where: str, link: str, recipe: str | None = None, **options: Unpack[TrainingOptions]) -> Any:
    """link: a socket (or a named pipe on Windows) on this machine, over which the leader asks. Ends when it is closed.

    The other options are those of the leader's job `finetune`. The result is the number of answers.
    """
    texts, rows = given_rows({name: plain(value, name, where) for name, value in options.items()})
    args, _ = gather(texts, recipe, where)
    with connected(link) as leader:
        questions, count = _heard(leader), 0
        with (
            helping(prepare_helper(args, rows=rows), port, code_digest()) as assistant,
            suppress(ConnectionError),  # it has hung up
        ):
            leader.send_bytes(message({"say": "ready"}))
            while question := questions.get():
                leader.send_bytes(assistant.answer(question))
                count += 1
    return {"answers": count}


def connected(link: str) -> Connection:
    """Raises UserError if nobody listens."""
    try:
        return Client(link)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"The leader of a data-parallel run cannot be reached at {link} ({error}): this job is started by "
            "'wgpu-lora cluster run', not by hand."
        ) from None


def _heard(leader: Connection) -> queue.SimpleQueue[bytes]:
    """The questions, b"" after the last. A thread reads them, so that this process also ends while it computes."""
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                questions.put(leader.recv_bytes())
        except (EOFError, OSError):
            questions.put(b"")
            threading.Event().wait(HUNG_UP)
            os._exit(1)

    threading.Thread(target=read, name="leader", daemon=True).start()
    return questions
