"""Reward functions: the built-in ones, those of files, and what becomes of ones that fail."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.train.rewards.builtin_rewards import BUILT_IN
from wgpu_lora.train.rewards.reward_functions import RewardFunctions, Rewards

CODE = """
import asyncio, os, time
def lengths(completions, **columns):
    print("printed by a reward function")
    return [len(text) for text in completions]
async def targets(prompts, completions, target, **columns):
    await asyncio.sleep(0)
    return [None if wanted is None else text == wanted for text, wanted in zip(completions, target)]
def broken(completions, **columns):
    raise KeyError("missing column")
def short(completions, **columns):
    return [1.0]
def infinite(completions, **columns):
    return [float("nan"), 2]
def slow(completions, **columns):
    time.sleep(60)
def dead(completions, **columns):
    os._exit(3)
number = 5
calls, loops = [], []
async def looped(completions, **columns):
    loops.append(asyncio.get_running_loop())
    calls.append(len(completions))
    return [len(set(loops))] * len(completions)
def counted(completions, **columns):
    return [sum(calls)] * len(completions)
def logged(completions, trainer_state, log_metric, log_extra, **columns):
    for text in completions:
        log_metric("words", len(text.split()))
    log_extra("first", [text[:1] for text in completions])
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)
def plain(completions, prompts, completion_ids, prompt=None, target=None):
    return [0.0] * len(completions)
def step(completions, log_metric, **columns):
    log_metric("step", 1)
def few(completions, log_extra, **columns):
    log_extra("a", [])
    return [0.0] * len(completions)
"""
COLUMNS: list[dict[str, Any]] = [{"prompt": "p", "target": "ab"}, {"prompt": "q"}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(CODE)
    return path


def test_functions_of_a_file_get_the_rows_columns(file: Path) -> None:
    functions = RewardFunctions(f"{file}:lengths, {file}:targets", "1,0.5")
    functions.load()
    rewards = functions.score(["p", "q"], ["ab", "abc"], [[1], [2, 3]], COLUMNS)
    np.testing.assert_array_equal(rewards.values, [[2, 1], [3, np.nan]])
    assert not rewards.failed
    assert functions.names == ["lengths", "targets"]
    np.testing.assert_array_equal(functions.weights, [1, 0.5])
    functions.close()


def test_a_function_that_fails_costs_its_rows(file: Path) -> None:
    """Also one that takes too long, or ends the process; those after it still count."""
    names = ["broken", "short", "infinite", "slow", "dead", "lengths"]
    functions = RewardFunctions(",".join(f"{file}:{name}" for name in names), seconds=1.5)
    rewards = functions.score(["p", "q"], ["ab", "abc"], [[1], [2, 3]], COLUMNS)
    functions.close()
    assert np.isnan(rewards.values[:, [0, 1, 3, 4]]).all()
    np.testing.assert_array_equal(rewards.values[:, [2, 5]], [[np.nan, 2], [2, 3]])
    assert rewards.failed == {"broken": 2, "short": 2, "infinite": 1, "slow": 2, "dead": 2}
    assert rewards.reasons["broken"] == "KeyError: 'missing column'"
    assert rewards.reasons["short"] == "it gave 1 reward for 2 completions"
    assert rewards.reasons["slow"] == "it took more than 1.5 seconds"
    assert rewards.reasons["dead"] == "it ended with exit code 3"


def scored(functions: RewardFunctions) -> Rewards:
    return functions.score(["p", "q"], ["a b", "c"], [[1], [2]], COLUMNS, {"global_step": 1, "max_steps": 4})


def test_functions_share_a_loop_and_their_file(file: Path) -> None:
    """Coroutines of all calls run in one event loop, and all functions of a file see one module."""
    functions = RewardFunctions(f"{file}:looped,{file}:counted")
    for calls in (1, 2):
        np.testing.assert_array_equal(scored(functions).values, [[1, 2 * calls]] * 2)
    functions.close()


def test_functions_may_log_as_in_trl(file: Path) -> None:
    """They get the trainer's state, and log metrics and columns of completions; those that take none of it need not."""
    functions = RewardFunctions(",".join(f"{file}:{name}" for name in ("logged", "plain", "step", "few")))
    rewards = scored(functions)
    np.testing.assert_array_equal(rewards.values[:, :2], [[0.25, 0]] * 2)
    assert (rewards.metrics, rewards.extra) == ({"words": 1.5}, {"first": ["a", "c"]})
    assert "a name of the log's own" in rewards.reasons["step"]
    assert "log_extra was given 0 values of 'a' for 2 completions" in rewards.reasons["few"]
    functions.close()


def test_a_traceback_is_shown_once(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    functions = RewardFunctions(f"{file}:broken,{file}:short")
    for _ in range(2):
        assert scored(functions).failed == {"broken": 2, "short": 2}
    functions.close()
    error = capfd.readouterr().err
    assert error.count("Traceback") == error.count('raise KeyError("missing column")') == 1


def test_an_answer_that_nobody_waited_for_is_not_the_next_ones(file: Path) -> None:
    functions = RewardFunctions(f"{file}:lengths")
    assert scored(functions).values.tolist() == [[3], [1]]
    child = functions._process._child
    assert child
    child.send({"function": f"{file}:lengths", "arguments": {"completions": []}, "state": {}, "number": 0})
    assert scored(functions).values.tolist() == [[3], [1]]
    functions.close()


def test_a_pattern_may_have_commas() -> None:
    functions = RewardFunctions("length:4, regex:a{1,3}, [b,c]$,accuracy:x", "1,2,3")
    assert functions.functions == ["length:4", "regex:a{1,3}, [b,c]$", "accuracy:x"]
    assert RewardFunctions(r"regex:^see x\.py:").names == ["regex"]
    named = RewardFunctions(r"regex:x\.py:")
    named.load()
    assert named.score(["p"] * 2, ["x.py:", "x"], [[1], [2]], [{}, {}]).values.tolist() == [[1], [0]]
    named.close()


def test_wrong_names_are_refused(file: Path, tmp_path: Path) -> None:
    for wrong, text in {
        "nothing": r"has no built-in 'nothing': give FILE.py:NAME, or one of accuracy, check",
        f"{tmp_path}/none.py:f": r"there is no file .*none.py",
        f"{file}:2x": r"'2x' is not the name of a function",
        "accuracy,accuracy": r"two functions named 'accuracy'",
        " ,": r"is empty",
        "regex:a,acuracy:x": r"'acuracy' behind a pattern of regex: write accuracy",
    }.items():
        with pytest.raises(UserError, match=text):
            RewardFunctions(wrong)
    for weights in ("1", "1,x", "1,inf"):
        with pytest.raises(UserError, match=r"must be 2 numbers with commas"):
            RewardFunctions("accuracy,check", weights)
    (tmp_path / "invalid.py").write_text("def f(:\n")
    for wrong, text in {
        f"{file}:number": r"has no function 'number'",
        f"{file}:absent": r"has no function 'absent'",
        f"{tmp_path}/invalid.py:f": r"cannot be loaded \(SyntaxError",
        "length": r"The reward length needs a number above 0",
        "regex:(": r"cannot be loaded",
    }.items():
        functions = RewardFunctions(wrong)
        with pytest.raises(UserError, match=text):
            functions.load()
        functions.close()


def rewards_of(name: str, completions: list[Any], **columns: Any) -> list[float | None]:
    kind, _, argument = name.partition(":")
    function = BUILT_IN[kind](argument or None)
    ids = [list(range(len(text.split()))) for text in completions if isinstance(text, str)]
    rewards = function(prompts=["p"] * len(completions), completions=completions, completion_ids=ids, **columns)
    return list(rewards)


def test_answers_are_compared_as_numbers_or_texts() -> None:
    answers = ["1,000", "x  Y", r"\frac{1}{2}", None, "7"]
    texts = ["#### 1000.0", "X y.", r"so \boxed{\frac{1}{2}}.", "8", "<think>7</think> 8"]
    assert rewards_of("accuracy", texts, answer=answers) == [1, 1, 1, None, 0]
    assert rewards_of("accuracy:solution", [[{"role": "assistant", "content": "5"}]], solution=["5"]) == [1]
    assert rewards_of("accuracy", ["5"]) == [None]


def test_code_is_checked_in_the_sandbox() -> None:
    good = "Here:\n```python\ndef f(x):\n    return x + 1\n```"
    texts, checks = [good, good.replace("+ 1", "+ 2"), good], ["assert f(1) == 2", "assert f(1) == 2", None]
    assert rewards_of("check", texts, check=checks) == [1, 0, None]


def test_json_is_validated(tmp_path: Path) -> None:
    texts = ['{"a": 1}', '```json\n{"a": "x"}\n```', "no"]
    assert rewards_of("json_schema", texts) == [1, 1, 0]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert rewards_of("json_schema", texts, schema=[schema] * 3) == [1, 0, 0]
    (tmp_path / "schema.json").write_text('{"required": ["b"]}')
    assert rewards_of(f"json_schema:{tmp_path / 'schema.json'}", texts) == [0, 0, 0]


def test_formats_and_lengths() -> None:
    assert rewards_of("regex:^a.c$", ["a\nc", "abcd"]) == [1, 0]
    assert rewards_of("regex:x", ["x", "b"], pattern=[None, "b+"]) == [1, 1]
    assert rewards_of("regex", ["x"]) == [None]
    assert rewards_of("length:4", ["a b c d", "a b", "a " * 9]) == [1, 0.5, 0]
    assert rewards_of("overlong:4/2", ["a b", "a b c", "a b c d", "a " * 9]) == [0, -0.5, -1, -1]
    assert rewards_of("think_format", ["<think>a</think>b", "b", "<think><think></think>"]) == [1, 0, 0]
    rewards = rewards_of("repetition:2", ["a b a b a b", "a b c", "a"])
    assert rewards[0] is not None
    assert math.isclose(rewards[0], 2 / 5 - 1)
    assert rewards[1:] == [0, 0]


def test_a_functions_text_goes_to_standard_error(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    functions = RewardFunctions(f"{file}:lengths")
    functions.score(["p"], ["a"], [[1]], [{}])
    functions.close()
    assert "printed by a reward function" in textwrap.dedent(capfd.readouterr().err)


PRINTS = r"""
import os, pathlib, sys, time
def prints(completions, **columns):
    print("\x1b]0;owned\x07\x1b[2J", flush=True)
    os.write(2, b"\xff\n")
    return [0.0] * len(completions)
def hangs(completions, **columns):
    pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
    time.sleep(600)
"""
PARENT = """
import os, sys, threading, time, pathlib
from wgpu_lora.train.rewards.reward_functions import RewardFunctions
def end():
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
threading.Thread(target=end).start()
RewardFunctions(sys.argv[2]).score(["p"], ["a"], [[1]], [{}])
"""


def test_what_a_function_prints_does_nothing_to_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rewards.py").write_text(PRINTS)
    functions = RewardFunctions(f"{tmp_path}/rewards.py:prints")
    assert functions.score(["p"], ["a"], [[1]], [{}]).values.tolist() == [[0.0]]
    functions.close()
    assert capfd.readouterr().err == "\\x1b]0;owned\\x07\\x1b[2J\n\\xff\n"


def test_a_function_that_hangs_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(PRINTS)
    arguments = [str(tmp_path / "pid"), f"{tmp_path}/rewards.py:hangs"]
    process = subprocess.run([sys.executable, "-c", PARENT, *arguments], timeout=120)
    assert process.returncode == -signal.SIGKILL
    end = time.monotonic() + 60
    while psutil.pid_exists(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < end
        time.sleep(0.05)
