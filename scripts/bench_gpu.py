"""The acceptance test for a GPU in one JSON file: whether its kernels are right, ceilings, bricks, training, PyTorch.

python scripts/bench_gpu.py [--json bench-gpu.json] [--device INDEX|NAME] [--quick]

Each part is a worker's job. A part that cannot run is in the file too, with the reason. The file is rewritten after
each part, so a later failure loses no results. The exit code is 1 if a kernel is wrong. --quick reduces everything to a
small shape and a few layers, tokens and steps, to check that all parts run; its figures are meaningless.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wgpu_lora.bench.brick_results import Writer, header
from wgpu_lora.bench.bricks import bricks_of
from wgpu_lora.bench.contract import load_contract
from wgpu_lora.cli.console import line
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.worker.worker import PROGRAM, Worker, WorkerFailed

SCHEMA = "wgpu-lora-bench-gpu/3"
SHAPES = ("qwen2.5-0.5b", "qwen2.5-7b")
QUICK_SHAPES = ("tiny-qwen3",)
SCRIPTS = {"comparison": "bench_reference.py", "kernels": "bench_gpu_kernels.py"}  # of jobs that are not the package's
PROGRAMS = {
    job: [sys.executable, str(Path(__file__).with_name(file).resolve()), "worker"] for job, file in SCRIPTS.items()
}
REFUSED = 2  # exit code of a job that cannot run
BROKEN = 1  # exit code of a job that ran: a contract is violated, or a training did not finish
Record = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A worker's job. pieces: the jobs to run instead if it is refused, since one of its bricks may not fit."""

    name: str
    job: str
    options: Record = field(default_factory=dict)
    pieces: tuple[Part, ...] = ()


def parts(device: str | None, quick: bool) -> Iterator[Part]:
    """Everything, in order; `quick` runs the same jobs on less."""
    on: Record = {"device": device} if device else {}
    layers, tokens = {"layers": 1} if quick else {}, {"tokens": 32 if quick else 512}
    steps, rounds = {"max_steps": 4 if quick else 12}, {"rounds": 1, "steps": 2} if quick else {}
    less: Record = {**layers, **tokens, "time_limit": 0.2} if quick else {}
    shapes = QUICK_SHAPES if quick else SHAPES
    for shape in shapes:
        yield Part(
            f"kernels at {shape}", "kernels", {"shape": shape, **tokens, **({"rounds": 1} if quick else {}), **on}
        )
    for shape in shapes:
        pieces = []
        for name in bricks_of(shape_config(shape)):
            taken = ("time_limit", *load_contract(name).options)  # a brick refuses any other
            options = {name: value for name, value in less.items() if name in taken}
            pieces.append(Part(f"{name} at {shape}", "bench", {"bricks": [name], "shape": shape, **options, **on}))
        yield Part(f"bricks at {shape}", "bench", {"shape": shape, **less, **on}, pieces=tuple(pieces))
    yield Part("training on the demo", "bench-training", {"recipe": "demo", **(steps if quick else {}), **on})
    for shape in shapes:
        options = {"shape": shape, **layers, **tokens, **steps, **on}
        yield Part(f"training at {shape}", "bench-training", options)
    for kind in ("bf16", "nf4"):
        for shape in shapes:
            sides = {"rows": [1], "rank": 16, "ours": ["nf4"], "torch": [kind], "torch_device": "cuda"}
            options = {"shape": shape, **layers, **tokens, **sides, **rounds, **on}
            yield Part(f"beside PyTorch + PEFT in {kind} at {shape}", "comparison", options)


def run(part: Part, timeout: float) -> Record:
    """The part's outcome: `ran` or, with the reason, `not run`; its exit code, and the records that it measured."""
    begin, found = time.perf_counter(), []
    with Worker(part.job, part.options, program=PROGRAMS.get(part.job, PROGRAM), timeout=timeout) as worker:
        try:
            for event in worker.events():
                found += [event["record"]] if event["event"] == "measured" else []
            code: int | None = worker.wait()
            reason = worker.failure_reason()
        except WorkerFailed as error:
            code, reason = error.code, str(error)
    record: Record = {"part": part.name, "job": {"job": part.job, "options": part.options}}
    record |= {"seconds": time.perf_counter() - begin, "exit_code": code, "results": found}
    if found and (code == 0 or (code == BROKEN and part.job != "comparison")):
        return {**record, "status": "ran"}
    return {**record, "status": "not run", "reason": reason}


def outcomes(work: Iterable[Part], timeout: float) -> Iterator[Record]:
    """Run every part, and the pieces of one that is refused."""
    for part in work:
        line("part", f"{part.name}: {part.job} {json.dumps(part.options)}")
        found = run(part, timeout)
        yield found
        if found.get("exit_code") == REFUSED:
            yield from outcomes(part.pieces, timeout)


def wrong(outcomes: Iterable[Record]) -> int:
    """The exit code: 1 if a kernel is wrong. Other parts that fail say so in the report."""
    return int(any(measured.get("right") is False for found in outcomes for measured in found["results"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench-gpu.json"))
    parser.add_argument("--device", help="as 'wgpu-lora info' lists them")
    parser.add_argument("--quick", action="store_true", help="only check that everything runs")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds per part")
    options = parser.parse_args()
    try:
        with Writer(options.json) as writer:  # refuses what cannot be written, before hours of measuring
            result = header(SCHEMA, Device(options.device), quick=options.quick)
            line("device", f"{result['device']['name']}, {result['device']['driver']}")
            result["parts"] = []
            for found in outcomes(parts(options.device, options.quick), options.timeout):
                result["parts"].append(found)
                writer.text(json.dumps(result, indent=1) + "\n")
    except UserError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        return 2
    print()
    for found in result["parts"]:
        why = f": {found['reason']}" if "reason" in found else ""
        failed = ", exit code 1" if found["status"] == "ran" and found["exit_code"] else ""
        line(found["status"], f"{found['part']}{failed}{why}")
    line("written", str(options.json))
    return wrong(result["parts"])


if __name__ == "__main__":
    sys.exit(main())
