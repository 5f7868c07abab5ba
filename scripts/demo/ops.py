"""The vocabulary of the demo's requests: filters, maps and reduces over a list of integers.

Each operation has a few English phrasings and one Python spelling. `{n}` is a constant drawn per row, `{src}` the
list that a reduce works on. A phrasing is imperative ("keep the even numbers"), so that any template can use it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """One operation: its name, its phrasings, its Python spelling, and the range of its constant if it has one."""

    key: str
    code: str
    phrases: tuple[str, ...]
    low: int = 0
    high: int = 0

    def draw(self, rng: random.Random) -> Step:
        """A use of this operation: a phrasing and a constant, both drawn from `rng`."""
        n = rng.randint(self.low, self.high) if self.high else 0
        return Step(self, n, rng.choice(self.phrases).replace("{n}", str(n)))


@dataclass(frozen=True)
class Step:
    """One use of an operation in one request."""

    op: Op
    n: int
    text: str

    def code(self, source: str = "out") -> str:
        """The Python spelling; a reduce reads the list called `source`."""
        return self.op.code.replace("{n}", str(self.n)).replace("{src}", source)


FILTERS = (
    Op("even", "x % 2 == 0", ("keep the even numbers", "keep only even values", "drop the odd numbers")),
    Op("odd", "x % 2 == 1", ("keep the odd numbers", "keep only odd values", "drop the even numbers")),
    Op("positive", "x > 0", ("keep the positive numbers", "keep only positive values", "pick what is above zero")),
    Op("negative", "x < 0", ("keep the negative numbers", "keep only negative values", "pick what is below zero")),
    Op("nonzero", "x != 0", ("drop the zeros", "skip every zero", "leave out the zeros")),
    Op("above", "x > {n}", ("keep numbers greater than {n}", "keep values above {n}", "pick what exceeds {n}"), 2, 15),
    Op("below", "x < {n}", ("keep numbers less than {n}", "keep values below {n}", "pick what is under {n}"), 2, 15),
    Op("multiple", "x % {n} == 0", ("keep the multiples of {n}", "keep values divisible by {n}"), 3, 9),
    Op("not_multiple", "x % {n} != 0", ("drop the multiples of {n}", "skip values divisible by {n}"), 3, 9),
    Op(
        "near",
        "abs(x) < {n}",
        ("keep numbers with absolute value below {n}", "keep values closer to zero than {n}"),
        4,
        15,
    ),
    Op("unequal", "x != {n}", ("remove every {n}", "drop values equal to {n}", "leave out each {n}"), 2, 15),
)

MAPS = (
    Op("double", "x * 2", ("double each one", "double every number", "take twice each value")),
    Op("square", "x * x", ("square each one", "square every number", "multiply each value by itself")),
    Op("cube", "x ** 3", ("cube each one", "cube every number", "raise each value to the third power")),
    Op("negate", "-x", ("negate each one", "flip the sign of every number", "change the sign of each value")),
    Op(
        "absolute",
        "abs(x)",
        ("take absolute values", "take the absolute value of each", "remove the sign of each value"),
    ),
    Op("halve", "x // 2", ("halve each one", "halve every number rounding down", "floor divide each value by two")),
    Op("plus", "x + {n}", ("add {n} to each one", "increase every number by {n}", "raise each value by {n}"), 2, 15),
    Op(
        "minus",
        "x - {n}",
        ("subtract {n} from each one", "decrease every number by {n}", "lower each value by {n}"),
        2,
        15,
    ),
    Op("times", "x * {n}", ("multiply each one by {n}", "scale every number by {n}"), 3, 15),
    Op("modulo", "x % {n}", ("take each one modulo {n}", "take remainders of division by {n}"), 3, 9),
)

REDUCES = (
    Op("sum", "sum({src})", ("return the sum", "return the total", "add everything up")),
    Op("largest", "max({src}, default=0)", ("return the largest or 0", "return the maximum, 0 if empty")),
    Op("smallest", "min({src}, default=0)", ("return the smallest or 0", "return the minimum, 0 if empty")),
    Op("ascending", "sorted({src})", ("sort the result", "return them in ascending order", "return a sorted list")),
    Op("descending", "sorted({src}, reverse=True)", ("sort from high to low", "return them in descending order")),
    Op("backwards", "{src}[::-1]", ("reverse the result", "return them in reverse order", "return them backwards")),
    Op("distinct", "len(set({src}))", ("count the distinct values", "return how many different values there are")),
    Op("first", "{src}[:{n}]", ("return the first {n}", "give back only the first {n}"), 2, 5),
    Op("text", '",".join(str(x) for x in {src})', ("join them with commas", "return a comma separated string")),
)

FIRST = (
    "amber apple birch blue bright calm cedar clear cloud coral crisp dusty early fair fast fern frost gold grand "
    "green happy hazel ivory jade jolly kind late light lilac lucky maple merry mild misty noble ocean olive opal "
    "pearl plain proud quick quiet rapid river royal ruby rusty silent silver smart snowy solid sunny swift tall "
    "tidy vivid warm wild wise young"
)
SECOND = (
    "anchor arrow badge basket beacon bell boat bottle branch bridge brush button candle castle chain circle coin "
    "corner dragon drum engine falcon feather field finch flame forest garden gate glass hammer harbor island kettle "
    "ladder lamp lantern leaf lemon marble meadow mirror mountain needle orchard otter paddle panda pebble pencil "
    "piano pocket puzzle rabbit ribbon robot rocket saddle shadow spoon stone tiger tower valley violin wagon window"
)


def draw_name(rng: random.Random) -> str:
    """A function name that says nothing about what the function does, so it can only be copied from the request."""
    return f"{rng.choice(FIRST.split())}_{rng.choice(SECOND.split())}"
