"""The demo: held-out requests answered before and after fine-tuning, and checked by code.

It teaches requests for functions to its own model, and the fields of orders to a published one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from wgpu_lora.api import answer, load
from wgpu_lora.data import read_jsonl
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.files.assets import DEMO_HELDOUT, ORDERS_HELDOUT, ORDERS_TRAIN
from wgpu_lora.files.atomic import numbered, write_bytes_atomic
from wgpu_lora.files.json_files import parse_object
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.train.checks.asserts import parse_check
from wgpu_lora.train.checks.code_check import run_check
from wgpu_lora.train.checks.sandbox.sandbox_process import confinement
from wgpu_lora.train.job import Job
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.resolve_options import find_recipe, resolve_options
from wgpu_lora.train.run.records import RunRecord


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


BATCH = 20  # requests answered together
RESULT = "demo.json"


@dataclass
class CheckedAnswers:
    """Results of all held-out requests. loss: of the held-out rows, None if not known yet."""

    answers: list[CheckedAnswer]
    loss: float | None = None

    @property
    def passed(self) -> int:
        return sum(checked.passed for checked in self.answers)

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "pass_rate": self.passed / len(self.answers),
            "loss": self.loss,
            "answers": [asdict(checked) for checked in self.answers],
        }


class _AnswerCounter(Events):
    """Counts what is checked instead of what is answered, and the tokens of all batches."""

    def __init__(self, events: Events, checked: list[CheckedAnswer], total: int):
        self._events, self._checked, self._total = events, checked, total
        self.before = 0

    def answering(self, done: int, total: int, tokens: int) -> None:
        self._events.answering(len(self._checked), self._total, self.before + tokens)


@dataclass
class Comparison:
    """A prepared run of the demo, and the results before and after it."""

    job: Job[Any]
    model: LoadedModel
    recipe: Path
    task: Task
    before: CheckedAnswers | None = None
    after: CheckedAnswers | None = None

    @classmethod
    def prepare(
        cls, model: str, output: str, device: str | None, changes: dict[str, Any], allow_unconfined: bool = False
    ) -> Comparison:
        """Load the model and data, and plan the run; `changes` are options that override the recipe.

        Args:
            model: `demo`, which learns functions, or an argument of `load`, which learns orders.

        Raises:
            UserError: for example, if answers cannot be confined here and `allow_unconfined` is not given.
        """
        task = Functions(allow_unconfined) if model == "demo" else Orders()
        options = {**task.options, **changes, "model": model, "output": str(numbered(Path(output))), "device": device}
        args, recipe = resolve_options(options, task.recipe, "The demo")
        loaded_model = load(model, device=device, base_dtype=args.base_dtype)
        return cls(prepare_job(args, loaded_model), loaded_model, recipe or find_recipe(task.recipe), task)

    def requests(self) -> list[str]:
        return [request_of(row) for row in self.task.rows]

    def measure(self, adapter: Path | None, events: Events = SILENT) -> CheckedAnswers:
        """Answers every held-out request greedily, and checks every answer.

        Args:
            events: hears how many requests are answered and checked, and how many tokens have come.
        """
        checked: list[CheckedAnswer] = []
        task = self.task
        counter = _AnswerCounter(events, checked, len(task.rows))
        for start in range(0, len(task.rows), BATCH):
            rows = task.rows[start : start + BATCH]
            prompts = [row["messages"][:-1] for row in rows]
            result = answer(
                self.model, prompts, adapter=adapter, max_new_tokens=task.new_tokens, batch=BATCH, events=counter
            )
            for completion, row in zip(result, rows, strict=True):
                checked.append(task.check(completion.text, row))
                counter.answering(0, 0, sum(len(item.token_ids) for item in result))
            counter.before += sum(len(item.token_ids) for item in result)
        return CheckedAnswers(checked)

    def trained(self, record: RunRecord, events: Events = SILENT) -> None:
        """Measures again, after the run that left this record; its held-out losses are those of the rows here."""
        assert self.before
        self.after = self.measure(self.job.run.directory, events)
        self.before.loss = record.state.first_eval_loss
        self.after.loss = record.state.last_eval_loss

    def pairs(self) -> list[tuple[str, CheckedAnswer, CheckedAnswer]]:
        """(request, before, after), starting with those that only succeed after training."""
        assert self.before
        assert self.after
        result = list(zip(self.requests(), self.before.answers, self.after.answers, strict=True))
        return sorted(result, key=lambda pair: pair[1].passed or not pair[2].passed)

    def write(self, record: RunRecord) -> Path:
        """Write the results to the run's demo.json."""
        assert self.before
        assert self.after
        path = self.job.run.directory / RESULT
        result = {
            "requests": self.requests(),
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "steps": record.state.step,
            "seconds": record.state.seconds,
            "recipe": str(self.recipe),
        }
        write_bytes_atomic(path, (json.dumps(result, indent=1) + "\n").encode())
        return path


def request_of(row: dict[str, Any]) -> str:
    return str(row["messages"][-2]["content"])
