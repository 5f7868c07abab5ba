"""The process of a tracker: messages as JSON lines on standard input, an answer to each on standard output."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any

from wgpu_lora.track.trackers.base import Tracked

LONGEST = 300  # characters of an error


def main() -> None:
    """Serve one run until it is finished, or until the input ends because the run's process was killed."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get among the answers
    tracker: Any = None
    try:
        for line in sys.stdin:
            message = json.loads(line)
            if "begin" in message:
                module, _, name = message["tracker"].partition(":")
                tracker = getattr(import_module(module), name)(Tracked(**message["begin"]))
            elif "log" in message:
                tracker.log(message["log"], message["step"])
            else:
                tracker.finish(message["finish"])
            answers.write(json.dumps({"place": tracker.place}) + "\n")
            answers.flush()
            if "finish" in message:
                os._exit(0)  # without waiting for threads of the library
        if tracker is not None:
            tracker.finish("killed")
    except BaseException as error:  # some libraries exit
        said = " ".join(f"{type(error).__name__}: {error}".split())
        answers.write(json.dumps({"error": said[:LONGEST]}) + "\n")
        answers.flush()
        os._exit(1)  # whatever hangs at exit, or prints
