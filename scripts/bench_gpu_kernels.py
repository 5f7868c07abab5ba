"""The job `kernels` of bench_gpu.py: every kernel of a model's shape is compared with its reference, then timed.

Heavy kernels are compared on a small call in every tiling that the tuner may choose. All kernels are compared in a
training step, and timed in it; the step alternates with a tuned one. What compilers predict (scripts/gpu_compilers) is
beside the measurements. A kernel that is wrong is reported by name, and the rest measured all the same.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `scripts`, if this file is run by its path

from scripts.gpu_compilers.predictions import figures, nearest, read
from scripts.gpu_compilers.recorded import Call, calls
from scripts.gpu_compilers.wanted import Wanted
from wgpu_lora.bench.reference_check import Checked
from wgpu_lora.bench.step_profile import profile_step
from wgpu_lora.bench.training_step import WARMUP, TrainingStep, chosen_model
from wgpu_lora.cli import main as command_line
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import WrongResults
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.tiling_check import NMSE, cut_verdict
from wgpu_lora.gpu.tuner import Tuner, skipped
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.typed_json import typed
from wgpu_lora.worker.job_kinds import KINDS
from wgpu_lora.worker.job_process import Ended, EventWriter

Record = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """One layer of a shape. rounds: timed steps. candidates: whether to compare tilings that are not the default."""

    shape: str
    device: str | None = None
    tokens: int = 512
    rank: int = 16
    rounds: int = 5
    candidates: bool = True


class ByKernel(Checked):
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
    wanted = Wanted((work.shape,), tokens=work.tokens, rank=work.rank, candidates=work.candidates)
    found = [call for call in calls(wanted, device) if call.default or not skipped(device.capabilities, call.tiling)]
    predicted = figures(nearest(device, read()), [call.to_json() for call in found])
    for call, prediction in zip(found, predicted, strict=True):
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
    found, verdicts = ByKernel(), verdicts_of(device)
    with ExitStack() as stack:

        def begun() -> TrainingStep:
            step = TrainingStep.fitting(model, args)
            stack.callback(step.close)
            return step

        one = begun()
        try:
            one.allocate()
        except WrongResults as error:  # the others can be compared all the same
            yield _wrong(error)
            verdicts.enabled = False
            one = begun()
            one.allocate()
        one.check(np.random.default_rng(0), found)
        for kernel, nmse in found.worst.items():
            right = None if math.isnan(nmse) else nmse <= NMSE
            reason = "" if right is not None else "its inputs are not finite"
            yield {"kind": "kernel", "kernel": kernel, "right": right, "nmse": nmse, "limit": NMSE, "reason": reason}
        verdicts.enabled = False  # that was all that there is to compare, and a wrong kernel can be timed, too
        profile = profile_step(one, work.rounds)
        for group in profile.groups(by_shape=True):
            yield {"kind": "time", "clock": profile.clock, **asdict(group)}
        tuned = TrainingStep(model, args)
        stack.callback(tuned.close)
        tuned.allocate(Tuner(device).tune(tuned.session.programs()))
        yield {"kind": "tuning", **_alternating({"default": one, "tuned": tuned}, work.rounds)}


def _wrong(error: WrongResults) -> Record:
    found = error.found
    of = {"nmse": found.nmse, "limit": found.limit, "reason": found.reason or str(error)}
    return {"kind": "kernel", "kernel": found.kernel, "right": False, **of}


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
    first, *others = (statistics.median(values) for values in seconds.values())
    return {"seconds": seconds, "processor_seconds": processor, "ratio": [other / first for other in others]}


def kernels(port: EventWriter, *, where: str, **options: Any) -> Ended:
    """The job; its exit code is 1 if a kernel is wrong.

    Raises:
        UserError: no kernel is wrong, but a part of the job cannot run. What was measured has been reported.
    """
    work = typed(Work, options, where)
    device = Device(work.device)
    verdicts_of(device).enabled = True
    verdicts_of(device).forget()
    prediction = nearest(device, read())
    if prediction:
        port.measured({"kind": "predicted", **{name: value for name, value in prediction.items() if name != "kernels"}})
    wrong, refused = list[str](), list[UserError]()
    for records in (tilings(device, work), step(device, work)):
        for record in _until_refused(records, refused):
            port.measured(record)
            if record.get("right", True) is False:
                wrong.append(record["kernel"])
    if refused and not wrong:
        raise refused[0]
    names = ", ".join(dict.fromkeys(wrong))
    said = "; ".join([f"these kernels are wrong: {names}", *dict.fromkeys(map(str, refused))])
    return Ended({"wrong": wrong}, int(bool(wrong)), said if wrong else "")


def _until_refused(records: Iterator[Record], refused: list[UserError]) -> Iterator[Record]:
    try:
        yield from records
    except WrongResults as error:
        yield _wrong(error)
    except UserError as error:
        refused.append(error)


if __name__ == "__main__":
    KINDS["kernels"] = kernels
    sys.exit(command_line(sys.argv[1:3]))
