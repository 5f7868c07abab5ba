"""Synthetic training rows, for recipes whose data are not available. All answers are correct."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from wgpu_lora.atomic import check_new, write_new_bytes

Row = dict[str, str]
THINGS = ("crate", "shelf", "basket", "train", "garden", "library", "boat", "kitchen", "market", "workshop")
GOODS = ("apples", "books", "lamps", "bolts", "seeds", "plates", "ropes", "keys", "tiles", "candles")
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
NAMES = ("Ada", "Bela", "Chidi", "Dana", "Emeka", "Fumi", "Goran", "Hana", "Ivo", "Jun")


def hive_mind(rng: np.random.Generator) -> Row:
    """A short question of one of five kinds about numbers, names and lists, with its answer."""

    def pick(words: Sequence[str]) -> str:
        return words[int(rng.integers(len(words)))]

    a, b, c = (int(n) for n in rng.integers(2, 40, 3))
    name, thing, goods, other = pick(NAMES), pick(THINGS), pick(GOODS), pick(GOODS)
    numbers = [int(n) for n in rng.integers(0, 99, 5)]
    listed = ", ".join(map(str, numbers))
    word = "".join(pick(SYLLABLES) for _ in range(4))  # there are too few real ones
    kinds = (
        (
            f"A {thing} holds {a} {goods} in each of {b} rows. {name} takes {c} away. How many are left?",
            f"{a} times {b} is {a * b}. Without {c} that leaves {a * b - c} {goods}."
            if a * b >= c
            else f"{a} times {b} is {a * b}, which is fewer than {c}: none are left.",
        ),
        (f"Sort these numbers from low to high: {listed}.", f"{', '.join(map(str, sorted(numbers)))}."),
        (f"Which is the largest of {listed}?", f"The largest is {max(numbers)}."),
        (
            f"{name} has {a} {goods} and {b} {other}. Write that as JSON.",
            json.dumps({"name": name, goods: a} | ({other: b} if other != goods else {goods: a + b})),
        ),
        (f"Spell the word '{word}' backwards.", f"'{word}' backwards is '{word[::-1]}'."),
    )
    prompt, completion = kinds[rng.integers(len(kinds))]
    return {"prompt": prompt, "completion": f" {completion}"}


GENERATORS: dict[str, Callable[[np.random.Generator], Row]] = {"hive-mind-0.5b": hive_mind}


def write_rows(make: Callable[[np.random.Generator], Row], path: Path, rows: int, seed: int) -> None:
    """Write `rows` distinct lines, the same for the same seed; `make` must be able to generate many more.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    check_new(path, "OUTPUT")
    rng = np.random.default_rng(seed)
    lines: dict[str, None] = {}  # in the order in which they were generated
    while len(lines) < rows:
        lines[json.dumps(make(rng)) + "\n"] = None
    write_new_bytes(path, "".join(lines).encode(), "OUTPUT")
