"""Steps of many adapters together, beside those of one: what sharing a base gains in time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from wgpu_lora.bench.check import Checked, check, poison
from wgpu_lora.bench.stats import Timings
from wgpu_lora.bench.step import LEARNING_RATE, SCALING
from wgpu_lora.bench.workload import Context, Extra, Workload
from wgpu_lora.bench.workloads.training import EARLY, state_fill
from wgpu_lora.gpu.choices import NO_CHOICES, Choices
from wgpu_lora.gpu.program import Program, missing_bytes
from wgpu_lora.models.inputs import Segment
from wgpu_lora.models.lora import AdapterSet, SlotSpec
from wgpu_lora.models.targets import ALL, targeted
from wgpu_lora.train.objectives.base import Group
from wgpu_lora.train.optimizer import SlotUpdate
from wgpu_lora.train.session import Session

FEW, MANY = 3, 8  # adapters
ROW = 64  # tokens of a row of data, and of the whole step of an adapter that has only short batches


def multi_adapter_step(context: Context) -> Iterator[Workload]:
    yield MultiAdapterStep(context)


def slot_session(context: Context, slots: int, target_modules: str, buckets: Sequence[int]) -> Session:
    """Of `slots` adapters of the run's rank on these modules; nothing is allocated."""
    config = context.config
    spec = SlotSpec(context.rank, dict.fromkeys(targeted(target_modules, config), SCALING))
    adapters = AdapterSet.declare(config, [spec] * slots, context.device.max_binding)
    return Session(context.model, adapters, list(buckets), positions=buckets[-1], compute_dtype=context.compute_dtype)


def new_bytes(*sessions: Session) -> int:
    """What allocating sessions of one model, all to be held at once, adds to the device at the peak."""
    model = sessions[0].model
    held = missing_bytes(set().union(*(session.storages() for session in sessions)))
    held += sum(session.memory().groups["activations"] for session in sessions)
    return max(held, model.bytes_to_load())


def make_up(session: Session, rng: np.random.Generator) -> None:
    """Adapters, gradients and moments of random values, and NaN wherever a step is to write."""
    device, update = session.device, session.optimizer
    assert session.arena is not None, "allocate() first"
    for buffer in (*session.arena.buffers, update.report.storage.buffer):
        poison(device, buffer)
    for page in (*session.adapters.params, *session.adapters.grads):
        device.write(page.storage.buffer, np.float32(0.02) * rng.standard_normal(page.shape, np.float32))
    for state, pages in update.state.items():
        for page in pages:
            device.write(page.storage.buffer, state_fill(state)(rng, page.shape))
    session.begin()


def check_update(session: Session, found: Checked) -> Checked:
    """Every kernel of the update of all slots against its reference."""
    for tensor, values in session.optimizer.settings(dict.fromkeys(range(len(session.adapters.specs)), EARLY)).items():
        session.device.write(tensor.storage.buffer, values)
    return check(session.optimizer.program, found)


class SlotStep:
    """An optimizer step of all slots of a session as the trainer takes it, on made-up rows of `lengths` tokens.

    Slots own equal shares of the rows, in order. times: how many a run takes, as adapters do in turn.
    """

    def __init__(self, session: Session, lengths: Sequence[int], times: int):
        self.session, self.tokens, self._times = session, sum(lengths), times
        self._slots = len(session.adapters.specs)
        self._rows = [(i * self._slots // len(lengths), length) for i, length in enumerate(lengths)]
        self._groups: list[Group] = []
        self._count = 0

    def check(self, rng: np.random.Generator, found: Checked) -> None:
        """Compares every kind of dispatch with its reference, on new rows, of which the runs that follow are too."""
        vocab, trained = self.session.model.config.vocab_size, Counter[int]()
        for slot, length in self._rows:
            trained[slot] += length - 1
        rows = [(slot, rng.integers(0, vocab, length)) for slot, length in self._rows]
        self._groups = [Group((Segment(ids, ids, slot),), slot, 1 / trained[slot]) for slot, ids in rows]
        batch = self.session.batch_for(self._groups)
        make_up(self.session, rng)
        batch.upload(self._groups)
        check(batch.program, found)
        check_update(self.session, found)

    def run(self) -> float:
        """Tokens a second."""
        begin = time.perf_counter()
        for _ in range(self._times):
            self._step()
        return self._times * self.tokens / (time.perf_counter() - begin)

    def _step(self) -> None:
        session, device = self.session, self.session.device
        self._count += 1
        session.begin()
        session.accumulate(self._groups)
        session.optimizer.apply(device, dict.fromkeys(range(self._slots), SlotUpdate(self._count, LEARNING_RATE)))


class MultiAdapterStep:
    """Steps of one, three and eight adapters on all linear layers, by turns in one run.

    Adapters trained one after another take steps of one slot; each one's steps are alike, so that one such step tells
    the tokens a second of all three. Together, a step of as many tokens has rows of every slot and updates every
    adapter; `third_alone` is the step in which one adapter has its part of those rows. Of adapters that have only a
    short row each, a step together has the rows of all.
    """

    case = ""
    clock = "host"

    def __init__(self, context: Context):
        tokens = context.tokens
        # A row for every slot, and of five tokens at least: of few, the scores' gradients are little but rounding.
        row = min(ROW, max(5, tokens // MANY))
        whole = [row] * (tokens // row)
        whole[-1] += tokens % row
        cases = {
            "alone": (1, whole, 1),
            "together": (FEW, whole, 1),
            "eight": (MANY, whole, 1),
            "third_alone": (1, whole[: -(-len(whole) // FEW)], FEW),
            "short_alone": (1, [row], FEW),
            "short_together": (FEW, [row] * FEW, 1),
        }
        buckets: dict[int, set[int]] = {}
        for slots, rows, _ in cases.values():
            buckets.setdefault(slots, set()).add(sum(rows))
        self._sessions = {n: slot_session(context, n, ALL, sorted(sizes)) for n, sizes in buckets.items()}
        self._steps = {name: SlotStep(self._sessions[n], rows, times) for name, (n, rows, times) in cases.items()}
        pairs = sum(n * (n + 1) // 2 for n in whole)
        self.keys = {"pairs": float(pairs), "trained": float(tokens - len(whole)), "slots": float(FEW)}
        self._turns: list[dict[str, float]] = []

    def nbytes(self) -> int:
        return new_bytes(*self._sessions.values())

    def programs(self) -> list[Program]:
        return [program for session in self._sessions.values() for program in session.programs()]

    def open(self, choices: Choices = NO_CHOICES) -> None:
        for session in self._sessions.values():
            session.allocate(choices=choices)

    def check(self, rng: np.random.Generator) -> Checked:
        found = Checked()
        for step in self._steps.values():
            step.check(rng, found)
        return found

    def run(self) -> float:
        """A turn of them all, every other one backwards, so that a machine that slows down favours none."""
        order = list(self._steps)[:: -1 if len(self._turns) % 2 else 1]
        self._turns.append({name: self._steps[name].run() for name in order})
        return self._steps["together"].tokens / self._turns[-1]["together"]

    def extra(self, timings: Timings) -> Extra:
        turns = self._turns[-timings.iterations :]

        def ratio(name: str, beside: str) -> float:
            """The median of each turn's own ratio, from which what slows a whole turn cancels."""
            return float(np.median([turn[name] / turn[beside] for turn in turns]))

        return {
            "together_speedup": ratio("together", "alone"),
            "same_updates_speedup": ratio("together", "third_alone"),
            "short_speedup": ratio("short_together", "short_alone"),
            "eight_of_three": ratio("eight", "together"),
            **{f"{name}_tokens_per_second": float(np.median([turn[name] for turn in turns])) for name in self._steps},
        }

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()
