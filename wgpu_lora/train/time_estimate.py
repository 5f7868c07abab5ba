"""The time of a run, from a few measured steps: loading, compilation, training and held-out losses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

from wgpu_lora.data import pack
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT
from wgpu_lora.gpu.memory_leases import budget_bytes, claim
from wgpu_lora.names.spelling import flag
from wgpu_lora.train.data_statistics import padded_tokens
from wgpu_lora.train.job import Job
from wgpu_lora.train.objectives.objective import Group
from wgpu_lora.train.session.data_stream import Step
from wgpu_lora.train.session.optimizer_update import SlotUpdate

WARMUP, STEPS = 2, 5  # steps that measure where to split submits, and steps that are timed
MOST = 24  # steps in all, if more have to compile
PREPARATION, COMPILATION, TRAINING, HELDOUT = "loading and tuning", "compilation", "training", "held-out loss"
REFERENCE = "precomputed references"


@dataclass(frozen=True)
class Projection:
    """The time of a run. It assumes that all steps take as long per position of a batch as those that were timed.

    stages: seconds of the whole run, by stage; writing checkpoints is not counted. timed: number of timed steps, and
    `seconds`, `tokens` and `samples` of them.
    """

    stages: dict[str, float]
    timed: int
    seconds: float
    tokens: int
    samples: int

    @property
    def total(self) -> float:
        return sum(self.stages.values())

    @property
    def steps(self) -> float:
        """Seconds of the stages that depend on the size of the model."""
        return sum(seconds for stage, seconds in self.stages.items() if stage in (TRAINING, HELDOUT))

    def cost(self, price_per_hour: float) -> float:
        return self.total / 3600 * price_per_hour

    def rates(self) -> dict[str, float]:
        """The speeds in tokens per second that projections use."""
        seconds = max(self.seconds, 1e-9)
        rates = {"tokens_per_second": self.tokens / seconds, "samples_per_second": self.samples / seconds}
        return {**rates, "seconds": self.steps}


def check_price(price_per_hour: float | None) -> None:
    """Raise UserError for a price that is none."""
    if price_per_hour is not None and not (math.isfinite(price_per_hour) and price_per_hour >= 0):
        raise UserError(f"{flag('price_per_hour')} must be 0 or more, not {price_per_hour:g}.")


def project_time(job: Job[Any]) -> Projection:
    """Load the weights, take a few steps of a run with one adapter, and project its time. Nothing is written.

    Raises:
        UserError: the run has several adapters, or the device has too little memory.
    """
    if len(job.runs) > 1:
        raise UserError("Only the steps of a single adapter are measured: give its data alone.")
    if job.run.rollouts:
        raise UserError(
            "The time of sampling depends on the completions, so that it is not projected: train a few steps."
        )
    job.check_memory()
    session, run, args = job.session, job.run, job.run.args
    budget = budget_bytes(session.device.info, args.budget())
    with ExitStack() as stack:
        seconds = args.wait_seconds()
        stack.enter_context(claim(session.device, session.needs(), "a measurement", budget, seconds, SILENT))
        stack.callback(session.close)
        preparation = _seconds(lambda: session.allocate(SILENT, job.choose_tilings(SILENT)))
        run.place_initial(session)
        if run.reference:
            session.place_reference(run.slot, run.reference.matrices)
        compilation, steps, reference = _take(job)
        heldout = _heldout(job)
    epoch = run.stream.epoch(0)
    total = run.stream.total_steps()
    padded = padded_tokens(run.stream, [batch for step in epoch for batch in step]) * total / len(epoch)
    elapsed = sum(seconds for _, seconds in steps)
    samples = [sample for step, _ in steps for sample in step.samples]
    timed = sum(padded_tokens(run.stream, step.micro_batches) for step, _ in steps)
    training = args.target_seconds or elapsed / timed * padded
    compiling = {} if args.target_seconds else {COMPILATION: compilation}  # a target includes it
    stages = {PREPARATION: preparation, **compiling, TRAINING: training}
    if run.stream.objective.precomputes:
        stages[REFERENCE] = reference * sum(len(d.samples) for d in (run.stream.prepared, run.heldout) if d)
    if heldout:  # a target includes those between steps
        stages[HELDOUT] = heldout * (args.eval_on_start + 1 if args.target_seconds else _times(job, total, len(epoch)))
    return Projection(stages, len(steps), elapsed, run.stream.processed_tokens(samples), len(samples))


def _take(job: Job[Any]) -> tuple[float, list[tuple[Step, float]], float]:
    """(seconds that compilation adds to the first steps, [(step, seconds) of the others], seconds to precompute the
    reference of a sample)."""
    compiling, references, steps = list[float](), list[float](), list[tuple[Step, float]]()
    built = job.session.built
    for number, step in enumerate(islice(job.run.stream.steps(), MOST)):
        before = len(built)
        seconds, reference = _step(job, step)
        if number < WARMUP or len(built) > before:
            compiling.append(seconds)
        else:
            steps.append((step, seconds))
            references.append(reference / len(step.samples))
        if len(steps) == STEPS:
            break
    if not steps:
        raise UserError(f"No step could be timed, since each of the first {MOST} compiled kernels: this is a bug.")
    average = sum(seconds for _, seconds in steps) / len(steps)
    return max(0.0, sum(compiling) - len(compiling) * average), steps, sum(references) / len(references)


def _step(job: Job[Any], step: Step) -> tuple[float, float]:
    """Take a step with a learning rate of 0, which costs as much as any other; returns its seconds, and those of the
    reference passes that a run would have made before training."""
    session, run = job.session, job.run
    batches: list[list[Group]] = run.stream.groups(step, run.slot)
    before = 0.0
    if run.stream.objective.precomputes:
        begin = time.perf_counter()
        batches = [session.with_reference_logprobs(groups) for groups in batches]
        before = time.perf_counter() - begin

    def take() -> None:
        session.begin()
        for groups in session.with_kl_estimate(batches):
            session.accumulate(groups)
        session.optimizer.apply(session.device, {run.slot: SlotUpdate(1, 0.0, run.args)})

    return _seconds(take), before


def _heldout(job: Job[Any]) -> float:
    """Seconds of one held-out loss, from one of its batches; 0 without held-out rows."""
    session, run = job.session, job.run
    batch = session.heldout
    if batch is None or run.heldout is None:
        return 0.0
    stream = run.heldout_stream
    batches = pack(stream.lengths, range(len(stream.lengths)), batch.tokens)
    [groups] = session.with_kl_estimate(stream.heldout_groups(batches[:1], run.slot))
    referenced = session.with_reference_logprobs(groups)  # once in a run

    def once() -> None:
        session.begin()
        batch.upload(session.teachers.with_teacher_logits(referenced))
        batch.program.run()
        session.totals.read_loss(session.device, run.slot)

    once()
    return _seconds(once) * len(batches)


def _times(job: Job[Any], total: int, epoch: int) -> int:
    """How many times the held-out loss is measured."""
    args = job.run.args
    return args.eval_on_start + math.ceil(total / (args.eval_steps or epoch))


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin
