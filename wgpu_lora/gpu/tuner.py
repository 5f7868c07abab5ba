"""Times the tilings of a program's heavy kernels on the device and keeps the fastest correct one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from wgpu_lora.events import SILENT, Events, Tuning
from wgpu_lora.gpu.choices import ChoiceFile, Entry, choice_key, nearest, same_shader, shader_digest
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.errors import ShaderError
from wgpu_lora.gpu.program import Dispatch, Program
from wgpu_lora.gpu.single import SingleKernel
from wgpu_lora.gpu.tiling import PLAIN, Tiling
from wgpu_lora.gpu.tunable import Constants, Tunable
from wgpu_lora.gpu.values import nmse, widened

SECONDS = 15.0  # limit of tuning, including compilation
RUNS = 3  # timed runs per tiling, after two warm-up runs
GAIN = 0.03  # a tiling replaces the default if it is faster by more than this share
NMSE = 1e-10  # limit of a tiling's error against the float64 reference


def wanted(asked: bool) -> bool:
    """Whether to tune: the user's choice, unless WGPU_LORA_NO_TUNE disables tuning everywhere."""
    return asked and not os.environ.get("WGPU_LORA_NO_TUNE")


class Tuner:
    """Finds tilings for the dispatches of recorded programs, once per device and model.

    A call copies the choice of one that differs only in the batch's rows, by up to a factor of four, without being
    timed. Calls that time runs out for keep the default, in later runs too.

    Args:
        seconds: no tiling is started that would exceed this total.
        directory: of the cache; by default WGPU_LORA_CACHE_DIR, or the user's cache directory.
    """

    def __init__(self, device: Device, seconds: float = SECONDS, directory: Path | None = None):
        self.device = device
        self.seconds = seconds
        self.file = ChoiceFile(device, directory)

    def estimate(self, programs: Iterable[Program]) -> Tuning:
        """How many sizes and tilings `tune` would time for these programs, and in how many seconds; it times none."""
        calls = self._calls(programs)
        return self._estimate(calls, self.file.read(_digests(calls)))

    def tune(self, programs: Iterable[Program], events: Events = SILENT) -> dict[str, Tiling]:
        """Choices for every heavy call of the programs, measured now or read from the cache.

        Kernels run on synthetic inputs; the programs themselves are not run. The heaviest calls come first.

        Args:
            events: receives `tuning` events.
        """
        calls = self._calls(programs)
        digests = _digests(calls)
        known = self.file.read(digests)
        tuning, begin = self._estimate(calls, known), time.perf_counter()
        fresh: dict[str, Entry] = {}
        try:
            for key, call in calls.items():
                if key in known or len(self._tilings(call)) < 2:
                    continue
                digest = digests[call.kernel.name]
                entry = self._taken_over(key, call, known) or self._measure(call, digest, tuning, begin, events)
                if entry:
                    fresh[key] = known[key] = entry
        finally:  # keep the choices made before an interrupt
            if fresh:
                self.file.add(fresh, digests)
        if tuning.tilings_done:
            tuning.seconds, tuning.over = time.perf_counter() - begin, True
            events.tuning(tuning)
        return {key: known[key].tiling for key in calls if key in known}

    def _tilings(self, call: Dispatch) -> list[Tiling]:
        capabilities = self.device.capabilities
        tilings = call.kernel.tilings(capabilities, call.constants)
        # On a CPU with subgroups, `plain` is always slower, and slow to compile.
        skipped = capabilities.subgroup_size and capabilities.software
        return [tiling for tiling in tilings if tiling.family != PLAIN or not skipped]

    def _calls(self, programs: Iterable[Program]) -> dict[str, Dispatch]:
        """One dispatch per key, the heaviest first."""
        calls: dict[str, Dispatch] = {}
        work: dict[str, float] = {}
        for program in programs:
            for step in program.dispatches:
                if step.kernel.tuning:
                    key = choice_key(step.kernel, step.present, step.constants)
                    calls.setdefault(key, step)
                    work[key] = work.get(key, 0.0) + step.kernel.tuning.work(step.constants)
        return {key: calls[key] for key in sorted(calls, key=lambda k: -work[k])}

    def _estimate(self, calls: dict[str, Dispatch], known: dict[str, Entry]) -> Tuning:
        sizes, tilings, seen = 0, 0, dict(known)
        for key, call in calls.items():
            count = len(self._tilings(call))
            if key not in seen and count > 1 and nearest(call.kernel, key, seen) is None:
                timed_then = ((0.0, call.tiling),)
                seen[key] = Entry(call.kernel.name, "", call.tiling, timed_then)  # similar calls will copy it
                sizes, tilings = sizes + 1, tilings + count
        timed = [(entry.took, len(entry.seconds)) for entry in known.values() if entry.took]
        each = sum(took for took, _ in timed) / max(1, sum(count for _, count in timed)) if timed else None
        return Tuning(sizes, tilings, self.seconds, each)

    def _taken_over(self, key: str, call: Dispatch, known: dict[str, Entry]) -> Entry | None:
        """The choice of a similar call, if it is valid and correct for this one."""
        like = nearest(call.kernel, key, known)
        if like is None or (tiling := known[like].tiling) not in self._tilings(call):
            return None
        if not same_shader(key, like) and not self._is_right(call, tiling):
            return None
        return Entry(call.kernel.name, known[like].digest, tiling, like=like)

    def _measure(self, call: Dispatch, digest: str, tuning: Tuning, begin: float, events: Events) -> Entry | None:
        """The fastest correct tiling; the default if no time is left, None if no tiling is correct."""
        tilings = self._tilings(call)
        started = time.perf_counter()
        timed: list[tuple[float, Tiling]] = []
        for done, tiling in enumerate(tilings):
            tuning.seconds = time.perf_counter() - begin
            if tuning.seconds + tuning.longest >= tuning.limit:
                if not done:
                    return Entry(call.kernel.name, digest, tilings[0])
                break
            tuning.kernel = call.kernel.name
            events.tuning(tuning)
            if self._is_right(call, tiling):
                timed.append((self._seconds(call, tiling), tiling))
            tuning.tilings_done += 1
            now = time.perf_counter() - begin
            tuning.each, tuning.longest = now / tuning.tilings_done, max(tuning.longest, now - tuning.seconds)
        tuning.sizes_done += 1
        if not timed:
            return None
        best = min(timed, key=lambda pair: pair[0])
        if timed[0][1] == tilings[0] and best[0] > (1 - GAIN) * timed[0][0]:
            best = timed[0]
        took = time.perf_counter() - started
        return Entry(call.kernel.name, digest, best[1], tuple(timed), took)

    def _seconds(self, call: Dispatch, tiling: Tiling) -> float:
        single = self._single(call, call.constants, tiling)
        try:
            return single.seconds(RUNS)
        finally:
            single.free()

    def _is_right(self, call: Dispatch, tiling: Tiling) -> bool:
        """Whether a tiling compiles and agrees with the float64 reference on a cut of the call."""
        small = _tuning(call).cut(call.constants, tiling)
        try:
            single = self._single(call, small, tiling)
        except ShaderError:  # other tilings may compile
            return False
        try:
            single.run()
            arrays = {name: widened(array) for name, array in single.arrays.items()}
            result = call.kernel(**{name: arrays.get(name) for name in call.kernel.bindings}, **small)
            wanted = result if isinstance(result, tuple) else (result,)
            names = [name for name in call.kernel.outputs if name in single.arrays]
            return all(
                nmse(widened(single.read(name)).reshape(-1), np.asarray(want).reshape(-1)) <= NMSE
                for name, want in zip(names, wanted, strict=True)
            )
        finally:
            single.free()

    def _single(self, call: Dispatch, constants: Constants, tiling: Tiling) -> SingleKernel:
        arrays = _tuning(call).inputs(constants, call.present, np.random.default_rng(0))
        return SingleKernel(self.device, call.kernel, arrays, constants, tiling)


def _tuning(call: Dispatch) -> Tunable:
    assert call.kernel.tuning is not None, f"{call.kernel.name} is not tuned"
    return call.kernel.tuning


def _digests(calls: dict[str, Dispatch]) -> dict[str, str]:
    return {call.kernel.name: shader_digest(call.kernel) for call in calls.values()}
