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
from scripts.gpu_compilers.recorded import Wanted
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
    """What a GPU's compiler makes of everything wanted. Raises UserError if it does not run to the end.

    raw: a directory for all that the compiler prints, with a file for each compute pipeline.
    """
    options = json.dumps(asdict(wanted))
    command = [*place.command, "-m", "scripts.gpu_compilers.child", str(subgroup_size), options]
    child = subprocess.Popen(
        command,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert child.stdout is not None
    with child, child.stdout:
        answers, doing, last = _read(gpu, subgroup_size, child.stdout, raw)
    if child.returncode or doing is not None:
        tail = "\n".join(last[-TAIL:])
        raise UserError(
            f"The compiler of {gpu.title} ended with exit code {child.returncode} {doing or 'before it began'}:\n{tail}"
        )
    return answers


def _read(gpu: Gpu, subgroup_size: int, printed: IO[str], raw: Path | None) -> tuple[Answers, str | None, list[str]]:
    """(answers, what was being done when the output ended or None, the last lines)."""
    answers, doing, section = Answers(gpu, subgroup_size), "", list[str]()
    for marker, section in _sections(printed):
        if "device" in marker:
            answers.device, answers.driver = marker["device"], marker["driver"]
        elif "call" in marker:
            doing = f"at {marker['call']['kernel']}, {marker['call']['tiling']}"
            answers.rows.append(Row(marker["call"], *_parsed(gpu, section)))
            if raw:
                name = f"{gpu.name}-{subgroup_size}-{len(answers.rows):03}-{marker['call']['kernel']}.txt"
                (raw / name).write_text("\n".join([json.dumps(marker["call"]), *section]))
        elif "error" in marker:
            answers.rows[-1] = Row(answers.rows[-1].call, None, marker["error"])
        elif "end" in marker:
            return answers, None, section
    return answers, doing, section


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
