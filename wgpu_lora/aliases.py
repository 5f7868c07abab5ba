"""Other programs' names of options, and typing errors: which option is meant, or what to do instead."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.instead import ANYWHERE, SENTENCES
from wgpu_lora.naming import flag, setting
from wgpu_lora.other_names import ALIASES, WORDS

_MARK = re.compile(r"\{(\w+)(?:=([^}]*))?\}")
TRAINING, TRAINS = "\0", "learning_rate"  # what marks training's sentences, and what only a command that trains has


@cache
def _table() -> tuple[dict[str, tuple[str, ...]], dict[str, list[str]], dict[str, list[str]]]:
    """By name: the options of an alias, sentences (training's begin with a mark that only training has), and the
    options that a word is about."""
    aliases = {name: options for options, names in ALIASES.items() for name in names.split()}
    sentences: dict[str, list[str]] = {}
    for said, names in (*((TRAINING + said, names) for said, names in SENTENCES), *ANYWHERE):
        for name in names.split():
            sentences.setdefault(name, []).append(said)
    words = {word: options.split() for together, options in WORDS.items() for word in together.split()}
    return aliases, sentences, words


def aliases_of(known: Collection[str]) -> dict[str, str]:
    """Other names -> the options of a command that they stand for; none that the command has itself."""
    found = {}
    for name, options in _table()[0].items():
        target = next((option for option in options if option in known), None)
        if target and name not in known:
            found[name] = target
    return found


def sentence(name: str, known: Collection[str]) -> str | None:
    """What to do instead of an option that other programs have; None where nothing is said of it, or only of options
    that this command does not have."""
    table = _table()[1]
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.92)
    for said in table[near[0]] if near else ():
        plain = said.removeprefix(TRAINING)
        needed = {option for option, _ in _MARK.findall(plain)} | ({TRAINS} if said != plain else set())
        if needed <= set(known):
            return f"{flag(near[0])} {_MARK.sub(_called, plain)}."
    return None


def _called(mark: re.Match[str]) -> str:
    if mark[2] is None:
        return flag(mark[1])
    try:
        return setting(mark[1], ast.literal_eval(mark[2]))
    except (ValueError, SyntaxError):
        return setting(mark[1], mark[2])


def unknown(name: str, known: Iterable[str], otherwise: str) -> str:
    """The end of a sentence about a name that nobody has: which was meant, by its letters or by its words."""
    near = nearest(name, list(known))
    return f": did you mean {' or '.join(near)}?" if near else f"; {otherwise}"


def nearest(name: str, known: Collection[str]) -> list[str]:
    """The options that a name may mean, as they are called here: by its letters, else by its words."""
    others = aliases_of(known)
    letters = difflib.get_close_matches(name, [*known, *others], n=1, cutoff=0.8)
    if letters:
        return [flag(others.get(letters[0], letters[0]))]
    words = _table()[2]
    found = [option for word in name.lower().split("_") for option in words.get(word, ()) if option in known]
    # What several words speak of comes first.
    ranked = sorted(dict.fromkeys(found), key=lambda option: -found.count(option))
    best = [option for option in ranked if found.count(option) == found.count(ranked[0])]
    return [flag(option) for option in best[:3]]


def real_names(
    values: Mapping[str, Any],
    known: Collection[str],
    where: str,
    what: str = "option",
    otherwise: str = "'wgpu-lora finetune --help-all' lists the options.",
) -> dict[str, Any]:
    """Values by the names of options, other programs' names and dashes understood.

    Args:
        where: what the values are of, and `what` they are; the errors begin with them.
        otherwise: said where no option is near.

    Raises:
        UserError: a name is not known, or two stand for one option.
    """
    others = aliases_of(known)
    given: dict[str, Any] = {}
    called: dict[str, str] = {}
    for key, value in values.items():
        typed = str(key).replace("-", "_")
        name = others.get(typed, typed)
        if name not in known:
            said = sentence(typed, [*known, "recipe"])
            if said:
                raise UserError(f"{where}: {said}")
            raise UserError(f"{where} has an unknown {what} '{key}'{unknown(typed, known, otherwise)}")
        if name in given:
            raise UserError(f"{where}: {flag(called[name])} and {flag(typed)} are the same {what}: leave one out.")
        given[name], called[name] = value, typed
    return given
