"""The job `kernels` of bench_gpu.py: every kernel of a model's shape is compared with its reference, then timed.

Heavy kernels are compared on a small call in every tiling that the tuner may choose. All kernels are compared in a
training step, and timed in it; the step alternates with a tuned one. What compilers predict (scripts/gpu_compilers) is
beside the measurements.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `scripts`, if this file is run by its path

from scripts.gpu_compilers.predictions import figures, nearest, read
from scripts.gpu_compilers.recorded import Call, Wanted, calls
from wgpu_lora.bench.check import Checked
from wgpu_lora.bench.profile import profile_step
from wgpu_lora.bench.step import WARMUP, TrainingStep, chosen_model
from wgpu_lora.cli import main as command_line
from wgpu_lora.gpu.cuts import NMSE, cut_verdict
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.tuner import Tuner, skipped
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.strict_json import typed
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.worker.child import Ended, Port
from wgpu_lora.worker.registry import KINDS

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
    """The largest error of each kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.worst: dict[str, float] = {}

    def add(self, nmse: float, kernel: str, part: bool) -> None:
        super().add(nmse, kernel, part)
        before = self.worst.get(kernel, 0.0)
        self.worst[kernel] = before if nmse <= before else nmse  # a NaN is the worst


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
    """All kernels of a training step in their default tilings: errors on random values, and times; then the step beside
    the same step with tuned tilings."""
    model = chosen_model(None, work.shape, 1, device)
    args = TrainingArguments(per_device_train_batch_size=1, max_length=work.tokens, lora_r=work.rank)
    one, found = TrainingStep.fitting(model, args), ByKernel()
    tuned = TrainingStep(model, args)
    choices = Tuner(device).tune(tuned.session.programs())
    try:
        one.allocate()
        one.check(np.random.default_rng(0), found)
        for kernel, nmse in found.worst.items():
            yield {"kind": "kernel", "kernel": kernel, "right": nmse <= NMSE, "nmse": nmse, "limit": NMSE}
        profile = profile_step(one, work.rounds)
        for group in profile.groups(by_shape=True):
            yield {"kind": "time", "clock": profile.clock, **asdict(group)}
        tuned.allocate(choices)
        yield {"kind": "tuning", **_alternating({"default": one, "tuned": tuned}, work.rounds)}
    finally:
        one.close()
        tuned.close()


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


def kernels(port: Port, *, where: str, **options: Any) -> Ended:
    """The job; its exit code is 1 if a kernel is wrong."""
    work = typed(Work, options, where)
    device = Device(work.device)
    verdicts_of(device).enabled = False  # everything is compared now, whatever the cache knows
    prediction = nearest(device, read())
    if prediction:
        port.measured({"kind": "predicted", **{name: value for name, value in prediction.items() if name != "kernels"}})
    wrong = list[str]()
    for records in (tilings(device, work), step(device, work)):
        for record in records:
            port.measured(record)
            if not record.get("right", True):
                wrong.append(record["kernel"])
    names = ", ".join(dict.fromkeys(wrong))
    return Ended({"wrong": wrong}, int(bool(wrong)), f"these kernels are wrong: {names}" if wrong else "")


if __name__ == "__main__":
    KINDS["kernels"] = kernels
    sys.exit(command_line(sys.argv[1:3]))
