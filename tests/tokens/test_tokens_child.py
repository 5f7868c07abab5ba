"""The child that runs a tokenizer: it ends as it should, whatever happens to it or to us."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from support.tokenizers import BYTE_BPE, document, split
from test_tokens_hostile import charsmap

from wgpu_lora.data import Tokenizer
from wgpu_lora.errors import UserError
from wgpu_lora.tokens import process
from wgpu_lora.tokens.backend import BackendError
from wgpu_lora.tokens.process import Child

TEXT = json.dumps(document("gpt2"))
SLOW = json.dumps({"model": BYTE_BPE, "pre_tokenizer": split("(?=a*a*a*b)a")})  # cubic


def pid_of(child: Child) -> int:
    assert child._process is not None
    return child._process.popen.pid


def ended(pid: int, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE and psutil.Process(pid).ppid() != os.getpid():
                return True  # somebody else's to bury
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def child() -> Iterator[Child]:
    yield Child(TEXT)
    gc.collect()


def test_one_that_was_killed_is_replaced(child: Child) -> None:
    ids, first = child.encode(["the hat"]), pid_of(child)
    os.kill(first, getattr(signal, "SIGKILL", signal.SIGTERM))
    with pytest.raises(BackendError, match="makes the tokenizers library fail"):
        child.encode(["the hat"])
    assert child.encode(["the hat"]) == ids
    assert pid_of(child) != first
    assert ended(first)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timers of computing")
def test_it_may_not_compute_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Child(SLOW)
    monkeypatch.setattr(process, "SECONDS", 0.2)
    with pytest.raises(BackendError, match="computed for more than"):
        slow.encode(["a" * 20_000])
    assert slow.encode(["ab"])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's memory")
def test_it_may_not_take_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MEMORY", 200 << 20)
    large = Child(json.dumps({"model": BYTE_BPE, "normalizer": charsmap(b"b" * 60)}))
    with pytest.raises(BackendError, match="memory"):
        large.encode(["a" * 200_000])
    assert len(large.encode(["a"])[0]) == 60


@pytest.mark.parametrize(("name", "most", "words"), [("PATIENCE", 1e-3, "computed for"), ("MEMORY", 1 << 20, "memory")])
def test_it_is_watched_where_the_system_does_not(
    monkeypatch: pytest.MonkeyPatch, name: str, most: float, words: str
) -> None:
    slow = Child(SLOW)
    monkeypatch.setattr(process, name, most)
    with pytest.raises(BackendError, match=words):
        slow.encode(["a" * 20_000])


def test_it_may_not_make_much_of_a_text(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_ANSWER", -8 * len(TEXT.encode()) + 400)
    assert len(child.encode(["a" * 100])[0]) == 100
    with pytest.raises(BackendError, match="output for a text is too large"):
        child.encode(["a" * 101])
    with pytest.raises(BackendError, match="output for a text is too large"):
        child.decode(child.encode(["a" * 90])[0] * 5, True)


def test_an_interrupt_ends_it(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pid_of(child)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(process, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            child.encode(["the hat"])
    assert ended(first)
    assert child.encode([""]) == [[]]  # the answer to this question, not to the last


def test_none_is_left_behind() -> None:
    before = {each.pid for each in psutil.Process().children()}
    child = Child(TEXT)
    assert {each.pid for each in psutil.Process().children()} > before
    del child
    gc.collect()
    assert {each.pid for each in psutil.Process().children()} == before
    with pytest.raises(BackendError):
        Child('{"model": 1}')
    gc.collect()
    assert {each.pid for each in psutil.Process().children()} == before


def test_it_ends_with_a_parent_that_is_killed() -> None:
    code = (
        "import os, signal, sys; from wgpu_lora.tokens.process import Child; child = Child(sys.stdin.read());"
        "print(child._process.popen.pid, flush=True); os.kill(os.getpid(), signal.SIGTERM)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=TEXT, capture_output=True, text=True, check=False)
    assert ended(int(done.stdout))


def test_threads_ask_one_after_the_other(child: Child) -> None:
    texts = [f"the hat {i} " * 20 for i in range(40)]
    expected = child.encode(texts)
    found: dict[int, list[list[int]]] = {}

    def ask(number: int) -> None:
        found[number] = [child.encode([text])[0] for text in texts[number::4]]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[number] == expected[number::4] for number in range(4))


def test_what_it_does_not_take_is_a_sentence(child: Child) -> None:
    tokenizer = Tokenizer(child)
    with pytest.raises(UserError, match="failed on"):
        tokenizer.encode("half a character: \ud800")
    with pytest.raises(UserError, match="cannot decode"):
        tokenizer.decode([-1])
    with pytest.raises(UserError, match="cannot decode"):
        tokenizer.decode([2**40])
    assert tokenizer.decode([2**31]) == ""
    with pytest.raises(UserError, match="more than 2 MiB: split it"):
        tokenizer.encode("é" * (3 << 19))
