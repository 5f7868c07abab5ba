"""Starts commands in forks of a process that has imported everything, so that each costs little and can be killed.

Reads lines of JSON, {"arguments": [...]}, from standard input. Writes {"pid": ...} for each, and {"code": ...} when it
has ended, negative for a signal. The keys that a command generates go to the pipe whose number is the first argument,
and nowhere else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def main() -> None:
    from wgpu_lora.protect import keys, run

    assert run  # with everything that it imports

    pipe = int(sys.argv[1])
    generate = keys.SessionKeys.generate.__func__  # type: ignore[attr-defined]

    def told(cls: Any) -> Any:
        made = generate(cls)
        scalar = made.signing.key.private_numbers().private_value.to_bytes(32, "big")
        said = {"identity": made.data.text().decode(), "scalar": scalar.hex()}
        os.write(pipe, (json.dumps(said) + "\n").encode())  # in one piece
        return made

    keys.SessionKeys.generate = classmethod(told)  # type: ignore[assignment]
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        arguments = json.loads(line)["arguments"]
        pid = os.fork()
        if not pid:
            _run(arguments)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


def _run(arguments: list[str]) -> None:
    """The command, in the child. Its output goes to standard error."""
    from wgpu_lora.cli import main as command

    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 70
    try:
        code = command(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
