"""Samples of answers to rows with unit checks: generated in batches, and checked meanwhile in confined processes."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, EventForwarder, Events
from wgpu_lora.formats.tokenizer.examples import TEXT
from wgpu_lora.infer.answers import Answer, answer_slots, tokenizer_of
from wgpu_lora.infer.generation_options import GenerationOptions
from wgpu_lora.infer.named_adapters import BASE
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.names.spelling import flag
from wgpu_lora.train.checks.code_check import OUTCOMES, CheckResult
from wgpu_lora.train.checks.coding_problems import STOPS, Problem
from wgpu_lora.train.checks.sandbox.sandbox_process import Confinement, confinement

CHECKERS = 4  # answers checked at a time, at most


@dataclass(frozen=True)
class Sample:
    """A checked answer. row, sample: numbers from 0; adapter: its name, or "base". program: the code that was run."""

    row: int
    task: str
    adapter: str
    sample: int
    seed: int
    answer: Answer
    program: str
    result: CheckResult

    def as_dict(self) -> dict[str, Any]:
        return {
            "task_id": self.task,
            "adapter": self.adapter,
            "sample": self.sample,
            "seed": self.seed,
            "outcome": self.result.outcome,
            "reason": self.result.reason,
            "response": self.answer.text,
            "code": self.program,
            "tokens": len(self.answer.token_ids),
            "stop_reason": self.answer.stop_reason,
        }


@dataclass(frozen=True)
class PassRate:
    """Results of an adapter, or of the base model. pass_at_k: by k; outcomes: their counts; by_row: passed samples."""

    pass_at_k: dict[int, float]
    rows: int
    samples: int
    outcomes: dict[str, int]
    by_row: list[int]


@dataclass(frozen=True)
class PassRates:
    """Results by name, base first. completion: whether rows of HumanEval's form were continued as text."""

    rates: dict[str, PassRate]
    samples: list[Sample]
    seconds: float
    completion: bool
    confinement: Confinement

    def as_dict(self) -> dict[str, Any]:
        """The results without the samples, as JSON."""
        confined = {
            "filter": self.confinement.filter_error is None,
            "namespaces": list(self.confinement.namespaces),
            "limits": list(self.confinement.limits),
            "not_enforced": self.confinement.unenforced,
        }
        rates = [{"name": name, **asdict(rate)} for name, rate in self.rates.items()]
        return {"results": rates, "seconds": self.seconds, "completion": self.completion, "confinement": confined}


def seed_of(seed: int, row: int, sample: int) -> int:
    """The seed of a sample's draws, independent of the number of samples, rows and adapters."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{row}/{sample}".encode()).digest()[:8], "little")


def check_settings(settings: GenerationOptions, samples: int) -> None:
    """Raise UserError if all samples of a row would be equal."""
    if samples > 1 and settings.temperature == 0:
        raise UserError(
            f"At temperature 0, all {samples:,} samples of a row are equal: give a temperature above 0, or one sample."
        )


def measure(
    model: LoadedModel,
    problems: Sequence[Problem],
    ks: Sequence[int],
    samples: int,
    settings: GenerationOptions,
    adapters: Mapping[str, str | Path],
    slots: Mapping[str, int | None],
    *,
    completion: bool = False,
    timeout: float = 5.0,
    batch: int | None = None,
    allow_unconfined: bool = False,
    received: list[Sample] | None = None,
    events: Events = SILENT,
) -> PassRates:
    """Answer each row `samples` times with each of `slots`, and check every answer.

    Args:
        completion: rows of HumanEval's form are continued as text; always so if the model has no chat template.
        timeout: seconds of a check.
        received: gets the samples as they are checked, in order.
        events: receives `loading` and `answering`, with the answers that are checked.

    Raises:
        UserError: as for `answer_slots`, or the system cannot confine answers and `allow_unconfined` is not given.
    """
    confined = confinement(allow_unconfined)
    check_settings(settings, samples)
    completion = completion or not tokenizer_of(model, next(iter(adapters.values()), None)).has_chat_template
    begin = time.perf_counter()
    checked: list[Sample] = [] if received is None else received
    names = list(slots)
    forms: dict[bool, list[tuple[int, Problem]]] = {True: [], False: []}  # continued as text, or asked
    for number, problem in enumerate(problems):
        forms[problem.completes and completion].append((number, problem))
    total = len(problems) * samples * len(names)
    with ThreadPoolExecutor(min(CHECKERS, os.cpu_count() or 1), "checker") as checkers:
        queue = _Queue(checkers, checked, total, events)
        try:
            for plain, rows in forms.items():
                if not rows:
                    continue
                draws = [(problem, row, sample) for row, problem in rows for sample in range(samples)]
                queue.expect(
                    draws, settings.seed, plain, lambda problem, code: problem.check(code, timeout, allow_unconfined)
                )
                stops = tuple(dict.fromkeys((*settings.stop, *(STOPS if plain else ()))))
                answer_slots(
                    model,
                    [problem.model_prompt(plain) for problem, _, _ in draws for _ in names],
                    list(adapters.values()),
                    [slot for _ in draws for slot in slots.values()],
                    replace(settings, stop=stops, prompt_format=TEXT if plain else settings.prompt_format),
                    batch=batch,
                    names=names,
                    seeds=[seed_of(settings.seed, row, sample) for _, row, sample in draws for _ in names],
                    events=queue,
                )
            queue.collect(wait=True)
        except BaseException:
            checkers.shutdown(cancel_futures=True)
            queue.collect()
            raise
    checked.sort(key=lambda sample: (sample.row, sample.sample, names.index(sample.adapter)))
    rates = {
        name: _rate([sample for sample in checked if sample.adapter == name], problems, ks, samples) for name in names
    }
    return PassRates(rates, checked, time.perf_counter() - begin, completion, confined)


class _Queue(EventForwarder):
    """Checks answers in other threads as soon as they are complete, and collects the samples in order."""

    def __init__(self, checkers: ThreadPoolExecutor, checked: list[Sample], total: int, events: Events):
        super().__init__(events)
        self._checkers, self._checked, self._total = checkers, checked, total
        self._pending: deque[tuple[Callable[[CheckResult], Sample], Future[CheckResult]]] = deque()
        self._tokens = self._before = 0

    def expect(
        self,
        draws: Sequence[tuple[Problem, int, int]],
        seed: int,
        plain: bool,
        check: Callable[[Problem, str], CheckResult],
    ) -> None:
        """Name the samples that come next, as (problem, row, sample)."""
        self._draws, self._seed, self._plain, self._check = draws, seed, plain, check
        self._before = self._tokens

    def answering(self, done: int, total: int, tokens: int) -> None:
        self._tokens = self._before + tokens
        self.collect()

    def answered(self, number: int, name: str | None, answer: Answer) -> None:
        problem, row, sample = self._draws[number]
        program = problem.program(answer.text, self._plain)
        seed = seed_of(self._seed, row, sample)
        result = partial(Sample, row, problem.name, name or BASE, sample, seed, answer, program)
        self._pending.append((result, self._checkers.submit(self._check, problem, program)))

    def collect(self, wait: bool = False) -> None:
        """Take the samples that are checked, up to the first that is not; `wait`: all of them."""
        while self._pending and (wait or self._pending[0][1].done()):
            make_result, future = self._pending.popleft()
            if not future.cancelled():
                self._checked.append(make_result(future.result()))
            if wait:
                super().answering(len(self._checked), self._total, self._tokens)
        super().answering(len(self._checked), self._total, self._tokens)


def _rate(samples: Sequence[Sample], problems: Sequence[Problem], ks: Sequence[int], count: int) -> PassRate:
    passed = Counter(sample.row for sample in samples if sample.result.passed)
    outcomes = Counter(sample.result.outcome for sample in samples)
    return PassRate(
        {k: mean_pass_at_k([passed[row] for row in range(len(problems))], count, k) for k in ks},
        len(problems),
        count,
        {outcome: outcomes[outcome] for outcome in OUTCOMES},
        [passed[row] for row in range(len(problems))],
    )


MAX_SAMPLES = 10_000


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k) of n samples of which c passed, unbiased (Chen et al. 2021, equation 1).

    The quotient is the product of 1 - k/i over n - c < i <= n, so that no factorial overflows.
    """
    assert 0 <= passed <= samples, f"{passed} of {samples} samples"
    assert 1 <= k <= samples, f"k = {k} of {samples} samples"
    if samples - passed < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(samples - passed + 1, samples + 1)))


def mean_pass_at_k(passed: Iterable[int], samples: int, k: int) -> float:
    """The mean over rows, of each of which `samples` were drawn."""
    return float(np.mean([pass_at_k(samples, count, k) for count in passed]))


def parse_ks(text: str | int | Sequence[int], samples: int) -> list[int]:
    """The values of k in a text such as "1,5", ascending.

    Raises:
        UserError: one is not a number from 1 to `samples`.
    """
    name = flag("pass_at_k")
    if not 1 <= samples <= MAX_SAMPLES:
        raise UserError(f"{flag('samples')} must be from 1 to {MAX_SAMPLES:,}, not {samples:,}.")
    parts = text.split(",") if isinstance(text, str) else [text] if isinstance(text, int) else list(text)
    try:
        result = sorted({int(part) for part in parts})
    except (TypeError, ValueError):
        raise UserError(f"{name} must be numbers such as 1,5, not {text!r:.60}.") from None
    if not result or result[0] < 1:
        raise UserError(f"{name} must be numbers from 1, not {text!r:.60}.")
    if result[-1] > samples:
        raise UserError(
            f"{name} {result[-1]} needs at least {result[-1]:,} samples per row, but {flag('samples')} is {samples:,}: "
            "draw more, or leave it out."
        )
    return result
