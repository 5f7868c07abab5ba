"""Starts commands in forks of a process that has imported everything, so that each costs little and can be killed.

Reads lines of JSON, {"arguments": [...]}, from standard input. Writes {"pid": ...} for each, and when it has ended
{"code": ..., "processor": seconds}, with a negative code for a signal. The keys that a command generates go to the pipe
whose number is the first argument, and nowhere else.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any


def main() -> None:
    from wgpu_lora.protect.runs import protected_run
    from wgpu_lora.protect.sealed import keys

    assert protected_run  # with everything that it imports

    pipe = int(sys.argv[1])
    generate = keys.SessionKeys.generate.__func__  # type: ignore[attr-defined]

    def generate_and_report(cls: Any) -> Any:
        session_keys = generate(cls)
        scalar = session_keys.signing.key.private_numbers().private_value.to_bytes(32, "big")
        message = {"identity": session_keys.data.text().decode(), "scalar": scalar.hex()}
        os.write(pipe, (json.dumps(message) + "\n").encode())  # in one piece
        return session_keys

    keys.SessionKeys.generate = classmethod(generate_and_report)  # type: ignore[assignment]
    _warm()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        arguments = json.loads(line)["arguments"]
        pid = os.fork()
        if not pid:
            _run(arguments)
        print(json.dumps({"pid": pid}), flush=True)
        _, status, used = os.wait4(pid, 0)
        spent = {"processor": used.ru_utime + used.ru_stime}
        print(json.dumps({"code": os.waitstatus_to_exitcode(status), **spent}), flush=True)


def _warm() -> None:
    """Does once what every fork would do alike: measuring the installed files, parsing wgpu's types, and templates."""
    import cffi
    from wgpu.backends.wgpu_native._api import ffi

    from wgpu_lora.gpu.kernel import _environment as templates
    from wgpu_lora.protect.attestation import measurements

    measured = measurements.measurements()
    measurements.measurements = lambda: copy.deepcopy(measured)
    for name in templates().list_templates(["j2"]):
        templates().get_template(name)
    read, write = os.pipe()
    if not (pid := os.fork()):  # a process that has opened a device cannot be forked
        from wgpu_lora.gpu.device import Device

        Device()
        named = [n for n, kind in ffi._parsed_types.items() if isinstance(kind, tuple) and len(kind) == 2]
        os.write(write, json.dumps(named).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        for name in json.load(pipe):
            with suppress(cffi.CDefError):  # types of functions
                ffi.typeof(name)
    os.waitpid(pid, 0)


def _run(arguments: list[str]) -> None:
    """The command, in the child. Its output goes to standard error."""
    from wgpu_lora.cli.app import main as command

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
