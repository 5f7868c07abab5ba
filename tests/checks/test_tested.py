"""Answers to rows of HumanEval's form: the test runs in a process that the answer cannot reach."""

from __future__ import annotations

import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.confinement import blocks, confined, nothing_left

from wgpu_lora.checks.code_check import CheckResult, run_test

pytestmark = confined

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


def test_a_right_answer_passes() -> None:
    assert run("    return sum(xs)\n") == CheckResult("passed", "passed", True)
    assert run("    return math.fsum(xs)\n\nx = 1").passed
    wrong = run("    return len(xs)")
    assert (wrong.outcome, wrong.reason[:55]) == ("failed", 'assert candidate(list(xs)) == sum(xs), "a sum": Asserti')


def test_hostile_answers_do_not_pass() -> None:
    with nothing_left(), ThreadPoolExecutor(4) as threads:
        results = threads.map(lambda name: run(HOSTILE[name], timeout=seconds_for(name)), HOSTILE)
        found = dict(zip(HOSTILE, results, strict=True))
    assert [(name, result) for name, result in found.items() if result.outcome != name.partition(":")[0]] == []
    assert all(result.reason for result in found.values())
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


@pytest.mark.parametrize("name", ODD)
def test_tests(name: str) -> None:
    answer, test = ODD[name].split("---\n")
    found = run(answer, "def check(f):\n" + textwrap.indent(test, "    "), seconds_for(name))
    outcome, words = name.split(", of")[0].split(": ", 1)
    assert (found.outcome, words in found.reason) == (outcome, True), found


def test_a_prompt_without_a_body() -> None:
    assert run("    return sum(xs)", "def check(f):\n    assert f([2]) == 2", prompt="def f(xs):\n").passed
