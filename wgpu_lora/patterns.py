"""Other people's regular expressions over module names: what Python's `re` means by them, in bounded time.

Names with dots and anchors, which is what nearly all patterns are, cannot take long and are matched here. All others
are matched in a child of this process, together, which the system ends after a second of computing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from wgpu_lora.errors import UserError

SECONDS = 1  # of computing
PATIENCE = 10.0  # seconds on a busy machine
IMPATIENCE = 2.0  # where the system does not bound computing
MAX_CHARACTERS = 1 << 18  # of all patterns together
_PLAIN = re.compile(r"\^?(?:\\\.|[\w.-])*\$?", re.ASCII)
_MOST_HERE = 50_000  # pairs of a pattern and a name
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
    plain = all(map(_PLAIN.fullmatch, patterns)) and len(patterns) * len(names) <= _MOST_HERE
    meant = [[rf"(.*\.)?({pattern})" if endings else pattern for pattern in group] for group in groups]
    if plain:
        compiled = [[re.compile(pattern) for pattern in group] for group in meant]
        return [[_first(group, name) for name in names] for group in compiled]
    return _in_child(groups, meant, names)


def _first(patterns: Sequence[re.Pattern[str]], name: str) -> int | None:
    return next((i for i, pattern in enumerate(patterns) if pattern.fullmatch(name)), None)


def _in_child(
    groups: Sequence[Sequence[str]], meant: Sequence[Sequence[str]], names: Sequence[str]
) -> list[list[int | None]]:
    too_long = UserError("matching the patterns exceeded its computation limit: simplify them")
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
        group, number = answer["bad"]
        raise UserError(f"{groups[group][number]!r:.200} is no regular expression ({answer['detail']:.200})")
    found: list[list[int | None]] = answer["found"]
    return found
