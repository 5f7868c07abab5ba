"""Steps of many adapters together, beside those of one: what sharing a base gains in time."""

from __future__ import annotations

import numpy as np

from wgpu_lora.bench.check import Checked
from wgpu_lora.bench.stats import Timings
from wgpu_lora.bench.step import SlotStep
from wgpu_lora.bench.workload import Context, Extra, SessionWorkload

FEW, MANY = 3, 8  # adapters
ROW = 64  # tokens of a row of data, and of the whole step of an adapter that has only short batches


class MultiAdapterStep(SessionWorkload):
    """Steps of one, three and eight adapters on all linear layers, by turns in one run.

    Adapters trained one after another take steps of one slot; each one's steps are alike, so that one such step tells
    the tokens a second of all three. Together, a step of as many tokens has rows of every slot and updates every
    adapter; `third_alone` is the step in which one adapter has its part of those rows. Of adapters that have only a
    short row each, a step together has the rows of all.
    """

    def __init__(self, context: Context):
        tokens = context.tokens
        # A row for every slot, and of five tokens at least: of few, the scores' gradients are little but rounding.
        row = min(ROW, max(5, tokens // MANY))
        whole = [row] * (tokens // row)
        whole[-1] += tokens % row
        # How many adapters, the rows of a step, and how many steps a turn takes, as adapters do one after another.
        cases = {
            "alone": (1, whole, 1),
            "together": (FEW, whole, 1),
            "eight": (MANY, whole, 1),
            "third_alone": (1, whole[: -(-len(whole) // FEW)], FEW),
            "short_alone": (1, [row], FEW),
            "short_together": (FEW, [row] * FEW, 1),
        }
        sessions = {
            slots: context.session(sorted({sum(rows) for n, rows, _ in cases.values() if n == slots}), slots)
            for slots in (1, FEW, MANY)
        }
        super().__init__(*sessions.values())
        self.steps = {
            name: SlotStep(sessions[slots], [(i * slots // len(rows), length) for i, length in enumerate(rows)])
            for name, (slots, rows, _) in cases.items()
        }
        self._times = {name: times for name, (_, _, times) in cases.items()}
        pairs = sum(n * (n + 1) // 2 for n in whole)
        self.keys = {"pairs": float(pairs), "trained": float(tokens - len(whole)), "slots": float(FEW)}
        self.turns: list[dict[str, float]] = []  # tokens a second

    def check(self, rng: np.random.Generator) -> Checked:
        found = Checked()
        for step in self.steps.values():
            step.check(rng, found)
        return found

    def run(self) -> float:
        """A turn of them all, every other one backwards, so that a machine that slows down favours none."""
        order = list(self.steps)[:: -1 if len(self.turns) % 2 else 1]
        seconds = {name: sum(self.steps[name].seconds(self._times[name])) for name in order}
        self.turns.append({name: self._times[name] * self.steps[name].tokens / seconds[name] for name in order})
        return seconds["together"]

    def extra(self, timings: Timings) -> Extra:
        turns = self.turns[-timings.iterations :]

        def ratio(name: str, beside: str) -> float:
            """The median of each turn's own ratio, from which what slows a whole turn cancels."""
            return float(np.median([turn[name] / turn[beside] for turn in turns]))

        return {
            "together_speedup": ratio("together", "alone"),
            "same_updates_speedup": ratio("together", "third_alone"),
            "short_speedup": ratio("short_together", "short_alone"),
            "eight_of_three": ratio("eight", "together"),
            **{f"{name}_tokens_per_second": float(np.median([turn[name] for turn in turns])) for name in self.steps},
        }
