"""The acceptance test for a GPU in one JSON file: whether its kernels are right, ceilings, bricks, training, PyTorch.

python -m scripts.bench.gpu_report [--json bench-gpu.json] [--device INDEX|NAME] [--quick]

Each part is a worker's job. A part that cannot run is in the file too, with the reason. The file is rewritten after
each part, so a later failure loses no results. The exit code is 1 if a kernel is wrong. --quick reduces everything to a
small shape and a few layers, tokens and steps, to check that all parts run; its figures are meaningless.

The job `kernels` compares every kernel of a model's shape with its reference, then times it: heavy ones on a small call
in every tiling that the tuner may choose, all of them in a training step, which alternates with a tuned one. What
compilers predict (scripts/gpu_compilers) is beside the measurements: registers and instructions of a pipeline, and the
share of the GPU's peak that the busiest port of its inner loop allows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scripts.gpu_compilers.compiler_report import figures, nearest, read_predictions
from scripts.gpu_compilers.recorded_kernels import Call, Selection, calls
from wgpu_lora.bench.brick_results import Writer, header
from wgpu_lora.bench.bricks import bricks_of
from wgpu_lora.bench.contract import load_contract
from wgpu_lora.bench.reference_check import ReferenceErrors
from wgpu_lora.bench.step_profile import Profile, profile_step
from wgpu_lora.bench.training_step import WARMUP, TrainingStep, chosen_model
from wgpu_lora.cli.app import main as command_line
from wgpu_lora.cli.console import line
from wgpu_lora.cluster.worker.job_file import KINDS
from wgpu_lora.cluster.worker.job_process import EventWriter, JobResult
from wgpu_lora.cluster.worker.worker import PROGRAM, Worker, WorkerFailed
from wgpu_lora.errors import UserError
from wgpu_lora.files.typed_json import read_as
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import WrongResults
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.tiling_check import NMSE, cut_verdict
from wgpu_lora.gpu.tuner import Tuner, is_skipped
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.train.options.training_arguments import TrainingArguments

SCHEMA = "wgpu-lora-bench-gpu/3"
SHAPES = ("qwen2.5-0.5b", "qwen2.5-7b")
QUICK_SHAPES = ("tiny-qwen3",)
# Of jobs that are not the package's.
PROGRAMS = {
    "comparison": (sys.executable, "-m", "scripts.bench.reference", "worker"),
    "kernels": (sys.executable, "-m", "scripts.bench.gpu_report", "worker"),
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
    quick_options: Record = {**layers, **tokens, "time_limit": 0.2} if quick else {}
    shapes = QUICK_SHAPES if quick else SHAPES
    for shape in shapes:
        yield Part(
            f"kernels at {shape}", "kernels", {"shape": shape, **tokens, **({"rounds": 1} if quick else {}), **on}
        )
    for shape in shapes:
        pieces = []
        for name in bricks_of(shape_config(shape)):
            option_names = ("time_limit", *load_contract(name).options)  # a brick refuses any other
            options = {name: value for name, value in quick_options.items() if name in option_names}
            pieces.append(Part(f"{name} at {shape}", "bench", {"bricks": [name], "shape": shape, **options, **on}))
        yield Part(f"bricks at {shape}", "bench", {"shape": shape, **quick_options, **on}, pieces=tuple(pieces))
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
    begin, results = time.perf_counter(), []
    with Worker(part.job, part.options, program=PROGRAMS.get(part.job, PROGRAM), timeout=timeout) as worker:
        try:
            for event in worker.events():
                results += [event["record"]] if event["event"] == "measured" else []
            code: int | None = worker.wait()
            reason = worker.failure_reason()
        except WorkerFailed as error:
            code, reason = error.code, str(error)
    record: Record = {"part": part.name, "job": {"job": part.job, "options": part.options}}
    record |= {"seconds": time.perf_counter() - begin, "exit_code": code, "results": results}
    if results and (code == 0 or (code == BROKEN and part.job != "comparison")):
        return {**record, "status": "ran"}
    return {**record, "status": "not run", "reason": reason}


def outcomes(work: Iterable[Part], timeout: float) -> Iterator[Record]:
    """Run every part, and the pieces of one that is refused."""
    for part in work:
        line("part", f"{part.name}: {part.job} {json.dumps(part.options)}")
        outcome = run(part, timeout)
        yield outcome
        if outcome.get("exit_code") == REFUSED:
            yield from outcomes(part.pieces, timeout)


def wrong(outcomes: Iterable[Record]) -> int:
    """The exit code: 1 if a kernel is wrong. Other parts that fail say so in the report."""
    return int(any(record.get("right") is False for outcome in outcomes for record in outcome["results"]))


# -- the job `kernels` -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """One layer of a shape. rounds: timed steps. candidates: whether to compare tilings that are not the default."""

    shape: str
    device: str | None = None
    tokens: int = 512
    rank: int = 16
    rounds: int = 5
    candidates: bool = True


class ByKernel(ReferenceErrors):
    """The largest error of each kernel; NaN if its inputs never let it be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.worst: dict[str, float] = {}

    def add(self, nmse: float, kernel: str, part: bool) -> None:
        super().add(nmse, kernel, part)
        before = self.worst.get(kernel, math.nan)
        self.worst[kernel] = before if math.isnan(nmse) else nmse if math.isnan(before) else max(before, nmse)


def tilings(device: Device, work: Work) -> Iterator[Record]:
    """Every pipeline of training, prefill and decoding; heavy kernels in every tiling, compared on a small call."""
    selection = Selection((work.shape,), tokens=work.tokens, rank=work.rank, candidates=work.candidates)
    pipelines = [
        call for call in calls(selection, device) if call.default or not is_skipped(device.capabilities, call.tiling)
    ]
    predicted = figures(nearest(device, read_predictions()), [call.to_json() for call in pipelines])
    for call, prediction in zip(pipelines, predicted, strict=True):
        record = {"kind": "tiling", **call.to_json(), "predicted": prediction}
        yield record | (_compared(device, call) if call.kernel.tuning else {})


def _compared(device: Device, call: Call) -> Record:
    dispatch = Dispatch(call.kernel, (), call.present, call.constants, call.tiling, (1, 1, 1))
    verdict = cut_verdict(device, dispatch, call.tiling)
    return {"right": verdict.right, "nmse": verdict.nmse, "limit": verdict.limit, "reason": verdict.reason}


def step(device: Device, work: Work) -> Iterator[Record]:
    """All kernels of a training step in their default tilings that are right: errors on random values, and times; then
    the step beside the same step with tuned tilings.

    Raises:
        WrongResults: a kernel is wrong in all tilings, so there is nothing more to measure.
    """
    model = chosen_model(None, work.shape, 1, device)
    args = TrainingArguments(per_device_train_batch_size=1, max_length=work.tokens, lora_r=work.rank)
    errors, verdicts = ByKernel(), verdicts_of(device)
    with ExitStack() as stack:

        def new_step() -> TrainingStep:
            step = TrainingStep.fitting(model, args)
            stack.callback(step.close)
            return step

        training_step = new_step()
        try:
            training_step.allocate()
        except WrongResults as error:  # the others can be compared all the same
            yield _wrong(error)
            verdicts.enabled = False
            training_step = new_step()
            training_step.allocate()
        training_step.check(np.random.default_rng(0), errors)
        for kernel, nmse in errors.worst.items():
            right = None if math.isnan(nmse) else nmse <= NMSE
            reason = "" if right is not None else "its inputs are not finite"
            yield {"kind": "kernel", "kernel": kernel, "right": right, "nmse": nmse, "limit": NMSE, "reason": reason}
        verdicts.enabled = False  # that was all that there is to compare, and a wrong kernel can be timed, too
        profile = profile_step(training_step, work.rounds)
        bounds = _bounds(training_step, profile)
        for group in profile.groups(by_shape=True):
            bound = bounds.get((group.kernel, group.shape))
            yield {"kind": "time", "clock": profile.clock, **asdict(group), "predicted_bound": bound}
        tuned = TrainingStep(model, args)
        stack.callback(tuned.close)
        tuned.allocate(Tuner(device).tune(tuned.session.programs()))
        yield {"kind": "tuning", **_alternating({"default": training_step, "tuned": tuned}, work.rounds)}


def _bounds(step: TrainingStep, profile: Profile) -> dict[tuple[str, str | None], float]:
    """The share of the GPU's peak that compilers predict for each kernel and shape; the lowest of its pipelines."""
    device, dispatches = (
        step.session.device,
        [dispatch for program in step.session.programs() for dispatch in program.dispatches],
    )
    calls = [
        Call(dispatch.kernel, dispatch.present, dispatch.constants, dispatch.tiling, True).to_json()
        for dispatch in dispatches
    ]
    shares: dict[tuple[str, str | None], float] = {}
    for piece, figure in zip(profile.pieces, figures(nearest(device, read_predictions()), calls), strict=True):
        if figure and figure["bound"]:
            of = piece.kernel, piece.shape
            shares[of] = min(figure["bound"], shares.get(of, figure["bound"]))
    return shares


def _wrong(error: WrongResults) -> Record:
    wrong_kernel = error.wrong_kernel
    of = {"nmse": wrong_kernel.nmse, "limit": wrong_kernel.limit, "reason": wrong_kernel.reason or str(error)}
    return {"kind": "kernel", "kernel": wrong_kernel.kernel, "right": False, **of}


def _alternating(steps: dict[str, TrainingStep], rounds: int) -> Record:
    """Seconds and processor seconds of steps that take turns, and the ratio of the medians: the others to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step.seconds(WARMUP)
    for _ in range(rounds):
        for name, step in steps.items():
            before = time.process_time()
            seconds[name] += step.seconds(1)
            processor[name].append(time.process_time() - before)
    first, *medians = (statistics.median(values) for values in seconds.values())
    return {"seconds": seconds, "processor_seconds": processor, "ratio": [median / first for median in medians]}


def kernels(port: EventWriter, *, where: str, **options: Any) -> JobResult:
    """The job; its exit code is 1 if a kernel is wrong.

    Raises:
        UserError: no kernel is wrong, but a part of the job cannot run. What was measured has been reported.
    """
    work = read_as(Work, options, where)
    device = Device(work.device)
    verdicts_of(device).enabled = True
    verdicts_of(device).forget()
    prediction = nearest(device, read_predictions())
    if prediction:
        port.measured({"kind": "predicted", **{name: value for name, value in prediction.items() if name != "kernels"}})
    wrong, refusals = list[str](), list[UserError]()
    for records in (tilings(device, work), step(device, work)):
        for record in _until_refused(records, refusals):
            port.measured(record)
            if record.get("right", True) is False:
                wrong.append(record["kernel"])
    if refusals and not wrong:
        raise refusals[0]
    names = ", ".join(dict.fromkeys(wrong))
    message = "; ".join([f"these kernels are wrong: {names}", *dict.fromkeys(map(str, refusals))])
    return JobResult({"wrong": wrong}, int(bool(wrong)), message if wrong else "")


def _until_refused(records: Iterator[Record], refusals: list[UserError]) -> Iterator[Record]:
    try:
        yield from records
    except WrongResults as error:
        yield _wrong(error)
    except UserError as error:
        refusals.append(error)


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
            for record in outcomes(parts(options.device, options.quick), options.timeout):
                result["parts"].append(record)
                writer.text(json.dumps(result, indent=1) + "\n")
    except UserError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        return 2
    print()
    for record in result["parts"]:
        why = f": {record['reason']}" if "reason" in record else ""
        failed = ", exit code 1" if record["status"] == "ran" and record["exit_code"] else ""
        line(record["status"], f"{record['part']}{failed}{why}")
    line("written", str(options.json))
    return wrong(result["parts"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:  # with this script's job
        KINDS["kernels"] = kernels
        sys.exit(command_line(sys.argv[1:3]))
    sys.exit(main())
