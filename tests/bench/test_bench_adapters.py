"""The bricks of many adapters on one base: what they compare, and that they find what they are there to find."""

from __future__ import annotations

from typing import Any

import pytest
from support.bench import CEILINGS, mini, result

from wgpu_lora.bench.brick import Context, new_bytes
from wgpu_lora.bench.brick_results import Result
from wgpu_lora.bench.brick_run import judge, measure
from wgpu_lora.bench.bricks import adapter_bricks
from wgpu_lora.bench.bricks.adapter_bricks import MultiAdapterMemory, MultiAdapterStep, planned_figures
from wgpu_lora.bench.contract import load_contract
from wgpu_lora.bench.timing import Timings
from wgpu_lora.gpu.device import Device
from wgpu_lora.memory_leases.memory_budget import Budget
from wgpu_lora.train.memory import MemoryPlan
from wgpu_lora.train.session.session import Session

SPEEDS = {"together_speedup": 1.0, "short_speedup": 1.3, "eight_of_three": 0.9}
MEMORY = {
    "memory_ratio": 1.05, "allocated_ratio": 1.05, "base_growth": 1.0, "activation_growth": 1.0,
    "base_reads_growth": 1.0, "unplanned_bytes": 0.0,
}  # fmt: skip


def judged(brick: str, context: Context, extra: dict[str, float], **keys: float) -> list[str]:
    """What is broken of a made-up result that reaches every budget."""
    contract = load_contract(brick)
    names = {**context.keys(), "pairs": 1.0, "trained": 1.0, "slots": 3.0, "adapted_sizes": 1.0, **keys}
    budget = {"of": contract.budget.of, "asked": None, "reached": 1.0}
    found = result(brick, extra=extra, budget=budget)
    judge(contract, found, {**names, **contract.values(names)}, "discrete")
    return found.broken


def measured(context: Context, workload: Any) -> Result:
    return measure(context, load_contract("multi_adapter_memory"), workload, CEILINGS, 0.01)


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("brick", "shape", "kept", "metric", "change"),
    [("multi_adapter_step", "tiny-qwen3", SPEEDS, name, -0.01) for name in SPEEDS]
    + [("multi_adapter_memory", "qwen2.5-7b", MEMORY, name, 1e-3 if MEMORY[name] else 1) for name in MEMORY],
)
def test_what_is_slower_or_larger_breaks_the_contract(
    device: Device, brick: str, shape: str, kept: dict[str, float], metric: str, change: float
) -> None:
    context = Context.of(device, shape)
    assert judged(brick, context, kept) == []
    (text,) = judged(brick, context, {**kept, metric: kept[metric] + change})
    assert text.startswith(f"{metric} is ")


# -- time --------------------------------------------------------------------------------------------------------------


def test_steps_of_equal_tokens_are_of_equal_rows(device: Device) -> None:
    step = MultiAdapterStep(Context.of(device, "tiny-qwen3", layers=1))
    assert {name: (one.tokens, [slot for slot, _ in one._rows]) for name, one in step.steps.items()} == {
        "alone": (512, [0] * 8), "together": (512, [0, 0, 0, 1, 1, 1, 2, 2]), "eight": (512, [*range(8)]),
        "third_alone": (192, [0] * 3), "short_alone": (64, [0]), "short_together": (192, [0, 1, 2]),
    }  # fmt: skip
    assert step.keys["trained"] == 8 * 63


def test_ratios_are_of_turns(device: Device) -> None:
    """A machine that halves its speed for whole turns changes no ratio."""
    step = MultiAdapterStep(mini(device))
    usual = {
        "alone": 100.0, "together": 110.0, "eight": 99.0, "third_alone": 55.0, "short_alone": 40.0,
        "short_together": 60.0,
    }  # fmt: skip
    step.turns = [dict.fromkeys(usual, 999.0)]  # a turn of the warm-up
    step.turns += [{name: speed / slow for name, speed in usual.items()} for slow in (1, 2, 2, 1, 2)]
    found = step.extra(Timings.of([1.0] * 5))
    names = ("together_speedup", "same_updates_speedup", "short_speedup", "eight_of_three")
    assert [found[name] for name in names] == pytest.approx([1.1, 2.0, 1.5, 0.9])
    assert found["together_tokens_per_second"] == 55


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [8, 512])
def test_the_plan_of_a_7b_model(device: Device, tokens: int) -> None:
    found = planned_figures(Context.of(device, "qwen2.5-7b", tokens=tokens))
    assert 1 < found["memory_ratio"] <= 1.05
    assert [found[name] for name in ("base_growth", "activation_growth", "base_reads_growth")] == [1, 1, 1]


def test_memory_that_grows_with_the_slots_is_found(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Session.memory

    def grown(session: Session) -> MemoryPlan:
        found = plan(session)
        more = {"activations": 4 * len(session.adapters.specs)}
        return MemoryPlan({name: size + more.get(name, 0) for name, size in found.groups.items()}, found.loading)

    context = mini(device)
    assert measured(context, MultiAdapterMemory(context)).broken == []
    monkeypatch.setattr(Session, "memory", grown)
    texts = measured(context, MultiAdapterMemory(context)).broken
    assert [text.split(" is ")[0] for text in texts] == ["activation_growth", "unplanned_bytes"]
    context.close()


def test_a_model_that_does_not_fit_is_cut_to_what_does(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    before, sizes = device.allocated, []
    for layers in (1, 2):
        context = mini(device, layers)
        sizes.append(device.allocated + new_bytes(context.session([context.tokens], 3, adapter_bricks.QV)))
    assert sizes[0] < sizes[1]
    for nbytes, layers in ((sizes[1] - 1, 1), (sizes[1], 2), (None, 2), (1000, 1), (sizes[0], 1)):
        budget = Budget(nbytes, "the test")
        monkeypatch.setattr(adapter_bricks, "budget_bytes", lambda info, budget=budget: budget)
        assert MultiAdapterMemory(mini(device, 2)).keys["allocated_layers"] == layers
    context = mini(device, 2)
    found = measured(context, MultiAdapterMemory(context))
    assert (found.broken, found.extra["allocated_layers"]) == ([], 1)
    assert found.extra["allocated_three_bytes"] < found.extra["memory_three_bytes"]
    context.close()
    assert device.allocated == before
