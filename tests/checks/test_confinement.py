"""The confined process: its filter, its bounds of time, memory and output, and systems that cannot confine."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes.confinement import TRY, UNGUARDED, blocks, confined, nothing_left, returned
from support.rows.hostile import memory_below

from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.processes import seccomp
from wgpu_lora.train.checks.code_check import run_check
from wgpu_lora.train.checks.sandbox import sandbox_process
from wgpu_lora.train.checks.sandbox.sandbox_process import OUTPUT, confinement

pytestmark = confined


@pytest.fixture(autouse=True)
def all_is_as_before() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_process, "ENTRY", UNGUARDED)


def test_this_system_confines() -> None:
    status = confinement()
    assert status.missing is None
    assert {"CPU", "AS", "NPROC", "FSIZE", "NOFILE"} <= set(status.limits)
    assert "a seccomp filter" in str(status)


# -- the filter --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unguarded")
def test_every_system_call_but_those_allowed_is_refused() -> None:
    code = TRY + textwrap.dedent("""
        def attack(allowed):
            open_ = []
            for number in [n for n in range(0, 700) if n not in allowed] + [2**30 - 1]:
                ctypes.set_errno(0)
                if libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1:
                    open_.append(number)
            return open_
        """)
    column = seccomp.ARCHITECTURES[platform.machine()][0]
    allowed = [
        n[column] for n in (*seccomp.ALLOWED.values(), *seccomp.NOT_EXECUTABLE.values()) if n[column] is not None
    ]
    # uretprobe and uprobe: newer kernels pass them by every filter; outside of a probe they end the caller.
    assert returned(code, [*allowed, 335, 336]) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 processor, of which x32 is a part")
@pytest.mark.usefixtures("unguarded")
def test_calls_of_another_architecture_end_it() -> None:
    result = run_check(TRY + "def attack():\n    return sys_(0x40000000 + 39)", "assert attack() != 0")
    assert "SIGSYS" in result.reason


@pytest.mark.usefixtures("unguarded")
def test_memory_cannot_be_made_executable() -> None:
    code = TRY + textwrap.dedent("""
        def attack():
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
            place = libc.mmap(None, 4096, 3, 0x22, -1, 0)
            assert place not in (None, 2**64 - 1)
            return [libc.mmap(None, 4096, prot, 0x22, -1, 0) for prot in (4, 5, 7)], libc.mprotect(
                ctypes.c_void_p(place), ctypes.c_size_t(4096), 5)
        """)
    assert returned(code) == ([2**64 - 1] * 3, -1)


@pytest.mark.parametrize("machine", list(seccomp.ARCHITECTURES))
def test_the_program_of_each_architecture(machine: str) -> None:
    """Run here by its rules, so that the other architecture's is tested too."""
    code = seccomp.program(machine)
    steps = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    column, own = seccomp.ARCHITECTURES[machine]

    def verdict(number: int, architecture: int = own, third: int = 0) -> int:
        data, accumulator, at = {0: number, 4: architecture, 32: third}, 0, 0
        while True:
            what, if_so, if_not, value = steps[at]
            if what == seccomp.RETURN:
                return value
            if what == seccomp.LOAD:
                accumulator = data[value]
            else:
                true = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[what]
                at += if_so if true else if_not
            at += 1

    allowed = {n[column] for n in seccomp.ALLOWED.values()} - {None}
    guarded = {n[column] for n in seccomp.NOT_EXECUTABLE.values()}
    for number in range(600):
        assert (verdict(number) == seccomp.ALLOW) == (number in allowed | guarded)
        assert (verdict(number, third=4) == seccomp.ALLOW) == (number in allowed)
        assert verdict(number, 0x40000003) == seccomp.KILL  # i386
        assert verdict(number + 0x40000000) == seccomp.KILL  # x32
    with pytest.raises(OSError, match="no seccomp filter for riscv64"):
        seccomp.program("riscv64")


@pytest.mark.skipif(
    not ctypes.util.find_library("seccomp"), reason="libseccomp, which the filter is compared with, is not installed"
)
def test_numbers_are_libseccomps() -> None:
    resolve = ctypes.CDLL(ctypes.util.find_library("seccomp")).seccomp_syscall_resolve_name_arch
    for column, architecture in seccomp.ARCHITECTURES.values():
        for name, numbers in (seccomp.ALLOWED | seccomp.NOT_EXECUTABLE).items():
            number = resolve(ctypes.c_uint32(architecture), name.encode())
            assert numbers[column] == (number if number >= 0 else None), name


# -- time, memory and output -------------------------------------------------------------------------------------------

# What becomes of it stands after =>, where it is always the same.
FLOODS = blocks(r"""
### stdout => wrote more than
import os
while True:
    os.write(1, b'x' * 10**7)
### lines => something other
import os
while True:
    os.write(1, b'\n' * 65536)
### little by little =>
import os
while True:
    os.write(1, b'[')
### values =>
import os
while True:
    os.write(1, b'["value", "1"]\n' * 999)
### sys.__stdout__ => wrote more than
import sys
while True:
    sys.__stdout__.write('x' * 10**6)
### stderr => no answer in 0.7 s
import os
while True:
    os.write(2, b'x' * 10**7)
### print => no answer in 0.7 s
while True:
    print('x' * 10**6)
### nested on the channel => something other
import os
os.write(1, b'[' * 100000 + b'\n')
### nested in a value => nested
import os
os.write(1, b'["value", "' + b'[' * 60000 + b'"]\n')
### nested reason => something other
import os
os.write(1, b'["raised", ' + b'[' * 900 + b']' * 900 + b']\n')
### digits => data that are not plain
import os
os.write(1, b'["value", "' + b'9' * 99999 + b'"]\n')
### nested => nested more than 32 deep
x = []
for _ in range(10**5):
    x = [x]
return x
### cyclic => nested more than 32 deep
x = []
x.append(x)
return x
### doubling => more than 10,000 values
x = []
for _ in range(30):
    x = [x, x]
return x
### long => more than 10,000 values
return [0] * 10**6
### huge str => more than 32,768 characters
return 'x' * 10**7
### huge int => more than 32,768 characters
return 1 << 10**8
### colliding keys => set of more than 1,000
return {i * (2**61 - 1) for i in range(1500)}
### memory => out of memory
return bytearray(8 * 1024**3)
### memory by and by => out of memory
x = []
while True:
    x.append(bytes(10**6))
### recursion => RecursionError
return f(n)
### deep stack =>
import sys
sys.setrecursionlimit(10**9)
return f(n)
### loop => no answer in 0.7 s
while True:
    pass
### one instruction => no answer in 0.7 s
return 3 ** 10**9
### backtracking => no answer in 0.7 s
import re
return bool(re.match(r'(a+)+b', 'a' * 60))
### sleep => no answer in 0.7 s
import time
time.sleep(99)
### swallowing => no answer in 0.7 s
while True:
    try:
        while True: pass
    except BaseException: pass
### signals =>
import signal
for s in range(1, 65):
    try:
        signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
### crash => SIGSEGV
import ctypes
return ctypes.string_at(1)
### abort => ended without an answer
import os
os.abort()
""")


@pytest.mark.usefixtures("unguarded")
def test_floods_and_hogs_end_in_time_and_cost_no_memory() -> None:
    def attack(name: str, body: str) -> tuple[str, float]:
        begin = time.monotonic()
        timeout = 0.7 if name.endswith(("=>", " s")) else 10.0  # the others end of themselves
        code = "def f(n):\n" + textwrap.indent(body, "    ")
        result = run_check(code, "assert f(1) == 5\nassert f(2) == 5", timeout=timeout)
        assert not result.passed
        return result.reason, time.monotonic() - begin

    with memory_below(64 * OUTPUT), ThreadPoolExecutor(6) as pool:
        results = list(pool.map(attack, FLOODS.keys(), FLOODS.values()))
    for name, (reason, seconds) in zip(FLOODS, results, strict=True):
        assert name.partition("=>")[2].strip() in reason, name
        assert seconds < (5.0 if name.endswith(("=>", " s")) else 10.0), name


# -- systems that confine less, or not at all --------------------------------------------------------------------------

IMPORTS = """
import json, os, sys
from wgpu_lora.train.checks.code_check import run_check
from wgpu_lora.train.checks.sandbox.sandbox_process import confinement
"""
# A filter that refuses a system call (where its first argument is as given), as a container's would.
REFUSE = """
import ctypes, struct
def refuse(number, first=None):
    steps = [(32, 0, 0, 0), (21, 0, 3, number), (32, 0, 0, 16), (21, 0, 0 if first is None else 1, first or 0)]
    steps += [(6, 0, 0, 0x50016), (6, 0, 0, 0x7FFF0000)]
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code, len(code))
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    whole = Program(len(steps), ctypes.addressof(held))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(whole), 0, 0) == 0
"""
UNSHARE, PRCTL = {"x86_64": (272, 157), "aarch64": (97, 167)}.get(platform.machine(), (0, 0))


def run_where(refused: str, code: str) -> subprocess.CompletedProcess[str]:
    whole = f"{REFUSE}\n{refused}\n{IMPORTS}\n{textwrap.dedent(code)}"
    return subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=False)


def test_the_filter_holds_where_namespaces_are_refused() -> None:
    answer = TRY + textwrap.dedent("""
        def f(pid):
            return tried(
                kill=lambda: os.kill(pid, 9), all=lambda: os.kill(-1, 9), fork=os.fork, pipe=os.pipe,
                read=lambda: open("/etc/passwd"), socket=lambda: 1 / (1 + libc.socket(2, 1, 0)),
            )
        """)
    code = f"""
        from wgpu_lora.train.checks.sandbox import sandbox_process
        sandbox_process.ENTRY = {UNGUARDED!r}
        print(confinement().namespaces, run_check({answer!r}, f"assert f({{os.getpid()}}) == {{{{}}}}").passed)
        """
    process = run_where(f"refuse({UNSHARE})", code)
    assert process.stdout == "[] True\n", process.stderr


def test_without_a_filter_it_is_refused_unless_allowed() -> None:
    code = """
        right, writing = "def f():\\n    return 1", "def f():\\n    open('attack', 'w')\\n    return 1"
        print(*[run_check(code, "assert f() == 1", allow_unconfined=True).reason for code in (right, writing)])
        print(confinement(True).missing)
        confinement()
        """
    process = run_where(f"refuse({PRCTL}, 22)", code)
    assert process.stdout == "passed PermissionError: open\nprctl(22) is refused (Invalid argument)\n", process.stderr
    last = process.stderr.splitlines()[-1]
    assert "cannot be confined on this system, because prctl(22) is refused" in last
    assert "--allow-unconfined" in last


@pytest.mark.parametrize("command", [["demo"], ["prove"]])
def test_commands_say_so_before_they_do_anything(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sandbox_process, "ENTRY", f"import sys; sys.platform = 'darwin'; {sandbox_process.ENTRY}")
    assert main(command) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "because darwin has no seccomp" in output.err
    assert "--allow-unconfined" in output.err
    assert os.listdir(tmp_path) == []
    result = run_check("def f():\n    return 1", "assert f() == 1", allow_unconfined=True)
    assert result.passed, result.reason
    with pytest.raises(UserError, match="darwin"):
        run_check("def f():\n    return 1", "assert f() == 1")
