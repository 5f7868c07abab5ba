"""Which compute pipelines a device gets right, by comparison with the kernels' float64 references.

Drivers miscompile shaders. Kernels that are tuned are compared on a small call before a program that uses them is built
(`gpu.tiling_check`), all others on the values of the first run of a program (`gpu.first_run`), once per device,
driver and shader. A tiling that is wrong is reported, and not used.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wgpu_lora.errors import DeviceWarning
from wgpu_lora.events import Events, WrongKernel
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import ShaderError, WrongResults
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.gpu.tuning_cache import ChoiceFile, Choices, Verdict, choice_key, shader_digest

PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"


class Verdicts:
    """The verdicts of a device, from the cache and of this process.

    Args:
        directory: of the cache, as for `Tuner`.

    Attributes:
        enabled: whether programs are checked and verdicts kept; WGPU_LORA_NO_CHECK turns it off.
    """

    def __init__(self, device: Device, directory: Path | None = None):
        self.device = device
        self.enabled = os.environ.get("WGPU_LORA_NO_CHECK", "") in ("", "0")
        self.file = ChoiceFile(device, directory)
        self._cached: dict[str, Verdict] | None = None
        self._fresh: dict[str, Verdict] = {}
        self._digests: dict[str, str] = {}
        self._failed: dict[str, Verdict] = {}  # does not compile: known even where nothing is checked
        self._reports: dict[tuple[str, Tiling], WrongKernel] = {}
        self._listeners: list[Events] = []

    def of(self, call: Dispatch, tiling: Tiling) -> Verdict | None:
        """The verdict on a call's compute pipeline, if it is known."""
        verdicts = self._all() if self.enabled else self._failed
        result = verdicts.get(_key(call, tiling)) if verdicts else None
        return result if result and result.digest == self._digest(call.kernel) else None

    def settle(self, call: Dispatch, tiling: Tiling, nmse: float | None, limit: float, reason: str = "") -> Verdict:
        """Notes a measured error, or None and the reason if the pipeline does not compile; `save` keeps it."""
        right = nmse is not None and nmse <= limit
        verdict = Verdict(call.kernel.name, self._digest(call.kernel), right, nmse, limit, reason)
        key = _key(call, tiling)
        if nmse is None:
            self._failed[key] = verdict
        if self.enabled:
            self._all()[key] = verdict
            self._fresh.pop(key, None)
            if right:  # others are checked again by every process, since a later version may check better
                self._fresh[key] = verdict
        if not right:
            self.tell(tiling, verdict)
        return verdict

    def usable(self, call: Dispatch) -> list[Tiling]:
        """The tilings of a call that are not known to be wrong or not to compile; reports those that precede them.

        Raises:
            WrongResults: there are none.
        """
        tilings: list[Tiling] = []
        for tiling in call.tilings(self.device.capabilities):
            verdict = self.of(call, tiling)
            if verdict is None or verdict.right:
                tilings.append(tiling)
            elif not tilings:
                result = self.tell(tiling, verdict)
        if not tilings:
            self.save()
            raise WrongResults(result)
        return tilings

    def choose(self, call: Dispatch, choices: Choices) -> Tiling:
        """The tiling chosen for a call, or the first usable one. Raises WrongResults."""
        tilings = self.usable(call)
        choice = choices.get(choice_key(call.kernel, call.present, call.constants)) if call.kernel.tuning else None
        # A run may be resumed on another device, where tilings for another subgroup size would give wrong results.
        return choice if choice in tilings else tilings[0]

    def compiled(self, call: Dispatch, choices: Choices) -> Dispatch:
        """The call in the tiling chosen for it, or in the first usable one if that does not compile. Raises
        WrongResults."""
        while True:
            tiled = call.tiled(self.choose(call, choices))
            try:
                tiled.kernel.compute_pipeline(self.device, tiled.present, tiled.constants, tiled.tiling)
            except ShaderError as error:  # it is not chosen again
                self.settle(call, tiled.tiling, None, 0.0, error.reason)
            else:
                return tiled

    def tell(self, tiling: Tiling, verdict: Verdict) -> WrongKernel:
        """Reports a wrong tiling, once per process and kernel, to those who listen and as a warning."""
        info = self.device.info
        of = tiling.to_json(), verdict.nmse, verdict.limit, verdict.reason
        result = WrongKernel(info.name, info.driver, verdict.kernel, *of)
        if (verdict.kernel, tiling) not in self._reports:
            self._reports[verdict.kernel, tiling] = result
            for events in self._listeners:
                events.miscompiled(result)
            warnings.warn(f"{result}.", DeviceWarning, stacklevel=_level_of_caller())
        return result

    @property
    def reported(self) -> list[str]:
        """The reports of this process, as sentences."""
        return [f"{item}." for item in self._reports.values()]

    @contextmanager
    def reported_to(self, events: Events) -> Iterator[None]:
        """Reports wrong tilings to `events` too."""
        self._listeners.append(events)
        try:
            yield
        finally:
            self._listeners.remove(events)

    def save(self) -> None:
        """Adds the new verdicts to the cache."""
        if self._fresh:
            self.file.add({}, {v.kernel: v.digest for v in self._fresh.values()}, self._fresh)
            self._fresh = {}

    def forget(self) -> None:
        """Forgets what the cache knows, so that everything is compared again."""
        self._cached = {}

    def _all(self) -> dict[str, Verdict]:
        if self._cached is None:
            self._cached = self.file.verdicts()
        return self._cached

    def _digest(self, kernel: Kernel) -> str:
        if kernel.name not in self._digests:
            self._digests[kernel.name] = shader_digest(kernel)
        return self._digests[kernel.name]


def _level_of_caller() -> int:
    """The `stacklevel` with which a warning names the line, outside of this package, that called it."""
    frame, level, result = sys._getframe(1).f_back, 2, 2
    while frame:
        if frame.f_code.co_filename.startswith(PACKAGE):
            result = level + 1
        frame, level = frame.f_back, level + 1
    return result


def _key(call: Dispatch, tiling: Tiling) -> str:
    return json.dumps([call.kernel.name, call.present, call.alike, tiling.to_json()])


def verdicts_of(device: Device) -> Verdicts:
    """The verdicts of a device, which all programs share."""
    if device.verdicts is None:
        device.verdicts = Verdicts(device)
    result: Verdicts = device.verdicts
    return result
