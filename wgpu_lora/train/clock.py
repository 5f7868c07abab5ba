"""The clock of a run: its elapsed time, the steps that there is time for, and the learning rate of a timed run.

Elapsed time is that from the beginning of the first step to the end of the last one, with all that lies between:
held-out losses, checkpoints, logging. That of a resumed run is the sum over its sessions. What comes after the last
step, its held-out loss and the final save, is not part of it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wgpu_lora.train.schedule import LR_SCHEDULES, decayed, warmup_steps
from wgpu_lora.train.state import step_budget

if TYPE_CHECKING:
    from wgpu_lora.train.run import Run

HELD_OUT, CHECKPOINT = "held-out loss", "checkpoint"  # what lies between steps and is left out if it does not fit
UNTIMED_SHARE = 0.02  # of the time, for such work that was not timed yet
TIMED = 3  # steps that are timed before the number of steps is estimated
RECENT = 32  # steps whose median is the time of the next one
LEAST_SHARE = 0.01  # of the peak, at the beginning of a warm-up by time: no step trains nothing


@dataclass
class Clock:
    """The clock of one session of a run; what the next session continues from is in the run's state."""

    run: Run
    _origin: float | None = None  # when the session's first step began, less the time of earlier sessions
    _begun: float = 0.0  # elapsed time at the beginning of the step
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
        self._begun = self.elapsed()
        if self.run.args.target_seconds:
            self._end_warmup()

    def end_step(self) -> None:
        """Call it when a step was taken, before it is counted."""
        state, end = self.run.state, self.elapsed()
        if self._steps:  # the first step of a session compiles kernels
            self._recent.append(end - self._begun)
            self._gaps += self._begun - state.elapsed_seconds
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
    def between(self, work: str) -> Iterator[None]:
        """Times what lies between two steps."""
        begin = self.now()
        yield
        self.run.state.between_seconds[work] = self.now() - begin

    # -- the end of a timed run ------------------------------------------------------------------------------------

    def used(self) -> bool:
        """Whether the run ends nearer to its target now than after another step."""
        state, target = self.run.state, self.run.args.target_seconds
        return bool(target) and self.elapsed() + state.step_seconds + state.elapsed_seconds > 2 * (target or 0.0)

    def fits(self, work: str) -> bool:
        """Whether the run would still end at its target if `work`, which the end has too, came before the next step."""
        target = self.run.args.target_seconds
        if not target:
            return True
        took = self.run.state.between_seconds.get(work, UNTIMED_SHARE * target)
        return self.elapsed() + took + self.run.state.step_seconds / 2 <= target

    # -- the learning rate of a timed run --------------------------------------------------------------------------

    def rate(self) -> float:
        """The learning rate of the step that has begun: a function of time, and of no estimate.

        The warm-up takes --warmup-ratio of the time, without the first step of a session, which compiles kernels, or
        else --warmup-steps steps. The decay goes from its end to the target, or to --max-steps if they come first.
        """
        args, state = self.run.args, self.run.state
        if LR_SCHEDULES[args.lr_scheduler_type].warms_up and state.warmed_seconds is None:
            return args.rate * min(1.0, max(LEAST_SHARE, self._warmed()))
        return decayed(args.lr_scheduler_type, args.rate, self._progress(), args.lr_scheduler_min)

    def _progress(self) -> float:
        """Progress of the decay at the beginning of the step, from 0 to 1."""
        args, state, warmed = self.run.args, self.run.state, self.run.state.warmed_seconds or 0.0
        assert args.target_seconds
        found = (self._begun - warmed) / max(args.target_seconds - warmed, 1e-9)
        if args.max_steps > 0:
            found = max(found, (state.step - state.warmed_step) / max(1, args.max_steps - state.warmed_step))
        return min(1.0, max(0.0, found))

    def _end_warmup(self) -> None:
        """Note when the warm-up ended, if it has."""
        state, args = self.run.state, self.run.args
        if state.warmed_seconds is None and self._warmed() >= 1:
            beyond = max(0.0, self._warming() - self._warmup_seconds()) if not args.warmup_steps else 0.0
            state.warmed_seconds, state.warmed_step = max(0.0, self._begun - beyond), state.step

    def _warmed(self) -> float:
        """The share of the warm-up that is done; at 1 it is over."""
        args, step = self.run.args, self.run.state.step
        found = 0.0
        if args.warmup_steps or args.max_steps > 0:
            count = args.warmup_steps
            if args.max_steps > 0:
                count = warmup_steps(args.max_steps, args.warmup_ratio, args.warmup_steps)
            found = (step + 1) / (count + 1) if step < count else 1.0
        if args.warmup_steps:
            return found
        seconds = self._warmup_seconds()
        return max(found, self._warming() / seconds if seconds else 1.0)

    def _warmup_seconds(self) -> float:
        return self.run.args.warmup_ratio * (self.run.args.target_seconds or 0.0)

    def _warming(self) -> float:
        """Seconds of warm-up so far."""
        state = self.run.state
        return state.warming_seconds + (self.elapsed() - state.elapsed_seconds if self._steps else 0.0)
