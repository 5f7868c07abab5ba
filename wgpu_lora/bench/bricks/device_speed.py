"""A short brick: how fast a device trains, and how much faster several adapters at once, for decisions where to."""

from __future__ import annotations

import numpy as np

from wgpu_lora.bench.brick import Context, Extra, SessionWorkload
from wgpu_lora.bench.reference_check import ReferenceErrors
from wgpu_lora.bench.timing import Timings, repeat
from wgpu_lora.bench.training_step import SlotStep, fill_with_random_state

ADAPTERS = 3
ROW = 64  # tokens per row
CV = 0.05  # of the time of a turn, below which no more are taken


class DeviceSpeed(SessionWorkload):
    """A step of one adapter, and one of three adapters at once that have a third of its tokens each; a step of one of
    these thirds alone is taken three times, as adapters that are trained one after another are."""

    def __init__(self, context: Context):
        rows = max(1, context.tokens // (ADAPTERS * ROW))
        lengths = [min(ROW, context.tokens)] * rows
        self._third = sum(lengths)
        alone = context.session([self._third, ADAPTERS * self._third], positions=lengths[0])
        together = context.session([ADAPTERS * self._third], ADAPTERS, positions=lengths[0])
        super().__init__(alone, together)
        self.steps = {
            "alone": SlotStep(alone, [(0, length) for length in lengths * ADAPTERS]),
            "third": SlotStep(alone, [(0, length) for length in lengths]),
            "together": SlotStep(together, [(slot, length) for slot in range(ADAPTERS) for length in lengths]),
        }
        row_lengths = lengths * ADAPTERS
        pairs = sum(n * (n + 1) // 2 for n in row_lengths)
        tokens = float(sum(row_lengths))
        self.keys = {"step_tokens": tokens, "pairs": float(pairs), "trained": tokens - len(row_lengths)}
        self.turns: list[dict[str, float]] = []  # seconds

    def check(self, rng: np.random.Generator) -> ReferenceErrors:
        result = ReferenceErrors()
        for step in self.steps.values():
            step.check(rng, result)
        return result

    def measure(self, iterations: int, limit: float) -> Extra:
        """The figures without comparisons with references, of at least `iterations` turns, or more for up to `limit`
        seconds while their times vary."""
        rng = np.random.default_rng(0)
        for session in self.sessions:
            fill_with_random_state(session, rng)
        for step in self.steps.values():
            step.fill_random(rng)
        self.run()  # compiles
        return self.figures(len(repeat(self.run, iterations, CV, limit)))

    def run(self) -> float:
        """A turn of all steps, in alternating order, so that a machine that slows down favours none."""
        order = list(self.steps)[:: -1 if len(self.turns) % 2 else 1]
        seconds = {name: sum(self.steps[name].seconds(ADAPTERS if name == "third" else 1)) for name in order}
        self.turns.append(seconds)
        return seconds["alone"]

    def figures(self, iterations: int) -> Extra:
        """Of the last turns. tokens_per_second: processed tokens of one adapter. joined_speedup: of three adapters at
        once over one after another, the median of the ratios of each turn."""
        turns = self.turns[-iterations:]
        return {
            "tokens_per_second": self.keys["step_tokens"] / float(np.median([turn["alone"] for turn in turns])),
            "joined_speedup": float(np.median([turn["third"] / turn["together"] for turn in turns])),
        }

    def extra(self, timings: Timings) -> Extra:
        return self.figures(timings.iterations)
