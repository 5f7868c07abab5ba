"""Systems that confine less, or not at all: what is said of that, and that nothing runs unless it is allowed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.confinement import TRY, UNGUARDED, confined

from wgpu_lora.checks.code_check import run_check
from wgpu_lora.checks.sandbox import sandbox_process
from wgpu_lora.cli import main
from wgpu_lora.errors import UserError

pytestmark = confined

IMPORTS = """
import json, os, sys
from wgpu_lora.checks.code_check import run_check
from wgpu_lora.checks.sandbox.sandbox_process import confinement
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
        from wgpu_lora.checks.sandbox import sandbox_process
        sandbox_process.ENTRY = {UNGUARDED!r}
        print(confinement().namespaces, run_check({answer!r}, f"assert f({{os.getpid()}}) == {{{{}}}}").passed)
        """
    done = run_where(f"refuse({UNSHARE})", code)
    assert done.stdout == "[] True\n", done.stderr


def test_without_a_filter_it_is_refused_unless_allowed() -> None:
    code = """
        right, writing = "def f():\\n    return 1", "def f():\\n    open('attack', 'w')\\n    return 1"
        print(*[run_check(code, "assert f() == 1", allow_unconfined=True).reason for code in (right, writing)])
        print(confinement(True).missing)
        confinement()
        """
    done = run_where(f"refuse({PRCTL}, 22)", code)
    assert done.stdout == "passed PermissionError: open\nprctl(22) is refused (Invalid argument)\n", done.stderr
    last = done.stderr.splitlines()[-1]
    assert "cannot be confined on this system, because prctl(22) is refused" in last
    assert "--allow-unconfined" in last


@pytest.mark.parametrize("command", [["demo"], ["prove"]])
def test_commands_say_so_before_they_do_anything(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sandbox_process, "ENTRY", f"import sys; sys.platform = 'darwin'; {sandbox_process.ENTRY}")
    assert main(command) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "because darwin has no seccomp" in said.err
    assert "--allow-unconfined" in said.err
    assert os.listdir(tmp_path) == []
    result = run_check("def f():\n    return 1", "assert f() == 1", allow_unconfined=True)
    assert result.passed, result.reason
    with pytest.raises(UserError, match="darwin"):
        run_check("def f():\n    return 1", "assert f() == 1")
