"""The demo: held-out requests answered before and after fine-tuning, and checked by code."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.api import answer, load
from wgpu_lora.demo.tasks import CheckedAnswer, Functions, Orders, Task
from wgpu_lora.events import SILENT, Events
from wgpu_lora.files.atomic import numbered, write_bytes_atomic
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.train.job import Job
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.resolve_options import find_recipe, resolve_options
from wgpu_lora.train.run.records import RunRecord

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
