"""Follows the runs of a job: their entries in the user's run log, and the trackers that they are reported to."""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from wgpu_lora.data import TokenizedData
from wgpu_lora.errors import DeviceWarning, UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.files.json_files import read_json
from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.train.run.adapter_run import AdapterRun, Tracking
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.train.run.run_checkpoint import BEST
from wgpu_lora.train.run.run_outcome import first_and_last
from wgpu_lora.train.run.stop_reasons import STOP_TEXT
from wgpu_lora.train.run.training_log import LOG, read_log
from wgpu_lora.train.track.hardware.sampler import Sampler
from wgpu_lora.train.track.run_log import (
    FAILED,
    HELD_OUT,
    KILLED,
    REWARD,
    STOPPED,
    TRAINING,
    DataFile,
    Git,
    Losses,
    RunEntry,
    git_state,
    run_log_enabled,
    run_name,
)
from wgpu_lora.train.track.run_recorder import Recording, device_facts, given_options, status_of
from wgpu_lora.train.track.secret_masking import masked
from wgpu_lora.train.track.trackers import GuardedTracker, TrackedRun, trackers_of

FILE = "tracking.json"  # the id of a directory's run


@dataclass
class RunTracking(Tracking):
    """A run in the run log."""

    run: AdapterRun
    recording: Recording
    sampler: Sampler
    events: Events
    group: str | None
    over: bool = False
    trackers: list[GuardedTracker] = field(default_factory=list)

    _urls: set[str] = field(default_factory=set)
    _sampled: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        self.sampler.start()
        write_bytes_atomic(self.run.directory / FILE, (json.dumps({"id": self.recording.entry.id}) + "\n").encode())
        entry, run = self.recording.entry, self.run
        name = entry.name + (f" {run.name}" if run.name else "")
        where = str(run.directory.resolve())
        tracked = TrackedRun(entry.id, name, where, self.group, run.args.notes, masked(entry.config), run.state.step)
        self.trackers = [GuardedTracker(tracker, tracked) for tracker in trackers_of(run.args.report_to)]

    def hardware(self) -> dict[str, float]:
        begin, self._sampled = self._sampled, time.monotonic()
        if text := self.sampler.warning():
            warnings.warn(text, DeviceWarning, stacklevel=2)
        return self.sampler.since(begin)

    def log(self, line: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log(metrics_of(line), int(line["step"]))
        self._show()

    def _show(self) -> None:
        """Tell, once, where each tracker shows the run."""
        for tracker in self.trackers:
            if tracker.url and tracker.url not in self._urls:
                self._urls.add(tracker.url)
                self.events.tracked(tracker.name, tracker.url, self.run.name)

    def finish(self, record: RunRecord) -> None:
        state, self.over = record.state, True
        outputs = [directory for directory in (self.run.directory, self.run.directory / BEST) if directory.is_dir()]
        status = STOPPED if record.outcome == "stopped early" else record.outcome
        self.recording.end(
            status,
            losses_of(self.run),
            seconds=round(state.seconds, 3),
            steps=state.step,
            tokens=state.tokens,
            outputs=[str(directory.resolve()) for directory in outputs],
            error=STOP_TEXT[record.stop_reason] if status == FAILED else None,
        )
        self._close(status)

    def fail(self, error: BaseException) -> None:
        """Called when an exception has ended the job before the run."""
        if not self.over:
            result = status_of(error)
            if self.run.stream.prepared.account.source.is_sealed and result.get("error"):
                result["error"] = type(error).__name__  # its message may have something of the rows
            self.recording.end(**result)
            self._close(result["status"])

    def _close(self, status: str) -> None:
        for tracker in self.trackers:
            tracker.finish(status)
        self._show()


def metrics_of(line: Mapping[str, float]) -> dict[str, float]:
    """A line of the log by the names that transformers reports: train/loss, train/learning_rate, eval/loss."""
    metrics = {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in line.items()
        if name != "step"
    }
    return {**metrics, "train/global_step": line["step"]}


@contextmanager
def track_runs(runs: Sequence[AdapterRun], device: DeviceInfo, home: Path, events: Events = SILENT) -> Iterator[None]:
    """Record the runs of a job in the block; runs that have not finished when an exception leaves it have failed.

    home: directory of the job's record.
    """
    trackings: list[RunTracking] = []
    sampler = Sampler(device)
    git = git_state() if any(run_log_enabled(run.args.run_log) for run in runs) else None  # it may take a while
    try:
        for run in runs:
            run.tracking = tracking = _start_tracking(run, device, home, git, sampler, events)
            trackings.append(tracking)
        yield
    except BaseException as error:
        for tracking in trackings:
            tracking.fail(error)
        raise
    finally:
        sampler.stop()
        for run in runs:
            run.tracking = Tracking()


def _start_tracking(
    run: AdapterRun, device: DeviceInfo, home: Path, git: Git | None, sampler: Sampler, events: Events
) -> RunTracking:
    args = run.args
    recording = Recording.of(
        "finetune",
        run_name(args.model, args.base_dtype, True, args.use_rslora, args.objective, args.compute_dtype),
        args.run_log,
        resumed=logged_id(run.directory) if args.resume else None,
        objective=args.objective,
        adapter=run.name,
        pipeline=str(home.resolve()) if run.name is not None else None,
        goal=args.goal,
        notes=args.notes,
        git=git,
        device=device_facts(device),
        config=given_options(args.as_dict()),
        data=_file(run.stream.prepared),
        eval_data=_file(run.heldout) if run.heldout else None,
        outputs=[str(run.directory.resolve())],
    )
    return RunTracking(run, recording, sampler, events, recording.entry.pipeline and home.resolve().name)


def _file(prepared: TokenizedData) -> DataFile:
    return DataFile(prepared.path, prepared.digest)


def logged_id(directory: Path) -> str | None:
    """The id of a directory's run; None if it has none, or a damaged one."""
    with suppress(UserError):
        result = read_json(directory / FILE).get("id")
        return result if isinstance(result, str) and result.isascii() and 0 < len(result) <= 64 else None
    return None


def losses_of(run: AdapterRun) -> Losses:
    """The held-out losses or, if no rows are held out, the logged training losses: first, lowest and last. Of a run
    that learns from rewards, those.

    Steps that are not logged yet count like a line.
    """
    state = run.state
    if run.rollouts:
        return _rewards(run.log_lines())
    if run.heldout:
        return Losses(HELD_OUT, state.first_eval_loss, state.best_eval_loss, state.trained_eval_loss)
    lines = run.log_lines()
    return _losses([*lines, {"loss": statistics.fmean(state.pending)}] if state.pending else lines, "loss", TRAINING)


def _losses(lines: Sequence[Mapping[str, float]], name: str, of: str) -> Losses:
    logged = [line[name] for line in lines if name in line]
    return Losses(of, logged[0], min(logged), logged[-1]) if logged else Losses(of)


def _rewards(lines: Sequence[Mapping[str, float]]) -> Losses:
    ends = first_and_last(lines, REWARD)
    return Losses(REWARD, ends[0], max(line[REWARD] for line in lines if REWARD in line), ends[1]) if ends else Losses()


def with_log(entry: RunEntry) -> RunEntry:
    """An entry of the run log; of a killed run, with what its log.jsonl says, if that is still the run's."""
    path = Path(entry.outputs[0]) / LOG if entry.outputs else None
    if entry.status != KILLED or not path or logged_id(path.parent) != entry.id or not path.is_file():
        return entry
    lines = read_log(path)
    candidates = _rewards(lines), _losses(lines, "eval_loss", HELD_OUT), _losses(lines, "loss", TRAINING)
    result = next((losses for losses in candidates if losses.final is not None), Losses())
    last = lines[-1] if lines else {}
    return replace(entry, losses=result, steps=last.get("step"), tokens=last.get("tokens"), seconds=last.get("seconds"))
