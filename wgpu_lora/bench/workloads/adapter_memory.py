"""The memory of many adapters on one base: planned beside one adapter's, and allocated."""

from __future__ import annotations

import numpy as np

from wgpu_lora.bench.check import Checked, check
from wgpu_lora.bench.stats import Timings
from wgpu_lora.bench.step import largest, make_up
from wgpu_lora.bench.workload import Context, Extra, SessionWorkload, new_bytes
from wgpu_lora.bench.workloads.adapters import FEW, MANY
from wgpu_lora.gpu.choices import NO_CHOICES, Choices
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.timer import clock_of
from wgpu_lora.models.targets import ALL
from wgpu_lora.share import budget_bytes
from wgpu_lora.train.session import Session

QV = "q_proj,v_proj"


def base_reads(session: Session) -> int:
    """Recorded dispatches that read weights of the base."""
    base = session.model.decoder.storages()
    steps = [step for program in session.programs() for step in program.dispatches]
    return sum(any(tensor.storage in base for tensor in step.tensors) for step in steps)


def planned_figures(context: Context) -> Extra:
    """What the plan says of one, three and eight adapters at equal tokens a step.

    memory_ratio is of three to one on q and v, all_ratio the same on all linear layers. A growth is the largest of
    the three figures over the smallest, at the worse of both targets.
    """
    found: Extra = {}
    growth = dict.fromkeys(("base_growth", "activation_growth", "base_reads_growth"), 1.0)
    for name, modules in (("memory", QV), ("all", ALL)):
        sessions = [context.session([context.tokens], slots, modules) for slots in (1, FEW, MANY)]
        plans = [session.memory() for session in sessions]
        one, few = plans[0].training, plans[1].training
        found |= {f"{name}_ratio": few / one, f"{name}_one_bytes": float(one), f"{name}_three_bytes": float(few)}
        figures = (
            [plan.groups["base"] for plan in plans],
            [plan.groups["activations"] for plan in plans],
            [base_reads(session) for session in sessions],
        )
        for key, values in zip(growth, figures, strict=True):
            growth[key] = max(growth[key], max(values) / min(values))
    return {**found, **growth}


class MultiAdapterMemory(SessionWorkload):
    """Three adapters on q and v beside one: planned for the whole model, allocated with as many layers as fit here.

    What is timed, on what was allocated, is what every adapter adds to a step: its update.
    """

    def __init__(self, context: Context):
        self._whole = context
        room, layers = budget_bytes(context.device.info).bytes, context.config.num_hidden_layers
        fits = layers if room is None else largest(lambda count: self._need(count) <= room, layers)
        # Where not even one layer fits, one is asked for, and refused as any brick's would be.
        self._cut = context.with_layers(fits or 1)
        super().__init__(*(self._cut.session([context.tokens], slots, QV) for slots in (1, FEW)))
        self._few = self.sessions[-1]
        self._allocated: list[int] = []
        self.clock = clock_of(context.device)
        self.keys = {"slots": float(FEW), "allocated_layers": float(fits or 1)}

    def _need(self, layers: int) -> int:
        context = self._whole.with_layers(layers)
        return context.device.allocated + new_bytes(context.session([context.tokens], FEW, QV))

    def nbytes(self) -> int:
        return new_bytes(self._few)

    def programs(self) -> list[Program]:
        return [self._few.optimizer.program]

    def open(self, choices: Choices = NO_CHOICES) -> None:
        """Allocates all that one adapter takes, gives it back but for the base, then all that three take."""
        device, base = self._cut.device, self._cut.model.decoder.storages()
        others = device.allocated - sum(storage.nbytes for storage in base if storage.buffer is not None)
        for session in self.sessions:
            session.allocate(choices=choices)
            self._allocated.append(device.allocated - others)
            if session is not self._few:
                session.close()

    def check(self, rng: np.random.Generator) -> Checked:
        make_up(self._few, rng)
        return check(self._few.optimizer.program)

    def run(self) -> float:
        return self._whole.timer.run(self._few.optimizer.program)

    def extra(self, timings: Timings) -> Extra:
        """Figures of the plan, then those of the allocation."""
        one, few = self._allocated
        planned = [session.memory().training for session in self.sessions]
        return {
            **planned_figures(self._whole),
            "allocated_one_bytes": float(one),
            "allocated_three_bytes": float(few),
            "allocated_ratio": few / one,
            "allocated_layers": self.keys["allocated_layers"],
            "unplanned_bytes": float(abs(one - planned[0]) + abs(few - planned[1])),
        }

    def close(self) -> None:
        super().close()
        if self._cut is not self._whole:
            self._cut.close()
