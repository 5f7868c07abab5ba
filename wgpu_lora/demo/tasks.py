"""What the demo teaches: requests for functions to its own model, and the fields of orders to a published one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from wgpu_lora.data import read_jsonl
from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import DEMO_HELDOUT, ORDERS_HELDOUT, ORDERS_TRAIN
from wgpu_lora.files.json_files import parse_object
from wgpu_lora.train.checks.asserts import parse_check
from wgpu_lora.train.checks.code_check import run_check
from wgpu_lora.train.checks.sandbox.sandbox_process import confinement


@dataclass(frozen=True)
class CheckedAnswer:
    """An answer and the result of its check."""

    text: str
    passed: bool
    reason: str


class Functions:
    """Python functions over a list of integers. Their unit checks run in a confined process.

    Raises:
        UserError: answers cannot be confined here and `allow_unconfined` is not given.
    """

    recipe: ClassVar[str] = "demo"
    new_tokens: ClassVar[int] = 96  # twice the longest answer
    name: ClassVar[str] = "Python functions over a list of integers"

    def __init__(self, allow_unconfined: bool):
        self._allow_unconfined = allow_unconfined
        self.check_method = f"run under {confinement(allow_unconfined)}"
        self.options: dict[str, Any] = {}
        self.rows = heldout_rows(DEMO_HELDOUT)
        for number, row in enumerate(self.rows, 1):
            parse_check(row.get("check"), f"{DEMO_HELDOUT}, line {number},")

    def check(self, text: str, row: dict[str, Any]) -> CheckedAnswer:
        """Run an answer."""
        result = run_check(text, row["check"], allow_unconfined=self._allow_unconfined)
        return CheckedAnswer(text, result.passed, result.reason)


class Orders:
    """The fields of a sentence that orders something, as JSON. Nothing of an answer is run."""

    recipe: ClassVar[str] = "orders"
    new_tokens: ClassVar[int] = 48  # twice the longest answer
    name: ClassVar[str] = "orders as JSON"
    check_method: ClassVar[str] = "read as JSON and compared, field by field"

    def __init__(self) -> None:
        self.options = {"data": str(ORDERS_TRAIN)}
        self.rows = heldout_rows(ORDERS_HELDOUT)

    def check(self, text: str, row: dict[str, Any]) -> CheckedAnswer:
        """Compare an answer with the fields of its row. What is before and after the JSON object does not count."""
        expected = json.loads(row["messages"][-1]["content"])
        try:
            fields = parse_object(text[text.find("{") : text.rfind("}") + 1].encode(), "the answer")
        except UserError:
            return CheckedAnswer(text, False, "not a JSON object")
        reasons = [
            f"{name} is {json.dumps(fields[name])}, not {json.dumps(value)}" if name in fields else f"{name} is missing"
            for name, value in expected.items()
            if name not in fields or fields[name] != value
        ]
        reasons += [f"{name} was not asked for" for name in fields if name not in expected]
        return CheckedAnswer(text, not reasons, "; ".join(reasons) or "passed")


Task = Functions | Orders


def heldout_rows(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(path)]
