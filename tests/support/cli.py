"""What the tests of the command line and of the Python door share: tiny models, tokenised rows, one device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support import MODELS
from wgpu_lora.cli.app import main

QWEN2 = str(MODELS / "qwen2")
ROWS = [{"input_ids": [(7 * i + j) % 40 + 1 for j in range(6 + i % 7)]} for i in range(8)]
# A row for each batch, so that a run of few steps is small; every run here shares its compiled kernels.
SMALL = {
    "max_length": 16,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "lora_r": 4,
    "logging_steps": 1,
    "max_steps": 2,
}


def flags(**options: Any) -> list[str]:
    """Options as the command line takes them."""
    arguments: list[str] = []
    for name, value in options.items():
        text = name.replace("_", "-")
        arguments += [f"--{'' if value else 'no-'}{text}"] if isinstance(value, bool) else [f"--{text}", str(value)]
    return arguments


def write_rows(path: Path, rows: list[Any] | None = None) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in (ROWS if rows is None else rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


class Result(NamedTuple):
    code: int
    out: str
    err: str

    def output(self) -> str:
        """What a command that succeeded printed."""
        assert self.code == 0, self
        return self.out

    def refusal(self) -> str:
        """The one sentence of a command that refused."""
        assert (self.code, self.err.count("\n"), self.err.startswith("wgpu-lora: ")) == (2, 1, True), self
        return self.err.removesuffix("\n")


Run = Callable[..., Result]


def commands(capsys: pytest.CaptureFixture[str], *first: Any) -> Run:
    """Runs commands in this process; `first` stands before their arguments."""

    def run(*arguments: Any) -> Result:
        code = main([str(argument) for argument in (*first, *arguments)])
        return Result(code, *capsys.readouterr())

    return run
