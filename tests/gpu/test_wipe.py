"""Buffers are overwritten and read back, freed ones too; what is not, is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wgpu_lora.gpu import buffer_wipe as module
from wgpu_lora.gpu.buffer_wipe import Wiper
from wgpu_lora.gpu.device import MAPPABLE, Device
from wgpu_lora.gpu.program import Arena


@pytest.fixture
def fresh() -> Device:
    """A device of its own: wiping the one that tests share would empty buffers that they keep."""
    return Device()


def filled(device: Device, nbytes: int, label: str = "rows") -> Any:
    buffer = device.create_buffer(nbytes, label)
    device.write(buffer, np.full(buffer.size, 0xA5, np.uint8))
    return buffer


def test_all_live_buffers_but_those_kept_are_zero(fresh: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 4096)
    rows, weights, odd = filled(fresh, 10_000), filled(fresh, 4096, "weights"), filled(fresh, 5)
    sizes = [rows.size, odd.size]
    if MAPPABLE in fresh.features:
        host = fresh.create_host_buffer(8192, "offloaded")
        fresh.write(host, np.full(8192, 7, np.uint8))
        sizes.append(host.size)
    arena = Arena(fresh, [512])
    report = Wiper(fresh).wipe(keep=[weights])
    assert report.verified, report
    assert (report.buffers, report.bytes) == (len(sizes) + 1, sum(sizes) + 512)
    assert (report.kept_buffers, report.kept_bytes) == (1, 4096)
    assert not fresh.read(rows).any()
    assert not fresh.read(arena.buffers[0]).any()
    assert fresh.read(weights).all()


@pytest.mark.parametrize("at", [0, 4095, 4096, 9999])
def test_one_byte_that_is_not_zero_is_found(fresh: Device, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(module, "PIECE", 4096)
    buffer = fresh.create_buffer(10_000, "rows")
    data = np.zeros(10_000, np.uint8)
    data[at] = 1
    fresh.write(buffer, data)
    monkeypatch.setattr(Wiper, "_clear", lambda self, buffers: None)  # a driver that does nothing
    report = Wiper(fresh).wipe()
    assert not report.verified
    assert report.not_wiped == ["rows (10,000 bytes): it did not read back as zeros"]
    assert report.buffers == 0


def test_buffers_are_wiped_before_they_are_freed(fresh: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    other_model, freed = filled(fresh, 512, "another model"), filled(fresh, 64)
    fresh.free(freed)
    buffer, contents = filled(fresh, 1024), []
    with Wiper(fresh) as wiper:
        with monkeypatch.context() as patch:
            patch.setattr(fresh.live, "discard", lambda b: contents.append(fresh.read(b).any()))
            fresh.free(buffer)
        fresh.live.discard(buffer)
        live_buffer = filled(fresh, 256)
        report = wiper.wipe()
    assert contents == [False]
    assert (report.buffers, report.bytes, report.verified) == (2, 1024 + 256, True)
    assert fresh.read(other_model).all()  # it was there before
    assert not fresh.read(live_buffer).any()
    assert fresh.before_free is None


def test_buffers_that_were_dropped_are_said_not_to_be_wiped(fresh: Device) -> None:
    filled(fresh, 4096)  # nobody keeps it
    report = Wiper(fresh).wipe()
    assert report.not_wiped == ["4,096 bytes of buffers that were dropped without being freed"]
    with Wiper(fresh) as wiper:
        assert wiper.wipe().verified  # they were dropped before
        filled(fresh, 64)
        assert wiper.wipe().not_wiped == ["64 bytes of buffers that were dropped without being freed"]


def test_a_lost_device_is_said_and_does_not_stop_a_cleanup(fresh: Device) -> None:
    with Wiper(fresh) as wiper:
        freed, _live = filled(fresh, 64), filled(fresh, 128)
        fresh.raw.destroy()
        fresh.free(freed)
    assert fresh.allocated == 128
    report = wiper.wipe()
    assert (report.buffers, report.verified) == (0, False)
    assert report.not_wiped == ["1 buffer, 64 bytes: the device was lost", "1 buffer, 128 bytes: the device was lost"]
