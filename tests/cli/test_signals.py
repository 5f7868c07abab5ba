"""Interrupts that Python or C would discard."""

from __future__ import annotations

import signal
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from cffi import FFI

from wgpu_lora.processes.signals import on_end_signal, repeat_discarded_interrupts


class _Referent:
    pass


class _Deleted:
    def __init__(self, act: Callable[[], None]):
        self.act = act

    def __del__(self) -> None:
        self.act()


def _in_destructor(act: Callable[[], None]) -> None:
    _Deleted(act)


def _in_weak_reference(act: Callable[[], None]) -> None:
    referent = _Referent()
    reference = weakref.ref(referent, lambda reference: act())
    del referent
    assert reference() is None


def _in_callback_of_c(act: Callable[[], None]) -> None:
    FFI().callback("void()", act)()


def _wait() -> None:
    for _ in range(1000):  # a repeated signal does not end a call of the system
        time.sleep(0.01)


@pytest.mark.parametrize("call", [_in_destructor, _in_weak_reference, _in_callback_of_c])
def test_a_discarded_interrupt_is_repeated(
    call: Callable[[Callable[[], None]], None], capfd: pytest.CaptureFixture[str]
) -> None:
    numbers: list[int] = []

    def end(number: int) -> None:
        numbers.append(number)
        raise KeyboardInterrupt

    def received() -> int | None:
        return numbers[-1] if numbers else None

    def interrupt() -> None:
        signal.raise_signal(signal.SIGTERM)

    with on_end_signal(end), repeat_discarded_interrupts(received):
        call(interrupt)
        with pytest.raises(KeyboardInterrupt):
            _wait()
    assert numbers == [signal.SIGTERM] * 2
    assert capfd.readouterr().err == ""


def test_other_discarded_exceptions_are_shown_until_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    numbers: list[Any] = [None]

    def fail() -> None:
        raise ValueError("unusual")

    with repeat_discarded_interrupts(lambda: numbers[-1]):
        _in_destructor(fail)
        numbers.append(2)
        _in_destructor(fail)
    assert len(shown) == 1
