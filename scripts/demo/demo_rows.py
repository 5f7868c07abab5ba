"""The demo's rows: three-step requests for the fine-tune, and the simpler requests of the pretraining corpus.

Fine-tuning asks for filter, map and reduce in one function. Pretraining never does: it has single operations, a
filter followed by a map, and a few unrelated little functions, and no reduce ever stands with another step. So the
base knows every word of a request, but not how to combine all three.

    python -m scripts.demo.demo_rows OUTPUT prompts

writes OUTPUT/train.jsonl for reinforcement learning: 2,400 rows of combinations that are not held out, and

    python -m scripts.demo.demo_rows OUTPUT [style|steps]

preference pairs to OUTPUT/train.jsonl and OUTPUT/valid.jsonl, from the demo's training and held-out rows. The
chosen answer is the row's. The rejected one is, for `style`, the same function with a comprehension instead of a loop;
for `steps`, the same answer with two lines (of the filter, the map and the reduction) of other rows' answers.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# -- operations, phrased and in Python ---------------------------------------------------------------------------------


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


# -- whether a function occurs in training rows ------------------------------------------------------------------------

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def fingerprints(source: str) -> Iterator[str]:
    """The fingerprint of every function in `source`, including nested ones and methods; none if it is not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            # In place: the functions inside come later, and renaming them again from their own start is harmless.
            yield _fingerprint(node)


def _fingerprint(function: ast.AST) -> str:
    for node in ast.walk(function):
        if isinstance(node, FUNCTIONS):
            documented = ast.get_docstring(node, clean=False) is not None
            node.body, node.decorator_list, node.returns = node.body[documented:], [], None
        elif isinstance(node, ast.arg):
            node.annotation = None
    names: dict[str, str] = {}
    for node in ast.walk(function):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                node.name = names.setdefault(node.name, f"v{len(names)}")
            case ast.arg():
                node.arg = names.setdefault(node.arg, f"v{len(names)}")
            case ast.Name():
                node.id = names.setdefault(node.id, f"v{len(names)}")
            case ast.Constant():
                node.value = node.kind = None
    return ast.dump(function).replace("AsyncFunctionDef(", "FunctionDef(")


def answer(row: dict) -> str:
    """The assistant's text in a `messages` row."""
    return row["messages"][-1]["content"]


def find_leaks(heldout: Iterable[dict], sources: Iterable[str]) -> list[str]:
    """The held-out answers whose function also occurs in one of the source texts."""
    candidates = [(print_, answer(row)) for row in heldout for print_ in fingerprints(answer(row))]
    prints = {print_ for print_, _ in candidates}
    hit = {print_ for text in sources for print_ in fingerprints(text) if print_ in prints}
    return [text for print_, text in candidates if print_ in hit]


# -- rows --------------------------------------------------------------------------------------------------------------

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


def request_text(templates: tuple[str, ...], name: str, rng: random.Random, *phrases: str) -> str:
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
            request = request_text(ONE_STEP, name, rng, text).replace("(xs)", f"({args})")
            request = request.replace("Given integers xs, ", "The function ").replace(" over a list of integers", "")
            yield messages(request, f"def {name}({args}):\n{body}")
        elif rng.random() < 0.2:
            first, second = rng.choice(FILTERS).draw(rng), rng.choice(MAPS).draw(rng)
            code = compose(name, first.code(), second.code(), "out")
            yield messages(request_text(TWO_STEPS, name, rng, first.text, second.text), code)
        else:
            step = rng.choice(rng.choice(kinds)).draw(rng)
            yield messages(request_text(ONE_STEP, name, rng, step.text), single(step, name))


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
    return messages(request_text(THREE_STEPS, name, rng, *(step.text for step in steps)), code) | {
        "check": "\n".join(f"assert {name}({xs!r}) == {y!r}" for xs, y in zip(inputs, right, strict=True)),
        "name": name,
        "steps": [step.op.key for step in steps],
    }


def three_operations() -> list[tuple[Op, Op, Op]]:
    """All filters, maps and reductions with at most one constant: which number belongs to which step is more than a
    model this small can learn from a few hundred rows, and not what the demo is about."""
    return [(f, m, r) for f in FILTERS for m in MAPS for r in REDUCES if sum(op.high > 0 for op in (f, m, r)) <= 1]


def prompt_rows(seed: int, count: int, heldout: list[dict]) -> list[dict]:
    """Rows as `demo_rows` makes them, with new numbers, names and words. None has a held-out row's name, operations or
    fingerprint."""
    rng, rows = random.Random(f"prompts {seed}"), list[dict]()
    prints = {print_ for row in heldout for print_ in fingerprints(answer(row))}
    names, steps = {row["name"] for row in heldout}, [row["steps"] for row in heldout]
    combinations = [ops for ops in three_operations() if [op.key for op in ops] not in steps]
    while len(rows) < count:
        rng.shuffle(combinations)
        for ops in combinations:
            row = three_step_row((ops[0].draw(rng), ops[1].draw(rng), ops[2].draw(rng)), rng)
            if row and row["name"] not in names and prints.isdisjoint(fingerprints(answer(row))):
                rows.append(row)
    return rows[:count]


def demo_rows(seed: int, train: int, heldout: int) -> tuple[list[dict], list[dict]]:
    """The demo's two files: no held-out row shares its fingerprint, or its three operations, with a training row."""
    rng = random.Random(f"demo {seed}")
    combinations = three_operations()
    rng.shuffle(combinations)
    rows = []
    for ops in combinations:
        row = three_step_row((ops[0].draw(rng), ops[1].draw(rng), ops[2].draw(rng)), rng)
        if row is not None:
            rows.append((next(fingerprints(answer(row))), row))
    heldout_rows: dict[str, dict] = {}
    for print_, row in rows:
        # One row of each shape: many of the same would make the score coarser than it looks.
        if len(heldout_rows) < heldout:
            heldout_rows.setdefault(print_, row)
    return [row for print_, row in rows if print_ not in heldout_rows][:train], list(heldout_rows.values())


# -- preference pairs --------------------------------------------------------------------------------------------------

DATA = Path(__file__).parents[2] / "wgpu_lora" / "demo" / "data"
SEED, PROMPTS = 1, 2400  # of prompts
ANSWER_LINES = (3, 4, -1)  # lines of an answer: the filter, the map, the reduction


def with_comprehension(lines: list[str]) -> list[str]:
    define, _, _, condition, append, result = lines
    condition, value = condition.strip().removesuffix(":"), append.strip().removeprefix("out.append(").removesuffix(")")
    return [define, f"    out = [{value} for x in xs {condition}]", result]


def pairs(rows: list[dict], kind: str, seed: int) -> list[dict]:
    """A pair for each row."""
    rng = random.Random(seed)
    answers = [row["messages"][1]["content"].split("\n") for row in rows]
    result = []
    for row, lines in zip(rows, answers, strict=True):
        wrong = with_comprehension(lines) if kind == "style" else [*lines]
        for step in rng.sample(ANSWER_LINES, 2) if kind == "steps" else ():
            wrong[step] = rng.choice(sorted({answer[step] for answer in answers} - {lines[step]}))
        prompt, chosen = row["messages"]
        result.append({"prompt": [prompt], "chosen": [chosen], "rejected": [{**chosen, "content": "\n".join(wrong)}]})
    return result


def main(output: Path, kind: str = "style") -> None:
    train, heldout = (
        [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    if kind == "prompts":
        files = {"train": prompt_rows(SEED, PROMPTS, heldout)}
    else:
        files = {"train": pairs(train, kind, 1), "valid": pairs(heldout, kind, 2)}
    output.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
