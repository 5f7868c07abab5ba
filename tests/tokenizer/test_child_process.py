"""A child process ends as it should, whatever happens to it or to us."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.children import UNLIMITED

from wgpu_lora.child_process import ChildEnded, ChildProcess, Limits, python_command

LIMITS = Limits(memory=150 << 20, seconds=0.3, output=1 << 20)
TESTS = Path(__file__).parent.parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory and system calls")


def start(**environment: str) -> ChildProcess:
    return ChildProcess(python_command("support.children", LIMITS), LIMITS, environment=environment)


def has_ended(pid: int, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE and psutil.Process(pid).ppid() != os.getpid():
                return True  # somebody else's to bury
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("compute", "computed for more than"),
        ("wait", "computed for more than"),
        ("take", "150 MiB of memory, or crashed"),
        ("crash", "or crashed"),
        ("leave", "or crashed"),
        ("flood", "its output is larger than 1 MiB"),
    ],
)
@pytest.mark.parametrize("unlimited", [False, True])
def test_it_ends_with_a_reason(message: str, reason: str, unlimited: bool) -> None:
    """`unlimited`: where the system limits nothing, so that only the watchdog does."""
    child = start(**({UNLIMITED: "1"} if unlimited else {}))
    begin = time.monotonic()
    with pytest.raises(ChildEnded, match=reason):
        child.ask(message)
    assert time.monotonic() - begin < 15
    assert not child.running
    assert has_ended(child.popen.pid)
    with pytest.raises(ChildEnded):
        child.ask("more")


def test_what_it_prints_is_no_message() -> None:
    child = start()
    assert child.ask("print") == "print"
    assert child.ask({"é": [1, None, "\ud800"]}) == {"é": [1, None, "\ud800"]}


@linux
def test_it_reaches_no_files_processes_or_network() -> None:
    assert start().ask("reach out") == [True, True, True]


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(ChildEnded, match="no process can be started"):
        ChildProcess(["/nowhere/at/all"])


def test_an_interrupt_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    child = start()

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(child, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        child.ask("hello")
    assert not child.running
    assert has_ended(child.popen.pid)


def test_ctrl_c_does_not_reach_it() -> None:
    child = start()
    assert os.getpgid(child.popen.pid) != os.getpgrp()
    assert child.ask("hello") == "hello"


def test_it_has_time_to_end_by_itself() -> None:
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(1); "
    child = ChildProcess([sys.executable, "-uc", code + "time.sleep(60)"])
    assert child.receive() == 1
    assert child.end(grace=20) == 7


def test_none_is_left_behind() -> None:
    before = {each.pid for each in psutil.Process().children()}
    child = start()
    assert child.ask("hello") == "hello"
    pid = child.popen.pid
    del child
    gc.collect()
    assert {each.pid for each in psutil.Process().children()} == before
    assert has_ended(pid)


def test_it_ends_with_a_parent_that_is_killed() -> None:
    code = "from support.children import start_and_die; start_and_die()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=TESTS)
    assert done.returncode == -signal.SIGKILL
    assert has_ended(int(done.stdout))


def test_a_fork_leaves_it_alone() -> None:
    child = start()
    assert child.ask("hello") == "hello"
    pid = os.fork()
    if not pid:
        code = 0 if not child.running and child.end() == 0 and start().ask("own") == "own" else 1
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert child.ask("still here") == "still here"
