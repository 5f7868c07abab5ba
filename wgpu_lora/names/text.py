"""Counts, lists, shares, durations and untrusted texts in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def count_noun(count: int, noun: str, plural: str | None = None) -> str:
    """`1 row`, `2 rows`, `1,024 rows`; `plural` if it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def join_words(items: Sequence[object], extra: int = 0, limit: int | None = None) -> str:
    """`a`, `a and b`, `a, b and c`; with `extra`, or of more than `limit`, `a, b and 40 more`."""
    if limit is not None and len(items) > limit:
        items, extra = items[:limit], len(items) - limit
    texts = [str(item) for item in items] + ([f"{extra:,} more"] if extra else [])
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def common_prefix(first: str, second: str) -> str:
    """What two texts begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))]


def percent(value: float) -> str:
    """Per cent, with a digit more where there would be one alone."""
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def escape_unprintable(text: str, keep: str = "") -> str:
    """Escape the characters of a text that are not printable, except those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def duration(seconds: float, digits: int = 0) -> str:
    """8 s, 2:05 min, 1:02:05 h; seconds alone with digits after the point."""
    if round(seconds, digits) < 60:
        return f"{seconds:.{digits}f} s"
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes}:{remainder:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{remainder:02} h"
