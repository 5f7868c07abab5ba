"""How steps are divided among devices, and what these tell each other."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from support.sharing import LocalLink

from wgpu_lora.train.data_parallel import gradient_messages
from wgpu_lora.train.data_parallel.leader import KEPT, SETTLING, LoadBalance, split_by_share
from wgpu_lora.train.data_parallel.remote_worker import RemoteWorker


def test_parts_follow_each_other_and_their_shares(rng: np.random.Generator) -> None:
    for members in (1, 2, 3, 5):
        sizes = rng.integers(1, 100, 40).tolist()
        speeds = rng.uniform(0.5, 4, members).tolist()
        spans = split_by_share(sizes, speeds)
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == 40
        for (begin, end), speed in zip(spans, speeds, strict=True):
            assert sum(sizes[begin:end]) == pytest.approx(sum(sizes) * speed / sum(speeds), abs=100)
    assert split_by_share([5], [0.4, 0.6]) == [(0, 0), (0, 1)]


def test_shares_follow_speeds_and_are_kept() -> None:
    found = LoadBalance()
    assert found.of([0, 1]) == [0.5, 0.5]
    for _ in range(SETTLING - 1):
        found.took(0, 100, 1.0)
        found.took(1, 100, 3.0)
        assert found.of([0, 1]) == [0.5, 0.5]
    kept = found.of([0, 1])
    assert kept == pytest.approx([0.75, 0.25])
    for _ in range(KEPT - 1):
        found.took(0, 100, 10.0)
        assert found.of([0, 1]) == kept
    idle = 2 * 100 / 3.0  # it counts as twice as fast as it was
    assert found.of([0, 1]) == pytest.approx([10 / (10 + idle), idle / (10 + idle)])
    assert found.of([0, 1, 2])[2] == pytest.approx(1 / 3)  # a new one as the mean
    assert found.patience(0, 100, own=1.0) > 40
    assert found.patience(2, 100, own=1.0) == 40


def test_a_late_helper_is_not_asked_before_it_has_answered() -> None:
    gate = threading.Event()

    def slow(question: bytes) -> bytes:
        gate.wait(60)
        return gradient_messages.message({"say": "part"})

    helper, end = RemoteWorker(LocalLink(slow)), time.monotonic() + 60
    while not helper.ready() and time.monotonic() < end:
        time.sleep(0.01)
    assert helper.new
    helper.ask(b"", 10)
    assert helper.answer(0.0) is None
    assert not helper.ready()
    gate.set()
    end = time.monotonic() + 60
    while not helper.ready() and time.monotonic() < end:
        time.sleep(0.01)
    assert helper.late
    assert not helper.new
    helper.close()


def test_messages_are_checked() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        gradient_messages.read_message(b"zork")
    said, arrays = gradient_messages.read_message(
        gradient_messages.message({"a": [1]}, {"b": np.arange(3, dtype=np.float32)})
    )
    assert (said, arrays["b"].tolist()) == ({"a": [1]}, [0, 1, 2])
