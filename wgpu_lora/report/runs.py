"""A finished run as its directory has it: run.json, log.jsonl, and profile.json where somebody made one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.train.output import LOG, RUN, read_log

PROFILE = "profile.json"  # 'wgpu-lora profile --json > DIR/profile.json'


@dataclass(frozen=True)
class Run:
    """What is known of a run. profile: per-kernel times, None where they were not measured."""

    name: str
    directory: Path
    facts: dict[str, Any]
    log: list[dict[str, Any]]
    profile: dict[str, Any] | None

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of the log's lines that have `key`."""
        lines = [line for line in self.log if line.get(key) is not None]
        return [line["step"] for line in lines], [line[key] for line in lines]

    @property
    def summary(self) -> str:
        """A Markdown line for a run log."""
        state, options, device = self.facts["state"], self.facts["options"], self.facts["environment"]["device"]
        speeds = sorted(self.series("tokens_per_second")[1])
        losses = [f"loss {_number(state['last_loss'])}"]
        if state["last_eval_loss"] is not None:
            losses.append(f"held-out {_number(state['last_eval_loss'])} (best {_number(state['best_eval_loss'])})")
        speed = f"{speeds[len(speeds) // 2]:,.0f} tokens/s" if speeds else "speed not logged"
        what = f"{options['model'] or 'demo'}, rank {options['lora_r']} on {options['target_modules']}"
        steps = f"{state['step']:,} of {state['total_steps']:,} steps ({self.facts['stop_reason']})"
        memory = f"{self.facts['memory']['peak']:,} bytes of device memory"
        return (
            f"- **{self.name}**: {what}, {steps}, {', '.join(losses)}, {state['seconds']:,.0f} s, {speed}, {memory}, "
            f"on {device['name']} ({device['driver']})"
        )


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """The runs of these directories, named apart.

    Raises:
        UserError: a directory holds no finished run, or its files are damaged.
    """
    names = [directory.resolve().name for directory in directories]
    apart = names if len(set(names)) == len(names) else [str(directory) for directory in directories]
    return [_read(name, directory) for name, directory in zip(apart, directories, strict=True)]


def _read(name: str, directory: Path) -> Run:
    path = directory / RUN
    if not path.is_file():
        raise UserError(f"{directory} holds no finished run (there is no {RUN}): give a run's --output directory.")
    try:
        facts = json.loads(path.read_text())
        log = read_log(directory / LOG) if (directory / LOG).is_file() else []
        profile = json.loads((directory / PROFILE).read_text()) if (directory / PROFILE).is_file() else None
        run = Run(name, directory, facts, log, profile)
        _ = run.summary, [kernel["seconds"] for kernel in profile["kernels"]] if profile else []  # what is read later
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"The run in {directory} cannot be read ({type(error).__name__}: {error}).") from error
    return run
