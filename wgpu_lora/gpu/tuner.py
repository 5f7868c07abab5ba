"""Times the tilings of a program's heavy kernels on the device at hand, and keeps the fastest that is right."""

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
from wgpu_lora.gpu.single import SingleKernel, nmse, widened
from wgpu_lora.gpu.tiling import PLAIN, Tiling
from wgpu_lora.gpu.tunable import Constants, Tunable

SECONDS = 15.0  # of tuning, compilation included
RUNS = 3  # timed runs of a tiling, after two that are not
GAIN = 0.03  # a tiling must be so much faster than the default to replace it
NMSE = 1e-10  # of a tiling's result against the float64 reference; half operands are rounded before


def wanted(asked: bool) -> bool:
    """Whether to tune: the user's choice, unless WGPU_LORA_NO_TUNE says no for all that runs."""
    return asked and not os.environ.get("WGPU_LORA_NO_TUNE")


class Tuner:
    """Finds tilings for the dispatches of recorded programs, once for a device and a model.

    A call takes the choice of one that differs in the batch's rows alone, up to four times as many or as few, without
    being timed. What the time does not suffice for keeps the default, and is not timed in later runs either.

    Args:
        seconds: begin no tiling that would take longer than this in all.
        directory: of the cache, instead of the user's own (or WGPU_LORA_CACHE_DIR).
    """

    def __init__(self, device: Device, seconds: float = SECONDS, directory: Path | None = None):
        self.device = device
        self.seconds = seconds
        self.file = ChoiceFile(device, directory)

    def outlook(self, programs: Iterable[Program]) -> Tuning:
        """What `tune` has to time, and how long that is going to take."""
        calls = self._calls(programs)
        return self._outlook(calls, self.file.read(_digests(calls)))

    def tune(self, programs: Iterable[Program], events: Events = SILENT) -> dict[str, Tiling]:
        """Choices for every heavy call of the programs, measured now or read from the cache.

        Nothing of the programs is run. The largest work comes first, so that little time is spent where it matters
        most.

        Args:
            events: told of `tuning`.
        """
        calls = self._calls(programs)
        digests = _digests(calls)
        known = self.file.read(digests)
        tuning, begin = self._outlook(calls, known), time.perf_counter()
        fresh: dict[str, Entry] = {}
        try:
            for key, call in calls.items():
                if key in known or len(self._tilings(call)) < 2:
                    continue
                digest = digests[call.kernel.name]
                entry = self._taken_over(key, call, known) or self._measure(call, digest, tuning, begin, events)
                if entry:
                    fresh[key] = known[key] = entry
        finally:  # what was found before an interrupt is worth keeping
            if fresh:
                self.file.add(fresh, digests)
        if tuning.tilings_done:
            tuning.seconds, tuning.over = time.perf_counter() - begin, True
            events.tuning(tuning)
        return {key: known[key].tiling for key in calls if key in known}

    def _tilings(self, call: Dispatch) -> list[Tiling]:
        capabilities = self.device.capabilities
        tilings = call.kernel.tilings(capabilities, call.constants)
        # In `plain`, lanes load what a neighbour has: on a CPU always slower, and long to compile.
        spared = capabilities.subgroup_size and capabilities.software
        return [tiling for tiling in tilings if tiling.family != PLAIN or not spared]

    def _calls(self, programs: Iterable[Program]) -> dict[str, Dispatch]:
        """One dispatch for every key, those of the most work first."""
        calls: dict[str, Dispatch] = {}
        work: dict[str, float] = {}
        for program in programs:
            for step in program.dispatches:
                if step.kernel.tuning:
                    key = choice_key(step.kernel, step.present, step.constants)
                    calls.setdefault(key, step)
                    work[key] = work.get(key, 0.0) + step.kernel.tuning.work(step.constants)
        return {key: calls[key] for key in sorted(calls, key=lambda k: -work[k])}

    def _outlook(self, calls: dict[str, Dispatch], known: dict[str, Entry]) -> Tuning:
        sizes, tilings, seen = 0, 0, dict(known)
        for key, call in calls.items():
            count = len(self._tilings(call))
            if key not in seen and count > 1 and nearest(call.kernel, key, seen) is None:
                timed_then = ((0.0, call.tiling),)
                seen[key] = Entry(call.kernel.name, "", call.tiling, timed_then)  # those like it will follow it
                sizes, tilings = sizes + 1, tilings + count
        timed = [(entry.took, len(entry.seconds)) for entry in known.values() if entry.took]
        each = sum(took for took, _ in timed) / max(1, sum(count for _, count in timed)) if timed else None
        return Tuning(sizes, tilings, self.seconds, each)

    def _taken_over(self, key: str, call: Dispatch, known: dict[str, Entry]) -> Entry | None:
        """The choice of a call like this one, if this call can have it and it is right."""
        like = nearest(call.kernel, key, known)
        if like is None or (tiling := known[like].tiling) not in self._tilings(call):
            return None
        if not same_shader(key, like) and not self._is_right(call, tiling):
            return None
        return Entry(call.kernel.name, known[like].digest, tiling, like=like)

    def _measure(self, call: Dispatch, digest: str, tuning: Tuning, begin: float, events: Events) -> Entry | None:
        """The best tiling of a call and what each took; the default where no time is left, None where none is right."""
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
        """Whether a tiling compiles and gives the reference's result, on a cut that a float64 reference can afford."""
        small = _tuning(call).cut(call.constants)
        try:
            single = self._single(call, small, tiling)
        except ShaderError:  # of this driver's compiler: others may do
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
