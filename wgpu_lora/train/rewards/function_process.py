"""The child process of a run's own functions: what it is asked for rewards, and the functions that a model calls."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.processes.child_process import PATIENCE, ChildEnded, ChildProcess, module_command
from wgpu_lora.train.rewards.function_child import FILE

START = 60.0  # seconds to import a function's file
LINE = 1 << 16  # bytes of a line that it prints, of which the rest follows on others
CHILD = "wgpu_lora.train.rewards.function_child"


class FunctionProcess:
    """Calls functions in a child process, which is started when it is needed, and ended when a call takes too long.

    Args:
        seconds: that a call may take.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._child: ChildProcess | None = None
        self._functions: set[str] = set()  # functions that the child has
        self._number = 0  # of the last message

    def load(self, function: str, option: str) -> None:
        """Load a function that an option names. Raises UserError if it cannot be."""
        reply = self.ask(function)
        if "error" in reply:
            raise UserError(
                f"{flag(option)}: {function:.200} cannot be loaded ({reply['error'].removesuffix('.')}): correct it."
            )

    def ask(self, function: str, **message: Any) -> dict[str, Any]:
        """The child's answer (see `function_child`), or {"error": ...}. Without a message, the function is loaded.

        The start of the child and the import of the function have a time of their own.
        """
        if self._child is None or not self._child.running:
            self._child, self._functions = None, set()
        if function not in self._functions:
            reply = self._answer({"function": function}, START)
            if "error" in reply:
                return reply
            self._functions.add(function)
        return self._answer({"function": function, **message}, self.seconds) if message else {}

    def _answer(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        begin = time.monotonic()
        self._number += 1
        try:
            if self._child is None:
                self._child = ChildProcess(module_command(CHILD), stderr=subprocess.PIPE)
                self._relay = threading.Thread(target=_relay, args=(self._child.popen.stderr,), daemon=True)
                self._relay.start()
            with self._child.within(seconds / PATIENCE):
                self._child.send({**message, "number": self._number})
                reply: dict[str, Any] = self._child.receive()
                while reply.pop("number") != self._number:  # of a message whose answer nobody waited for
                    reply = self._child.receive()
                return reply
        except ChildEnded as error:
            late = time.monotonic() - begin >= seconds
            return {"error": f"it took more than {seconds:g} seconds" if late else str(error)}

    def close(self) -> None:
        if self._child:
            self._child.end()
            self._child = None
            self._relay.join(1.0)  # what the functions have started may hold its pipe


def _relay(printed: IO[bytes]) -> None:
    """Pass on what functions print, without characters that would act on the terminal."""
    with printed, suppress(OSError):
        while line := printed.readline(LINE):
            text = escape_unprintable(line.decode("utf-8", "backslashreplace").rstrip("\r\n"), keep="\t")
            os.write(2, f"{text}\n".encode())


def function_list(parts: Iterable[str], option: str) -> list[str]:
    """The functions that an option names. Raises UserError if there is none."""
    result = [part.strip() for part in parts if part.strip()]
    if not result:
        raise UserError(f"{flag(option)} is empty: name at least one function.")
    return result


def function_name(function: str, option: str) -> str | None:
    """NAME of FILE.py:NAME; None if it is not of this form. Raises UserError if it is wrong."""
    before, colon, name = function.partition(FILE + ":")
    if not colon:
        return None
    if not Path(before + FILE).is_file():
        raise UserError(f"{flag(option)}: there is no file {before + FILE!s:.200}: correct the path.")
    if not name.isidentifier():
        raise UserError(f"{flag(option)}: {name!r:.80} is not the name of a function: give FILE.py:NAME.")
    return name


def check_distinct(names: Sequence[str], option: str) -> None:
    """Raise UserError if two functions have the same name."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{flag(option)} has two functions named {name!r:.80}: rename one of them.")


OPTION = "tools"


class Tools:
    """Functions that run in a child process, which reward functions may share (`process`).

    schemas: as the chat template takes them, with the JSON schema of each function's parameters from its annotations,
    and its docstring as the description.

    Args:
        functions: FILE.py:NAME, separated by commas.
        seconds: that a call may take.

    Raises:
        UserError: a function cannot be loaded, or has parameters that JSON has no schema for.
    """

    def __init__(self, functions: str, seconds: float):
        self._functions: dict[str, str] = {}
        listed = function_list(functions.split(","), OPTION)
        for function in listed:
            name = function_name(function, OPTION)
            if name is None:
                raise UserError(f"{flag(OPTION)} has {function!r:.80}: give functions as FILE.py:NAME.")
            self._functions[name] = function
        check_distinct([function.rpartition(":")[2] for function in listed], OPTION)
        self.process = FunctionProcess(seconds)
        self.schemas: list[dict[str, Any]] = []
        for name, function in self._functions.items():
            self.process.load(function, OPTION)
            reply = self.process.ask(function, schema=True)
            if "error" in reply:
                raise UserError(
                    f"{flag(OPTION)}: the parameters of {name} have no JSON schema ({reply['error']}): annotate them."
                )
            self.schemas.append({"type": "function", "function": {"name": name, **reply}})

    def call(self, name: str, arguments: Any) -> tuple[str, bool]:
        """(What a function returns, as text; whether it failed, with the reason as JSON, as in TRL)."""
        function = self._functions.get(name)
        if function is None:
            reply = {"error": f"there is no tool {name!r:.80}, but {', '.join(self._functions)}"}
        elif not isinstance(arguments, dict):
            reply = {"error": "the arguments are not a JSON object"}
        else:
            reply = self.process.ask(function, call=arguments)
        return (json.dumps(reply), True) if "error" in reply else (reply["result"], False)

    def close(self) -> None:
        self.process.close()
