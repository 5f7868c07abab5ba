"""Match untrusted regular expressions against module names, with the semantics of Python's `re`, in bounded time.

Nearly all patterns are strictly regular; RE2 gives them the same meaning and matches them in linear time. All others
(look-arounds, backreferences, flags) are matched together by `re` in a child process that is limited to one second of
CPU time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.processes.child_process import ChildEnded, ChildProcess, Limits, python_command, serve

LIMITS = Limits(memory=1 << 30, seconds=1.0)
MAX_CHARACTERS = 1 << 18  # of all patterns together
MAX_MEMORY = 1 << 20  # bytes that RE2 may take for a pattern
_REGULAR = re.compile(
    r"(?:[\w.^$|)*+?!@#%&=~,:;<>/ -]|\(\?:|\((?!\?)|\\[.dDwWsS-]|\[\^?[^\[\]\\:&~|]+\]|\{\d+(?:,\d*)?\})*", re.ASCII
)
_NOTHING_REPEATED = re.compile(r"(?:^|[\^$]|\((?!\?:))[*+?{]")  # RE2 accepts some of what is an error in `re`
_MOST_HERE = 200_000  # pairs of a pattern and a name


def first_matches(
    groups: Sequence[Sequence[str]], names: Sequence[str], endings: bool = False
) -> list[list[int | None]]:
    """For each group of patterns and each name, the index of the first pattern that matches the whole name.

    Args:
        endings: also match names with a prefix that ends with a dot, as PEFT's `get_pattern_key` does.

    Raises:
        UserError: a pattern is invalid, or matching takes more than about a second. The message has no full stop.
    """
    patterns = [pattern for group in groups for pattern in group]
    if sum(map(len, patterns)) > MAX_CHARACTERS:
        raise UserError(f"the patterns are longer than {MAX_CHARACTERS:,} characters together")
    is_small = len(patterns) * len(names) <= _MOST_HERE
    result: list[list[int | None]] = []
    child_patterns: list[list[tuple[int, str]]] = []  # by group, patterns that RE2 cannot match: (index, pattern)
    for group in groups:
        expressions = [rf"(.*\.)?({pattern})" if endings else pattern for pattern in group]
        regular = [is_small and _is_regular(pattern) for pattern in group]
        compiled = [
            _compiled(pattern) if is_regular else None for pattern, is_regular in zip(expressions, regular, strict=True)
        ]
        result.append([_first(compiled, name) for name in names])
        child_patterns.append([(i, pattern) for i, pattern in enumerate(expressions) if compiled[i] is None])
    if any(child_patterns):
        firsts = _in_child(groups, child_patterns, names)
        result = [
            [_minimum(*pair) for pair in zip(*group_pair, strict=True)]
            for group_pair in zip(result, firsts, strict=True)
        ]
    return result


def _is_regular(pattern: str) -> bool:
    """Whether RE2 gives it the same meaning, or none."""
    return _REGULAR.fullmatch(pattern) is not None and not _NOTHING_REPEATED.search(pattern)


def _compiled(pattern: str) -> Any:
    """Compile a pattern with RE2; None if it cannot, or would take too much memory."""
    import re2

    options = re2.Options()
    options.log_errors, options.max_mem, options.never_capture = False, MAX_MEMORY, True  # groups cost much time
    try:
        return re2.compile(pattern, options)
    except re2.error:
        return None


def _first(patterns: Sequence[Any], name: str) -> int | None:
    return next((i for i, pattern in enumerate(patterns) if pattern and pattern.fullmatch(name)), None)


def _minimum(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _in_child(
    groups: Sequence[Sequence[str]], child_patterns: Sequence[Sequence[tuple[int, str]]], names: Sequence[str]
) -> list[list[int | None]]:
    child = None
    try:
        child = ChildProcess(python_command(__name__, LIMITS), LIMITS)
        answer = child.ask([[[pattern for _, pattern in group] for group in child_patterns], list(names)])
    except ChildEnded as error:
        reason = "exceeded its computation limit: simplify them" if child else f"failed ({error})"
        raise UserError(f"matching the patterns {reason}") from None
    finally:
        if child:
            child.end()
    if "invalid" in answer:
        group, index = answer["invalid"]
        pattern = groups[group][child_patterns[group][index][0]]
        raise UserError(f"{pattern!r:.200} is not a regular expression ({answer['detail']:.200})")
    return [
        [None if index is None else child_patterns[group][index][0] for index in indices]
        for group, indices in enumerate(answer["matches"])
    ]


def _answer(request: tuple[list[list[str]], list[str]]) -> dict[str, Any]:
    """In the child: the first patterns of groups that match names, or the index of one that is invalid."""
    groups, names = request
    compiled: list[list[re.Pattern[str]]] = []
    for group in groups:
        compiled.append([])
        for pattern in group:
            try:
                compiled[-1].append(re.compile(pattern))
            except (re.error, RecursionError, OverflowError) as error:
                detail = getattr(error, "msg", str(error))  # without the position, which is that in a longer pattern
                return {"invalid": [len(compiled) - 1, len(compiled[-1])], "detail": detail}
    return {"matches": [[_first(group, name) for name in names] for group in compiled]}


def main() -> None:
    serve(_answer)
