"""Other programs' names of options, and typing errors: which option is meant, or what to do instead."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection, Mapping
from functools import cache
from numbers import Integral, Real
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.names.instead import ANYWHERE, SENTENCES
from wgpu_lora.names.naming import flag, setting
from wgpu_lora.names.others import ALIASES, VALUES, WORDS

_MARK = re.compile(r"\{(\w+)(?:=([^}]*))?\}")
CLOSE, NEARLY = 0.87, 0.9  # how alike, of 1, letters have to be
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


def instead(name: str, known: Collection[str]) -> str | None:
    """What to do instead of an option that other programs have, as a sentence.

    None where nothing is said of it, or of one that is nearly so called, or only of options that this command has not.
    """
    table = _table()[1]
    meant = name if name in table else _by_letters(name, [*known, *aliases_of(known), *table], NEARLY)
    for said in table.get(meant or "", ()):
        plain = said.removeprefix(TRAINING)
        needed = {option for option, _ in _MARK.findall(plain)} | ({TRAINS} if said != plain else set())
        if needed <= set(known):
            return f"{flag(name)} {_MARK.sub(_called, plain)}."
    return None


def _called(mark: re.Match[str]) -> str:
    if mark[2] is None:
        return flag(mark[1])
    try:
        return setting(mark[1], ast.literal_eval(mark[2]))
    except (ValueError, SyntaxError):
        return setting(mark[1], mark[2])


def advice(name: str, known: Collection[str], otherwise: str) -> str:
    """What to say of a name that nobody has: the options that may be meant, by its letters or else by its words."""
    meant = nearest(name, known)
    return f"did you mean {' or '.join(meant)}?" if meant else otherwise


def nearest(name: str, known: Collection[str]) -> list[str]:
    """The options that a name may mean, as they are called here."""
    others = aliases_of(known)
    letters = _by_letters(name, [*known, *others], CLOSE)
    target = others.get(letters or "", letters)
    if target in known:
        return [flag(str(target))]
    found = [option for word in name.lower().split("_") for option in _table()[2].get(word, ()) if option in known]
    # What several words speak of comes first.
    best = [option for option in dict.fromkeys(found) if found.count(option) == max(map(found.count, found))]
    return [flag(option) for option in best[:3]]


def _by_letters(name: str, names: Collection[str], least: float) -> str | None:
    """The name that differs least from another, if they are at least so alike."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=least)), None)


def real_names(
    values: Mapping[str, Any],
    known: Collection[str],
    where: str,
    what: str = "option",
    otherwise: str | None = None,
) -> dict[str, Any]:
    """Values by the names of options, other programs' names and dashes understood; numbers of NumPy become Python's.

    Args:
        where: what the values are of, and `what` they are; the errors begin with them.
        otherwise: said where no option is near, by default where those of training are listed.

    Raises:
        UserError: a name is not known, or two stand for one option.
    """
    in_python = flag("a_name") == "a_name"
    listed = "help(wgpu_lora.finetune)" if in_python else "'wgpu-lora finetune --help-all'"
    otherwise = otherwise or f"{listed} lists the options."
    others = aliases_of(known)
    given: dict[str, Any] = {}
    called: dict[str, str] = {}
    for key, value in values.items():
        typed = str(key).replace("-", "_")
        name = others.get(typed, typed)
        if name not in known:
            said = instead(typed, [*known, "recipe"])
            if said:
                raise UserError(f"{where}: {said}")
            raise UserError(f"{where} has an unknown {what} '{key}': {advice(typed, known, otherwise)}")
        if name in given:
            raise UserError(f"{where}: {flag(called[name])} and {flag(typed)} are the same {what}: leave one out.")
        given[name], called[name] = _builtin(value), typed
    return given


def real_value(name: str, value: Any) -> Any:
    """The value of an option where others call it something else."""
    said = VALUES.get(name, {}) if isinstance(value, str) else {}
    return next((real for real, others in said.items() if value in others.split()), value)


def _builtin(value: Any) -> Any:
    """A number of NumPy's, say from a sweep, as JSON has it."""
    if isinstance(value, bool | int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
