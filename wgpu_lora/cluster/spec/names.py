"""Names of clusters, runs and tasks: parts of paths, of Ray's names and of messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from wgpu_lora.errors import UserError

LONGEST = 64
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST - 1}}}")


def is_safe(text: str) -> bool:
    """Whether a text can be a name: it is a plain part of a path on every system, and never an option."""
    return bool(_NAME.fullmatch(text))


def checked_name(text: str, what: str) -> str:
    """The text, if it can be a name; `what` begins the error, such as `The run's name`.

    Raises:
        UserError: it cannot.
    """
    if not is_safe(text):
        raise UserError(
            f"{what} is {text!a:.80}, but must be up to {LONGEST} letters, digits, '.', '_' and '-', of which the "
            "first is a letter or a digit."
        )
    return text


def safe_name(text: str) -> str:
    """A name as near to a text as possible."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:LONGEST].rstrip("._-") or "adapter"


def told_apart(names: Sequence[str], fixed: Collection[str] = ()) -> list[str]:
    """The names, numbered where they are alike but for their case, or like a fixed one.

    Some file systems do not tell names apart by their case.
    """
    found: list[str] = []
    seen = {name.casefold() for name in fixed}
    taken = seen | {name.casefold() for name in names}
    for name in names:
        one, number = name, 1
        while one.casefold() in seen or (number > 1 and one.casefold() in taken):
            number += 1
            one = f"{name[: LONGEST - 1 - len(str(number))]}-{number}"
        seen.add(one.casefold())
        found.append(one)
    return found
