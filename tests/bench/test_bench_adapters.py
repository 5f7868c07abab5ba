"""The bricks of many adapters on one base: what they compare, and that they find what they are there to find."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import path_of
from support.bench import CEILINGS, mini, result

from wgpu_lora.bench.brick import Context, new_bytes
from wgpu_lora.bench.brick_results import Result
from wgpu_lora.bench.brick_run import judge, measure
from wgpu_lora.bench.bricks import adapter_bricks
from wgpu_lora.bench.bricks.adapter_bricks import MultiAdapterMemory, MultiAdapterStep, base_reads, planned_figures
from wgpu_lora.bench.contract import load_contract
from wgpu_lora.bench.timing import Timings
from wgpu_lora.gpu.device import Device
from wgpu_lora.memory_leases.memory_budget import Budget
from wgpu_lora.models.adapter_set import AdapterSet, SlotSpec
from wgpu_lora.train.memory import MemoryPlan
from wgpu_lora.train.session.session import Session
from wgpu_lora.weights.nf4.nf4_products import NF4Product

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


@pytest.mark.parametrize("metric", SPEEDS)
def test_a_slower_pipeline_breaks_the_contract(device: Device, metric: str) -> None:
    context = Context.of(device, "tiny-qwen3")
    assert judged("multi_adapter_step", context, SPEEDS) == []
    (text,) = judged("multi_adapter_step", context, {**SPEEDS, metric: SPEEDS[metric] - 0.01})
    assert text.startswith(f"{metric} is ")
    assert judged("multi_adapter_step", mini(device), dict.fromkeys(SPEEDS, 0.1)) == []


@pytest.mark.parametrize("metric", MEMORY)
def test_more_memory_breaks_the_contract(device: Device, metric: str) -> None:
    context = Context.of(device, "qwen2.5-7b")
    assert judged("multi_adapter_memory", context, MEMORY) == []
    (text,) = judged("multi_adapter_memory", context, {**MEMORY, metric: MEMORY[metric] + 1e-3 + (MEMORY[metric] == 0)})
    assert text.startswith(f"{metric} is ")


# -- time --------------------------------------------------------------------------------------------------------------


def test_steps_of_equal_tokens_are_of_equal_rows(device: Device) -> None:
    step = MultiAdapterStep(Context.of(device, "tiny-qwen3", layers=1))
    tokens = {name: one.tokens for name, one in step.steps.items()}
    assert tokens == {
        "alone": 512, "together": 512, "eight": 512, "third_alone": 192, "short_alone": 64, "short_together": 192,
    }  # fmt: skip
    rows = {name: one._rows for name, one in step.steps.items()}
    assert {length for of in rows.values() for _, length in of} == {64}
    assert [slot for slot, _ in rows["together"]] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [slot for slot, _ in rows["eight"]] == list(range(8))
    assert [slot for slot, _ in rows["short_together"]] == [0, 1, 2]
    assert step.keys["trained"] == 8 * 63


@pytest.mark.parametrize("tokens", [8, 11, 37, 130, 1000])
def test_any_tokens_are_divided(device: Device, tokens: int) -> None:
    step = MultiAdapterStep(Context.of(device, "tiny-qwen3", layers=1, tokens=tokens))
    assert {step.steps[name].tokens for name in ("alone", "together", "eight")} == {tokens}


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


def test_every_slot_takes_its_step(device: Device) -> None:
    """Of eight adapters with a row each, every one is updated, and by gradients: moments are zero before."""
    context = mini(device, tokens=80)
    step = MultiAdapterStep(context)
    step.open()
    try:
        step.check(np.random.default_rng(0))
        session = step.sessions[-1]
        for slot in range(8):
            session.optimizer.state.write(device, slot, {})
        before = [session.adapters.read(device, slot) for slot in range(8)]
        assert step.run() > 0
        for slot in range(8):
            after = session.adapters.read(device, slot)
            assert all(
                (a != b).mean() > 0.5 for key in after for a, b in zip(after[key], before[slot][key], strict=True)
            )
            assert all(np.isfinite(matrix).all() for pair in after.values() for matrix in pair)
    finally:
        step.close()
        context.close()


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [8, 512])
def test_the_plan_of_a_7b_model(device: Device, tokens: int) -> None:
    found = planned_figures(Context.of(device, "qwen2.5-7b", tokens=tokens))
    assert 1 < found["memory_ratio"] <= 1.05
    assert [found[name] for name in ("base_growth", "activation_growth", "base_reads_growth")] == [1, 1, 1]


@pytest.mark.parametrize("recompute", [False, True])
def test_slots_of_different_targets_share_the_base_too(device: Device, recompute: bool) -> None:
    """Three adapters, each on projections and layers of its own, beside one that has all of theirs."""
    context = mini(device, layers=2)
    every = [module for module in context.config.lora_modules if module.startswith("model.layers.1.")]
    parts = [{path_of(0, "q_proj"): 2.0, path_of(1, "v_proj"): 1.0}, {path_of(1, "down_proj"): 2.0}]
    parts.append(dict.fromkeys(every, 0.5))
    union = {key: 1.0 for part in parts for key in part}

    def session(specs: list[SlotSpec]) -> Session:
        adapters = AdapterSet.declare(context.config, specs, device.max_binding)
        return Session(context.model, adapters, [context.tokens], positions=context.tokens, recompute=recompute)

    one, few = session([SlotSpec(4, union)]), session([SlotSpec(4, part) for part in parts])
    assert base_reads(one) == base_reads(few) > 0
    for group in ("base", "activations"):
        assert one.memory().groups[group] == few.memory().groups[group]


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


def test_a_base_that_is_read_for_every_slot_is_found(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, made = NF4Product.forward, Context.session

    def by_slot(context: Context, buckets: list[int], slots: int, *rest: Any) -> Session:
        def repeated(self: NF4Product, *args: Any) -> None:
            for _ in range(slots):
                forward(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(NF4Product, "forward", repeated)
            return made(context, buckets, slots, *rest)

    monkeypatch.setattr(Context, "session", by_slot)
    found = planned_figures(mini(device))
    assert found["base_reads_growth"] > 2
    assert found["base_growth"] == 1


def test_what_nobody_planned_is_found(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, extra = Session.allocate, []

    def careless(session: Session, **given: Any) -> None:
        allocate(session, **given)
        extra.append(device.create_buffer(256))

    monkeypatch.setattr(Session, "allocate", careless)
    context = mini(device)
    found = measured(context, MultiAdapterMemory(context))
    assert found.extra["unplanned_bytes"] >= 256
    assert any(text.startswith("unplanned_bytes") for text in found.broken)
    for buffer in extra:
        device.free(buffer)
    context.close()


def test_a_model_that_does_not_fit_is_cut_to_what_does(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def need(layers: int) -> int:
        context = mini(device, layers)
        return device.allocated + new_bytes(context.session([context.tokens], 3, adapter_bricks.QV))

    def room(nbytes: int | None) -> None:
        monkeypatch.setattr(adapter_bricks, "budget_bytes", lambda info: Budget(nbytes, "the test"))

    before = device.allocated
    sizes = [need(layers) for layers in (1, 2)]
    assert sizes[0] < sizes[1]
    for nbytes, layers in ((sizes[0], 1), (sizes[1] - 1, 1), (sizes[1], 2), (None, 2), (1000, 1)):
        room(nbytes)
        assert MultiAdapterMemory(mini(device, 2)).keys["allocated_layers"] == layers
    room(sizes[0])
    context = mini(device, 2)
    found = measured(context, MultiAdapterMemory(context))
    assert found.broken == []
    assert found.extra["allocated_layers"] == 1
    assert found.extra["allocated_three_bytes"] < found.extra["memory_three_bytes"]
    context.close()
    assert device.allocated == before


def test_a_base_that_is_there_already_is_counted_once(device: Device) -> None:
    context = mini(device)
    context.model.load_weights()
    workload = MultiAdapterMemory(context)
    planned, before = workload.nbytes(), device.allocated
    device.peak_allocated = before
    workload.open()
    assert device.peak_allocated - before == planned
    assert workload.extra(Timings.of([1.0]))["unplanned_bytes"] == 0
    workload.close()
    context.close()
