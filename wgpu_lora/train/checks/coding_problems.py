"""Rows with unit checks, their prompts, and the programs that answers make."""

from __future__ import annotations

import ast
import keyword
import re
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from wgpu_lora.data.column_types import ANYTHING, MESSAGES, TEXT, TEXT_OR_MESSAGES
from wgpu_lora.data.row_counts import RowCounts
from wgpu_lora.data.row_formats import RowFormat, RowFormats
from wgpu_lora.data.source import BadRow as Unusable
from wgpu_lora.data.source import Source
from wgpu_lora.errors import UserError
from wgpu_lora.infer.prompts import Prompt, check_prompt
from wgpu_lora.train.checks.asserts import MAX_CHECK, parse_check
from wgpu_lora.train.checks.code_check import CheckResult, run_check, run_test
from wgpu_lora.train.checks.sandbox.sandbox_child import completed

REQUEST = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{}\n```"
# Where the completion of a function ends (Chen et al. 2021, section 3.1).
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")
NO_CHECK = (
    "the row has no check: give 'prompt', 'test' and 'entry_point' as in HumanEval, or a prompt and a 'check' with "
    "asserts."
)
_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Problem:
    """A row: what the model is asked, and what its answer must do.

    name: its `task_id`, else its position in the file. prompt: messages or text; in HumanEval's form, code.
    """

    name: str
    prompt: Prompt

    completes = False

    def model_prompt(self, completion: bool) -> Prompt:
        """The prompt for the model. completion: a text that it continues, instead of a request that it answers."""
        return self.prompt

    def program(self, text: str, completion: bool) -> str:
        """The code that an answer is run as."""
        raise NotImplementedError

    def check(self, program: str, timeout: float, allow_unconfined: bool) -> CheckResult:
        raise NotImplementedError


@dataclass(frozen=True)
class AssertProblem(Problem):
    """A row whose `check` has asserts that compare calls of the answer with literals (checks/asserts.py)."""

    asserts: str

    def program(self, text: str, completion: bool) -> str:
        return code_of(text, {name for assertion in parse_check(self.asserts) for name, _, _ in assertion.calls})

    def check(self, program: str, timeout: float, allow_unconfined: bool) -> CheckResult:
        return run_check(program, self.asserts, timeout, allow_unconfined)


@dataclass(frozen=True)
class HumanEval(Problem):
    """A row of HumanEval's form: the beginning of a function, and `test`, which defines `check(candidate)`."""

    test: str
    entry_point: str

    completes = True

    def model_prompt(self, completion: bool) -> Prompt:
        assert isinstance(self.prompt, str)
        return self.prompt if completion else REQUEST.format(self.prompt.rstrip())

    def program(self, text: str, completion: bool) -> str:
        prompt = str(self.prompt)
        if completion:
            return prompt + text
        code = code_of(text, {self.entry_point})
        if _defines(code, {self.entry_point}):
            return f"{completed(prompt)}\n\n{code}"  # with the prompt's imports and other functions
        opening = prompt if prompt.endswith("\n") else f"{prompt}\n"
        return opening + (code if code.startswith((" ", "\t", "\n")) else textwrap.indent(code, "    "))

    def check(self, program: str, timeout: float, allow_unconfined: bool) -> CheckResult:
        return run_test(program, str(self.prompt), self.test, self.entry_point, timeout, allow_unconfined)


def _name(task: Any) -> str:
    return "" if task is None else str(task)[:80]


def _human_eval(row: Any) -> HumanEval:
    prompt, test, entry_point = row["prompt"], row["test"], row["entry_point"]
    if max(len(prompt), len(test)) > MAX_CHECK:
        raise UserError(f"'prompt' or 'test' has more than {MAX_CHECK:,} characters.")
    if not entry_point.isidentifier() or keyword.iskeyword(entry_point):
        raise UserError(f"'entry_point' is {entry_point!r:.60}, but must be the name of a function.")
    if not completed(prompt):
        raise UserError("'prompt' is not Python code that a completion can continue.")
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UserError(f"'test' cannot be parsed ({' '.join(str(error).split())}).") from None
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if not checks:
        raise UserError("'test' does not define check(candidate).")
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree)):
        raise UserError("'test' has no assert, so any answer would pass.")
    return HumanEval(_name(row["task_id"]), prompt, test, entry_point)


def _asserted(row: Any, prompt: Any) -> AssertProblem:
    messages = prompt
    while isinstance(messages, list) and len(messages) > 1 and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    check_prompt(messages)
    parse_check(row["check"], "the row")
    return AssertProblem(_name(row["task_id"]), messages, row["check"])


FORMATS: RowFormats[Problem] = RowFormats(
    (
        RowFormat({"prompt": TEXT, "test": TEXT, "entry_point": TEXT}, _human_eval, {"task_id": ANYTHING}),
        RowFormat(
            {"messages": MESSAGES, "check": TEXT}, lambda row: _asserted(row, row["messages"]), {"task_id": ANYTHING}
        ),
        RowFormat(
            {"prompt": TEXT_OR_MESSAGES, "check": TEXT},
            lambda row: _asserted(row, row["prompt"]),
            {"task_id": ANYTHING},
        ),
    )
)


def read_problems(source: Source) -> list[Problem]:
    """Read all rows.

    Raises:
        UserError: rows have no check, or one that cannot be run (with their positions); there is no row.
    """
    account, result = RowCounts(source), []
    for position, row in source.rows(FORMATS):
        try:
            if isinstance(row, Unusable):
                raise UserError(row.reason)
            if not (row.get("check") or (row.get("test") and row.get("entry_point"))):
                raise UserError(NO_CHECK)
            problem = FORMATS.read(row)
            result.append(problem if problem.name else replace(problem, name=str(position)))
        except UserError as error:
            account.add_bad(position, Unusable(str(error)))
    account.refuse_bad("fix them")
    if not result:
        raise UserError(f"{source.display_name} has no rows: give rows with checks.")
    return result


def code_of(text: str, names: set[str]) -> str:
    """The code in an answer: the first code block that defines one of `names`, else the first, else all of it."""
    text = text.rpartition("</think>")[2]
    blocks = [textwrap.dedent(block) if block.startswith((" ", "\t")) else block for block in _blocks(text)]
    return next((block for block in blocks if _defines(block, names)), next(iter(blocks), text))


def _blocks(text: str) -> Iterator[str]:
    return (item[1] for item in _BLOCK.finditer(text))


def _defines(code: str, names: Collection[str]) -> bool:
    """Whether code defines one of the names; by its text, since what a model wrote is only parsed when confined."""
    either = "|".join(map(re.escape, names))
    return bool(
        re.search(rf"^(?:(?:async +)?def|class) +(?:{either})\b|^(?:{either}) *(?::[^=\n]*)?=", code, re.MULTILINE)
    )
