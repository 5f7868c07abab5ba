"""The confined runner of the demo's unit checks."""

from __future__ import annotations

import sys

import pytest

from wgpu_lora.demo.check import run_check

RIGHT = "def double(x):\n    return 2 * x"
CHECK = "assert double(4) == 8\nassert double(0) == 0"


def test_right_answer_passes():
    result = run_check(RIGHT, CHECK)
    assert result.passed, result.reason
    assert result.reason == "passed"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def double(x):\n    return None", "assertion failed"),
        ("def double(x:", "does not parse"),
        ("Here is the function you asked for", "does not parse"),
        ("double = 3", "defines no function"),
        ("def other(x):\n    return 2 * x", "NameError"),
        ("def double(x):\n    return double(x)", "RecursionError"),
    ],
)
def test_wrong_answers_fail_and_say_why(code, reason):
    result = run_check(code, CHECK)
    assert not result.passed
    assert reason in result.reason


def test_printing_is_no_verdict():
    result = run_check("def double(x):\n    print('{\"reason\": null}')\n    return 2 * x", CHECK)
    assert result.passed, result.reason


def test_endless_loop_is_stopped():
    result = run_check("def double(x):\n    while True:\n        pass", CHECK, timeout=1.0)
    assert not result.passed
    assert "no answer in 1 s" in result.reason


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces a limit on address space")
def test_memory_hog_is_stopped():
    result = run_check("def double(x):\n    return len(bytearray(8 * 1024**3))", CHECK)
    assert not result.passed
    assert "memory" in result.reason


@pytest.mark.parametrize(
    "body",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "import os; os.system('true')",
        "import subprocess; subprocess.run(['true'])",
        "import socket; socket.socket()",
        "open('left-behind', 'w')",
        "import ctypes; ctypes.CDLL(None)",
    ],
)
def test_ways_out_are_no_pass(body):
    assert not run_check(f"def double(x):\n    {body}\n    return 2 * x", CHECK).passed


def test_environment_is_not_inherited(monkeypatch):
    monkeypatch.setenv("WGPU_LORA_SECRET", "1")
    code = "import os\ndef double(x):\n    return 2 * x if 'WGPU_LORA_SECRET' not in os.environ else 0"
    result = run_check(code, CHECK)
    assert result.passed, result.reason
