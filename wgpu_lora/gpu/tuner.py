"""Times the tilings of a program's heavy kernels on the device and keeps the fastest correct one."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wgpu_lora.events import SILENT, Events, Tuning
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import WrongResults
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tiling import PLAIN, Capabilities, Tiling
from wgpu_lora.gpu.tiling_check import cut_verdict, single_call, tuning_of
from wgpu_lora.gpu.tuning_cache import ChoiceFile, TuningEntry, Verdict, choice_key, shader_digest
from wgpu_lora.gpu.verdicts import verdicts_of

SECONDS = 15.0  # limit of tuning, including compilation
AHEAD = 300.0  # the same, where it is what was asked for
RUNS = 3  # timed runs per tiling, after two warm-up runs


def tuning_enabled(requested: bool) -> bool:
    """Whether to tune: the user's choice, unless WGPU_LORA_NO_TUNE disables tuning everywhere."""
    return requested and not os.environ.get("WGPU_LORA_NO_TUNE")


def is_skipped(capabilities: Capabilities, tiling: Tiling) -> bool:
    """Whether a tiling is not worth a trial: `plain` on a CPU with subgroups, always slower, and slow to compile."""
    return tiling.family == PLAIN and bool(capabilities.subgroup_size) and capabilities.software


class Tuner:
    """Finds tilings for the dispatches of recorded programs, once per device and size.

    Only what was timed beside another tiling is a choice. Calls that time runs out for keep the default, in later runs
    too.

    Args:
        seconds: no tiling is started that would exceed this total.
        directory: of the cache; by default WGPU_LORA_CACHE_DIR, or the user's cache directory.
        retune: time what is known, too. thorough: time what earlier runs had no time for, too.

    Attributes:
        complete: whether every call of the last `tune` has a choice that was timed.
    """

    def __init__(
        self,
        device: Device,
        seconds: float = SECONDS,
        directory: Path | None = None,
        retune: bool = False,
        thorough: bool = False,
    ):
        self.device = device
        self.seconds = seconds
        self.file = ChoiceFile(device, directory)
        self.retune, self.thorough = retune, retune or thorough
        self.complete = False

    def estimate(self, programs: Iterable[Program]) -> Tuning:
        """How many sizes and tilings `tune` would time for these programs, and in how many seconds; it times none."""
        calls, work = self._calls(programs)
        entries = self.file.read(digests := _digests(calls))
        return self._estimate(self._trials(calls, work, entries, digests), entries)

    def tune(self, programs: Iterable[Program], events: Events = SILENT) -> dict[str, Tiling]:
        """A tiling for every heavy call of the programs: measured now, read from the cache, or the default.

        Kernels run on synthetic inputs; the programs themselves are not run. Each call is timed in its default tiling
        first, the heaviest first. These times give the calls' shares of a step, by which the other tilings share what
        is left of the limit.

        Args:
            events: receives `tuning` events.

        Raises:
            WrongResults: the device gets a kernel wrong in all tilings.
        """
        calls, work = self._calls(programs)
        entries = self.file.read(digests := _digests(calls))
        trials = self._trials(calls, work, entries, digests)
        tuning, begin, ended = self._estimate(trials, entries), time.perf_counter(), False
        try:
            self._time(list(trials.values()), tuning, begin, events)
            for trial in trials.values():
                if trial.all_wrong:
                    self._find_right(trial)
            ended = True
        finally:  # keep the choices made before an interrupt
            result = {key: trial.entry(digests[trial.call.kernel.name]) for key, trial in trials.items()}
            fresh = {key: result[key] for key, trial in trials.items() if trial.compared and (ended or trial.is_over)}
            entries |= fresh
            verdicts_of(self.device).save()
            skipped_keys = [
                key for key in result if ended and key not in entries and result[key].tiling == trials[key].tilings[0]
            ]
            if fresh or skipped_keys:
                self.file.add(fresh, digests, skipped={key: result[key].digest for key in skipped_keys})
        if trials:
            tuning.seconds, tuning.over = time.perf_counter() - begin, True
            events.tuning(tuning)
        candidates = {key: tilings for key, call in calls.items() if len(tilings := self._tilings(call)) > 1}
        self.complete = candidates.keys() <= entries.keys()
        defaults = {key: tilings[0] for key, tilings in candidates.items()}
        return defaults | {key: entry.tiling for key, entry in (result | entries).items() if key in candidates}

    def _usable(self, call: Dispatch) -> Sequence[Tiling]:
        return call.tilings(self.device.capabilities)

    def _tilings(self, call: Dispatch) -> list[Tiling]:
        """Those worth timing."""
        return [tiling for tiling in self._usable(call) if not is_skipped(self.device.capabilities, tiling)]

    def _calls(self, programs: Iterable[Program]) -> tuple[dict[str, Dispatch], dict[str, float]]:
        """One dispatch per key, the heaviest first, and the multiply-adds of all dispatches of each key."""
        calls: dict[str, Dispatch] = {}
        work: dict[str, float] = {}
        for program in programs:
            for step in program.dispatches:
                if step.kernel.tuning:
                    key = choice_key(step.kernel, step.present, step.constants)
                    calls.setdefault(key, step)
                    work[key] = work.get(key, 0.0) + step.kernel.tuning.work(step.constants)
        return {key: calls[key] for key in sorted(calls, key=lambda k: -work[k])}, work

    def _trials(
        self,
        calls: dict[str, Dispatch],
        work: dict[str, float],
        entries: dict[str, TuningEntry],
        digests: dict[str, str],
    ) -> dict[str, Trial]:
        """The calls to time, the heaviest first."""
        finished_keys = set() if self.retune else set(entries)
        finished_keys |= set() if self.thorough else self.file.skipped_keys(digests.values())
        remaining = {key: (call, self._tilings(call)) for key, call in calls.items() if key not in finished_keys}
        return {key: Trial(call, tilings, work[key]) for key, (call, tilings) in remaining.items() if len(tilings) > 1}

    def _estimate(self, trials: dict[str, Trial], entries: dict[str, TuningEntry]) -> Tuning:
        timed = [(entry.took, len(entry.seconds)) for entry in entries.values() if entry.took]
        average = sum(elapsed for elapsed, _ in timed) / max(1, sum(count for _, count in timed)) if timed else None
        return Tuning(len(trials), sum(len(trial.tilings) for trial in trials.values()), self.seconds, average)

    def _time(self, trials: list[Trial], tuning: Tuning, begin: float, events: Events) -> None:
        """Times the default of each call, for at most half of the time, then always a tiling of the call with the most
        seconds per tiling so far."""
        while trials:
            tuning.seconds = time.perf_counter() - begin
            trial = next((candidate for candidate in trials if not candidate.attempts), None)
            candidates = [candidate for candidate in trials if candidate.attempts]
            if not trial or (candidates and tuning.seconds + tuning.longest > tuning.limit / 2):
                trial = max(candidates, key=lambda candidate: candidate.urgency)
            if tuning.seconds + tuning.longest >= tuning.limit:
                return
            tuning.kernel = trial.call.kernel.name
            events.tuning(tuning)
            before = trial.compared
            self._try_next(trial)
            now = time.perf_counter() - begin
            tuning.tilings_done += 1
            tuning.sizes_done += trial.compared - before
            tuning.each, tuning.longest = now / tuning.tilings_done, max(tuning.longest, now - tuning.seconds)
            if trial.is_over:
                trials.remove(trial)

    def _try_next(self, trial: Trial) -> None:
        call, tiling, begin = trial.call, trial.tilings[trial.attempts], time.perf_counter()
        trial.attempts += 1
        if self._verdict(call, tiling).right:
            trial.timed.append((self._seconds(call, tiling), tiling))
            if trial.promising:  # not because the default was timed at a busy moment
                first = trial.timed[0]
                trial.timed[0] = min(first[0], self._seconds(call, first[1])), first[1]
        elif trial.is_over and trial.all_wrong:
            self._find_right(trial)
        trial.elapsed += time.perf_counter() - begin

    def _find_right(self, trial: Trial) -> None:
        """Takes the first right tiling, untimed, of a call of which those that were tried are wrong. One that is not
        worth timing is better than none, and whether programs are checked later is up to the user."""
        call, tilings = trial.call, trial.tilings[: trial.attempts]
        for tiling in self._usable(call):
            if tiling not in tilings:
                tilings.append(tiling)
                if self._verdict(call, tiling).right:
                    trial.untimed = tiling
                    return
        raise WrongResults(verdicts_of(self.device).tell(tilings[-1], self._verdict(call, tilings[-1])))

    def _seconds(self, call: Dispatch, tiling: Tiling) -> float:
        single = single_call(self.device, call, call.constants, tiling)
        try:
            return single.seconds(RUNS)
        finally:
            single.free()

    def _verdict(self, call: Dispatch, tiling: Tiling) -> Verdict:
        return cut_verdict(self.device, call, tiling)


def _digests(calls: dict[str, Dispatch]) -> dict[str, str]:
    return {call.kernel.name: shader_digest(call.kernel) for call in calls.values()}


GAIN = 0.03  # a tiling replaces the default if it is faster by more than this share


@dataclass
class Trial:
    """Attributes:
    tilings: the default first. attempts: how many of them, in order.
    work: multiply-adds of all calls of the programs that the choice is for.
    timed: (seconds, tiling) of those that are right. elapsed: seconds that this needed.
    untimed: the first right one, where all that were timed are wrong.
    """

    call: Dispatch
    tilings: list[Tiling]
    work: float
    attempts: int = 0
    timed: list[tuple[float, Tiling]] = field(default_factory=list)
    elapsed: float = 0.0
    untimed: Tiling | None = None

    @property
    def is_over(self) -> bool:
        return self.attempts == len(self.tilings)

    @property
    def all_wrong(self) -> bool:
        """Whether those that were tried are wrong, and no other is known to be right."""
        return self.attempts > 0 and not self.timed and self.untimed is None

    @property
    def compared(self) -> bool:
        return len(self.timed) > 1

    @property
    def urgency(self) -> float:
        """The time of the calls in the programs, in seconds per tiling that was tried; infinite if all were wrong."""
        if not self.timed:
            return math.inf
        return self.timed[0][0] * self.work / tuning_of(self.call).work(self.call.constants) / self.attempts

    @property
    def promising(self) -> bool:
        """Whether the tiling timed last would replace the default."""
        return len(self.timed) > 1 and self.timed[-1][0] < (1 - GAIN) * self.timed[0][0]

    def entry(self, digest: str) -> TuningEntry:
        """The fastest tiling, or the default unless it is wrong or slower by more than GAIN. If none was timed, the
        first right one that is known, or the default."""
        name, timed = self.call.kernel.name, self.timed
        if not timed:
            return TuningEntry(name, digest, self.untimed or self.tilings[0])
        best = min(timed, key=lambda pair: pair[0])
        if timed[0][1] == self.tilings[0] and best[0] > (1 - GAIN) * timed[0][0]:
            best = timed[0]
        return TuningEntry(name, digest, best[1], tuple(timed), self.elapsed)
