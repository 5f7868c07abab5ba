"""The state that the checks share: the recipe, the child processes, and their results, computed on first use."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from wgpu_lora.data import training_data
from wgpu_lora.data.row_files import FileSource
from wgpu_lora.errors import UserError
from wgpu_lora.formats.hub import resolve_model
from wgpu_lora.proof.heldout_rows import count_leaked_rows
from wgpu_lora.proof.watched_workers import Children
from wgpu_lora.train.finetune import with_demo_data
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.resolve_options import resolve_options
from wgpu_lora.train.run.records import RUN, RunRecord
from wgpu_lora.train.run.training_log import LOG, read_log
from wgpu_lora.weights.base_formats import DEFAULT_FORMAT
from wgpu_lora.words import count_noun
from wgpu_lora.worker.worker import Worker, WorkerFailed

T = TypeVar("T")


class Refused(UserError):
    """--devices cannot be followed, so there is nothing to prove."""


def computed_once(make: Callable[[Proof], T]) -> Callable[[Proof], T]:
    """A method that runs once. If a worker fails in it, the first caller fails, and for others it raises NotRun."""

    def get(proof: Proof) -> T:
        result, name = proof.made, make.__name__
        if isinstance(result.get(name), WorkerFailed):
            raise NotRun(f"it needs what failed before: {result[name]}")
        if name not in result:
            try:
                result[name] = make(proof)
            except WorkerFailed as error:
                result[name] = error
                raise
        return result[name]

    return get


@dataclass
class Proof:
    """One proof. args: the recipe's options, with files for data and eval_data. made: the results of its methods.

    select, discrete: --devices and --require-discrete.
    """

    out: Path
    recipe: Path
    args: TrainingArguments
    select: str | None
    children: Children
    discrete: int = 0
    allow_unconfined: bool = False
    made: dict[str, Any] = field(default_factory=dict)

    @computed_once
    def devices(self) -> dict[str, Any]:
        """The result of jobs.devices. Raises Refused if --devices cannot be followed."""
        result: dict[str, Any] = self.children.run(
            "devices", "proof-devices", select=self.select, discrete=self.discrete
        )
        if "refused" in result:
            raise Refused(result["refused"])
        return result

    def known_devices(self) -> dict[str, Any]:
        """The same for a report: empty if no check needed the devices, or if they could not be listed."""
        result = self.made.get("devices")
        return result if isinstance(result, dict) else {}

    def lacks_discrete(self) -> str | None:
        """Why --require-discrete is not met, if it is not."""
        if not self.discrete:
            return None
        try:
            used = sum(device["kind"] == "discrete" for device in hardware(self.devices()))
        except WorkerFailed as error:
            return f"--require-discrete {self.discrete}, but the devices could not be listed: {error}"
        if used >= self.discrete:
            return None
        gpus = count_noun(used, "discrete GPU is", "discrete GPUs are")
        return f"--require-discrete {self.discrete} is not met: {gpus} used"

    def used(self) -> list[int]:
        """Device indices; the first one trains."""
        if not self.devices()["used"]:
            raise NotRun("there is no device (check 1)")
        return self.devices()["used"]

    def device(self, index: int) -> dict[str, Any]:
        return self.devices()["devices"][index]

    @computed_once
    def training(self) -> Training:
        """The fine-tuning run, whether it succeeded or not."""
        return train(self.children, self.recipe, self.args, self.out / "run", self.used())

    def trained(self) -> Training:
        """The fine-tuning run. Raises NotRun if it did not succeed."""
        training = self.training()
        if training.code:
            raise NotRun(f"fine-tuning ended with exit code {training.code} (check 3)")
        return training

    @cached_property
    def seen_rows(self) -> tuple[int, int]:
        """How many of the held-out rows are training rows too, and how many there are."""
        return count_leaked_rows(Path(str(self.args.data)), Path(str(self.args.eval_data)))


def hardware(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The devices used, each once even if several APIs list it; `found` is the result of jobs.devices, or empty."""
    indices = {found["hardware"][index]: index for index in found.get("used", [])}
    return [found["devices"][index] for index in indices.values()]


def read_recipe(recipe: str) -> tuple[TrainingArguments, Path]:
    """A recipe's options, and its path.

    Raises:
        UserError: it cannot be read, has no held-out data, has data that are not files, or has another base_dtype.
    """
    args, path = resolve_options({}, recipe, "The command line")
    assert path
    args = with_demo_data(args)
    assert args.data
    data, heldout = training_data(args.data, args.eval_data, split=args.split, eval_split=args.eval_split)
    for source in (data, heldout):
        if source and not isinstance(source, FileSource):
            raise UserError(f"A proof reads files, but {source.path} is a data set: save it to a file.")
    if not heldout:
        raise UserError(f"The recipe {path} has no held-out data, which a proof needs: give it eval_data.")
    if args.base_dtype != DEFAULT_FORMAT:
        wanted = DEFAULT_FORMAT.upper()
        raise UserError(
            f"The recipe {path} has base_dtype {args.base_dtype}, but a proof is for {wanted}: leave it out."
        )
    resolve_model(args.model or "demo")
    return replace(args, data=data.path, split=None, eval_data=heldout.path, eval_split=None, resume=False), path


PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
LEFT_OUT = "left out by --only"
PROVEN, REFUTED, OPEN = "proven", "refuted", "open"  # refuted: a check failed

FACTS = ("name", "driver", "backend")  # of a device
Facts = Mapping[str, Any]


class NotRun(Exception):
    """A check cannot be carried out here; the message says why."""


class Finding:
    """The figures and the faults of a check; any fault makes it fail."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.faults: list[str] = []

    def expect(self, holds: object, fault: str) -> None:
        """Note the fault unless the condition holds; conditions are written so that NaN does not satisfy them."""
        if not holds:
            self.faults.append(fault)

    def expect_device(self, index: int, listed: Facts, who: str, said: Facts, names: Sequence[str] = FACTS) -> None:
        """Note a fault for each named fact of a device that differs from the list of devices."""
        for name in names:
            fault = f"{who} says {name} {said[name]}, but device {index} has {listed[name]}"
            self.expect(said[name] == listed[name], fault)


@dataclass(frozen=True)
class Check:
    """The outcome of a check, the reason in a sentence, and the figures that it is based on."""

    number: int
    name: str
    status: str
    seconds: float
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """All nine checks, by number. code: 1 if one failed or none passed.

    devices: what they ran on, see `run.on_devices`. lacking: why --require-discrete is not met.
    """

    checks: list[Check]
    directory: Path
    devices: str = ""
    lacking: str | None = None

    def numbers(self, kind: str) -> list[str]:
        """The numbers of the checks with a status; those that --only leaves out have LEFT_OUT instead of theirs."""
        return [str(c.number) for c in self.checks if kind == (LEFT_OUT if c.reason == LEFT_OUT else c.status)]

    @property
    def outcome(self) -> str:
        if self.lacking or self.numbers(FAILED):
            return REFUTED
        return PROVEN if len(self.numbers(PASSED)) == len(self.checks) else OPEN

    @property
    def proven(self) -> bool:
        return self.outcome == PROVEN

    @property
    def code(self) -> int:
        return int(self.outcome == REFUTED or not self.numbers(PASSED))

    @property
    def verdict(self) -> str:
        if self.proven:
            return f"Proven: all training and inference ran on wgpu, without CUDA, on {self.devices}."
        passed, left_out = self.numbers(PASSED), self.numbers(LEFT_OUT)
        reasons = [f"{kind}: {', '.join(n)}" for kind in (FAILED, NOT_RUN, LEFT_OUT) if (n := self.numbers(kind))]
        verdict = "Partly checked" if self.outcome == OPEN and left_out and passed else "Not proven"
        on = f" on {self.devices}" if self.devices else ""
        told = "; ".join([self.lacking, *reasons] if self.lacking else reasons)
        return f"{verdict}: {len(passed)} of {len(self.checks)} checks passed{on}; {told}."


POLL = 0.05  # seconds


@dataclass
class Evaluated:
    """An evaluation: its result, and the optimizer steps that ended while it computed; or why it failed."""

    result: dict[str, Any]
    steps: int
    failed: str | None = None


@dataclass
class Training:
    """The fine-tuning run and the evaluations around it, whether they succeeded or not.

    code, said: exit code and last words of the finetune job. record: None if it left none.
    before: the held-out loss on the training device, before any step.
    beside: evaluations on the other device, or afterwards on the same one if there is no other.
    """

    directory: Path
    code: int
    said: str
    before: dict[str, Any]
    beside: list[Evaluated]
    devices: list[int]
    log: list[dict[str, Any]]
    record: RunRecord | None


def evaluate_options(args: TrainingArguments, device: int) -> dict[str, Any]:
    """Options of an `evaluate` job that measures the run's held-out loss."""
    same = ("model", "max_length", "on_overflow", "base_dtype", "completion_only_loss", "enable_thinking")
    values = {name: getattr(args, name) for name in same}
    return {"data": args.eval_data, "device": device, "adapter": args.init_adapter, **values}


def finetune_options(recipe: Path, args: TrainingArguments, output: Path, device: int) -> dict[str, Any]:
    """Options of a `finetune` job of the recipe that logs every step; the loss before it is measured separately."""
    place = {"recipe": str(recipe), "output": str(output), "device": str(device)}
    return {**place, "eval_data": args.eval_data, "logging_steps": 1, "eval_on_start": False}


def train(children: Children, recipe: Path, args: TrainingArguments, output: Path, devices: list[int]) -> Training:
    """Trains on the first device, and evaluates meanwhile on the second; on a single device, afterwards.

    Raises:
        WorkerFailed: the evaluation before the run failed.
    """
    devices = devices[:2]
    first, last = devices[0], devices[-1]
    before = children.run("evaluate-before", "evaluate", **evaluate_options(args, first))
    options = finetune_options(recipe, args, output, first)
    finetune = None if last != first else children.start("finetune", "finetune", **options)
    if finetune:
        finetune.wait()
    with children.start("evaluate", "evaluate", asked=True, turns=True, **evaluate_options(args, last)) as evaluate:
        with suppress(WorkerFailed):  # then evaluating fails too
            evaluate.ask("prepare")
        finetune = finetune or children.start("finetune", "finetune", **options)
        beside = list(evaluations(evaluate, finetune))
    code = finetune.wait()
    log = read_log(output / LOG) if (output / LOG).is_file() else []
    record = RunRecord.read(output) if (output / RUN).is_file() else None
    return Training(output, code, finetune.failure_reason(), before, beside, devices, log, record)


def evaluations(evaluate: Worker, finetune: Worker) -> Iterator[Evaluated]:
    """Evaluates until steps ended while an evaluation computed, or until training has ended; at least once."""
    steps, training = 0, True
    while training and not steps:
        while (training := finetune.running()) and not step_times(finetune):
            time.sleep(POLL)
        try:
            result = evaluate.ask("evaluate")
        except WorkerFailed as error:
            yield Evaluated({}, 0, str(error))
            return
        now = time.time()  # computing is the last thing that an evaluation does
        steps = sum(now - result["seconds"] <= moment <= now for moment in step_times(finetune))
        yield Evaluated(result, steps)


def step_times(worker: Worker) -> list[float]:
    """When a worker's steps ended, in seconds since the epoch."""
    lines = worker.log.read_bytes().splitlines(keepends=True) if worker.log.is_file() else []
    events = [json.loads(line) for line in lines if line.endswith(b"\n")]  # the last may be incomplete
    return [event["time"] for event in events if event["event"] == "step"]
