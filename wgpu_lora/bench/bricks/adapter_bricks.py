"""Bricks of several adapters on one base, compared with one adapter: time and memory."""

from __future__ import annotations

import numpy as np

from wgpu_lora.bench.brick import Context, Extra, SessionWorkload, new_bytes
from wgpu_lora.bench.reference_check import ReferenceErrors, check
from wgpu_lora.bench.timing import Timings
from wgpu_lora.bench.training_step import SlotStep, fill_with_random_state, largest
from wgpu_lora.gpu.memory_leases import budget_bytes
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.timer import clock_of
from wgpu_lora.gpu.tuning_cache import NO_CHOICES, Choices
from wgpu_lora.models.adapter_modules import ALL, resolve_target_modules
from wgpu_lora.train.session.session import Session

FEW, MANY = 3, 8  # adapters
ROW = 64  # tokens per row, and per step of an adapter with little data
QV = "q_proj,v_proj"


class MultiAdapterStep(SessionWorkload):
    """Steps of one, three and eight adapters on all linear layers, alternating in one run.

    Adapters trained one after another take steps of one slot. Their steps are alike, so one of them gives their speed.
    `together` and `eight` have as many tokens, divided among all slots, and update every adapter; `third_alone` is one
    adapter's share of `together`. `short_alone` and `short_together` have one row per adapter.
    """

    compares = True

    def __init__(self, context: Context):
        tokens = context.tokens
        # A row for every slot, of at least 5 tokens: with fewer, gradients of scores are mostly rounding errors.
        row = min(ROW, max(5, tokens // MANY))
        lengths = [row] * (tokens // row)
        lengths[-1] += tokens % row
        # Adapters, rows of a step, and steps per turn, where adapters take them one after another.
        cases = {
            "alone": (1, lengths, 1),
            "together": (FEW, lengths, 1),
            "eight": (MANY, lengths, 1),
            "third_alone": (1, lengths[: -(-len(lengths) // FEW)], FEW),
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
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        self.keys = {"pairs": float(pairs), "trained": float(tokens - len(lengths)), "slots": float(FEW)}
        self.turns: list[dict[str, float]] = []  # tokens per second

    def check(self, rng: np.random.Generator) -> ReferenceErrors:
        result = ReferenceErrors()
        for step in self.steps.values():
            step.check(rng, result)
        return result

    def run(self) -> float:
        """A turn of all steps, in alternating order, so that a machine that slows down favours none."""
        order = list(self.steps)[:: -1 if len(self.turns) % 2 else 1]
        seconds = {name: sum(self.steps[name].seconds(self._times[name])) for name in order}
        self.turns.append({name: self._times[name] * self.steps[name].tokens / seconds[name] for name in order})
        return seconds["together"]

    def extra(self, timings: Timings) -> Extra:
        """Ratios are medians of the ratios of each turn, so that a slow turn does not affect them."""
        turns = self.turns[-timings.iterations :]
        ratios = {
            "together_speedup": ("together", "alone"),
            "same_updates_speedup": ("together", "third_alone"),
            "short_speedup": ("short_together", "short_alone"),
            "eight_of_three": ("eight", "together"),
        }
        return {
            **{name: float(np.median([turn[a] / turn[b] for turn in turns])) for name, (a, b) in ratios.items()},
            **{f"{name}_tokens_per_second": float(np.median([turn[name] for turn in turns])) for name in self.steps},
        }


def base_reads(session: Session) -> int:
    """The number of recorded dispatches that read weights of the base."""
    base = session.model.decoder.storages()
    steps = [step for program in session.programs() for step in program.dispatches]
    return sum(any(tensor.storage in base for tensor in step.tensors) for step in steps)


def planned_figures(context: Context) -> Extra:
    """Figures of the plans of one, three and eight adapters, with the same tokens per step.

    memory_ratio: three relative to one on q and v; all_ratio: on all linear layers. Growths: the largest of the three
    figures over the smallest, for the worse of both targets.
    """
    result: Extra = dict.fromkeys(("base_growth", "activation_growth", "base_reads_growth"), 1.0)
    for name, modules in (("memory", QV), ("all", ALL)):
        sessions = [context.session([context.tokens], slots, modules) for slots in (1, FEW, MANY)]
        plans = [session.memory() for session in sessions]
        single, few = plans[0].training, plans[1].training
        result |= {f"{name}_ratio": few / single, f"{name}_one_bytes": float(single), f"{name}_three_bytes": float(few)}
        figures = {
            "base_growth": [plan.groups["base"] for plan in plans],
            "activation_growth": [plan.groups["activations"] for plan in plans],
            "base_reads_growth": [base_reads(session) for session in sessions],
        }
        result |= {key: max(result[key], max(values) / min(values)) for key, values in figures.items()}
    return result


class MultiAdapterMemory(SessionWorkload):
    """Memory of three adapters on q and v relative to one: planned for the whole model, allocated with the layers that
    fit. The update of all adapters is timed.
    """

    def __init__(self, context: Context):
        self._whole = context
        room, layers = budget_bytes(context.device.info).bytes, context.config.num_hidden_layers
        fits = layers if room is None else largest(lambda count: self._need(count) <= room, layers)
        # If not even one layer fits, one is claimed, and refused as for any brick.
        self._cut = context.with_layers(fits or 1)
        super().__init__(*(self._cut.session([context.tokens], slots, QV) for slots in (1, FEW)))
        self._few = self.sessions[-1]
        self._allocated: list[int] = []
        self.clock = clock_of(context.device)
        self.keys = {"slots": float(FEW), "allocated_layers": float(fits or 1)}
        config = self._cut.config
        self.keys["adapted_sizes"] = float(
            sum(sum(config.lora_modules[path]) for path in resolve_target_modules(QV, config))
        )

    def _need(self, layers: int) -> int:
        context = self._whole.with_layers(layers)
        return context.device.allocated + new_bytes(context.session([context.tokens], FEW, QV))

    def nbytes(self) -> int:
        return new_bytes(self._few)

    def programs(self) -> list[Program]:
        return [self._few.optimizer.program]

    def open(self, choices: Choices = NO_CHOICES) -> None:
        """Allocate what one adapter needs, free it except for the base, then allocate what three need."""
        device, base = self._cut.device, self._cut.model.decoder.storages()
        other_bytes = device.allocated - sum(storage.nbytes for storage in base if storage.buffer is not None)
        for session in self.sessions:
            session.allocate(choices=choices)
            self._allocated.append(device.allocated - other_bytes)
            if session is not self._few:
                session.close()

    def check(self, rng: np.random.Generator) -> ReferenceErrors:
        fill_with_random_state(self._few, rng)
        return check(self._few.optimizer.program)

    def run(self) -> float:
        return self._whole.timer.run(self._few.optimizer.program)

    def extra(self, timings: Timings) -> Extra:
        single, few = self._allocated
        planned_bytes = [session.memory().training for session in self.sessions]
        return {
            **planned_figures(self._whole),
            "allocated_one_bytes": float(single),
            "allocated_three_bytes": float(few),
            "allocated_ratio": few / single,
            "allocated_layers": self.keys["allocated_layers"],
            "unplanned_bytes": float(abs(single - planned_bytes[0]) + abs(few - planned_bytes[1])),
        }

    def close(self) -> None:
        super().close()
        if self._cut is not self._whole:
            self._cut.close()
