"""Answers are run confined: against asserts of rows, and against tests of HumanEval's form."""

from __future__ import annotations

import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from support.processes.confinement import blocks, confined, nothing_left

from wgpu_lora.errors import UserError
from wgpu_lora.train.checks import code_check as check_run
from wgpu_lora.train.checks.asserts import parse_check
from wgpu_lora.train.checks.code_check import CheckResult, run_test

# Also where nothing can be confined: what confines has tests of its own.
run_check = partial(check_run.run_check, allow_unconfined=True)
RIGHT = "def double(x):\n    return 2 * x"
CHECK = "assert double(4) == 8\nassert double(0) == 0"


USUAL = """
import bisect, collections, datetime, functools, heapq, itertools, math, random, re, statistics, string
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

@dataclass
class Held:
    value: "Any"

@functools.lru_cache(None)
def of(x):
    return functools.reduce(lambda a, b: a + b, itertools.chain([x], [x]))

def double(x):
    assert isinstance([], Iterable) and random.choice([1]) and collections.Counter("a")["a"] == 1
    assert re.sub("(é)", r"\\1", "é") == "é" and string.digits and math.isclose(1.0, 1.0)
    assert datetime.datetime.strptime("2024-02-29", "%Y-%m-%d").strftime("%d") == "29"
    assert statistics.median([1, Decimal(2)]) and heapq.nsmallest(1, [2]) == [2] and bisect.bisect([1], 1) == 1
    assert "\\N{BULLET}".encode("utf-16") and f"{Held(2).value:>3}" == "  2"
    print("said", flush=True)
    return of(x)
"""
LATE = [
    "from collections import Counter\ndef f():\n    return Counter('aab').most_common(1) == [('a', 2)]",
    "def f(name='1252'):\n    return b'\\x80'.decode('cp' + name) == '€'",
    "def f():\n    return 'a'.encode('utf-16-le').decode('UTF-16LE') == 'a'",
    "import codecs\ndef f():\n    return codecs.encode('a', 'rot13') == 'n' and 'é'.encode('cp037') == b'Q'",
    "import traceback, timeit\ndef f():\n"
    "    return timeit.timeit('1', number=1) > 0 and bool(traceback.format_stack())",
    "import warnings\ndef f():\n    return 'UserWarning' in warnings.formatwarning('a', UserWarning, 'b', 1)",
    "import uuid\ndef f():\n    return uuid.uuid5(uuid.NAMESPACE_DNS, 'a').version == 5",
    "from functools import singledispatch\n@singledispatch\ndef g(x):\n    return 0\n@g.register\ndef _(x: int):\n"
    "    return 1\ndef f():\n    return g(1) == 1",
]
WAYS_OUT = [
    "import os; os._exit(0)",
    "import sys; sys.exit(0)",
    "raise SystemExit",
    "import os; os.system('true')",
    "import subprocess; subprocess.run(['true'])",
    "import socket; socket.socket()",
    "open('left-behind', 'w')",
    "import ctypes; ctypes.CDLL(None)",
]
# Answers, and what is said of them, which is "passed" or a reason.
ANSWERS = [
    (RIGHT, "passed"),
    ("def double(x):\n    print('{\"reason\": null}')\n    return 2 * x", "passed"),
    (USUAL, "passed"),
    ("import os\ndef double(x):\n    return 2 * x if 'WGPU_LORA_SECRET' not in os.environ else 0", "passed"),
    ("def double(x):\n    return None", "assertion failed"),
    ("def double(x:", "does not parse"),
    ("Here is the function you asked for", "does not parse"),
    ("double = 3", "defines no function"),
    ("def other(x):\n    return 2 * x", "NameError"),
    ("def double(x):\n    return double(x)", "RecursionError"),
    ("def double(x):\n    while True:\n        pass", "no answer in 1 s"),
    ("def double(x):\n    raise ValueError('\\x1b[2J\\ud800\\u202e')", r"ValueError: \x1b[2J\ud800\u202e"),
    *((f"def double(x):\n    {body}\n    return 2 * x", "") for body in WAYS_OUT),
]


@pytest.mark.parametrize(("code", "reason"), ANSWERS)
def test_answers(code, reason, monkeypatch):
    monkeypatch.setenv("WGPU_LORA_SECRET", "1")  # which is not inherited
    result = run_check(code, CHECK, timeout=1.0 if "while True" in code else 30.0)
    assert result.passed == (reason == "passed"), result.reason
    assert reason in result.reason


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces a limit on address space")
def test_memory_hog_is_stopped():
    assert "memory" in run_check("def double(x):\n    return len(bytearray(8 * 1024**3))", CHECK).reason


@pytest.mark.parametrize("code", LATE)
def test_what_the_library_imports_late_is_there(code):
    result = run_check(code, "assert f() is True")
    assert result.passed, result.reason


def test_what_parses_is_said():
    assert run_check("def other(x):\n    return 2 * x", CHECK).parses
    assert run_check("double = 3", CHECK).parses
    assert not run_check("def double(x:", CHECK).parses
    assert not run_check("def double(x):\n    return '\\ud800\0'", CHECK).parses


@pytest.mark.parametrize(
    "check",
    [
        "assert f(1) == 1, 'message'",
        "assert f(1) == 1, f'{f(1)} is not 1'",
        "assert f([1, (2,)], key={'a': {1}}) == set()",
        "assert f(-1.5) != None and not f('') or 1 < f(2) <= 3",
        "assert 3 in f() and f() is not None",
        "assert f(1) == g(2)",
    ],
)
def test_forms_of_checks(check):
    assert parse_check(check)


@pytest.mark.parametrize(
    "check",
    [
        "", "# nothing", None, 5, "assert", "f(1)", "assert True", "assert 1 == 1", "x = f(1)\nassert x == 1",
        "assert f(x) == 1", "assert f(g(1)) == 1", "assert f(*[1]) == 1", "assert f(**{'a': 1}) == 1", "assert f(...)",
        "assert f(1).real == 1", "assert f.g(1) == 1", "assert f(1)[0] == 1", "assert [f(1)] == [1]", "assert f(1) + 1",
        "assert f(1) is 2", "assert f([1]) == set([1])", "assert f({[1]}) == 1", "assert f({[1]: 1}) == 1",
        "assert (lambda: 1)() == 1", "assert (y := f(1))", "import os",
        "assert f(1) == ...", "assert all(f(i) for i in [1])", "assert f(1) == 1\0", "assert f(" + "(" * 9999,
        "assert " + "not " * 9999 + "f(1)", "assert f(1) == " + "-" * 9999 + "1", "#" * 99999 + "\nassert f(1) == 1",
    ],
    ids=lambda check: str(check)[:25] or "empty",
)  # fmt: skip
def test_a_check_of_another_form_is_an_error_in_the_data(check):
    with pytest.raises(UserError, match=r'rows\.jsonl, line 3 has a "check"'):
        parse_check(check, "rows.jsonl, line 3")
    with pytest.raises(UserError):
        run_check(RIGHT, check)


@pytest.mark.parametrize(
    ("check", "why"),
    [
        ("def g():\n    pass\nassert f(1)", "'def g(): pass' is not an assert"),
        ("assert f(" + "-" * 9999 + "1)", "nested too deeply"),
        ("assert f(1) == f'{a}'", "is not a literal"),
        ("assert f({[1]})", "'{[1]}' is not a literal (unhashable type: 'list')"),
    ],
)
def test_why_a_check_is_not_understood_is_one_line(check, why):
    with pytest.raises(UserError) as caught:
        parse_check(check)
    reason = str(caught.value)
    assert why in reason
    assert reason.isprintable()
    assert " at 0x" not in reason


def test_what_is_asserted_of_other_values_is_as_in_python():
    code = """
import collections, decimal, fractions, re
f = lambda n: [
    decimal.Decimal("1"), fractions.Fraction(1, 2), {1: 2}.keys(), {1: 2}.items(), bytearray(b"a"), range(3),
    re.match("a", "a"), collections.deque([1]), object, decimal.Decimal("0.1"), collections.deque(),
][n]
"""
    holds = """f(0) == 1; f(1) == 0.5 and f(1) < 1; f(2) == {1}; f(3) == {(1, 2)}; f(4) == b"a"; 2 in f(5)
        f(5) != [0, 1, 2]; f(6); f(7) != [1]; f(8) is not None and f(8) != 3; f(9) != 0.1; not f(10)"""
    result = run_check(
        code, "\n".join(f"assert {expression.strip()}" for expression in holds.replace("\n", ";").split(";"))
    )
    assert result.passed, result.reason
    for fails in ("f(7) == [1]", "f(7) != f(7)", "f(6) is None", "f(7) < 3", "f(0) == 2", "f(9) == 0.1", "1 in f(7)"):
        assert not run_check(code, f"assert {fails}").passed
    reason = run_check(code, "assert f(7) == [1]").reason
    assert reason == "assertion failed: f(7) == [1], where f returned <deque object>"


# -- answers to rows of HumanEval's form -------------------------------------------------------------------------------

PROMPT = '''import math
from typing import List

def double(x):
    return 2 * x

def f(xs: List[int]) -> int:
    """The sum of all numbers."""
'''
TEST = """
METADATA = {'author': 'x'}

def check(candidate):
    import random
    for _ in range(4):
        xs = [random.randint(0, 1000) for _ in range(5)]
        assert candidate(list(xs)) == sum(xs), "a sum"
    assert double(f([1, 2])) == 6
"""
# Bodies of f by outcome. What each tries is refused, or does no harm; none of them passes.
HOSTILE = blocks(r"""
### timeout: an infinite loop
    while True: pass
### timeout: a long sleep
    import time; time.sleep(99)
### timeout: waiting for the test's next line
    import os
    while os.read(0, 1 << 16): pass
### failed: a fork bomb
    import os
    while True: os.fork()
### failed: threads that linger
    import threading
    while True: threading.Thread(target=f, args=(xs,)).start()
### failed: memory
    return [0] * 10**9
### failed: a long answer
    return 'x' * 10**6
### error: much output
    import os
    while True: os.write(1, b'x' * 65536)
### failed: a file of the system
    return open('/etc/passwd').read()
### failed: the home
    import os; return os.listdir(os.path.expanduser('~'))
### failed: writing a file
    open('/tmp/attack', 'w').write('x')
### failed: the network
    import socket; socket.create_connection(('127.0.0.1', 1))
### failed: killing the parent
    import os; os.kill(os.getppid(), 9)
### failed: another program
    import subprocess; return subprocess.check_output(['true'])
### failed: leaving
    raise SystemExit(0)
### error: leaving at once
    import os; os._exit(0)
### failed: leaving later
    import atexit; atexit.register(print, 'passed'); return 0
### failed: a signal's handler
    import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)
### error: printing what passed tests print
    import os
    os.write(1, b'["passed", ""]\n' * 9); return 0
### failed: sending values
    import os
    os.write(1, b'["value", "[[\\"int\\", \\"3\\"], null]"]\n' * 9); return 0
### failed: equal to everything
    class A(int):
        __eq__ = lambda s, o: True
        __hash__ = None
    return A()
### failed: replaced checks
    import builtins, sys
    builtins.AssertionError = builtins.sum = lambda *a: 0
    for m in list(sys.modules.values()):
        for n in ('check', 'run', '_serve', '_attempt'):
            if hasattr(m, n): setattr(m, n, lambda *a: (0, None))
    return 0
### failed: ending a loop
    raise StopIteration
### failed: a forged failure
    raise AssertionError('passed')
### failed: the end of a generator
    raise GeneratorExit
### failed: a number of many digits
    return 10 ** 10 ** 5
### failed: recursion
    return f(xs)
### failed: no code
    return xs +
""")


def run(body: str, test: str = TEST, timeout: float = 30.0, prompt: str = PROMPT) -> CheckResult:
    return run_test(prompt + body, prompt, test, "f", timeout)


def seconds_for(name: str) -> float:
    return 1.0 if name.startswith("timeout") else 30.0


@confined
def test_a_right_answer_passes() -> None:
    assert run("    return sum(xs)\n") == CheckResult("passed", "passed", True)
    assert run("    return math.fsum(xs)\n\nx = 1").passed
    wrong = run("    return len(xs)")
    assert (wrong.outcome, wrong.reason[:55]) == ("failed", 'assert candidate(list(xs)) == sum(xs), "a sum": Asserti')


@confined
def test_hostile_answers_do_not_pass() -> None:
    with nothing_left(), ThreadPoolExecutor(4) as threads:
        results = threads.map(lambda name: run(HOSTILE[name], timeout=seconds_for(name)), HOSTILE)
        by_name = dict(zip(HOSTILE, results, strict=True))
    assert [(name, result) for name, result in by_name.items() if result.outcome != name.partition(":")[0]] == []
    assert all(result.reason for result in by_name.values())
    assert not Path("/tmp/attack").exists()


ODD = blocks(r"""
### passed: passed, of an answer that changes a list
    xs.append(3)
---
x = [1]
f(x)
assert x == [1, 3]
### passed: passed, of an answer that changes a dict given by name
    xs['a'] = {2}
---
x = {}
f(xs=x)
assert x == {'a': {2}}
### passed: passed, of an exception
    raise ValueError('no')
---
try:
    f([1])
except ValueError as error:
    assert str(error) == 'no'
else:
    assert False
### error: the test does not call f, so any answer would pass
    return 1
---
assert True
### error: the test gives the answer <function object>, which is not plain data
    return 1
---
try:
    f({1: [lambda: 1]})
except Exception:
    assert f([1]) == 1
### error: the test gives the answer <function object>, which is not plain data, of a test that catches everything
    return 1
---
f([1])
try:
    f(lambda: 1)
except:
    pass
### failed: returned more than 10,000 values, of a test that expects an exception
    return [0] * 100_000
---
try:
    f([1])
except Exception:
    pass
### failed: out of memory, of a test that expects an exception
    return ' ' * 2 ** 40
---
try:
    f([1])
except Exception:
    pass
### failed: SystemExit
    return 1
---
f([1])
raise SystemExit(0)
### error: the test ended without an answer (exit code 0)
    return 1
---
import os
f([1])
os._exit(0)
### timeout: no answer in 1 s
    return 1
---
f([1])
while True: pass
### failed: NameError
    return 1
---
assert g(1)
### failed: TypeError
    return None
---
assert abs(f([1])) < 1
""")


@confined
@pytest.mark.parametrize("name", ODD)
def test_tests(name: str) -> None:
    answer, test = ODD[name].split("---\n")
    result = run(answer, "def check(f):\n" + textwrap.indent(test, "    "), seconds_for(name))
    outcome, words = name.split(", of")[0].split(": ", 1)
    assert (result.outcome, words in result.reason) == (outcome, True), result


@confined
def test_a_prompt_without_a_body() -> None:
    assert run("    return sum(xs)", "def check(f):\n    assert f([2]) == 2", prompt="def f(xs):\n").passed
