"""Caches of what a run's live teacher says about its rows: with them, no teacher is needed beside the student."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from pathlib import Path

from wgpu_lora.data import Prepared
from wgpu_lora.distill.build import write_cache
from wgpu_lora.distill.digests import template_digest
from wgpu_lora.distill.plan import Plan, plan_cache, standing
from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, Events, Passing
from wgpu_lora.infer.named import on_device
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.names.naming import flag
from wgpu_lora.share.refusals import advising
from wgpu_lora.strict_json import to_json
from wgpu_lora.train.slot import AdapterRun
from wgpu_lora.train.teachers import LiveTeacher

BATCH_TOKENS = 1024  # computed at a time
LOGITS = "f32"  # a live teacher's, so that training gets the same numbers


def cache_plans(run: AdapterRun, student: LoadedModel) -> dict[str, Plan]:
    """The caches that replace a run's live teacher, by the options that name them: `teacher_cache` and, if the held-out
    rows are data of their own, `eval_teacher_cache`.

    Raises:
        UserError: the run has no live teacher.
    """
    live, args = _teacher(run), run.args
    rows = {"teacher_cache": run.stream.prepared}
    if run.heldout and args.validation_split is not None:
        rows["teacher_cache"] = _joined(run.stream.prepared, run.heldout)
    elif run.heldout:
        rows["eval_teacher_cache"] = run.heldout
    names = (
        "compute_dtype",
        "on_overflow",
        "completion_only_loss",
        "enable_thinking",
        "template_date",
        "skip_bad_rows",
    )
    tokenizer = student.tokenizer.digest if student.tokenizer else None
    template = template_digest(student.tokenizer, args.template_kwargs())  # the student's encodes the rows
    plans = {}
    for name, prepared in rows.items():
        plan = plan_cache(
            live.model,
            prepared,
            live.kept if live.kept.random else replace(live.kept, seed=0),  # which nothing is drawn with
            logits=LOGITS,
            samples=None,
            batch_tokens=BATCH_TOKENS,
            template_kwargs=args.template_kwargs(),
            teacher={"adapter": live.adapter[2] if live.adapter else None, "config": live.model.config.digest()},
            options={option: getattr(args, option) for option in names},
        )
        plans[name] = replace(plan, header=replace(plan.header, tokenizer=tokenizer, template=template))
    return plans


def caches_digest(run: AdapterRun, plans: dict[str, Plan]) -> str:
    """Equal for runs that the same caches serve, wherever their files are; 32 hexadecimal digits."""
    live = _teacher(run)
    headers = {name: {**asdict(plan.header), "data": plan.header.data["sha256"]} for name, plan in plans.items()}
    for header in headers.values():
        header["teacher"] = [live.digest(), header["teacher"]["config"]]  # without its name
    return hashlib.sha256(to_json(headers, sort_keys=True).encode()).hexdigest()[:32]


def write_caches(run: AdapterRun, student: LoadedModel, output: Path, events: Events) -> dict[str, str]:
    """Write the caches of `cache_plans` into directories below `output` that are named as the options; shards that are
    finished there are kept. Returns the directories, by option.

    Raises:
        UserError: as `write_cache` and `standing`.
    """
    live, plans = _teacher(run), cache_plans(run, student)
    places = {name: output / name for name in plans}
    done = {name: standing(places[name], plan) for name, plan in plans.items()}
    adapter = run.args.teacher_adapter
    with (
        on_device(live.model, [adapter] if live.adapter and adapter else []) as adapters,
        advising("teacher", "teacher_top_k"),
    ):
        before, total = 0, sum(len(plan.rows) for plan in plans.values())
        for name, plan in plans.items():
            told = _Together(before, total, events)
            write_cache(places[name], plan, done[name], live.model, adapters, run.args.compute_dtype, told)
            before += len(plan.rows)
    return {name: str(place) for name, place in places.items()}


class _Together(Passing):
    """Counts the rows of all caches together."""

    def __init__(self, before: int, total: int, events: Events):
        super().__init__(events)
        self._before, self._total = before, total

    def evaluating(self, evaluating: Evaluating) -> None:
        super().evaluating(replace(evaluating, rows=self._before + evaluating.rows, total=self._total))


def _teacher(run: AdapterRun) -> LiveTeacher:
    if run.teacher is None:
        raise UserError(f"The run has no {flag('teacher')} that could be cached: give it one.")
    return run.teacher


def _joined(rows: Prepared, heldout: Prepared) -> Prepared:
    """All rows of data that some were held out of."""
    both = sorted([*rows.rows, *heldout.rows], key=lambda row: row.index)
    return replace(rows, rows=both, values=(), keys=rows.keys[:0])
