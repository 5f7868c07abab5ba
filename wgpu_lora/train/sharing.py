"""Data-parallel training, the leader's side: helpers on other devices compute parts of each step's gradient.

The leader is a usual run: it alone has the optimizer and its state, the checkpoints and the held-out loss. Helpers get
the parameters of each step, so that devices that round differently cannot drift apart, and answer with the gradients
and totals of their parts. These are added to the leader's in f32 and in the order of the members, so that the same
members, shares and drivers give the same bits, and others what one device gives with accumulation, to float rounding.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wgpu_lora.errors import UserError
from wgpu_lora.names.naming import setting
from wgpu_lora.train import exchange
from wgpu_lora.train.asking import Answer, Helper, Link
from wgpu_lora.train.shares import Shares, Span, divided

if TYPE_CHECKING:
    from wgpu_lora.train.options.arguments import TrainingArguments
    from wgpu_lora.train.run import Run
    from wgpu_lora.train.session import Session
    from wgpu_lora.train.stream import Step


def check_shared(args: TrainingArguments) -> None:
    """Raise UserError for runs whose steps cannot be shared."""
    if args.train == "quant-scales":
        raise UserError(
            f"{setting('train', args.train)} cannot be trained on several devices at once: use one device, or train an "
            "adapter."
        )


@dataclass(frozen=True)
class SharedStep:
    """A step of a run, of which members compute parts. estimate: of the whole step (`Objective.estimate`), if any."""

    session: Session
    run: Run
    step: Step
    estimate: float | None = None

    @classmethod
    def estimated(cls, session: Session, run: Run, step: Step) -> SharedStep:
        """The step with its estimate, which needs passes over all of its mismatched rows."""
        if not run.stream.objective.mismatched:
            return cls(session, run, step)
        return cls(session, run, step, session.estimated(run.stream.groups(step, run.slot))[0][0].shared)

    def accumulate(self, span: Span) -> None:
        """Add the losses, metrics and gradients of a part, and wait until that is done."""
        for groups in self.run.stream.part(self.step, *span, self.run.slot):
            known = groups if self.estimate is None else [replace(one, shared=self.estimate) for one in groups]
            self.session.accumulate(known)
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


class Sharing:
    """The helpers of a run with one slot. Nothing waits for them to come: each takes part from the first step at which
    it is there.

    Args:
        links: to the helpers, members 1, 2, ...
        code: digest of the package's code, which must be that of the helpers.
    """

    def __init__(self, links: Sequence[Link], code: str = ""):
        self._helpers = {number: Helper(link) for number, link in enumerate(links, 1)}
        self._shares, self._code = Shares(), code
        self._barred: set[int] = set()  # helpers whose values cannot be used
        self._took: dict[int, float] = {}  # each member's share of the last step

    def close(self) -> None:
        for helper in self._helpers.values():
            helper.close()

    def facts(self) -> dict[str, float]:
        """Of the last step, for the log: the share of its tokens that each member computed."""
        return {f"share/{member}": round(share, 4) for member, share in self._took.items()}

    def accumulate(self, session: Session, run: Run, step: Step) -> None:
        """`Session.begin`, and the losses, metrics and gradients of a step, by all members that are there."""
        session.begin()
        members = [0, *self.ready()]
        if len(members) == 1:
            self._took = {0: 1.0}
            for groups in session.estimated(run.stream.groups(step, run.slot)):
                session.accumulate(groups)
            return
        sizes = [run.stream.lengths[sample] for sample in step.samples]
        spans = dict(zip(members, divided(sizes, self._shares.of(members)), strict=True))
        tokens = {member: sum(sizes[slice(*span)]) for member, span in spans.items()}
        shared = SharedStep.estimated(session, run, step)
        asked = [member for member in members[1:] if tokens[member]]
        self._ask(shared, {member: spans[member] for member in asked}, tokens)
        begin = time.monotonic()
        shared.accumulate(spans[0])
        own = time.monotonic() - begin
        if tokens[0]:
            self._shares.took(0, tokens[0], own)
        answers = {}
        for member in asked:
            patience = self._shares.patience(member, tokens[member], own)
            answers[member] = self._helpers[member].answer(begin + patience - time.monotonic())
        used = self._add(shared, spans, answers)
        helped = {member: tokens[member] / sum(sizes) for member in used}
        self._took = {0: 1 - sum(helped.values()), **helped}

    def ready(self) -> list[int]:
        """The helpers that may be asked now."""
        for member, helper in self._helpers.items():
            if helper.ready() and helper.late:
                self._shares.took(member, helper.tokens, helper.late.seconds)
                helper.late = None
        return [member for member, helper in self._helpers.items() if helper.ready() and member not in self._barred]

    def _ask(self, shared: SharedStep, spans: Mapping[int, Span], tokens: Mapping[int, int]) -> None:
        parameters = exchange.parameters(shared.session)
        for member, span in spans.items():
            helper, said, arrays = self._helpers[member], shared.question(span), parameters
            if helper.new:
                self._shares.forget(member)
                said["run"] = {**shared.run.identity(), "code": self._code}
                arrays = {**parameters, **exchange.frozen(shared.session)}
            helper.ask(exchange.message(said, arrays), tokens[member])

    def _add(
        self, shared: SharedStep, spans: Mapping[int, Span], answers: Mapping[int, Answer | None]
    ) -> dict[int, Answer]:
        """Add the helpers' sums, and compute here what is missing; returns the answers that were added."""
        session = shared.session
        found = {m: answer for m, answer in answers.items() if answer and exchange.usable(session, answer.arrays)}
        for member in answers.keys() - found.keys():
            shared.accumulate(spans[member])
        own = exchange.sums(session)
        for member, answer in answers.items():
            if answer and member in found:
                self._shares.took(member, self._helpers[member].tokens, answer.seconds)
            elif answer and exchange.finite(own):  # else the rows are at fault, as the update will report
                self._barred.add(member)
                warnings.warn(
                    f"helper {member} of the data-parallel run {shared.run.directory} answers with values that are not "
                    "finite or not those of this run: it is not asked again",
                    stacklevel=1,
                )
        if found:
            exchange.place_sums(session, exchange.added(own, [answer.arrays for answer in found.values()]))
        return found
