"""A compiler over all that is selected, in a process where a shim pretends that the GPU is there.

python -m scripts.gpu_compilers.compiler_run SUBGROUP_SIZE SELECTION SKIPPED is that process.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from scripts.gpu_compilers.compiled_shader import Compiled, Unreadable
from scripts.gpu_compilers.gpus import Environment, Gpu
from scripts.gpu_compilers.port_model import Bound, bound
from scripts.gpu_compilers.recorded_kernels import Selection, calls
from wgpu_lora.errors import UserError
from wgpu_lora.files.typed_json import typed
from wgpu_lora.gpu.device import Device, DeviceOptions
from wgpu_lora.gpu.device_errors import ShaderError
from wgpu_lora.gpu.tiling import Tiling

MARKER = "@@gpu-compilers "  # begins a line; JSON follows
_LIBC, LINES = ctypes.CDLL(None), 1  # _IOLBF
TAIL = 12  # lines of a child that failed


@dataclass(frozen=True)
class Row:
    """A compute pipeline (`Call.to_json`), and what the compiler made of it; None if it gave up.

    bound: of its inner loop. repeated: whether an earlier pipeline is the same program.
    """

    call: dict[str, Any]
    compiled: Compiled | None
    error: str = ""
    bound: Bound | None = None
    repeated: bool = False

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
        bound = self.bound and {**asdict(self.bound), "share": round(self.bound.share, 3)}
        return {**self.call, **compiled, "bound": bound, "repeated": self.repeated}


@dataclass
class Answers:
    """What one compiler said, for one subgroup size."""

    gpu: Gpu
    subgroup_size: int
    device: str = ""
    driver: str = ""
    rows: list[Row] = field(default_factory=list)

    @property
    def max_occupancy(self) -> int:
        """The highest occupancy, in the GPU's unit."""
        return self.gpu.occupancy[1] * self.subgroup_size // 32

    def to_json(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu.name,
            "device": self.device,
            "driver": self.driver,
            "subgroup_size": self.subgroup_size,
            "occupancy": {"unit": self.gpu.occupancy[0], "most": self.max_occupancy},
            "kernels": [row.to_json() for row in self.rows],
        }


def ask(
    gpu: Gpu, subgroup_size: int, environment: Environment, selection: Selection, raw: Path | None = None
) -> Answers:
    """What a GPU's compiler makes of everything selected. Raises UserError if it does not even begin.

    raw: a directory for all that the compiler prints, with a file for each compute pipeline.
    """
    answers, ended = Answers(gpu, subgroup_size), False
    while not ended:  # a compiler that crashes is started again behind what it crashed at
        before = len(answers.rows)
        options = [str(subgroup_size), json.dumps(asdict(selection)), str(before)]
        child = subprocess.Popen(
            [*environment.command, "-m", "scripts.gpu_compilers.compiler_run", *options],
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
            answers.rows.append(_row(answers, marker["call"], section))
            if raw:
                name = f"{gpu.name}-{answers.subgroup_size}-{len(answers.rows):03}-{marker['call']['kernel']}.txt"
                (raw / name).write_text("\n".join([json.dumps(marker["call"]), *section]))
        elif "error" in marker:
            answers.rows[-1] = Row(answers.rows[-1].call, None, marker["error"])
        elif "end" in marker:
            return True, section
    return False, section


def _row(answers: Answers, call: dict[str, Any], section: list[str]) -> Row:
    if not any(section):  # drivers compile a program once, and then know it although its text differs
        candidates = [
            row for row in answers.rows if all(row.call[n] == call[n] for n in ("kernel", "bindings", "tiling"))
        ]
        if candidates:
            nearest = max(
                candidates, key=lambda row: sum(row.call["constants"].get(n) == v for n, v in call["constants"].items())
            )
            return replace(nearest, call=call, repeated=True)
    try:
        compiled = answers.gpu.parse(section)
    except Unreadable as error:
        return Row(call, None, f"the compiler's output has no statistics: {error}")
    threads = call["tiling"]["lanes"]
    return Row(call, compiled, bound=compiled.loop and bound(compiled.loop, answers.gpu.rates, threads))


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


# -- in the process ----------------------------------------------------------------------------------------------------


def mark(content: dict[str, Any]) -> None:
    """Write a marker after all that the compilers have printed so far."""
    _LIBC.fflush(None)  # drivers print with C's buffers
    os.write(sys.stdout.fileno(), f"\n{MARKER}{json.dumps(content)}\n".encode())


def compile_all(subgroup_size: int, selection: Selection, offset: int) -> None:
    """Compiles every call behind the first `offset`, with a marker before each; compilers print in between.

    Runs where a shim pretends that the GPU is there.
    """
    # A driver that prints to both streams would break lines of the one that is buffered.
    _LIBC.setvbuf(ctypes.c_void_p.in_dll(_LIBC, "stdout"), None, LINES, 0)
    device = Device(0, DeviceOptions(subgroup_size=subgroup_size, backend=selection.backend))
    mark({"device": device.info.name, "driver": device.info.driver, "software": device.capabilities.software})
    for call in calls(selection, device)[offset:]:
        mark({"call": call.to_json()})
        try:
            call.kernel.compute_pipeline(device, call.present, call.constants, call.tiling)
        except ShaderError as error:
            mark({"error": str(error)})
    mark({"end": True})


if __name__ == "__main__":
    compile_all(int(sys.argv[1]), typed(Selection, json.loads(sys.argv[2])), int(sys.argv[3]))
