"""The clock of a run: elapsed time, the end of a timed run, and its learning rate, with a time of the test's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.events import hearing
from support.sampling import sample
from support.training.training import model_dir, random_rows

from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, StepResult
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.job import Job
from wgpu_lora.train.loop.slot_progress import CHECKPOINT, HELD_OUT, LEAST_SHARE, TrainingClock
from wgpu_lora.train.lr_schedule import LR_SCHEDULES, learning_rate
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.train.run.run_state import RunState
from wgpu_lora.train.run.training_log import LOG, read_log

COMPILATION = 2.0  # seconds that the first step of a session takes longer


@dataclass
class Time:
    """The time, which passes only when the test lets it."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    passing = Time()
    monkeypatch.setattr(TrainingClock, "now", staticmethod(passing))
    return passing


@dataclass
class Loop:
    """What the training loop does with a clock, with steps of given durations."""

    time: Time
    args: TrainingArguments
    state: RunState = field(default_factory=lambda: RunState(total_steps=100))
    step_starts: list[float] = field(default_factory=list)  # elapsed time at the beginning of each step
    rates: list[float] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    did: list[tuple[str, int]] = field(default_factory=list)

    def session(
        self,
        lasting: Callable[[int], float],
        between: Callable[[int], dict[str, float]] = lambda step: {},
        most: float = math.inf,
    ) -> Loop:
        """Takes steps until the time is used, or `most` of them. between: seconds of work after a step, by its kind."""
        run: Any = SimpleNamespace(args=self.args, state=self.state)
        clock = TrainingClock(run)
        for step in range(10**6):
            if step == most or (self.state.step and clock.out_of_time()):
                return self
            clock.begin_step()
            self.step_starts.append(clock.elapsed())
            seconds = lasting(self.state.step) + (0 if step else COMPILATION)
            self.time.now += 0.9 * seconds  # the rate is asked for when the gradient is there
            self.rates.append(clock.learning_rate())
            self.time.now += 0.1 * seconds
            clock.end_step()
            self.state.step += 1
            clock.estimate()
            self.budgets.append(self.state.total_steps)
            for work, duration in between(self.state.step).items():
                if work not in (HELD_OUT, CHECKPOINT) or clock.has_time_for(work):
                    with clock.timed_work(work):
                        self.time.now += duration
                    self.did.append((work, self.state.step))
        raise AssertionError("it does not end")

    @property
    def target(self) -> float:
        return self.args.target_seconds


def timed(target: float = 60.0, **changes: Any) -> TrainingArguments:
    return TrainingArguments(**({"target_seconds": target, "learning_rate": 1.0} | changes))


def nothing(step: int) -> dict[str, float]:
    return {}


RNG = np.random.default_rng(0)
NOISE = RNG.lognormal(0, 0.4, 10_000)
PACES: dict[str, Callable[[int], float]] = {
    "even": lambda step: 0.1,
    "uneven": lambda step: 0.1 * float(NOISE[step % len(NOISE)]),
    "slower": lambda step: 0.05 * 1.004**step,
    "faster": lambda step: 0.02 + 0.4 * 0.99**step,
    "outliers": lambda step: 1.5 if step % 37 == 36 else 0.1,
    "sudden": lambda step: 0.05 if step < 300 else 0.5,
    "long": lambda step: 7.0,
    "tiny": lambda step: 0.02,
}
WORK: dict[str, Callable[[int], dict[str, float]]] = {
    "nothing": nothing,
    "losses": lambda step: {HELD_OUT: 1.1} if step % 50 == 0 else {},
    "slow checkpoints": lambda step: {CHECKPOINT: 4.0} if step % 60 == 0 else {},
    "a pause": lambda step: {"pause": 9.0} if step == 40 else {},
}


@pytest.mark.parametrize("first", [math.inf, 200], ids=["whole", "resumed"])
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("pace", PACES)
def test_it_ends_within_a_step_of_its_target(time: Time, pace: str, work: str, first: float) -> None:
    """Losses and checkpoints that would not end in time are left out, also if an earlier session timed them."""
    began, loop = time.now, Loop(time, timed()).session(PACES[pace], WORK[work], first)
    loop.session(PACES[pace], WORK[work])  # if it has ended, nothing more
    last = PACES[pace](loop.state.step - 1)
    assert abs(loop.state.elapsed_seconds - loop.target) <= max(last, loop.target / 1000, loop.state.step_seconds)
    assert loop.state.elapsed_seconds <= time.now - began + 1e-9
    if (pace, work, first) == ("even", "nothing", math.inf):  # the nearer of two steps' ends
        assert (loop.state.step, loop.state.elapsed_seconds) == (580, pytest.approx(60, abs=0.051))


def test_sessions_add_up(time: Time) -> None:
    loop = Loop(time, timed()).session(PACES["even"], most=100)
    first = loop.state.elapsed_seconds
    assert first == pytest.approx(12.0)
    time.now += 10_000  # nobody trains
    loop.session(PACES["even"])
    assert loop.state.elapsed_seconds == pytest.approx(60.0, abs=0.051)
    assert loop.state.step == 560
    assert loop.step_starts[100] == pytest.approx(first)
    loop.session(PACES["even"])  # it has ended
    assert loop.state.step == 560


def test_the_budget_follows_the_pace(time: Time) -> None:
    """It is a guess until steps were timed, and then right wherever the rest is like what was."""
    loop = Loop(time, timed()).session(PACES["even"])
    assert loop.budgets[:3] == [100, 100, 100]
    assert all(abs(budget - 580) <= 1 for budget in loop.budgets[3:])
    slower = Loop(time, timed()).session(lambda step: 0.05 if step < 300 else 0.1)
    assert abs(slower.budgets[299] - 1160) <= 1
    assert abs(slower.budgets[340] - slower.state.step) <= 1
    busy = Loop(time, timed()).session(PACES["even"], lambda step: {HELD_OUT: 1.0} if step % 10 == 0 else {})
    assert abs(busy.budgets[100] - busy.state.step) <= 10  # one loss more or less


# -- the learning rate -------------------------------------------------------------------------------------------------


def slope(kind: str, args: TrainingArguments, warmed: float) -> float:
    """The largest change of the rate per second."""
    decay = LR_SCHEDULES[kind].decay
    points = np.linspace(0, 1, 2001)
    falls = np.abs(np.diff([decay(x) for x in points])).max() * 2000 if decay else 0.0
    by_decay = (args.learning_rate - args.lr_scheduler_min) * falls / (args.target_seconds - warmed)
    seconds = args.warmup_ratio * args.target_seconds
    return max(by_decay, args.learning_rate / seconds if seconds and LR_SCHEDULES[kind].warms_up else 0.0)


@pytest.mark.parametrize(("kind", "pace", "work"), sample([*product(LR_SCHEDULES, PACES, WORK)], 1 / 4))
def test_the_rate_changes_no_faster_than_its_schedule(time: Time, kind: str, pace: str, work: str) -> None:
    """Whatever the steps and the estimate of their number do: by no more than its slope per second."""
    args = timed(lr_scheduler_type=kind, warmup_ratio=0.1, lr_scheduler_min=0.05)
    loop = Loop(time, args).session(PACES[pace], WORK[work])
    rates, warmed = loop.rates, loop.state.warmed_seconds
    steepest = slope(kind, args, warmed)
    ends = [*loop.step_starts[1:], loop.state.elapsed_seconds]
    for i in range(1, len(rates)):
        passed = ends[i] - loop.step_starts[i - 1]  # both rates lie in it
        assert abs(rates[i] - rates[i - 1]) <= steepest * passed + 1e-9, (i, rates[i - 1 : i + 1])
    assert min(rates) > 0
    assert max(rates) == pytest.approx(1.0, abs=steepest * max(np.diff(loop.step_starts), default=0) + 1e-9)
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    if LR_SCHEDULES[kind].decay:  # and it ends at the end of the schedule
        assert rates[-1] - 0.05 <= steepest * (loop.target - loop.step_starts[-1]) + 1e-9


@pytest.mark.parametrize("kind", LR_SCHEDULES)
def test_even_steps_have_the_schedule_of_steps(time: Time, kind: str) -> None:
    """Where every step takes as long, following the time is following the steps."""
    loop = Loop(time, timed(50.0, lr_scheduler_type=kind, warmup_ratio=0.0)).session(
        lambda step: 0.1 if step else 0.1 - COMPILATION
    )
    assert loop.state.step == 500
    expected = [learning_rate(kind, 1.0, step, 500, 0) for step in range(500)]
    np.testing.assert_allclose(loop.rates, expected, atol=1e-9)


def test_a_warmup_by_time_is_one_of_training_and_one_in_steps_of_steps(time: Time) -> None:
    loop = Loop(time, timed(warmup_ratio=0.03)).session(PACES["even"])  # 1.8 s, and compilation takes 2
    shares = [loop.rates[i] for i in (0, 1, 17, 19)]
    assert shares == [LEAST_SHARE, *(pytest.approx(share, abs=1e-3) for share in (0.09 / 1.8, 1.69 / 1.8, 1.0))]
    assert loop.state.warmed_seconds == pytest.approx(2.1 + 1.8)
    steps = Loop(time, timed(warmup_steps=20)).session(PACES["uneven"])
    assert steps.rates[:20] == pytest.approx([(step + 1) / 21 for step in range(20)])
    assert (steps.rates[20], steps.state.warmed_step) == (1.0, 20)
    assert steps.rates[-1] < 1e-4 < steps.rates[21] < 1.0


def test_a_resumed_run_goes_on_along_its_schedule(time: Time) -> None:
    """Within the warm-up too, and its kernels that compile again do not end it."""
    whole, parts = (Loop(time, timed(warmup_ratio=0.1)) for _ in range(2))
    whole.session(PACES["even"])
    for most in (30, 100, math.inf):
        parts.session(PACES["even"], most=most)
    assert parts.rates[:30] == pytest.approx(whole.rates[:30])
    assert parts.rates[30] == pytest.approx(parts.rates[29], abs=0.02)
    assert parts.rates[31] == pytest.approx(parts.rates[30], abs=0.02)
    assert parts.rates[-1] < 1e-4
    share = (parts.step_starts[200] - parts.state.warmed_seconds) / (60 - parts.state.warmed_seconds)
    assert parts.rates[200] == pytest.approx(0.5 * (1 + math.cos(math.pi * share)))


def test_steps_that_come_before_the_time_end_the_schedule_too(time: Time) -> None:
    loop = Loop(time, timed(1000.0, max_steps=50, lr_scheduler_type="linear", warmup_ratio=0.1)).session(
        PACES["even"], most=50
    )
    assert loop.rates == pytest.approx([learning_rate("linear", 1.0, step, 50, 5) for step in range(50)])
    assert loop.budgets[-1] == 50
    sooner = Loop(time, timed(10.0, max_steps=10**6, lr_scheduler_type="linear", warmup_ratio=0.1)).session(
        PACES["even"]
    )
    assert sooner.rates[-1] < 0.02


# -- in the training loop ----------------------------------------------------------------------------------------------


def options(tmp_path: Path, name: str = "run", **changes: Any) -> TrainingArguments:
    for seed, data in enumerate(("rows.jsonl", "heldout.jsonl")):
        if not (tmp_path / data).exists():
            random_rows(tmp_path / data, 8 - 4 * seed, 301, seed)
    arguments: dict[str, Any] = {
        "model": str(model_dir("qwen2")),
        "data": str(tmp_path / "rows.jsonl"),
        "eval_data": str(tmp_path / "heldout.jsonl"),
        "output": str(tmp_path / name),
        "lora_r": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "packing": False,
        "max_length": 16,
        "target_seconds": 60.0,
        "learning_rate": 1e-3,
        "warmup_ratio": 0.1,
        "save_steps": 5,
        "eval_steps": 7,
        "logging_steps": 1,
        "tune": False,
        "run_log": False,
    }
    return TrainingArguments(**(arguments | changes))


@dataclass
class Passing:
    """Lets 3 s pass in a step, 5 in a held-out loss and 4 in a checkpoint."""

    time: Time
    monkeypatch: pytest.MonkeyPatch
    losses: list[int | None] = field(default_factory=list)
    snapped: list[bool] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)

    def train(self, device: Device, args: TrainingArguments, stop: int = 0) -> RunRecord:
        job: Job = prepare_job(args, open_model(str(args.model), device, args.base_dtype))
        save, before = AdapterRun.save, type(job.run.trainable).before_step
        passing = self

        def slow_save(run: AdapterRun, *arguments: Any) -> None:
            passing.time.now += 4
            save(run, *arguments)

        def slow_step(trainable: Any, session: Any, ending: bool) -> None:
            passing.time.now += 3
            passing.snapped.append(ending)
            before(trainable, session, ending)

        def step(result: StepResult) -> bool:
            passing.results.append(result)
            return result.step == stop

        def evaluating(evaluation: Evaluating) -> None:
            if evaluation.loss is not None:
                passing.time.now += 2  # and 3 before
                passing.losses.append(evaluation.step)

        with self.monkeypatch.context() as patch:
            patch.setattr(AdapterRun, "save", slow_save)
            patch.setattr(type(job.run.trainable), "before_step", slow_step)
            return job.train(hearing(step=step, evaluating=evaluating))


@pytest.fixture
def passing(time: Time, monkeypatch: pytest.MonkeyPatch) -> Passing:
    return Passing(time, monkeypatch)


def test_a_timed_run(device: Device, tmp_path: Path, passing: Passing) -> None:
    """13 steps of 3 s, 2 checkpoints of 4 s and a held-out loss of 5 s take 52 s, of a target of 51."""
    record = passing.train(device, options(tmp_path, target_seconds=51.0))
    assert (record.stop_reason, record.steps, record.step_budget) == ("target seconds", 13, 13)
    assert (record.target_seconds, record.elapsed_seconds) == (51.0, 52.0)
    assert passing.losses == [0, 7, 13]  # the first and the last are not part of the time
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "step-10",
        "step-13",
        "step-5",
    ]
    log = read_log(tmp_path / "run" / LOG)
    assert (log[-1]["step"], log[-1]["eval_loss"]) == (13, record.eval_loss)
    assert [line["elapsed_seconds"] for line in log[:7]] == [0, 3, 6, 9, 12, 15, 22]
    assert RunRecord.read(tmp_path / "run") == record


def test_a_timed_run_is_resumed_and_extended(device: Device, tmp_path: Path, passing: Passing) -> None:
    args = options(tmp_path, eval_data=None, save_steps=0, target_seconds=30.0)
    stopped = passing.train(device, args, stop=4)
    assert (stopped.stop_reason, stopped.elapsed_seconds) == ("callback", 12.0)
    again = replace(args, resume=True)
    record = passing.train(device, again)
    assert (record.stop_reason, record.steps, record.elapsed_seconds) == ("target seconds", 10, 30.0)
    rates = [result.learning_rate for result in passing.results]
    assert len(rates) == 10
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert passing.train(device, again).steps == 10
    with pytest.raises(UserError, match=r"already used 30.0 s, more than target_seconds=20"):
        passing.train(device, replace(again, target_seconds=20.0))
    longer = passing.train(device, replace(again, target_seconds=45.0))
    assert (longer.steps, longer.elapsed_seconds) == (15, 45.0)


@pytest.mark.parametrize("snap_steps", [None, 3])
def test_last_steps_stay_the_last(device: Device, tmp_path: Path, passing: Passing, snap_steps: int | None) -> None:
    """Rounding does not begin by a guess, and does not end because steps get faster; the last held-out loss has it."""
    args = options(tmp_path, train="quant-scales", base_dtype="q2a4-g16", save_steps=0, eval_steps=100)
    args = replace(args, model=str(model_dir("qwen3")), snap_steps=snap_steps, target_seconds=90.0)
    random_rows(tmp_path / "rows.jsonl", 8, 100)
    random_rows(tmp_path / "heldout.jsonl", 4, 100, seed=0)

    record = passing.train(device, args)
    steps = passing.snapped  # of a held-out loss before the first step, of the steps, and of one after the last
    assert (steps[0], steps[-1]) == (False, True)
    assert steps == sorted(steps)
    assert record.steps == 30
    assert sum(steps) == 3 + 1
