"""Runs a compiler over everything that is wanted, and reads what it prints."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from scripts.gpu_compilers.child import MARKER
from scripts.gpu_compilers.compiled import Compiled, Unreadable
from scripts.gpu_compilers.devices import Gpu
from scripts.gpu_compilers.places import Place
from scripts.gpu_compilers.wanted import Wanted
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.tiling import Tiling

TAIL = 12  # lines of a child that failed


@dataclass(frozen=True)
class Row:
    """A compute pipeline (`Call.to_json`), and what the compiler made of it; None if it gave up."""

    call: dict[str, Any]
    compiled: Compiled | None
    error: str = ""

    @property
    def spills(self) -> bool:
        """Whether it is unfit: values that belong in registers are in memory, or there is no program at all."""
        return self.compiled is None or self.compiled.in_memory

    @property
    def tiling(self) -> Tiling:
        return Tiling.from_json(self.call["tiling"])

    def to_json(self) -> dict[str, Any]:
        compiled: dict[str, Any] = {"error": self.error}
        if self.compiled:
            compiled = asdict(self.compiled)
            if self.compiled.loop:
                compiled["loop"]["share"] = round(self.compiled.loop.share, 3)
        return {**self.call, **compiled}


@dataclass
class Answers:
    """What one compiler said, for one subgroup size."""

    gpu: Gpu
    subgroup_size: int
    device: str = ""
    driver: str = ""
    rows: list[Row] = field(default_factory=list)

    @property
    def most(self) -> int:
        """The highest occupancy, in the GPU's unit."""
        return self.gpu.occupancy[1] * self.subgroup_size // 32

    def to_json(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu.name,
            "device": self.device,
            "driver": self.driver,
            "subgroup_size": self.subgroup_size,
            "occupancy": {"unit": self.gpu.occupancy[0], "most": self.most},
            "kernels": [row.to_json() for row in self.rows],
        }


def ask(gpu: Gpu, subgroup_size: int, place: Place, wanted: Wanted, raw: Path | None = None) -> Answers:
    """What a GPU's compiler makes of everything wanted. Raises UserError if it does not even begin.

    raw: a directory for all that the compiler prints, with a file for each compute pipeline.
    """
    answers, ended = Answers(gpu, subgroup_size), False
    while not ended:  # a compiler that crashes is started again behind what it crashed at
        before = len(answers.rows)
        options = [str(subgroup_size), json.dumps(asdict(wanted)), str(before)]
        child = subprocess.Popen(
            [*place.command, "-m", "scripts.gpu_compilers.child", *options],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert child.stdout is not None
        with child, child.stdout:
            ended, last = _read(answers, child.stdout, raw)
        if not ended and len(answers.rows) == before:
            tail = "\n".join(last[-TAIL:])
            raise UserError(f"{gpu.title}: nothing was compiled (exit code {child.returncode}):\n{tail}")
        if not ended:
            answers.rows[-1] = Row(answers.rows[-1].call, None, f"the compiler crashed (exit code {child.returncode})")
    return answers


def _read(answers: Answers, printed: IO[str], raw: Path | None) -> tuple[bool, list[str]]:
    """Adds what is printed to the answers; returns whether the child came to its end, and the last lines."""
    gpu, section = answers.gpu, list[str]()
    for marker, section in _sections(printed):
        if "device" in marker:
            answers.device, answers.driver = marker["device"], marker["driver"]
        elif "call" in marker:
            answers.rows.append(Row(marker["call"], *_parsed(gpu, section)))
            if raw:
                name = f"{gpu.name}-{answers.subgroup_size}-{len(answers.rows):03}-{marker['call']['kernel']}.txt"
                (raw / name).write_text("\n".join([json.dumps(marker["call"]), *section]))
        elif "error" in marker:
            answers.rows[-1] = Row(answers.rows[-1].call, None, marker["error"])
        elif "end" in marker:
            return True, section
    return False, section


def _parsed(gpu: Gpu, section: list[str]) -> tuple[Compiled | None, str]:
    try:
        return gpu.parse(section), ""
    except Unreadable as error:
        return None, f"the compiler's output has no statistics: {error}"


def _sections(printed: IO[str]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Each marker with the lines that follow it; what precedes the first has an empty one."""
    marker: dict[str, Any] = {}
    lines: list[str] = []
    for line in printed:
        if line.startswith(MARKER):
            yield marker, lines
            marker, lines = json.loads(line.removeprefix(MARKER)), []
        else:
            lines.append(line.rstrip("\n"))
    yield marker, lines
