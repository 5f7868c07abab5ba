"""Data-parallel training, the leader's side: helpers on other devices compute parts of each step's gradient.

The leader is a usual run: it alone has the optimizer and its state, the checkpoints and the held-out loss. Helpers get
the parameters of each step, so that devices that round differently cannot drift apart, and answer with the gradients
and totals of their parts. These are added to the leader's in f32 and in the order of the members, so that the same
members, shares and drivers give the same bits, and others what one device gives with accumulation, to float rounding.
"""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import setting
from wgpu_lora.processes.signals import check_stop
from wgpu_lora.train.data_parallel import gradient_messages
from wgpu_lora.train.data_parallel.gradient_messages import Arrays, read_message
from wgpu_lora.train.objectives import OBJECTIVES

if TYPE_CHECKING:
    from wgpu_lora.train.options.training_arguments import TrainingArguments
    from wgpu_lora.train.run.adapter_run import AdapterRun
    from wgpu_lora.train.session.data_stream import Step
    from wgpu_lora.train.session.session import Session

RETRY_SECONDS = 5.0  # before a replica that was lost is tried again
TICK = 0.1  # seconds


class Link(Protocol):
    """A way to a replica."""

    def ready(self) -> Future[Any]:
        """Done once the replica has loaded its model; fails if it cannot."""

    def compute(self, question: bytes) -> Future[bytes]:
        """The answer to a question; fails if the replica is lost."""


@dataclass(frozen=True)
class Answer:
    """The gradients and totals of a part, and the seconds from the question to them."""

    arrays: Arrays
    seconds: float


class RemoteWorker:
    """A replica at the other end of a link.

    Attributes:
        tokens: of the part that it was last asked for. late: the last answer to a part that the leader had computed
            itself by then. new: it has come since it was last asked, so that it does not know the run yet.
        problem: why it was lost, or is waited for; empty once it is ready.
    """

    def __init__(self, link: Link):
        self._link, self._ready = link, link.ready()
        self._retry_time: float | None = None  # when it is tried again
        self._answer: Future[bytes] | None = None
        self._begin = 0.0
        self.tokens, self.new = 0, True
        self.late: Answer | None = None
        self.problem = ""

    def ready(self) -> bool:
        """Whether it may be asked: it is there, and has answered everything."""
        if self._answer is not None and self._answer.done():
            self.late = self._take()
        if self._retry_time is not None and time.monotonic() >= self._retry_time:
            self._ready, self._retry_time, self.new = self._link.ready(), None, True
        if self._retry_time is None and self._ready.done() and (error := self._ready.exception()):
            self._lose(error)
        if self._retry_time is not None or not self._ready.done() or self._answer is not None:
            return False
        self.problem = ""
        return True

    def ask(self, question: bytes, tokens: int) -> None:
        """Ask a replica that is ready for a part of so many tokens; returns at once."""
        self.new, self.tokens, self._begin = False, tokens, time.monotonic()
        self._answer = self._link.compute(question)

    def answer(self, seconds: float) -> Answer | None:
        """The answer to the only open question; None if it is late, or the replica was lost."""
        assert self._answer is not None
        end = time.monotonic() + seconds
        while not self._answer.done() and time.monotonic() < end:
            check_stop()
            wait([self._answer], min(TICK, max(0.0, end - time.monotonic())))
        if not self._answer.done():
            self.problem = "it has not answered in time, and its part was computed by the leader"
            return None
        return self._take()

    def _take(self) -> Answer | None:
        answer, self._answer = self._answer, None
        assert answer is not None
        try:
            return Answer(read_message(answer.result())[1], time.monotonic() - self._begin)
        except Exception as error:  # of whatever carries messages, and ValueError: it is not a message
            self._lose(error)
            return None

    def _lose(self, error: BaseException) -> None:
        self.problem, self._retry_time = str(error), time.monotonic() + RETRY_SECONDS


def check_shared(args: TrainingArguments) -> None:
    """Raise UserError for runs whose steps cannot be shared."""
    if OBJECTIVES[args.objective].samples:
        raise UserError(
            f"{setting('objective', args.objective)} samples its completions on one device: use one device a run."
        )
    if args.train == "quant-scales":
        raise UserError(
            f"{setting('train', args.train)} cannot be trained on several devices at once: use one device, or train an "
            "adapter."
        )


@dataclass(frozen=True)
class StepPart:
    """A step of a run, of which members compute parts. estimate: of the whole step (`Objective.estimate`), if any."""

    session: Session
    run: AdapterRun
    step: Step
    estimate: float | None = None

    @classmethod
    def estimated(cls, session: Session, run: AdapterRun, step: Step) -> StepPart:
        """The step with its estimate, which needs passes over all of its mismatched rows."""
        if not run.stream.objective.needs_kl_rows:
            return cls(session, run, step)
        return cls(session, run, step, session.with_kl_estimate(run.stream.groups(step, run.slot))[0][0].kl_estimate)

    def accumulate(self, span: Span) -> None:
        """Add the losses, metrics and gradients of a part, and wait for the device."""
        for groups in self.run.stream.part(self.step, *span, self.run.slot):
            batch = groups if self.estimate is None else [replace(group, kl_estimate=self.estimate) for group in groups]
            self.session.accumulate(batch)
        self.session.device.wait()

    def question(self, span: Span) -> dict[str, Any]:
        """What a helper needs to know of a part, besides the parameters."""
        references = self.run.stream.references
        return {
            "epoch": self.step.epoch,
            "index": self.step.index,
            "samples": len(self.step.samples),
            "span": span,
            "estimate": self.estimate,
            "references": {str(i): references[i] for i in self.step.samples[slice(*span)] if i in references},
        }


class DataParallelLeader:
    """The helpers of a run with one slot. Nothing waits for them to come: each takes part from the first step at which
    it is there.

    Args:
        links: to the helpers, members 1, 2, ...
        code: digest of the package's code, which must be that of the helpers.
    """

    def __init__(self, links: Sequence[Link], code: str = ""):
        self._helpers = {number: RemoteWorker(link) for number, link in enumerate(links, 1)}
        self._shares, self._code = LoadBalance(), code
        self._barred: set[int] = set()  # helpers whose values cannot be used
        self._step_shares: dict[int, float] = {}  # each member's share of the last step

    @property
    def problem(self) -> str:
        """Why replicas do not take part; empty if all do. Other threads may read it, which must not ask `ready`."""
        reasons = {helper.problem for helper in self._helpers.values() if helper.problem}
        return " ".join(f"A replica does not help: {reason}" for reason in sorted(reasons))

    def facts(self) -> dict[str, float]:
        """Of the last step, for the log: the share of its tokens that each member computed."""
        return {f"share/{member}": round(share, 4) for member, share in self._step_shares.items()}

    def accumulate(self, session: Session, run: AdapterRun, step: Step) -> None:
        """`Session.begin`, and the losses, metrics and gradients of a step, computed by all ready members."""
        session.begin()
        members = [0, *self.ready()]
        if len(members) == 1:
            self._step_shares = {0: 1.0}
            for groups in session.with_kl_estimate(run.stream.groups(step, run.slot)):
                session.accumulate(groups)
            return
        sizes = [run.stream.lengths[sample] for sample in step.samples]
        spans = dict(zip(members, split_by_share(sizes, self._shares.of(members)), strict=True))
        tokens = {member: sum(sizes[slice(*span)]) for member, span in spans.items()}
        shared = StepPart.estimated(session, run, step)
        helpers = [member for member in members[1:] if tokens[member]]
        self._ask(shared, {member: spans[member] for member in helpers}, tokens)
        begin = time.monotonic()
        shared.accumulate(spans[0])
        seconds = time.monotonic() - begin
        if tokens[0]:
            self._shares.record(0, tokens[0], seconds)
        answers = {}
        for member in helpers:
            patience = self._shares.patience(member, tokens[member], seconds)
            answers[member] = self._helpers[member].answer(begin + patience - time.monotonic())
        contributors = self._add(shared, spans, answers)
        shares = {member: tokens[member] / sum(sizes) for member in contributors}
        self._step_shares = {0: 1 - sum(shares.values()), **shares}

    def ready(self) -> list[int]:
        """The helpers that may be asked now."""
        for member, helper in self._helpers.items():
            if helper.ready() and helper.late:
                self._shares.record(member, helper.tokens, helper.late.seconds)
                helper.late = None
        return [member for member, helper in self._helpers.items() if helper.ready() and member not in self._barred]

    def _ask(self, shared: StepPart, spans: Mapping[int, Span], tokens: Mapping[int, int]) -> None:
        parameters = gradient_messages.parameters(shared.session)
        for member, span in spans.items():
            helper, request, arrays = self._helpers[member], shared.question(span), parameters
            if helper.new:
                self._shares.forget(member)
                request["run"] = {**shared.run.identity(), "code": self._code}
                arrays = {**parameters, **gradient_messages.read_offsets(shared.session)}
            helper.ask(gradient_messages.message(request, arrays), tokens[member])

    def _add(
        self, shared: StepPart, spans: Mapping[int, Span], answers: Mapping[int, Answer | None]
    ) -> dict[int, Answer]:
        """Add the helpers' sums, and compute missing parts here; returns the answers that were added."""
        session = shared.session
        result = {
            m: answer
            for m, answer in answers.items()
            if answer and gradient_messages.is_valid_gradient(session, answer.arrays)
        }
        for member in answers.keys() - result.keys():
            shared.accumulate(spans[member])
        gradients = gradient_messages.read_gradients(session)
        for member, answer in answers.items():
            if answer and member in result:
                self._shares.record(member, self._helpers[member].tokens, answer.seconds)
            # If the leader's gradients are not finite, the rows are at fault, as the update will report.
            elif answer and gradient_messages.finite(gradients):
                self._barred.add(member)
                warnings.warn(
                    f"replica {member} of the data-parallel run {shared.run.directory} answers with values that are "
                    "not finite or not those of this run: it is not asked again",
                    stacklevel=1,
                )
        if result:
            gradient_messages.write_gradients(
                session, gradient_messages.sum_gradients(gradients, [answer.arrays for answer in result.values()])
            )
        return result


SHARE_STEPS = 32  # steps that shares stay as they are, so that results can be explained
SETTLING = 4  # steps after which those of other members are adapted first
RECENT = 8  # parts whose median is a member's speed
LATE, GRACE = 4.0, 2.0  # a part is late after this multiple of its usual time, plus seconds
FIRST, FIRST_GRACE = 10.0, 30.0  # likewise before the member was timed: multiple of the leader's time, plus seconds

Span = tuple[int, int]  # [begin, end) among the samples of a step


def split_by_share(sizes: Sequence[int], shares: Sequence[float]) -> list[Span]:
    """A span for each member, in order, with about its share of the tokens; the last ends with the step.

    Spans follow each other, so that micro-batches are cut at most once per member, and are cut between samples only.
    """
    ends = [0, *itertools.accumulate(sizes)]
    spans, begin, share = list[Span](), 0, 0.0
    for member_share in shares[:-1]:
        share += member_share
        target = ends[-1] * share / sum(shares)
        end = min(range(begin, len(ends)), key=lambda i: abs(ends[i] - target))
        spans.append((begin, end))
        begin = end
    return [*spans, (begin, len(sizes))]


@dataclass
class LoadBalance:
    """The shares of members, by number; the leader is 0."""

    _seconds: dict[int, deque[float]] = field(default_factory=dict)  # per token, of each member's recent parts
    _current: dict[int, float] = field(default_factory=dict)
    _remaining_steps: int = 0  # until the shares are computed again
    _parts: set[int] = field(default_factory=set)  # members that had a part since they were computed

    def of(self, members: Sequence[int]) -> list[float]:
        """The shares of the next step, which sum to 1."""
        if list(self._current) != list(members):
            self._current, self._remaining_steps = self._computed(members), SETTLING
        elif not self._remaining_steps:
            for idle in self._current.keys() - self._parts:  # its speed may have changed since
                self._seconds[idle] = deque((value / 2 for value in self._seconds.get(idle, ())), RECENT)
            self._current, self._remaining_steps = self._computed(members), SHARE_STEPS
            self._parts = set()
        self._remaining_steps -= 1
        return list(self._current.values())

    def _computed(self, members: Sequence[int]) -> dict[int, float]:
        speeds = {
            member: 1 / statistics.median(seconds) for member in members if (seconds := self._seconds.get(member))
        }
        usual = statistics.fmean(speeds.values()) if speeds else 1.0
        result = {member: speeds.get(member, usual) for member in members}
        return {member: speed / sum(result.values()) for member, speed in result.items()}

    def record(self, member: int, tokens: int, seconds: float) -> None:
        """A member has computed a part of this many tokens."""
        self._seconds.setdefault(member, deque(maxlen=RECENT)).append(max(seconds, 1e-9) / max(tokens, 1))
        self._parts.add(member)

    def forget(self, member: int) -> None:
        """A member is another process or device now."""
        self._seconds.pop(member, None)

    def patience(self, member: int, tokens: int, leader_seconds: float) -> float:
        """Seconds after which a part of `tokens` is late, if that of the leader took `leader_seconds`."""
        seconds = self._seconds.get(member)
        if not seconds:
            return FIRST * leader_seconds + FIRST_GRACE
        return LATE * statistics.median(seconds) * tokens + GRACE
