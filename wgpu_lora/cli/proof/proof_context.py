"""What the checks share: the recipe, its held-out rows, the child processes with their results, and the outcomes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from wgpu_lora.cli.proof.watched_workers import Children
from wgpu_lora.cluster.worker.worker import Worker, WorkerFailed
from wgpu_lora.data import parse_example, read_examples, training_data
from wgpu_lora.data.curation.deduplication import example_parts, normalize_text
from wgpu_lora.data.example_formats import EXAMPLES
from wgpu_lora.data.row_files import FileSource, file_source
from wgpu_lora.data.source import strict_rows
from wgpu_lora.errors import UserError
from wgpu_lora.formats.hub import resolve_model
from wgpu_lora.formats.tokenizer.examples import Conversation, Example, Tokens
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import with_demo_data
from wgpu_lora.train.resolve_options import resolve_options
from wgpu_lora.train.run.records import RUN, RunRecord
from wgpu_lora.train.run.training_log import LOG, read_log
from wgpu_lora.weights.base_formats import AUTO, DEFAULT_FORMAT

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
LEFT_OUT = "left out by --only"
PROVEN, REFUTED, OPEN = "proven", "refuted", "open"  # refuted: a check failed


class NotRun(Exception):
    """A check cannot be carried out here; the message says why."""


@dataclass
class Finding:
    """The figures and the faults of a check; any fault makes it fail."""

    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def expect(self, holds: object, fault: str) -> None:
        """Note the fault unless the condition holds; conditions are written so that NaN does not satisfy them."""
        if not holds:
            self.faults.append(fault)

    def expect_device(self, listed: Mapping[str, Any], program: str, facts: Mapping[str, Any]) -> None:
        """Note a fault for each fact of a device used, such as its driver, that differs from the list of devices."""
        for name, value in facts.items():
            self.expect(value == listed[name], f"{program} has the {name} {value}, but the device has {listed[name]}")


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
    """All nine checks, by number. code: 1 if one failed or none passed. devices: what they ran on, see `on_devices`."""

    checks: list[Check]
    directory: Path
    devices: str = ""

    def numbers(self, kind: str) -> list[str]:
        """The numbers of the checks with a status; those that --only leaves out have LEFT_OUT instead of theirs."""
        return [str(c.number) for c in self.checks if kind == (LEFT_OUT if c.reason == LEFT_OUT else c.status)]

    @property
    def outcome(self) -> str:
        if self.numbers(FAILED):
            return REFUTED
        return PROVEN if len(self.numbers(PASSED)) == len(self.checks) else OPEN

    @property
    def code(self) -> int:
        return int(self.outcome == REFUTED or not self.numbers(PASSED))

    @property
    def verdict(self) -> str:
        if self.outcome == PROVEN:
            return f"Proven: all training and inference ran on wgpu, without CUDA, on {self.devices}."
        passed, partly = self.numbers(PASSED), self.outcome == OPEN and self.numbers(LEFT_OUT)
        reasons = [f"{kind}: {', '.join(n)}" for kind in (FAILED, NOT_RUN, LEFT_OUT) if (n := self.numbers(kind))]
        start = "Partly checked" if partly and passed else "Not proven"
        on = f" on {self.devices}" if self.devices else ""
        return f"{start}: {len(passed)} of {len(self.checks)} checks passed{on}; {'; '.join(reasons)}."


def carry_out(number: int, name: str, check: Callable[[Proof, Finding], str], proof: Proof) -> Check:
    """Runs a check, whose errors are faults."""
    begin, finding, status, reason = time.perf_counter(), Finding(), PASSED, ""
    try:
        reason = check(proof, finding)
    except NotRun as error:
        status, reason = NOT_RUN, str(error)
    except (WorkerFailed, UserError) as error:
        finding.faults.append(str(error))
    except Exception as error:  # an error in one check must not lose the findings of the others
        finding.faults.append(f"the check itself broke: {type(error).__name__}: {error}")
    if finding.faults:
        status, reason = FAILED, "; ".join(finding.faults)
    return Check(number, name, status, round(time.perf_counter() - begin, 2), reason, finding.figures)


# -- the held-out rows -------------------------------------------------------------------------------------------------


def rows_of(path: str) -> dict[str, dict[str, Any]]:
    """The rows of a file by their positions, such as 'data.jsonl, line 3'. Raises UserError if one cannot be read."""
    source = file_source(Path(path))
    return {source.locate(position): row for position, row in strict_rows(source, EXAMPLES)}


def request_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages before the last assistant turn; empty if there are none, or if `generate` cannot ask for this turn.

    It cannot for rows that are no conversations, or that have tools or options of the chat template.

    Raises:
        UserError: the row fits no format.
    """
    example = parse_example(row)
    if not isinstance(example, Conversation) or example.tools or example.template_kwargs:
        return []
    turns = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
    return example.messages[: turns[-1]] if turns else []


def count_leaked_rows(train: Path, heldout: Path) -> tuple[int, int]:
    """(rows of `heldout` with the content of a row of `train`, rows of `heldout`). Raises UserError."""
    contents = {_content(example) for _, example in read_examples(file_source(train))}
    leaked = [_content(example) in contents for _, example in read_examples(file_source(heldout))]
    return sum(leaked), len(leaked)


def _content(example: Example) -> tuple[str, ...]:
    """The normalised texts of a row, whatever is trained of it."""
    if isinstance(example, Conversation):
        example = Conversation(example.messages, frozenset())
    elif isinstance(example, Tokens):
        example = Tokens(example.input_ids, [])
    return tuple(map(normalize_text, example_parts(example)))


# -- the training run --------------------------------------------------------------------------------------------------


@dataclass
class Evaluated:
    """An evaluation: its result, and the optimizer steps that ended while it computed; or why it failed."""

    result: dict[str, Any]
    steps: int
    failed: str | None = None


@dataclass
class Training:
    """The fine-tuning run and the evaluations around it, whether they succeeded or not.

    code, reason: of its end. record: None if it left none.
    before: the held-out loss on the training device, before any step.
    evaluations: evaluations on the other device, or afterwards on the same one if there is no other.
    """

    directory: Path
    devices: list[int]
    code: int = 0
    reason: str = ""
    before: dict[str, Any] = field(default_factory=dict)
    evaluations: list[Evaluated] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    record: RunRecord | None = None


def evaluations(evaluate: Worker, finetune: Worker) -> Iterator[Evaluated]:
    """Evaluates until steps ended while an evaluation computed, or until training has ended; at least once."""
    steps, training = 0, True
    while training and not steps:
        training = any(event["event"] == "step" for event in finetune.events()) and finetune.running()
        try:
            result = evaluate.ask("evaluate")
        except WorkerFailed as error:
            yield Evaluated({}, 0, str(error))
            return
        now = time.time()  # computing is the last thing that an evaluation does
        lines = finetune.log.read_bytes().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]  # the last may be incomplete
        steps = sum(e["event"] == "step" and now - result["seconds"] <= e["time"] <= now for e in events)
        yield Evaluated(result, steps)


@dataclass
class Proof:
    """One proof. args: the recipe's options, with files for data and eval_data.

    devices: the result of worker_jobs.devices. discrete: --require-discrete.
    """

    out: Path
    recipe: Path
    args: TrainingArguments
    devices: dict[str, Any]
    children: Children
    discrete: int = 0
    allow_unconfined: bool = False
    differences: bool = True  # whether gradients are compared with differences of the loss

    def lacks_discrete(self) -> str | None:
        """Why --require-discrete is not met, if it is not."""
        count = sum(device["kind"] == "discrete" for device in hardware(self.devices))
        gpus = count_noun(count, "discrete GPU is", "discrete GPUs are")
        return None if count >= self.discrete else f"--require-discrete {self.discrete} is not met: {gpus} used"

    def device_indices(self) -> list[int]:
        """Device indices; the first one trains."""
        if not self.devices["used"]:
            raise NotRun("there is no device (check 1)")
        return self.devices["used"]

    def finetune_options(self, output: Path) -> dict[str, Any]:
        """Options of a `finetune` job of the recipe that logs every step; the loss before it is measured separately."""
        place = {"recipe": str(self.recipe), "output": str(output), "device": str(self.device_indices()[0])}
        return {**place, "eval_data": self.args.eval_data, "logging_steps": 1, "eval_on_start": False}

    @cached_property
    def training(self) -> Training:
        """The fine-tuning run on the first device, evaluated meanwhile on the second; on a single device, afterwards.

        It may have failed.
        """
        args, output, start = self.args, self.out / "run", self.children.start
        training = Training(output, self.device_indices()[:2])
        first, last = training.devices[0], training.devices[-1]
        shared_options = ("model", "max_length", "on_overflow", "base_dtype", "completion_only_loss", "enable_thinking")
        options = {
            "data": args.eval_data,
            "adapter": args.init_adapter,
            **{name: getattr(args, name) for name in shared_options},
        }
        with start("evaluate", "evaluate", interactive=True, turns=True, device=last, **options) as evaluate:
            try:
                training.before = self.children.run("evaluate-before", "evaluate", device=first, **options)
            except WorkerFailed as error:
                training.code, training.reason = error.code or 1, str(error)
                return training
            if first != last:
                with suppress(WorkerFailed):  # then evaluating fails too
                    evaluate.ask("prepare")
            finetune = start("finetune", "finetune", **self.finetune_options(output))
            if first == last:
                finetune.wait()
            training.evaluations = list(evaluations(evaluate, finetune))
        training.code, training.reason = finetune.wait(), finetune.failure_reason()
        training.log = read_log(output / LOG) if (output / LOG).is_file() else []
        training.record = RunRecord.read(output) if (output / RUN).is_file() else None
        return training

    def trained(self) -> Training:
        """The fine-tuning run. Raises NotRun if it did not succeed."""
        if self.training.code:
            raise NotRun(f"fine-tuning ended with exit code {self.training.code} (check 3)")
        return self.training

    @cached_property
    def step(self) -> dict[str, Any]:
        """The first step of the fine-tuning run, repeated by a child: the result of worker_jobs.step."""
        where = {"directory": str(self.trained().directory), "device": self.training.devices[0]}
        return self.children.run("step", "proof-step", **where, differences=self.differences)

    @cached_property
    def leaked_rows(self) -> tuple[int, int]:
        """How many of the held-out rows are training rows too, and how many there are."""
        return count_leaked_rows(Path(str(self.args.data)), Path(str(self.args.eval_data)))


def hardware(devices: dict[str, Any]) -> list[dict[str, Any]]:
    """The devices used, each once even if several APIs list it; from the result of worker_jobs.devices."""
    indices = {devices["hardware"][index]: index for index in devices["used"]}
    return [devices["devices"][index] for index in indices.values()]


def on_devices(devices: dict[str, Any]) -> str:
    """The devices used, in words, from the result of worker_jobs.devices; empty if there are none.

    "2 software devices (llvmpipe, SwiftShader); no discrete GPU was found".
    """
    kinds: dict[str, list[str]] = {}
    for device in hardware(devices):
        kinds.setdefault(device["kind"], []).append(device["name"])
    text = " and ".join(f"{count_noun(len(of), f'{kind} device')} ({', '.join(of)})" for kind, of in kinds.items())
    if not text or "discrete" in kinds:
        return text
    listed = any(device["kind"] == "discrete" for device in devices["devices"])
    return f"{text}; no discrete GPU was {'used' if listed else 'found'}"


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
    if not heldout:
        raise UserError(f"The recipe {path} has no held-out data, which a proof needs: give it eval_data.")
    for source in (data, heldout):
        if not isinstance(source, FileSource):
            raise UserError(f"A proof reads files, but {source.path} is a data set: save it to a file.")
    if args.base_dtype not in (AUTO, DEFAULT_FORMAT):
        base = f"base_dtype {args.base_dtype}, but a proof is for {DEFAULT_FORMAT.upper()}"
        raise UserError(f"The recipe {path} has {base}: leave it out.")
    resolve_model(args.model or "demo")
    args = replace(args, data=data.path, split=None, eval_data=heldout.path, eval_split=None, resume=False)
    return replace(args, base_dtype=DEFAULT_FORMAT), path
