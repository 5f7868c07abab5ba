"""The child process of untrusted_patterns.py: JSON patterns and names on stdin, the matches as JSON on stdout."""

import json
import re
import sys
from contextlib import suppress


def limit(seconds: int) -> None:
    """Limit CPU time and memory if the system can; elsewhere only the parent's time limit applies."""
    try:
        import resource
    except ImportError:
        return
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, 1 << 30, 1 << 30),
    ):
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (soft, hard))


def main() -> None:
    request = json.load(sys.stdin)
    limit(request["seconds"])
    groups: list[list[re.Pattern[str]]] = []
    for number, group in enumerate(request["groups"]):
        groups.append([])
        for pattern in group:
            try:
                groups[-1].append(re.compile(pattern))
            except (re.error, RecursionError, OverflowError) as error:
                detail = getattr(error, "msg", str(error))  # without the position, which is that in a longer pattern
                json.dump({"bad": [number, len(groups[-1])], "detail": detail}, sys.stdout)
                return
    found = [
        [next((i for i, pattern in enumerate(group) if pattern.fullmatch(name)), None) for name in request["names"]]
        for group in groups
    ]
    json.dump({"found": found}, sys.stdout)


if __name__ == "__main__":
    main()
