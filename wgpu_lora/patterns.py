"""Other people's regular expressions over module names: what Python's `re` means by them, in bounded time.

What is regular in the strict sense, as nearly all patterns are, means the same to RE2, which matches it in linear time.
All others (look-arounds, references, flags) are matched by `re` in a child of this process, together, which the system
ends after a second of computing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError

SECONDS = 1  # of computing
PATIENCE = 10.0  # seconds on a busy machine
IMPATIENCE = 2.0  # where the system does not bound computing
MAX_CHARACTERS = 1 << 18  # of all patterns together
MAX_MEMORY = 1 << 20  # bytes of RE2 for a pattern
_REGULAR = re.compile(
    r"(?:[\w.^$|)*+?!@#%&=~,:;<>/ -]|\(\?:|\((?!\?)|\\[.dDwWsS-]|\[\^?[^\[\]\\:&~|]+\]|\{\d+(?:,\d*)?\})*", re.ASCII
)
_MOST_HERE = 200_000  # pairs of a pattern and a name
_CHILD = Path(__file__).with_name("pattern_child.py")


def first_matches(
    groups: Sequence[Sequence[str]], names: Sequence[str], endings: bool = False
) -> list[list[int | None]]:
    """For each group of patterns and each name, which pattern is the first to match all of it (`re.fullmatch`).

    endings: a name may have more in front, which ends with a dot, as PEFT's `get_pattern_key` has it.

    Raises:
        UserError: a pattern is none, or matching takes more than about a second. The text says what is wrong, and has
            no full stop.
    """
    patterns = [pattern for group in groups for pattern in group]
    if sum(map(len, patterns)) > MAX_CHARACTERS:
        raise UserError(f"the patterns are longer than {MAX_CHARACTERS:,} characters together")
    here = len(patterns) * len(names) <= _MOST_HERE
    found: list[list[int | None]] = []
    others: list[list[tuple[int, str]]] = []  # by group, what RE2 does not have: a pattern's number, and what it means
    for group in groups:
        meant = [rf"(.*\.)?({pattern})" if endings else pattern for pattern in group]
        regular = [here and _REGULAR.fullmatch(pattern) is not None for pattern in group]
        compiled = [
            _compiled(pattern) if is_regular else None for pattern, is_regular in zip(meant, regular, strict=True)
        ]
        found.append([_first(compiled, name) for name in names])
        others.append([(i, pattern) for i, pattern in enumerate(meant) if compiled[i] is None])
    if any(others):
        firsts = _in_child(groups, others, names)
        found = [[_least(*pair) for pair in zip(*both, strict=True)] for both in zip(found, firsts, strict=True)]
    return found


def _compiled(pattern: str) -> Any:
    """The pattern as RE2 has it; None where it has not, or would take too much memory."""
    import re2

    options = re2.Options()
    options.log_errors, options.max_mem = False, MAX_MEMORY
    try:
        return re2.compile(pattern, options)
    except re2.error:
        return None


def _first(patterns: Sequence[Any], name: str) -> int | None:
    return next((i for i, pattern in enumerate(patterns) if pattern and pattern.fullmatch(name)), None)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _in_child(
    groups: Sequence[Sequence[str]], others: Sequence[Sequence[tuple[int, str]]], names: Sequence[str]
) -> list[list[int | None]]:
    too_long = UserError("matching the patterns exceeded its computation limit: simplify them")
    meant = [[pattern for _, pattern in group] for group in others]
    request = json.dumps({"groups": meant, "names": list(names), "seconds": SECONDS})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_CHILD)],
            input=request.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE if os.name == "posix" else IMPATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise too_long from None
    if done.returncode:
        raise too_long
    answer = json.loads(done.stdout)
    if "bad" in answer:
        group, place = answer["bad"]
        pattern = groups[group][others[group][place][0]]
        raise UserError(f"{pattern!r:.200} is no regular expression ({answer['detail']:.200})")
    return [
        [None if place is None else others[group][place][0] for place in places]
        for group, places in enumerate(answer["found"])
    ]
