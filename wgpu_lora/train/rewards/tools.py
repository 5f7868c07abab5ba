"""Python functions that a model may call in its answers."""

from __future__ import annotations

import json
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import flag
from wgpu_lora.train.rewards.function_process import FunctionProcess, check_distinct, function_list, function_name

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
