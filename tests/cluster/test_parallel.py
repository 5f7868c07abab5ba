"""The way of questions from a data-parallel unit's process to its helpers, without Ray and without training."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection
from pathlib import Path

import pytest
from support.cli import QWEN2, SMALL, write_rows
from wgpu_lora.cluster.parallel import process
from wgpu_lora.cluster.parallel.line import Line
from wgpu_lora.cluster.parallel.process import LocalHelper, Lost, Refused
from wgpu_lora.cluster.parallel.relay import Relay

from wgpu_lora.train.data_parallel.gradient_messages import LOST, message, read_message


class Echo:
    """A helper that answers questions with themselves; it is lost or refuses when the test says so."""

    def __init__(self) -> None:
        self.wrong: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.starts, self.ended = 0, threading.Event()

    def ready(self) -> bytes:
        if not self.wrong.empty():
            raise self.wrong.get()
        self.starts += 1
        return message({"say": "ready", "start": self.starts})

    def ask(self, question: bytes) -> bytes:
        if not self.wrong.empty():
            raise self.wrong.get()
        return question

    def end(self) -> None:
        self.ended.set()


@contextmanager
def relayed(*helpers: Echo) -> Iterator[tuple[Relay, list[Connection]]]:
    with Relay(helpers, again=0.01) as relay:
        yield relay, [Client(link) for link in relay.links]


def said(link: Connection) -> str:
    assert link.poll(60)
    found: str = read_message(link.recv_bytes())[0]["say"]
    return found


def test_questions_go_to_helpers_and_back() -> None:
    first, second = Echo(), Echo()
    with relayed(first, second) as (relay, links):
        assert [said(link) for link in links] == ["ready", "ready"]
        for link in links:
            link.send_bytes(message({"say": "part"}))
        assert [said(link) for link in links] == ["part", "part"]
        assert relay.problem == ""
        paths = [Path(link) for link in relay.links]
    assert first.ended.is_set()
    assert second.ended.is_set()
    assert not any(path.exists() or path.parent.exists() for path in paths)
    with pytest.raises(EOFError):
        links[0].recv_bytes()


def test_a_lost_helper_is_started_again() -> None:
    helper = Echo()
    helper.wrong.put(Lost("It never came."))
    with relayed(helper) as (relay, (link,)):
        assert (said(link), said(link)) == (LOST, "ready")
        helper.wrong.put(Lost("Its node is gone."))
        link.send_bytes(message({"say": "part"}))
        assert said(link) == LOST
        assert said(link) == "ready"
        assert helper.starts == 2
        assert relay.problem == ""


def test_one_that_is_lost_at_its_first_part_is_started_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    helper, waits = Echo(), list[float]()
    with relayed(helper) as (relay, (link,)):
        monkeypatch.setattr(relay._over, "wait", waits.append)
        for _ in range(3):
            assert said(link) == "ready"
            helper.wrong.put(Lost("Its driver crashed."))
            link.send_bytes(message({"say": "part"}))
            assert said(link) == LOST
        assert said(link) == "ready"
        link.send_bytes(message({"say": "part"}))
        assert said(link) == "part"
        helper.wrong.put(Lost("Its driver crashed."))
        link.send_bytes(message({"say": "part"}))
        assert (said(link), said(link)) == (LOST, "ready")
    assert waits == [0.01, 0.02, 0.04, 0.01]


def test_a_helper_that_refuses_is_not_started_again() -> None:
    helper = Echo()
    with relayed(helper) as (relay, (link,)):
        assert said(link) == "ready"
        helper.wrong.put(Refused("It has other rows."))
        link.send_bytes(message({"say": "part"}))
        with pytest.raises(EOFError):
            link.recv_bytes()
        assert relay.problem == "It has other rows."
    assert helper.starts == 1


def test_a_leader_that_never_calls_holds_nothing_up() -> None:
    helper = Echo()
    with Relay([helper]) as relay:
        assert relay.links
    assert helper.ended.is_set()
    line = Line()
    assert line.call(lambda: True, seconds=0.0) is None
    line.close()


def test_a_directory_for_temporary_files_may_have_a_long_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    line = Line()
    with Client(line.address):
        assert line.call(lambda: True, seconds=60)
    line.close()
    assert not Path(line.address).parent.exists()


def test_why_a_process_cannot_help_is_its_own_sentence(tmp_path: Path) -> None:
    """A device that is not there is lost, since it may come back; rows that are not there are refused."""
    options = {**SMALL, "model": QWEN2, "data": str(tmp_path / "rows.jsonl"), "output": "the leader's"}
    helper = LocalHelper(options, lambda: None)
    with pytest.raises(Lost, match="is not there") as absent:
        helper.ready()
    assert not isinstance(absent.value, Refused)
    helper = LocalHelper(options, lambda: 0)
    with pytest.raises(Refused, match=r"ended: .*rows\.jsonl"):
        helper.ready()
    helper.end()
    with pytest.raises(Lost, match="was ended"):
        helper.ready()
    with pytest.raises(Lost, match="was ended"):
        helper.ask(b"")


@pytest.mark.rare
def test_a_process_that_is_killed_or_hangs_is_lost_and_another_one_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    helper = LocalHelper({**SMALL, "model": QWEN2, "data": str(write_rows(tmp_path / "rows.jsonl"))}, lambda: 0)
    try:
        assert read_message(helper.ready())[0] == {"say": "ready"}
        assert helper._process
        helper._process._worker.process.kill()
        with pytest.raises(Lost, match="ended") as lost:
            helper.ask(message({}))
        assert not isinstance(lost.value, Refused)
        assert read_message(helper.ready())[0] == {"say": "ready"}
        os.kill(helper._process._worker.process.pid, signal.SIGSTOP)
        monkeypatch.setattr(process, "HUNG", 0.5)
        with pytest.raises(Lost, match=r"did not answer for 0\.5 s") as lost:
            helper.ask(message({}))
        assert not isinstance(lost.value, Refused)
        monkeypatch.undo()
        assert read_message(helper.ready())[0] == {"say": "ready"}
        with pytest.raises(Refused, match="use the same version of wgpu-lora on all machines"):
            helper.ask(message({"zork": 1}))
    finally:
        helper.end()
