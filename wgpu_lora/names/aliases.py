"""Resolve option names of other programs and typing errors to the option meant, or to advice."""

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
from wgpu_lora.names.others import ALIASES, VALUES, WORDS
from wgpu_lora.names.spelling import flag, setting

_MARK = re.compile(r"\{(\w+)(?:=([^}]*))?\}")
CLOSE, NEARLY = 0.87, 0.9  # least similarity of names, from 0 to 1
TRAINING, TRAINS = "\0", "learning_rate"  # mark of sentences about training; an option of training commands only


@cache
def _table() -> tuple[dict[str, tuple[str, ...]], dict[str, list[str]], dict[str, list[str]]]:
    """By name: options of an alias, sentences about an unsupported option, and options that a word refers to."""
    aliases = {name: options for options, names in ALIASES.items() for name in names.split()}
    sentences: dict[str, list[str]] = {}
    for sentence, names in (*((TRAINING + sentence, names) for sentence, names in SENTENCES), *ANYWHERE):
        for name in names.split():
            sentences.setdefault(name, []).append(sentence)
    words = {word: options.split() for together, options in WORDS.items() for word in together.split()}
    return aliases, sentences, words


def aliases_of(known: Collection[str]) -> dict[str, str]:
    """Aliases -> the options of a command, without names that are options of the command themselves."""
    found = {}
    for name, options in _table()[0].items():
        target = next((option for option in options if option in known), None)
        if target and name not in known:
            found[name] = target
    return found


def foreign_option_advice(name: str, known: Collection[str]) -> str | None:
    """The advice for an option of other programs, as a sentence.

    None if there is no advice for this or a similar name, or only advice that names options this command lacks.
    """
    table = _table()[1]
    meant = name if name in table else _by_letters(name, [*known, *aliases_of(known), *table], NEARLY)
    for sentence in table.get(meant or "", ()):
        plain = sentence.removeprefix(TRAINING)
        needed = {option for option, _ in _MARK.findall(plain)} | ({TRAINS} if sentence != plain else set())
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
    """The advice for an unknown name: the options that may be meant, or else `otherwise`."""
    meant = nearest(name, known)
    return f"did you mean {' or '.join(meant)}?" if meant else otherwise


def nearest(name: str, known: Collection[str]) -> list[str]:
    """The options that an unknown name may mean, by its spelling or else by its words."""
    others = aliases_of(known)
    letters = _by_letters(name, [*known, *others], CLOSE)
    target = others.get(letters or "", letters)
    if target in known:
        return [flag(str(target))]
    found = [option for word in name.lower().split("_") for option in _table()[2].get(word, ()) if option in known]
    # Prefer options that several words refer to.
    best = [option for option in dict.fromkeys(found) if found.count(option) == max(map(found.count, found))]
    longer = [option for option in known if len(name) > 2 and option.startswith(name)]
    return [flag(option) for option in best[:3] or sorted(longer, key=len)[:1]]


def _by_letters(name: str, names: Collection[str], least: float) -> str | None:
    """The most similar of `names`, if its similarity is at least `least`."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=least)), None)


def real_names(
    values: Mapping[str, Any],
    known: Collection[str],
    where: str,
    what: str = "option",
    otherwise: str | None = None,
) -> dict[str, Any]:
    """Values by option name: resolves aliases and dashes, and converts NumPy numbers to Python's.

    Args:
        where: where the values come from; starts the error messages.
        what: what the names are called in error messages.
        otherwise: advice if no option is similar; by default, where to find the list of training options.

    Raises:
        UserError: a name is unknown, or two names stand for the same option.
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
            sentence = foreign_option_advice(typed, [*known, "recipe"])
            if sentence:
                raise UserError(f"{where}: {sentence}")
            raise UserError(f"{where} has an unknown {what} '{key}': {advice(typed, known, otherwise)}")
        if name in given:
            raise UserError(f"{where}: {flag(called[name])} and {flag(typed)} are the same {what}: leave one out.")
        given[name], called[name] = _builtin(value), typed
    return given


def real_value(name: str, value: Any) -> Any:
    """Resolve the value of an option if other programs call it differently."""
    values = VALUES.get(name, {}) if isinstance(value, str) else {}
    return next((real for real, others in values.items() if value in others.split()), value)


def _builtin(value: Any) -> Any:
    """Convert a NumPy number, for example from a sweep, to a Python number."""
    if isinstance(value, bool | int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
