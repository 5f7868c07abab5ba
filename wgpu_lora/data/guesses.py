"""Guess the meaning of keys in rows that fit no format, to suggest which to rename."""

from __future__ import annotations

from collections.abc import Sequence

# Common names for the parts of a row, the most common first; and for roles.
_ASKED = ("prompt", "instruction", "question", "query", "problem", "input", "user", "source")
_ANSWERED = ("completion", "output", "answer", "response", "solution", "reply", "target", "assistant")
_TURNS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant", "model": "assistant",
                "function": "tool", "observation": "tool"}  # fmt: skip


def renaming(names: Sequence[str]) -> str | None:
    """Advice on which keys to rename; None if their meaning cannot be guessed."""
    known = {name.strip().lower(): name for name in names}
    if "chosen" in known and "rejected" in known:
        return "these are preferences, which are not supported; the chosen answers can be trained on, as 'completion'"
    turns = next((known[name] for name in _TURNS if name in known), None)
    asked, answered = (next((name for name in each if name in known), None) for each in (_ASKED, _ANSWERED))
    if turns is not None:
        renamed = {turns: "messages"}
    elif asked and answered:
        wanted = ("instruction", "output") if asked == "instruction" else ("prompt", "completion")
        renamed = {known[asked]: wanted[0], known[answered]: wanted[1]}
    else:
        renamed = {known["text"]: "text"} if "text" in known else {}
    told = [f"{name!r:.80} to {new!r}" for name, new in renamed.items() if name != new]
    return f"rename {' and '.join(told)}" if told else None
