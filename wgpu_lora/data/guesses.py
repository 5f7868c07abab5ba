"""Guess the meaning of keys in rows that fit no format, to suggest which to rename."""

from __future__ import annotations

from collections.abc import Collection, Sequence

# Other names of keys, the most common first; and of roles.
_QUESTION = ("instruction", "question", "query", "problem", "input", "user", "source")
_ANSWER = ("completion", "output", "answer", "response", "solution", "reply", "target", "assistant")
_OTHER_KEYS = {
    "messages": ("conversations", "dialogue", "dialog", "chat"),
    "conversations": ("conversation",),
    "prompt": _QUESTION,
    "completion": _ANSWER,
    "output": _ANSWER,
}
OTHER_ROLES = dict.fromkeys(("gpt", "bot", "ai", "model", "chatgpt", "bing", "chatbot", "bard", "agent"), "assistant")
OTHER_ROLES |= dict.fromkeys(("human", "person", "instruction"), "user") | {
    "observation": "tool",
    "tool_response": "tool",
}


def renaming(names: Sequence[str], formats: Sequence[Sequence[str]]) -> str | None:
    """Advice on which keys to rename, for one of the formats, given by their required keys; None without a guess."""
    known = {name.strip().lower(): name for name in names}
    if "chosen" in known and "rejected" in known and not any("chosen" in keys for keys in formats):
        return f"these are preferences; rename {known['chosen']!r} to 'completion' to train on the chosen answers alone"
    first = {keys[0] for keys in formats}
    guesses = [guess for keys in formats if (guess := _renamed(known, keys, first - {*keys}))]
    if not guesses:
        return None
    fewest = min(guesses, key=len)
    return f"rename {' and '.join(f'{name!r:.80} to {key!r}' for name, key in fewest.items())}"


def _renamed(known: dict[str, str], keys: Sequence[str], taken: Collection[str]) -> dict[str, str]:
    """New names of keys, by the old ones, with which all of `keys` are there; empty if that cannot be guessed.

    known: names by their lower case; taken: keys that mean something else.
    """
    found: dict[str, str] = {}
    for key in keys:
        left = {name for name in known if known[name] not in found and name not in taken} - ({*keys} - {key})
        name = next((name for name in (key, *_OTHER_KEYS.get(key, ())) if name in left), None)
        if name is None:
            return {}
        found[known[name]] = key
    return {name: key for name, key in found.items() if name != key}
