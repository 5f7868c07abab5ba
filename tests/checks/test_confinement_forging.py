"""Forged passes: what is no right value does not count as one, whatever an answer sends or changes."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil
import pytest
from support.processes.confinement import blocks, confined

from wgpu_lora.train.checks.code_check import run_check
from wgpu_lora.train.checks.sandbox import plain_data
from wgpu_lora.train.checks.sandbox.sandbox_process import ENTRY

pytestmark = confined


EXPECTED = "f(2) is 5, says the row"
FORGERIES = blocks(r"""
### equal to everything
class A:
    __eq__ = lambda s, o: True
    __ne__ = lambda s, o: False
    __hash__ = None
x = A()
### lying str
class A(str):
    __eq__ = lambda s, o: True
    __hash__ = str.__hash__
x = A('no')
### lying __class__
class A:
    __class__ = property(lambda s: str)
    __eq__ = lambda s, o: True
x = A()
### metaclass
class M(type):
    __eq__ = __subclasscheck__ = __instancecheck__ = lambda c, o: True
    __hash__ = type.__hash__
class A(metaclass=M):
    __eq__ = lambda s, o: True
x = A()
### reduce
class A:
    def __reduce__(s):
        return eval, ('True',)
x = A()
### iter and repr
class A(list):
    __iter__ = lambda s: iter('no')
    __repr__ = __str__ = lambda s: '1'
x = A()
### patched plain
import sys
for m in list(sys.modules.values()):
    for n in ('dump', 'dumps'):
        if hasattr(m, n):
            setattr(m, n, lambda v: 'true')
x = 1
### patched builtins
import builtins, operator
for n in ('isinstance', 'type', 'all', 'any', 'repr', 'issubclass'):
    setattr(builtins, n, lambda *a: True)
operator.eq = lambda a, b: True
x = 1
### patched runner
import sys
for m in list(sys.modules.values()):
    for n in dir(m):
        if n in ('_say', '_attempt', '_call'):
            setattr(m, n, lambda *a: ('true', None))
x = 1
### verdict on the channel
import os
for line in (b'{"passed": true}', b'["passed", null]', b'["value", "true"]', b'true'):
    os.write(1, line + b'\n')
x = 1
### values on the channel
import os
os.write(1, b'["value", "[]"]\n' * 9)
os._exit(0)
x = 1
### half a line
import os
os.write(1, b'["value", ')
x = 1
### exit
import os
os._exit(0)
x = 1
### exit in the call
class A:
    def __getattribute__(s, n):
        import os
        os._exit(0)
x = A()
### system exit
raise SystemExit(0)
x = 1
### system exit in the call
class X:
    def __index__(s):
        raise SystemExit(0)
x = X()
### assertion
class AssertionError(BaseException): pass
x = AssertionError()
### frames
import sys
frame = sys._getframe()
while frame:
    for n in list(frame.f_globals):
        if n in ('code', 'calls', 'job'):
            frame.f_globals[n] = []
    frame = frame.f_back
x = 1
### gc
import gc
x = [o for o in gc.get_objects() if isinstance(o, (str, dict, list)) and 'says the row' in repr(o)[:10**6]]
x = [o for o in x if isinstance(o, str) and o.startswith('f(2) is')][:1]
x = x[0] if x else ''
### atexit
import sys
atexit = sys.modules.get('atexit')
if atexit:
    atexit.register(lambda: 1)
x = 1
### breakpoint
breakpoint()
x = 1
### generator
x = (c for c in 'no')
### endless iterator
import itertools
x = itertools.count()
### None
x = None
""")


@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES.keys())
def test_no_pass_is_forged(code: str) -> None:
    check = f"assert f(2) == {EXPECTED!r} or f(3) == 3"
    assert not run_check(f"{code}\ndef f(n):\n    return x", check).passed


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone may look into the process")
def test_what_is_expected_is_not_in_the_process() -> None:
    """Looked for from outside, in all that it may write, while the answer runs."""
    answer, sent, expected = "import time\ndef f(n):\n    time.sleep(60)", b"argument-8d1f", b"expected-8d1f"
    check = f"assert f({sent.decode()!r}) == {expected.decode()!r}"
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(run_check, answer, check, 1.0)
        memories: list[bytes] = []
        while not (memories or result.done()):
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if ENTRY in child.cmdline():  # until then it is a fork of this process
                        memories += [memory for memory in [memory_of(child.pid)] if sent in memory]
    assert result.result().reason == "no answer in 1 s"
    assert memories
    assert not any(expected in memory for memory in memories)


def memory_of(pid: int) -> bytes:
    """What may be written in a process, as root sees it."""
    content = b""
    with suppress(OSError), open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if "rw" in line.split()[1]:
                with suppress(OSError):
                    memory.seek(begin)
                    content += memory.read(end - begin)
    return content


# -- plain data ----------------------------------------------------------------------------------------------------

KEPT = (
    None, True, 1, 0, -1, 10**5000, -(2**64), 1.0, -0.0, 1e308, math.inf, 1 + 2j, "", "a\x00\ud800\x1b", b"", b"\xff",
    [], (), set(), frozenset(), {}, [1, (2, [True, None])], {1: "a", (2, 3): [4]}, {1}, {1, "a", (None,)},
    frozenset({(1,)}),
)  # fmt: skip


@pytest.mark.parametrize("value", KEPT, ids=lambda value: type(value).__name__)
def test_plain_data_comes_back_as_it_is(value: Any) -> None:
    back = plain_data.load(plain_data.dump(value))
    assert back == value
    assert type(back) is type(value)
    if not isinstance(value, set | int):
        assert repr(back) == repr(value)  # types within, signs, the order of keys


def test_values_arrive_with_their_types() -> None:
    values = r"float('nan'), -0.0, True, (1,), {'b': 1, 'a': 2}, 10**5000, '\ud800', {3}, b'\0'"
    code = f"def f(n):\n    return [{values}][n]"
    holds = r"""
        f(0) != f(0); f(1) == 0; f(2) is True; f(2) == 1; f(3) == (1,); f(3) != [1]; f(4) == {'a': 2, 'b': 1}
        f(5) > 1e300; f(6) == '\ud800'; f(7) == {3} and f(7) != set(); f(8) == b'\0'; not f(7) == [3]
        0 == f(7) == 2 or 3 in f(7); f(n=2)
        """
    fails = "f(0) == f(0); f(2) is None; f(3) == [1]; f(7) < 3; f(9) == 1; f(5) == 1; f(6) == ''; not f(2)"
    expressions = [expression.strip() for expression in holds.replace("\n", ";").split(";") if expression.strip()]
    result = run_check(code, "\n".join(f"assert {expression}" for expression in expressions))
    assert result.passed, result.reason
    for expression in fails.split("; "):
        assert not run_check(code, f"assert {expression}").passed


def test_subclasses_count_as_what_they_hold() -> None:
    code = "from collections import Counter, namedtuple\nfrom enum import IntEnum\nclass E(IntEnum):\n    A = 3\n"
    code += "def f():\n    return [Counter('aab'), namedtuple('P', 'x y')(1, 2), E.A]"
    assert run_check(code, "assert f() == [{'a': 2, 'b': 1}, (1, 2), 3]").passed


NO_PLAIN_DATA = [
    "1",
    "1.5",
    "NaN",
    "{}",
    "[]",
    '["int"]',
    '["int",5]',
    '["int","x"]',
    '["float","0x1p99999"]',
    '["float",null]',
    '["list","ab"]',
    '["list",5]',
    '["list",[1]]',
    '["eval","1"]',
    '[["list"],[]]',
    '["set",[["list",[]]]]',
    '["dict",[["list",[]]]]',
    '["dict",[[["dict",[]],1]]]',
    '["bytes","0"]',
    '["complex","1"]',
    '["ratio","1/0"]',
    '["ratio","1"]',
    '["ratio",[]]',
    '["object","x"]',
    '["object",1,true]',
    '["set",[["object","x",true]]]',
    '["range",[["int","0"],["int","fffffffff"],["int","1"]]]',
    '["range",[["float","0x1p1"]]]',
    "[null,null]",
    "nullnull",
    "�",
]
NO_PLAIN_DATA += ["", "[" * 10**5, "[" * 40 + "]" * 40, "9" * 5000, '["list", [' + ",".join(["null"] * 10_001) + "]]"]
NO_PLAIN_DATA += ['["set", [' + ",".join(f'["int", "{i * (2**61 - 1):x}"]' for i in range(5000)) + "]]"]
NO_PLAIN_DATA += ['["set", [' + ",".join(f'["ratio", "{i * (2**61 - 1):x}/1"]' for i in range(900)) + "]]"]


@pytest.mark.parametrize("text", NO_PLAIN_DATA, ids=lambda text: text[:20] or "empty")
def test_what_is_no_plain_data_is_refused(text: str) -> None:
    begin = time.monotonic()
    with pytest.raises(plain_data.NotPlainError):
        plain_data.load(text)
    assert time.monotonic() - begin < 1.0
