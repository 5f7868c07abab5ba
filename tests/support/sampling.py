"""Test cases drawn by the commit: each commit tries others, and `make test-full` (WGPU_LORA_TESTS_FULL) all of them."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

FULL = bool(os.environ.get("WGPU_LORA_TESTS_FULL"))
ROOT = Path(__file__).parents[2]
T = TypeVar("T")


def git(*arguments: str) -> str:
    """What git prints, or nothing where there is no git, no repository or no such commit."""
    try:
        process = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return process.stdout if process.returncode == 0 else ""


@cache
def commit() -> str:
    return git("rev-parse", "HEAD").strip()


@cache
def changed_files() -> frozenset[str]:
    """The files that the commit and the working tree changed."""
    return frozenset(git("diff", "--name-only", "HEAD~1").splitlines())


def seeds(count: int, name: str) -> list[int]:
    """Seeds of the commit, other ones by name."""
    return random.Random(f"{commit()} {name}").sample(range(2**31), count)


def sample(cases: Sequence[T], share: float, always: Callable[[T], Any] = lambda case: False) -> list[T]:
    """A share of the cases, in their order, at least one, and those that `always` names."""
    count = max(1, round(share * len(cases)))
    indices = set(range(len(cases)) if FULL else random.Random(commit()).sample(range(len(cases)), count))
    return [case for index, case in enumerate(cases) if index in indices or always(case)]
