"""Overwrites a device's buffers with zeros, and reads them back, so that nothing of a run stays in its memory.

It reaches every buffer that `Device` made. It does not reach what the driver and wgpu keep for themselves: buffers
through which writes and reads are staged, and copies that a driver makes when it moves memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import DeviceLost, raise_device_lost
from wgpu_lora.names.text import count_noun

PIECE = 64 << 20  # bytes that are read back at a time


@dataclass
class WipeReport:
    """The buffers of a device that were overwritten.

    Attributes:
        buffers, bytes: that were overwritten, and read back whole as zeros.
        kept_buffers, kept_bytes: that were left as they are, because they hold nothing secret.
        seconds: that it took.
        not_wiped: what was not, and why, in words.
    """

    buffers: int = 0
    bytes: int = 0
    kept_buffers: int = 0
    kept_bytes: int = 0
    seconds: float = 0.0
    not_wiped: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        """Whether all buffers that were to be overwritten were, and read back as zeros."""
        return not self.not_wiped


class Wiper:
    """Overwrites buffers of a device before they are freed, from `with` on, and the others in `wipe`.

    Freed memory cannot be reached any more, so a run whose buffers must be wiped takes place within `with`.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.report = device, WipeReport()
        self._leaked_before = 0  # bytes
        self._earlier_buffers: WeakSet[Any] = WeakSet()  # buffers from before `with`, such as other models'

    def __enter__(self) -> Wiper:
        gc.collect()  # what others have dropped before is not of this run
        self._leaked_before = self._leaked_bytes()
        self._earlier_buffers = WeakSet(self.device.live)
        self.device.before_free = lambda buffer: self._wipe([buffer])
        return self

    def __exit__(self, *_: object) -> None:
        self.device.before_free = None

    def wipe(self, keep: Collection[Any] = ()) -> WipeReport:
        """Overwrites all live buffers except those in `keep` (the base's weights, which are public).

        After `with`, those that were there before it are left alone: they are others', such as another model's.
        A device that is lost, or fails, is reported and raises nothing: the rest of a cleanup must go on.
        """
        keep_ids = {id(buffer) for buffer in keep}
        live = sorted(self.device.live - self._earlier_buffers, key=lambda buffer: -buffer.size)
        buffers = [buffer for buffer in live if id(buffer) in keep_ids]
        self.report.kept_buffers, self.report.kept_bytes = len(buffers), sum(buffer.size for buffer in buffers)
        self._wipe([buffer for buffer in live if id(buffer) not in keep_ids])
        if (leaked := self._leaked_bytes() - self._leaked_before) > 0:
            self.report.not_wiped.append(f"{leaked:,} bytes of buffers that were dropped without being freed")
        return self.report

    def _leaked_bytes(self) -> int:
        """Bytes of buffers that Python has collected but that were not freed."""
        live = sum(int(buffer.size) for buffer in self.device.live)
        return self.device.allocated + self.device.host_allocated - live

    def _wipe(self, buffers: list[Any]) -> None:
        begin, remaining = time.perf_counter(), list(buffers)
        try:
            self._clear(buffers)
            while remaining:
                if self._is_zero(remaining[-1]):
                    self.report.buffers += 1
                    self.report.bytes += remaining[-1].size
                else:
                    self.report.not_wiped.append(f"{_name(remaining[-1])}: it did not read back as zeros")
                remaining.pop()
        except (DeviceLost, self.device.webgpu.api.GPUError, RuntimeError, MemoryError) as error:
            is_lost = isinstance(error, DeviceLost)
            reason = "the device was lost" if is_lost else " ".join(str(error).split())[:200]
            nbytes = sum(buffer.size for buffer in remaining)
            self.report.not_wiped.append(f"{count_noun(len(remaining), 'buffer')}, {nbytes:,} bytes: {reason}")
        self.report.seconds += time.perf_counter() - begin

    def _clear(self, buffers: Iterable[Any]) -> None:
        raw = self.device.raw
        with raise_device_lost(self.device.info.name):
            encoder = raw.create_command_encoder()
            for buffer in buffers:
                encoder.clear_buffer(buffer)
            raw.queue.submit([encoder.finish()])
        self.device.wait()

    def _is_zero(self, buffer: Any) -> bool:
        """Reads a whole buffer back, in pieces."""
        starts = range(0, buffer.size, PIECE)
        return not any(self.device.read(buffer, min(PIECE, buffer.size - at), at).any() for at in starts)


def _name(buffer: Any) -> str:
    return f"{buffer.label or 'a buffer'} ({buffer.size:,} bytes)"
