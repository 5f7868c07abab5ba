"""Tokenizers and chat templates made to harm: each ends in a sentence, in bounded time and memory."""

from __future__ import annotations

import base64
import gc
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes.children import UNLIMITED
from support.rows.data import backend_json
from support.rows.tokenizers import ADDED, BYTE_BPE, UNIGRAM, WORD_PIECE, normalizing, of, replace, split

from wgpu_lora.formats.tokenizer.tokenizer_process import LIMITS
from wgpu_lora.processes.child_process import ChildEnded, ChildProcess, Limits, python_command

Part = dict[str, Any]


def stated(**parts: Any) -> str:
    return json.dumps({"version": "1.0", "added_tokens": ADDED, "model": BYTE_BPE, **parts})


def model(kind: Part, **fields: Any) -> str:
    return stated(model={**kind, **fields})


def charsmap(text: bytes) -> Part:
    """A table that makes `text` of every a."""
    units = [1 << 10] + [0] * 255
    units[1 ^ 97] = (1 ^ 97 ^ 200) << 10 | 1 << 8 | 97
    trie = struct.pack("<256I", *units)
    return of("Precompiled", precompiled_charsmap=base64.b64encode(struct.pack("<I", len(trie)) + trie + text).decode())


PREFIXED = model(BYTE_BPE, continuing_subword_prefix="zzz")
LONG = "{% set s = 'a' * 100000 %}"
NS = "{% set ns = namespace(x='a' * 1000, l=[]) %}"
LIMIT, READ = "computed for more than|of memory, or crashed", "is not a supported tokenizer"
# tokenizer.json: (document, words of the sentence)
TOKENIZERS = {
    "look-ahead": (stated(pre_tokenizer=split("(?=a*a*a*b)a")), LIMIT),
    "nested repeats": (stated(pre_tokenizer=split("(?:a+)+b")), "failed on"),
    "growth": (stated(normalizer=normalizing(*[replace("a", "a" * 60)] * 6)), LIMIT),
    "matches nothing": (stated(normalizer=normalizing(*[replace("a*", "xyxyxyxy", "Regex")] * 14)), LIMIT),
    "characters": (stated(normalizer=charsmap(b"b" * 20_000)), LIMIT),
    "a table that leads out": (stated(normalizer=of("Precompiled", precompiled_charsmap="CAAAAAAAEAAAAAAA")), "failed"),
    "no table": (stated(normalizer=of("Precompiled", precompiled_charsmap="")), READ),
    "long pieces": (model(UNIGRAM, vocab=[["<unk>", 0.0], *(["a" * i, -1.0 / i] for i in range(1, 3000))]), LIMIT),
    "long words": (model(WORD_PIECE, vocab={"a": 0, "<unk>": 1}, max_input_chars_per_word=10**9), LIMIT),
    "an unknown token that is unknown": (model(BYTE_BPE, unk_token="nothing", vocab={"b": 0}, merges=[]), "failed on"),
    "an id far off": (model(BYTE_BPE, vocab={"a": 2**32 - 1}, merges=[]), "a token id beyond 4,194,304"),
    "an id below 0": (model(BYTE_BPE, vocab={"a": -1}, merges=[]), READ),
    "a prefix": (PREFIXED, READ),
    "a key twice": (PREFIXED.replace('"zzz"', 'null, "continuing_subwor\\u0064_prefix": "zzz"'), "is repeated"),
    "an unknown model": (model(BYTE_BPE, type="Foo"), READ),
    "an unknown part": (stated(decoder=of("Split")), READ),
    "half a character": (stated(normalizer=replace("a", "\ud800")), "a value that JSON cannot"),
    "no number": (stated(x=float("nan")), "not JSON"),
    "deep": ('{"model":' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "many values": ('{"model":[' + "[]," * 8_000_000 + "[]]}", LIMIT),
}
TEMPLATES = {
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", LIMIT),
    "macros": ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", LIMIT),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "output": ("{% for i in range(99999) %}" + "a" * 9000 + "{% endfor %}", LIMIT),
    "product": ("{{ 'a' * 10 ** 10 }}", LIMIT),
    "power": ("{{ 10 ** (10 ** 8) }}", LIMIT),
    "squares": ("{% set n = namespace(x=7) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}", LIMIT),
    "a width": ("{{ '{:>1000000000}'.format(1) }}", LIMIT),
    "a width in %": ("{{ '%1000000000d' % 1 }}", LIMIT),
    "a wide date": ("{{ strftime_now('%0100000d' * 30000) }}", LIMIT),
    "center": ("{{ 'a' | center(10 ** 9) }}", LIMIT),
    "doubling": (NS + "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", LIMIT),
    "keeping": (NS + "{% for i in range(99999) %}{% set ns.l = ns.l + [ns.x ~ i] %}{% endfor %}", LIMIT),
    "replace": (LONG + "{{ s | replace('a', s) }}", LIMIT),
    "join": (LONG + "{{ ([s] * 10000) | join(s) }}", LIMIT),
    "sum of lists": ("{{ ([[1] * 1000] * 10000) | sum(start=[]) | length }}", LIMIT),
    "laughs": ("{% set x = ['ha'] %}" + "{% set x = [x, x] %}" * 40 + "{{ x | tojson }}", LIMIT),
    "laughs hashed": ("{% set x = (1, 2) %}" + "{% set x = (x, x) %}" * 40 + "{{ {x: 1} | length }}", LIMIT),
    "counting": (LONG + "{% for i in range(99999) %}{{ s.count('b') }}{% endfor %}", LIMIT),
    "searching": ("{% set l = range(99999) | list %}{% for i in l %}{{ -1 in l }}{% endfor %}", LIMIT),
    "a long template": ("{{a}}" * 200_000, "longer than 131,072 characters"),
    "nested brackets": ("{{ " + "(" * 60_000, "cannot be compiled|" + LIMIT),
    "its class": ("{{ ''.__class__.__mro__ }}", "refuses|lacks"),
    "changes": ("{{ messages.append(1) }}", "refuses"),
    "its globals": ("{{ raise_exception.__globals__.os }}", "refuses|lacks"),
    "a message": ("{{ raise_exception('a' * 2000000) }}", "refuses this conversation: aaa"),
}
CASES = {f"tokenizer: {name}": (*case, None) for name, case in TOKENIZERS.items()} | {
    f"template: {name}": (backend_json(), words, source) for name, (source, words) in TEMPLATES.items()
}
# Smaller limits than those in use, so that it takes less time.
RUN = """
import json, re, resource, sys, time
from pathlib import Path
from wgpu_lora.processes.child_process import Limits
from wgpu_lora.data import Tokenizer
from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer import tokenizer_process
tokenizer_process.LIMITS = Limits(memory=300 << 20, seconds=0.5, seconds_per_mib=1)
for name, (document, _, source) in json.load(sys.stdin).items():
    Path("tokenizer.json").write_text(document)
    Path("chat_template.jinja").write_text(source or "")
    begin = time.monotonic()
    try:
        found = Tokenizer.load(Path("."))
        if source:
            found.render([{"role": "user", "content": "Hi"}])
        for text in ("hello", "a" * 160_000, " " * 20_000 + "x"):
            found.decode(found.encode(text, True)[:1000])
        sentence = ""
    except UserError as error:
        sentence = str(error)
    # What getrusage says of a process itself goes back to before its exec, to whoever forked it.
    here = int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    print(json.dumps([name, time.monotonic() - begin, here, child, sentence]), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory")
@pytest.mark.parametrize("kind", ["tokenizer", "template"])
def test_each_ends_in_a_sentence(tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    cases = {name: case for name, case in CASES.items() if name.startswith(kind)}
    code, place = [sys.executable, "-c", RUN], tmp_path_factory.mktemp(kind)
    process = subprocess.run(code, input=json.dumps(cases), capture_output=True, text=True, cwd=place, check=True)
    assert process.stderr == ""
    rows = [json.loads(line) for line in process.stdout.splitlines()]
    assert [row[0] for row in rows] == list(cases)
    for name, seconds, here, child, sentence in rows:
        assert re.search(cases[name][1], sentence), (name, sentence)
        assert seconds < 15, name
        assert here < 400, name
        assert child < 450, name
        assert len(sentence) < 1000, name


def test_the_limits_in_use_are_of_seconds() -> None:
    assert LIMITS.seconds_for(100_000) < 6
    assert LIMITS.seconds_for(64 << 20) == 60
    assert LIMITS.memory == 2 << 30


# -- a child process ends as it should, whatever happens to it or to us ------------------------------------------------

LOW_LIMITS = Limits(memory=150 << 20, seconds=0.3, output=1 << 20)
TESTS = Path(__file__).parent.parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory and system calls")


def start(**environment: str) -> ChildProcess:
    return ChildProcess(python_command("support.processes.children", LOW_LIMITS), LOW_LIMITS, environment=environment)


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
    before = {item.pid for item in psutil.Process().children()}
    child = start()
    assert child.ask("hello") == "hello"
    pid = child.popen.pid
    del child
    gc.collect()
    assert {item.pid for item in psutil.Process().children()} == before
    assert has_ended(pid)


def test_it_ends_with_a_parent_that_is_killed() -> None:
    code = "from support.processes.children import start_and_die; start_and_die()"
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}  # children take nothing from the current folder
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS.parent, env=environment)
    assert process.returncode == -signal.SIGKILL
    assert has_ended(int(process.stdout))


def test_a_fork_leaves_it_alone() -> None:
    child = start()
    assert child.ask("hello") == "hello"
    pid = os.fork()
    if not pid:
        code = 0 if not child.running and child.end() == 0 and start().ask("own") == "own" else 1
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert child.ask("still here") == "still here"
