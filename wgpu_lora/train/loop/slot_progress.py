"""One slot in the training loop: its next step, the result of a step, its log, and why it ends."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from wgpu_lora.events import SILENT, Events, StepResult
from wgpu_lora.processes.signals import Stopped
from wgpu_lora.train.lr_schedule import LR_SCHEDULES, decayed, warmup_steps
from wgpu_lora.train.objectives.objective import Group
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.run.run_checkpoint import BEST
from wgpu_lora.train.run.run_state import step_budget
from wgpu_lora.train.session.data_stream import Step
from wgpu_lora.train.session.optimizer_update import SlotUpdate, StepReport
from wgpu_lora.train.session.session import Session


@dataclass
class SlotProgress:
    """A run in training. `ended` is the reason for its end, None while it has work.

    eval_steps: steps between held-out losses if the options do not give them; 0 means after every epoch.
    """

    run: AdapterRun
    session: Session
    eval_steps: int = 0
    ended: str | None = None
    events: Events = SILENT
    _facts: dict[str, float] = field(default_factory=dict)  # of the last step, besides its line
    _metrics: dict[str, float] = field(default_factory=dict)  # of its line, those that are shown
    _last_line: dict[str, Any] = field(default_factory=dict)  # of the last step
    _last_entry: dict[str, Any] = field(default_factory=dict)  # the last one in the log

    def __post_init__(self) -> None:
        state, self.clock = self.run.state, TrainingClock(self.run)
        self._steps: Iterator[Step] = self.run.stream.steps(state.epoch, state.index)
        self.step = next(self._steps)

    def reason_to_end(self) -> str | None:
        args, state = self.run.args, self.run.state
        if state.postponed:
            return None
        if 0 < args.max_steps <= state.step:
            return "max steps"
        if args.target_seconds:
            return "target seconds" if state.step and self.clock.out_of_time() else None
        return "epochs" if state.step >= state.total_steps else None

    # -- a step ----------------------------------------------------------------------------------------------------

    @property
    def trained_tokens(self) -> int:
        return self.run.stream.trained_tokens(self.step.samples)

    @property
    def sampling_seconds(self) -> dict[str, float]:
        """Of the step, by what they were for; nothing if the objective does not sample."""
        return self.run.rollouts.seconds if self.run.rollouts else {}

    def micro_batches(self) -> list[list[Group]]:
        """The groups of the next step."""
        return self.run.stream.groups(self.step, self.run.slot)

    def previous_batches(self) -> list[list[Group]]:
        """The groups of the previous step; none before the first."""
        stream, state = self.run.stream, self.run.state
        step = stream.step_before(state.epoch, state.index)
        return stream.groups(step, self.run.slot) if step else []

    def begin(self) -> None:
        """Begin the next step."""
        self.clock.begin_step()
        self.run.before_step(self.session)
        if self.run.rollouts:
            self.run.rollouts.prepare(self.session, self.step, self.run.slot, self.events)

    def update(self) -> SlotUpdate:
        rate = self.clock.learning_rate() if self.run.args.target_seconds else self.run.learning_rate()
        return SlotUpdate(self.run.state.step + 1, rate, self.run.args)

    def advance(self, report: StepReport, update: SlotUpdate, seconds: float) -> None:
        """Count the step that was taken; call `logged` next."""
        self.clock.end_step()
        state, step, stream, tokens = self.run.state, self.step, self.run.stream, self.trained_tokens
        processed, units = stream.processed_tokens(step.samples), stream.units(step.samples)
        loss = report.loss_sum / units
        sums = self.session.totals.read_metrics(self.session.device, self.run.slot, stream.objective)
        metrics = stream.step_metrics(sums, units)
        state.step += 1
        state.epoch, state.index = (step.epoch + 1, 0) if step.last_of_epoch else (step.epoch, step.index + 1)
        state.tokens += tokens
        state.processed_tokens += processed
        state.seconds += seconds
        state.pending_tokens += tokens
        state.pending_processed_tokens += processed
        state.pending_seconds += seconds  # tokens/s count training only
        state.pending.append(loss)
        state.last_loss = loss
        self.clock.estimate()
        epoch = round(step.epoch + (step.index + 1) / len(self.run.stream.epoch(step.epoch)), 4)
        self._facts = {"epoch": epoch, "seconds": seconds, "tokens": tokens, "processed": processed}
        rate, norm = update.learning_rate, report.grad_norm
        self._line = {"loss": loss, "learning_rate": rate, "grad_norm": norm, **metrics}
        names = stream.objective.progress_metrics
        if names is not None:
            metrics = {name: value for name, value in metrics.items() if name in names}
        self._metrics = metrics
        self.step = next(self._steps)

    def note(self, facts: Mapping[str, float]) -> None:
        """Add to the log line of the step that was taken."""
        self._line |= facts

    @property
    def epoch_done(self) -> int | None:
        """The number, from 1, of the epoch that the last step completed; None if it completed none."""
        state = self.run.state
        return state.epoch if state.step and not state.index else None

    def heldout_due(self) -> bool:
        state, interval = self.run.state, self.run.args.eval_steps or self.eval_steps
        is_due = state.step % interval == 0 if interval else self.epoch_done is not None
        return self._last() or (is_due and self.clock.has_time_for(HELD_OUT))

    def checkpoint_due(self, overdue: bool) -> bool:
        """Whether to save after this step, by --save-steps or since one is overdue; the end has one of its own."""
        state, interval = self.run.state, self.run.args.save_steps
        by_steps = bool(interval) and state.step % interval == 0
        return (overdue or by_steps) and not self._last() and self.clock.has_time_for(CHECKPOINT)

    def _last(self) -> bool:
        """Whether the step is known to be the last; by time, that is only known when the next would begin."""
        args, state = self.run.args, self.run.state
        return 0 < args.max_steps <= state.step if args.target_seconds else state.step >= state.total_steps

    def measure_start(self, events: Events) -> None:
        """Measure the held-out loss before the first step, and log it on a line of its own."""
        result = self._measure(events)
        if result:
            self._log({"step": 0, "epoch": 0.0, **result, **self._times()})

    def measure_heldout(self, events: Events) -> None:
        """Measure the held-out loss after the step that was taken. Raises Stopped; call `postpone` then."""
        self._line |= self._measure(events)

    def postpone(self) -> None:
        """Keep what is logged of the step in the state: the rest of it is done when the run is resumed."""
        self.run.state.postponed = [self._facts, self._line, self._metrics]

    def resume_step(self) -> bool:
        """Whether the rest of the last step is to be done."""
        state = self.run.state
        if state.postponed:
            (self._facts, self._line, self._metrics), state.postponed = state.postponed, []
            return True
        return False

    def _measure(self, events: Events) -> dict[str, float]:
        begin = time.perf_counter()
        with self.clock.timed_work(HELD_OUT):
            result = self.run.measure_heldout(self.session, events)
        self.run.state.seconds += time.perf_counter() - begin
        return result

    # -- the log ---------------------------------------------------------------------------------------------------

    def logged(self) -> StepResult:
        """The result of the step; also writes a log line if one is due."""
        run, state, line = self.run, self.run.state, self._line
        self._last_line = line
        if run.logs(state.step, "eval_loss" in line):
            self._write(line)
        return StepResult(
            state.step,
            state.total_steps,
            self._facts["epoch"],
            line["loss"],
            line["learning_rate"],
            line["grad_norm"],
            state.tokens,
            self._facts["seconds"],
            line.get("eval_loss"),
            run.name,
            run.slot,
            int(self._facts["tokens"]),
            int(self._facts["processed"]),
            self._metrics,
        )

    def save_best(self) -> None:
        """Save best/ if the held-out loss of this step is the lowest, once its line is in the log."""
        run, best = self.run, self.run.directory / BEST
        if run.state.best_step == run.state.step and "eval_loss" in self._line:
            run.write_checkpoint(self.session, best)
            self.events.saved(run.storage.disk_path(best), run.state.step, run.name)

    def write_pending(self) -> None:
        """Write a log line for the steps since the last one."""
        if self.run.state.pending:
            self._write(self._last_line)

    def close(self, events: Events) -> None:
        """The last held-out loss and log line of a run whose time is used; they are not part of it."""
        self.run.state.total_steps = self.run.state.step
        if not self._last_line or "eval_loss" in self._last_line:
            return
        try:
            result = self._measure(events)
        except Stopped:
            result = {}
        self._last_line |= result
        if result and not self.run.state.pending:  # the last step was logged, when nobody knew that it was the last
            self._log(self._last_entry | result | self._times())
        self.write_pending()
        self.save_best()

    def _write(self, line: dict[str, Any]) -> None:
        state = self.run.state
        entry = {
            "step": state.step,
            "epoch": self._facts["epoch"],
            **line,
            "loss": statistics.fmean(state.pending),  # mean since the last line
            "tokens": state.tokens,
            "tokens_per_second": round(state.pending_tokens / max(state.pending_seconds, 1e-9), 2),
            "processed_tokens": state.processed_tokens,
            "processed_tokens_per_second": round(state.pending_processed_tokens / max(state.pending_seconds, 1e-9), 2),
            **self._times(),
        }
        self._log(entry)
        self._last_entry = entry
        state.pending, state.pending_tokens, state.pending_processed_tokens, state.pending_seconds = [], 0, 0, 0.0

    def _times(self) -> dict[str, float]:
        state = self.run.state
        return {"seconds": round(state.seconds, 4), "elapsed_seconds": round(state.elapsed_seconds, 4)}

    def _log(self, line: dict[str, Any]) -> None:
        line |= self.run.tracking.hardware()
        self.run.log.write(line)
        self.run.tracking.log(line)
        self.events.logged(line, self.run.name)


HELD_OUT, CHECKPOINT = "held-out loss", "checkpoint"  # what lies between steps and is left out if it does not fit
UNTIMED_SHARE = 0.02  # of the time, for such work that was not timed yet
TIMED = 3  # steps that are timed before the number of steps is estimated
RECENT = 32  # steps whose median is the time of the next one
LEAST_SHARE = 0.01  # of the peak, at the beginning of a warm-up by time: no step trains nothing


@dataclass
class TrainingClock:
    """The clock of one session of a run; what the next session continues from is in the run's state."""

    run: AdapterRun
    _origin: float | None = None  # when the session's first step began, less the time of earlier sessions
    _step_start: float = 0.0  # elapsed time at the beginning of the step
    _steps: int = 0  # of this session
    _gaps: float = 0.0  # seconds between the steps of this session
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    @staticmethod
    def now() -> float:
        return time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since the beginning of the run's first step, without the time between sessions."""
        return self.run.state.elapsed_seconds if self._origin is None else self.now() - self._origin

    # -- steps -----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        if self._origin is None:
            self._origin = self.now() - self.run.state.elapsed_seconds
        self._step_start = self.elapsed()
        if self.run.args.target_seconds:
            self._end_warmup()

    def end_step(self) -> None:
        """Called after a step, before it is counted."""
        state, end = self.run.state, self.elapsed()
        if self._steps:  # the first step of a session compiles kernels
            self._recent.append(end - self._step_start)
            self._gaps += self._step_start - state.elapsed_seconds
            if state.warmed_seconds is None:
                state.warming_seconds += end - state.elapsed_seconds
            state.step_seconds = statistics.median(self._recent)
        state.elapsed_seconds = end
        self._steps += 1

    def estimate(self) -> None:
        """Measure the number of steps of a timed run anew; call it when the step is counted."""
        state, args = self.run.state, self.run.args
        if not args.target_seconds:
            return
        state.calibrated = state.calibrated or len(self._recent) >= TIMED
        if state.calibrated:
            between = self._gaps / (self._steps - 1) if self._steps > 1 else 0.0
            state.total_steps = step_budget(state, args, state.step_seconds + between)
        else:
            state.total_steps = max(state.total_steps, state.step + 1)

    @contextmanager
    def timed_work(self, work: str) -> Iterator[None]:
        """Times what lies between two steps."""
        begin = self.now()
        yield
        self.run.state.between_seconds[work] = self.now() - begin

    # -- the end of a timed run ------------------------------------------------------------------------------------

    def out_of_time(self) -> bool:
        """Whether the run ends nearer to its target now than after another step."""
        state, target = self.run.state, self.run.args.target_seconds
        return bool(target) and self.elapsed() + state.step_seconds + state.elapsed_seconds > 2 * (target or 0.0)

    def has_time_for(self, work: str) -> bool:
        """Whether the run would still end at its target if `work`, which the end has too, came before the next step."""
        target = self.run.args.target_seconds
        if not target:
            return True
        seconds = self.run.state.between_seconds.get(work, UNTIMED_SHARE * target)
        return self.elapsed() + seconds + self.run.state.step_seconds / 2 <= target

    # -- the learning rate of a timed run --------------------------------------------------------------------------

    def learning_rate(self) -> float:
        """The learning rate of the step that has begun: a function of time, and of no estimate.

        The warm-up takes --warmup-ratio of the time, without the first step of a session, which compiles kernels, or
        else --warmup-steps steps. The decay goes from its end to the target, or to --max-steps if they come first.
        """
        args, state = self.run.args, self.run.state
        if LR_SCHEDULES[args.lr_scheduler_type].warms_up and state.warmed_seconds is None:
            return args.rate * min(1.0, max(LEAST_SHARE, self._warmup_share()))
        return decayed(args.lr_scheduler_type, args.rate, self._progress(), args.lr_scheduler_min)

    def _progress(self) -> float:
        """Progress of the decay at the beginning of the step, from 0 to 1."""
        args, state, warmed = self.run.args, self.run.state, self.run.state.warmed_seconds or 0.0
        assert args.target_seconds
        result = (self._step_start - warmed) / max(args.target_seconds - warmed, 1e-9)
        if args.max_steps > 0:
            result = max(result, (state.step - state.warmed_step) / max(1, args.max_steps - state.warmed_step))
        return min(1.0, max(0.0, result))

    def _end_warmup(self) -> None:
        """Note when the warm-up ended, if it has."""
        state, args = self.run.state, self.run.args
        if state.warmed_seconds is None and self._warmup_share() >= 1:
            beyond = max(0.0, self._warmup_elapsed() - self._warmup_seconds()) if not args.warmup_steps else 0.0
            state.warmed_seconds, state.warmed_step = max(0.0, self._step_start - beyond), state.step

    def _warmup_share(self) -> float:
        """The share of the warm-up that is done; at 1 it is over."""
        args, step = self.run.args, self.run.state.step
        result = 0.0
        if args.warmup_steps or args.max_steps > 0:
            count = args.warmup_steps
            if args.max_steps > 0:
                count = warmup_steps(args.max_steps, args.warmup_ratio, args.warmup_steps)
            result = (step + 1) / (count + 1) if step < count else 1.0
        if args.warmup_steps:
            return result
        seconds = self._warmup_seconds()
        return max(result, self._warmup_elapsed() / seconds if seconds else 1.0)

    def _warmup_seconds(self) -> float:
        return self.run.args.warmup_ratio * (self.run.args.target_seconds or 0.0)

    def _warmup_elapsed(self) -> float:
        """Seconds of warm-up so far."""
        state = self.run.state
        return state.warming_seconds + (self.elapsed() - state.elapsed_seconds if self._steps else 0.0)
