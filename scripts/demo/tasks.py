"""The demo's rows: three-step requests for the fine-tune, and the simpler requests of the pretraining corpus.

Fine-tuning asks for filter, map and reduce in one function. Pretraining never does: it has single operations, a
filter followed by a map, and a few unrelated little functions, and no reduce ever stands with another step. So the
base knows every word of a request, but not how to combine all three.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from .leaks import answer, fingerprints
from .ops import FILTERS, MAPS, REDUCES, Op, Step, draw_name

PROBES = [3, -4, 7, 12, -9, 0, 6, 25, 14, -30, 8, 5, 18, -1, 2, 7, 9]

THREE_STEPS = (
    "Write a Python function {name}(xs). {A}, {b}, and {c}.",
    "Write {name}(xs) in Python. {A}, then {b}, and finally {c}.",
    "Define a function {name}(xs) over a list of integers: {a}, {b}, then {c}.",
    "I need a Python function {name}(xs). It should {a}, {b} and {c}.",
    "Please write {name}(xs). First {a}, next {b}, and at the end {c}.",
    "Given integers xs, {name}(xs) should {a}, then {b}, then {c}. Write it in Python.",
)

TWO_STEPS = (
    "Write a Python function {name}(xs). {A} and {b}.",
    "Write {name}(xs) in Python. {A}, then {b}.",
    "Define a function {name}(xs) over a list of integers: {a}, {b}.",
    "I need a Python function {name}(xs). It should {a} and {b}.",
    "Please write {name}(xs). First {a}, next {b}.",
    "Given integers xs, {name}(xs) should {a}, then {b}. Write it in Python.",
)

ONE_STEP = (
    "Write a Python function {name}(xs). {A}.",
    "Write {name}(xs) in Python. {A}.",
    "Define a function {name}(xs) over a list of integers: {a}.",
    "I need a Python function {name}(xs). It should {a}.",
    "Please write {name}(xs). Just {a}.",
    "Given integers xs, {name}(xs) should {a}. Write it in Python.",
)

# Other little functions, so that the base does not take every request for one about a list.
OTHERS = (
    ("a, b", "return the larger of two numbers", "    return max(a, b)"),
    ("a, b", "return the smaller of two numbers", "    return min(a, b)"),
    ("a, b", "return the difference of a and b", "    return a - b"),
    ("a, b", "tell whether a divides b", "    return b % a == 0"),
    ("n", "tell whether n is even", "    return n % 2 == 0"),
    ("n", "return the factorial of n", "    out = 1\n    for i in range(2, n + 1):\n        out *= i\n    return out"),
    ("n", "list the squares below n", "    return [i * i for i in range(n)]"),
    ("n", "return the digits of n as a list", "    return [int(c) for c in str(n)]"),
    ("text", "reverse a string", "    return text[::-1]"),
    ("text", "turn a string into upper case", "    return text.upper()"),
    ("text", "count the words of a string", "    return len(text.split())"),
    ("text", "count the vowels of a string", '    return sum(c in "aeiou" for c in text)'),
    ("text", "tell whether a string is a palindrome", "    return text == text[::-1]"),
    ("text", "strip the spaces around a string", "    return text.strip()"),
    ("path", "read a text file", "    with open(path) as file:\n        return file.read()"),
    ("items", "return a dict that counts the items", "    counts = {}\n    for item in items:\n"
     "        counts[item] = counts.get(item, 0) + 1\n    return counts"),
)  # fmt: skip


def asking(templates: tuple[str, ...], name: str, rng: random.Random, *phrases: str) -> str:
    """A request for a function with these steps."""
    first = phrases[0]
    capital = first[0].upper() + first[1:]
    return rng.choice(templates).format(name=name, A=capital, **dict(zip("abc", phrases, strict=False)))


def messages(request: str, code: str) -> dict:
    """A row in `messages` form."""
    return {"messages": [{"role": "user", "content": request}, {"role": "assistant", "content": code}]}


def compose(name: str, cond: str | None, expr: str, result: str) -> str:
    """The loop every answer about a list is written as; a step that is missing leaves no trace in it."""
    lines = [f"def {name}(xs):", "    out = []", "    for x in xs:"]
    indent = "        "
    if cond is not None:
        lines.append(f"{indent}if {cond}:")
        indent += "    "
    return "\n".join([*lines, f"{indent}out.append({expr})", f"    return {result}"])


def single(step: Step, name: str) -> str:
    """The answer to a request with one operation."""
    if step.op in FILTERS:
        return compose(name, step.code(), "x", "out")
    if step.op in MAPS:
        return compose(name, None, step.code(), "out")
    return f"def {name}(xs):\n    return {step.code('xs')}"


def pretraining_rows(seed: int, count: int) -> Iterator[dict]:
    """The instruction part of the pretraining corpus, the same for the same seed."""
    rng = random.Random(f"pretraining {seed}")
    kinds: tuple[tuple[Op, ...], ...] = (FILTERS, MAPS, REDUCES)
    for _ in range(count):
        name = draw_name(rng)
        if rng.random() < 0.1:
            args, text, body = rng.choice(OTHERS)
            request = asking(ONE_STEP, name, rng, text).replace("(xs)", f"({args})")
            request = request.replace("Given integers xs, ", "The function ").replace(" over a list of integers", "")
            yield messages(request, f"def {name}({args}):\n{body}")
        elif rng.random() < 0.2:
            first, second = rng.choice(FILTERS).draw(rng), rng.choice(MAPS).draw(rng)
            code = compose(name, first.code(), second.code(), "out")
            yield messages(asking(TWO_STEPS, name, rng, first.text, second.text), code)
        else:
            step = rng.choice(rng.choice(kinds)).draw(rng)
            yield messages(asking(ONE_STEP, name, rng, step.text), single(step, name))


def _results(code: str, name: str, inputs: list[list[int]]) -> list[object]:
    space: dict = {}
    exec(code, space)
    return [space[name](list(xs)) for xs in inputs]


def _inputs(steps: tuple[Step, ...]) -> list[list[int]]:
    """Lists that tell these steps from similar ones: around every constant, with signs, repeats and zeros."""
    edges = [value for step in steps if step.n for value in (step.n - 1, step.n, step.n + 1, -step.n, 2 * step.n)]
    return [[], [0], [1, 2, 3, 4, 5, 6], PROBES, [-8, 11, -3, 10, 4, 4, -7, 30, 16], [*edges, 1, -2, 9, 10, 20]]


def three_step_row(steps: tuple[Step, Step, Step], rng: random.Random) -> dict | None:
    """A row of the demo, or None if a step makes no difference for the check's inputs (absolute of positive)."""
    name = draw_name(rng)
    cond, expr, result = (step.code() for step in steps)
    code, inputs = compose(name, cond, expr, result), _inputs(steps)
    right = _results(code, name, inputs)
    for poorer in (
        compose(name, None, expr, result),
        compose(name, cond, "x", result),
        compose(name, cond, expr, "out"),
        compose(name, cond, expr, result.replace("out", "xs")),
    ):
        if _results(poorer, name, inputs) == right:
            return None
    return messages(asking(THREE_STEPS, name, rng, *(step.text for step in steps)), code) | {
        "check": "\n".join(f"assert {name}({xs!r}) == {y!r}" for xs, y in zip(inputs, right, strict=True)),
        "name": name,
        "steps": [step.op.key for step in steps],
    }


def demo_rows(seed: int, train: int, heldout: int) -> tuple[list[dict], list[dict]]:
    """The demo's two files: no held-out row shares its fingerprint, or its three operations, with a training row."""
    rng = random.Random(f"demo {seed}")
    # At most one constant in a request: which number belongs to which step is more than a model this small can learn
    # from a few hundred rows, and not what the demo is about.
    combinations = [
        (f, m, r) for f in FILTERS for m in MAPS for r in REDUCES if sum(op.high > 0 for op in (f, m, r)) <= 1
    ]
    rng.shuffle(combinations)
    rows = []
    for ops in combinations:
        row = three_step_row((ops[0].draw(rng), ops[1].draw(rng), ops[2].draw(rng)), rng)
        if row is not None:
            rows.append((next(fingerprints(answer(row))), row))
    held: dict[str, dict] = {}
    for print_, row in rows:
        # One row of each shape: many of the same would make the score coarser than it looks.
        if len(held) < heldout:
            held.setdefault(print_, row)
    return [row for print_, row in rows if print_ not in held][:train], list(held.values())
