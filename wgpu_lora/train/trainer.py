"""The training loop: upload, replay, update, and at the end of each step decide whether to go on."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from wgpu_lora.train.optimizer import AdamWSettings
from wgpu_lora.train.session import Session
from wgpu_lora.train.slot import AdapterRun
from wgpu_lora.train.stream import Step

CALIBRATION_STEPS = 3  # timed after one that pays for compilation
STOP_TEXT = {
    "epochs": "all epochs are done",
    "max steps": "the step limit is reached",
    "target seconds": "the time budget is used",
    "interrupt": "interrupted; continue with --resume",
    "non-finite": "the loss or the gradient is not finite; no update was applied, and the adapter is that of the step "
    "before",
}


@dataclass(frozen=True)
class StepResult:
    """What a callback sees of a step."""

    step: int
    total_steps: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    seconds: float  # of the step alone, held-out loss excluded
    eval_loss: float | None


Callback = Callable[[StepResult], None]


@dataclass
class Trainer:
    """Trains one slot until it stops for one stated reason."""

    session: Session
    run: AdapterRun
    callback: Callback = lambda result: None
    _stop: threading.Event = field(default_factory=threading.Event)
    _durations: list[float] = field(default_factory=list)
    _last_epoch: float = 0.0
    _last_line: dict[str, Any] = field(default_factory=dict)

    def train(self) -> dict[str, Any]:
        """Runs to the end and writes everything; returns run.json's contents.

        Raises:
            UserError: the checkpoint to resume is damaged. OSError: the disk refused; earlier checkpoints are whole.
        """
        with self._signals():  # to the end: a second Ctrl-C must not cost the saving
            reason = self._loop()
            if reason == "target seconds":
                self._close()
            if self.run.state.step:
                self.run.save(self.session)
            return self.run.finish(self.session, reason)

    def _loop(self) -> str:
        run, state = self.run, self.run.state
        for step in run.stream.steps(state.epoch, state.index):
            ended = self._ended()
            if ended:
                return ended
            begin = time.perf_counter()
            line = self._take(step)
            if line is None:
                return "non-finite"
            trained = time.perf_counter() - begin
            if self._heldout_due(step):
                line |= self._heldout()
            state.seconds += time.perf_counter() - begin
            state.pending_seconds += trained  # tokens/s are of training alone
            self._calibrate(trained)
            self._log(step, line, trained)
            save_steps = run.args.save_steps
            if save_steps and state.step % save_steps == 0 and state.step < state.total_steps:
                run.save(self.session)
        raise AssertionError("a data stream has no end")

    def _ended(self) -> str | None:
        args, state = self.run.args, self.run.state
        if self._stop.is_set():
            return "interrupt"
        if 0 < args.max_steps <= state.step:
            return "max steps"
        if args.target_seconds:
            # Until the budget is fixed, the number of steps says nothing.
            used = state.calibrated and state.step >= state.total_steps
            return "target seconds" if used or state.seconds >= args.target_seconds else None
        return "epochs" if state.step >= state.total_steps else None

    def _take(self, step: Step) -> dict[str, Any] | None:
        """One optimizer step; None where it was not finite, and then nothing was updated."""
        run, state, device = self.run, self.run.state, self.session.device
        optimizer = self.session.optimizer
        tokens = run.stream.trained_tokens(step)
        optimizer.begin(device)
        for batch in step.micro_batches:
            segments = run.stream.segments(step, batch, 1 / tokens, run.slot)
            inputs, program = self.session.step_for(sum(len(s.input_ids) for s in segments))
            inputs.upload(device, segments)
            program.run()
        rate, args = run.rate(), run.args
        settings = AdamWSettings(weight_decay=args.weight_decay, max_grad_norm=args.max_grad_norm)
        report = optimizer.apply(device, [state.step + 1], [rate], settings)[run.slot]
        if not report.applied:
            return None
        loss = report.loss_sum / tokens
        state.step += 1
        state.epoch, state.index = (step.epoch + 1, 0) if step.last_of_epoch else (step.epoch, step.index + 1)
        state.tokens += tokens
        state.pending_tokens += tokens
        state.pending.append(loss)
        state.last_loss = loss
        return {"loss": loss, "learning_rate": rate, "grad_norm": report.grad_norm}

    def _heldout_due(self, step: Step) -> bool:
        every, state = self.run.args.eval_steps, self.run.state
        last = state.step >= state.total_steps
        return last or (state.step % every == 0 if every else step.last_of_epoch)

    def _calibrate(self, elapsed: float) -> None:
        """With --target-seconds, fixes the schedule's length once some steps have been timed."""
        state, target = self.run.state, self.run.args.target_seconds
        if not target or state.calibrated:
            return
        self._durations.append(elapsed)
        if len(self._durations) > CALIBRATION_STEPS:
            typical = statistics.median(self._durations[1:])
            total = state.step + max(0, int((target - state.seconds) / typical))
            state.total_steps = min(total, self.run.args.max_steps) if self.run.args.max_steps > 0 else total
            state.calibrated = True

    def _heldout(self) -> dict[str, Any]:
        loss = self.run.measure_heldout(self.session)
        return {} if loss is None else {"eval_loss": loss}

    def _close(self) -> None:
        """The last log line and held-out loss of a run whose last step was not known to be the last."""
        line = self._last_line
        if not line or "eval_loss" in line:
            return
        line = line | self._heldout()
        if self.run.state.pending:
            self._write(self._last_epoch, line)

    def _log(self, step: Step, line: dict[str, Any], seconds: float) -> None:
        run, state = self.run, self.run.state
        steps = len(run.stream.epoch(step.epoch))
        epoch = round(step.epoch + (step.index + 1) / steps, 4)
        result = StepResult(
            state.step,
            state.total_steps,
            epoch,
            line["loss"],
            line["learning_rate"],
            line["grad_norm"],
            state.tokens,
            seconds,
            line.get("eval_loss"),
        )
        self.callback(result)
        self._last_epoch, self._last_line = epoch, line
        last = state.step >= state.total_steps
        if state.step % run.args.logging_steps == 0 or last or "eval_loss" in line:
            self._write(epoch, line)

    def _write(self, epoch: float, line: dict[str, Any]) -> None:
        state = self.run.state
        entry = {
            "step": state.step,
            "epoch": epoch,
            **line,
            "loss": statistics.fmean(state.pending),  # since the last line
            "tokens": state.tokens,
            "tokens_per_second": round(state.pending_tokens / max(state.pending_seconds, 1e-9), 2),
            "seconds": round(state.seconds, 4),
        }
        self.run.log.write(entry)
        state.pending, state.pending_tokens, state.pending_seconds = [], 0, 0.0

    def stop(self) -> None:
        """Ends the run after the step in progress, as an interrupt does."""
        self._stop.set()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, lambda *_: self.stop())
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
