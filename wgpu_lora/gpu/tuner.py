"""Times the tilings of a program's heavy kernels on the device at hand, and keeps the fastest that is right."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from wgpu_lora.gpu.choices import ChoiceFile, Choices, choice_key, shader_digest
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import Tiles
from wgpu_lora.gpu.program import Dispatch, Program
from wgpu_lora.gpu.single import SingleKernel, nmse, widened

SECONDS = 15.0  # spent on tuning at most, compilation included
RUNS = 3  # timed runs of a tiling, after two that are not
GAIN = 0.03  # a tiling must be so much faster than the default to replace it
NMSE = 1e-10  # of a tiling's result against the float64 reference; half operands are rounded before
CHECKED = 64  # rows, columns and steps that a check is cut to, give or take what keeps the shape's divisibility

Note = Callable[[str], None]


def wanted(asked: bool) -> bool:
    """Whether to tune: the user's choice, unless WGPU_LORA_NO_TUNE says no for all that runs."""
    return asked and not os.environ.get("WGPU_LORA_NO_TUNE")


class Tuner:
    """Finds tilings for the dispatches of recorded programs.

    Args:
        seconds: stop measuring after so long; what was not reached keeps its default.
        directory: of the cache, instead of the user's own (or WGPU_LORA_CACHE_DIR).
    """

    def __init__(self, device: Device, seconds: float = SECONDS, directory: Path | None = None):
        self.device = device
        self.seconds = seconds
        self.file = ChoiceFile(device, directory)

    def tune(self, programs: Iterable[Program], note: Note = lambda text: None) -> Choices:
        """Choices for every heavy call of the programs, measured now or read from the cache.

        Nothing of the programs is run. The largest work comes first, so that little time is spent where it matters
        most.
        """
        calls = self._calls(programs)
        digests = {call.kernel.name: shader_digest(call.kernel) for call in calls.values()}
        known = self.file.read(digests)
        begin, found = time.perf_counter(), {}
        for key, call in calls.items():
            if key in known:
                continue
            left = self.seconds - (time.perf_counter() - begin)
            if left <= 0:
                break
            note(call.kernel.name)
            entry = self._measure(call, left)
            if entry:
                found[key] = {"kernel": call.kernel.name, "digest": digests[call.kernel.name], **entry}
        if found:
            self.file.add(found, digests)
        return {key: entry["tiles"] for key, entry in {**known, **found}.items() if key in calls}

    def untimed(self, programs: Iterable[Program]) -> int:
        """How many calls `tune` would have to measure."""
        calls = self._calls(programs)
        known = self.file.read({call.kernel.name: shader_digest(call.kernel) for call in calls.values()})
        return sum(key not in known and len(self._tilings(call)) > 1 for key, call in calls.items())

    def _tilings(self, call: Dispatch) -> list[Tiles]:
        traits = self.device.traits
        tilings = call.kernel.tilings(traits, call.constants)
        if traits.subgroup_size and traits.software:
            # Without subgroups, lanes load what a neighbour has: on a CPU always slower, and long to compile.
            tilings = [t for t in tilings if t.get("sg")]
        return tilings

    def _calls(self, programs: Iterable[Program]) -> dict[str, Dispatch]:
        """One dispatch for every key, those of the most work first."""
        calls: dict[str, Dispatch] = {}
        work: dict[str, float] = {}
        for program in programs:
            for step in program.dispatches:
                if step.kernel.sample:
                    key = choice_key(step.kernel, step.present, step.constants)
                    calls.setdefault(key, step)
                    work[key] = work.get(key, 0.0) + operations(step.constants)
        return {key: calls[key] for key in sorted(calls, key=lambda k: -work[k])}

    def _measure(self, call: Dispatch, seconds: float) -> dict[str, Any] | None:
        """The best tiling of a call and what each took; None where there is nothing to choose, or no time."""
        tilings = self._tilings(call)
        if len(tilings) < 2:
            return None
        begin = time.perf_counter()
        timed: list[tuple[float, Tiles]] = []
        for tiles in tilings:
            if timed and time.perf_counter() - begin > seconds:
                break
            if self._is_right(call, tiles):
                timed.append((self._seconds(call, tiles), tiles))
        if not timed:
            return None
        best = min(timed, key=lambda pair: pair[0])
        if timed[0][1] == tilings[0] and best[0] > (1 - GAIN) * timed[0][0]:
            best = timed[0]
        return {"tiles": best[1], "seconds": [[took, tiles] for took, tiles in timed]}

    def _seconds(self, call: Dispatch, tiles: Tiles) -> float:
        single = self._single(call, call.constants, tiles)
        try:
            return single.seconds(RUNS)
        finally:
            single.free()

    def _is_right(self, call: Dispatch, tiles: Tiles) -> bool:
        """Whether a tiling gives the reference's result, on a shape cut down to what a float64 reference can afford."""
        small = cut(call)
        single = self._single(call, small, tiles)
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

    def _single(self, call: Dispatch, constants: dict[str, Any], tiles: Tiles) -> SingleKernel:
        assert call.kernel.sample
        arrays = call.kernel.sample(SimpleNamespace(**constants), call.present, np.random.default_rng(0))
        return SingleKernel(self.device, call.kernel, arrays, constants, tiles)


def operations(constants: dict[str, Any]) -> float:
    """Multiplications of a product, or of causal attention: what orders calls by what there is to gain."""
    c = constants
    if "m" in c:
        return float(c["m"]) * c["n"] * c["k"]
    return float(c["rows"]) * c.get("keys", c["rows"]) * c["kv_heads"] * c["group"] * c["dim"]


def cut(call: Dispatch) -> dict[str, Any]:
    """The call's constants with smaller sizes that compile to the same shader."""
    constants = dict(call.constants)
    for name in ("m", "n", "k"):
        if name in constants and constants[name] > 3 * CHECKED:
            constants[name] = 2 * CHECKED + constants[name] % CHECKED
    for name in ("a_skip", "a_first", "y_skip", "y_first"):
        if name in constants:
            constants[name] %= 4
    for skip, first in (("a_skip", "a_first"), ("y_skip", "y_first")):
        if constants.get(skip, 0) < constants.get(first, 0):
            constants[skip] += 4
    if "stride" in constants:
        c = SimpleNamespace(**constants)
        values = c.m * c.n if c.form == "tn" else c.n * c.k
        constants["stride"] = -(-values // 4) * 4 + c.stride % 4
    for name in ("rows", "keys"):
        if name in constants:
            constants[name] = min(constants[name], CHECKED // 2)
    return constants
