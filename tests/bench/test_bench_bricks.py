"""Every brick once on a miniature model, the options that change it, what checks it, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support import MODELS
from support.bench import CEILINGS, MINI, MINI_DELTA, mini, result
from support.processes.broken import Break

from wgpu_lora.bench import device_ceilings
from wgpu_lora.bench.brick import Context, default_shape, new_bytes
from wgpu_lora.bench.brick_results import Result
from wgpu_lora.bench.brick_run import bench, check_fit, judge, measure
from wgpu_lora.bench.bricks import WORKLOADS, adapter_bricks, bricks_of, layer_bricks, serving_bricks
from wgpu_lora.bench.bricks.adapter_bricks import MultiAdapterMemory, MultiAdapterStep, planned_figures
from wgpu_lora.bench.contract import OPTIONS, brick_names, load_contract
from wgpu_lora.bench.device_ceilings import bandwidth_gbs, decode_fma_gflops, dispatch_seconds, fma_gflops
from wgpu_lora.bench.recorded_brick import ProgramWorkload
from wgpu_lora.bench.reference_check import check
from wgpu_lora.bench.timing import Timings
from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import WrongResults
from wgpu_lora.gpu.memory_leases.memory_budget import Budget
from wgpu_lora.gpu.reference_values import nmse
from wgpu_lora.models.synthetic_models import synthetic_model
from wgpu_lora.ops.elementwise import add_forward, swiglu_forward
from wgpu_lora.train.memory import MemoryPlan
from wgpu_lora.train.session.session import Session


@pytest.fixture
def small_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and batches that share few compiled kernels, so that the suite stays fast."""
    monkeypatch.setattr(serving_bricks, "PROMPTS", (5, 9))
    monkeypatch.setattr(serving_bricks, "NEW_TOKENS", 3)
    monkeypatch.setattr(serving_bricks, "SEQUENCES", 2)


@pytest.mark.usefixtures("small_serving")
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_brick(device: Device, name: str) -> None:
    """It agrees with its reference, within the memory that it planned, which it gives back."""
    contract, before = load_contract(name), device.allocated
    context = mini(device, brick=name)
    labels = set()
    for workload in WORKLOADS[name](context):
        device.peak_allocated, there, planned = 0, device.allocated, workload.nbytes()
        measurement = measure(context, contract, workload, CEILINGS, time_limit=0.01)
        labels.add(measurement.label)
        assert measurement.broken == [], measurement.label
        assert measurement.reference is not None
        assert measurement.reference["outputs"] > 0
        assert measurement.iterations >= contract.measure.iterations
        assert 0 < measurement.p20 <= measurement.seconds <= measurement.p80
        assert min(measurement.operations, measurement.bytes) > 0
        used = device.peak_allocated - there
        assert used == pytest.approx(planned, abs=64) if contract.kind == "training" else used <= planned
    assert len(labels) == {"ttft": 2, "batch": 2}.get(name, 1)
    context.close()
    assert device.allocated == before


@pytest.mark.parametrize("compute_dtype", ["bf16", "f16"])
def test_half_operands_are_held_to_their_references_too(device: Device, compute_dtype: str) -> None:
    results, _ = bench(mini(device, compute_dtype=compute_dtype), ["nf4_matmul_backward"], 0.01, ceilings=CEILINGS)
    for measurement in results:
        assert measurement.broken == []


# -- what checks them --------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(device: Device) -> Iterator[ProgramWorkload]:
    """y = x + x, and swiglu of x and y."""
    context = mini(device)
    workload = ProgramWorkload(context)
    x = workload.input((8,))
    y = workload.rec.temp((8,))
    workload.rec.dispatch(add_forward, x, x, y, size=8)
    workload.rec.dispatch(swiglu_forward, x, y, workload.rec.temp((8,)), size=8)
    yield workload
    workload.close()
    context.close()


def test_a_wrong_kernel_is_found(recorded: ProgramWorkload) -> None:
    dispatches = recorded.forward.dispatches
    wrong = replace(swiglu_forward, reference=lambda gate, up, y, size: gate * up)
    dispatches[1] = replace(dispatches[1], kernel=wrong)
    recorded.open()
    verdict = recorded.check(np.random.default_rng(0))
    assert verdict.kernel == "swiglu_forward"
    assert verdict.nmse > 1e-3


def test_what_nobody_wrote_is_found(device: Device, recorded: ProgramWorkload) -> None:
    first, second = recorded.forward.dispatches
    recorded.forward.dispatches = [second]  # reads what the first would have written
    recorded.open()
    recorded.fresh(np.random.default_rng(0))
    assert check(recorded.forward).outputs == 1
    assert np.isnan(device.read(recorded.temps[1].storage.buffer).view(np.float32)).all()
    assert first.kernel is add_forward


OF_DELTA = ["delta_inverse", "delta_mix", "delta_pairs", "delta_scan"]
KERNELS = {
    "nf4_matmul": ["nf4_matmul", "nf4_scales"],
    "nf4_matmul_backward": ["nf4_matmul_backward", "nf4_scales"],
    "lora_forward": ["lora_nt", "nf4_matmul", "nf4_scales"],
    "lora_backward": ["lora_nn", "lora_tn", "nf4_matmul_backward", "nf4_scales"],
    "attention": ["attention_forward"],
    "attention_backward": ["attention_backward_kv", "attention_backward_q", "attention_stats"],
    "rmsnorm": ["rmsnorm_backward", "rmsnorm_forward"],
    "rope": ["rope_backward", "rope_forward"],
    "swiglu": ["swiglu_backward", "swiglu_forward"],
    "delta_rule": [*OF_DELTA, "delta_gates"],
    "delta_rule_backward": [
        *OF_DELTA, "delta_beta_gradient", "delta_flow", "delta_gates_backward", "delta_group_sum", "delta_scaled",
        "delta_scan_backward", "delta_sums", "delta_through",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", layer_bricks.BRICKS)
def test_a_brick_times_its_own_kernels_alone(device: Device, name: str) -> None:
    """Of the layer that they are recorded with, forward and backward."""
    context = mini(device, brick=name)
    (workload,) = WORKLOADS[name](context)
    timed, *baseline = workload.programs()
    assert {step.kernel.name for step in timed.dispatches} == set(KERNELS[name])
    assert bool(baseline) == name.startswith("lora")
    context.close()


def test_a_brick_finds_its_kind_of_layer(device: Device) -> None:
    """Whichever is the first of the model."""
    model = synthetic_model(MINI_DELTA, device, "nf4", "mini")
    names = ["attention", "delta_rule"]
    for name in names:
        (workload,) = WORKLOADS[name](Context(model, tokens=16, rank=4))
        assert workload.programs()[0].dispatches
    assert set(names) < set(bricks_of(MINI_DELTA)) == set(WORKLOADS)
    assert bricks_of(MINI) == [name for name in brick_names() if not name.startswith("delta_rule")]
    with pytest.raises(UserError, match=r"mini has no gated delta nets: choose another shape, such as qwen3\.5-0\.8b"):
        check_fit(mini(device), "delta_rule")


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([3.0, 4.0, 7.0], [3.0, 4.0, np.nan], 0),
        ([3.0, 4.5, np.nan], [3.0, 4.0, np.nan], 0.01),
        ([3.0, np.nan, 0.0], [3.0, 4.0, np.nan], float("inf")),
        ([0.0, 0.0], [0.0, 0.0], 0),
        ([1.0, 1.0], [0.0, 0.0], float("inf")),
    ],
)
def test_nmse(got: list[float], want: list[float], error: float) -> None:
    assert nmse(np.array(got), np.array(want)) == error


def test_a_ceiling_is_measured_in_the_tilings_that_compile(device: Device, broken: Break) -> None:
    before = device.allocated
    broken("stream_copy", lambda tiling: tiling.cols > 1, compiles=False)
    assert 0 < bandwidth_gbs(device, 1 << 12) < float("inf")
    broken("stream_copy", compiles=False)
    with pytest.raises(WrongResults, match=r"does not compile stream_copy \(register allocation failed\): update"):
        bandwidth_gbs(device, 1 << 12)
    assert device.allocated == before


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_said_with_the_layers_that_do(device: Device) -> None:
    def needs(layers: int) -> int:
        context = mini(device, layers)
        (workload,) = WORKLOADS["train_step"](context)
        return device.allocated + workload.nbytes()

    before = device.allocated
    room = needs(1)
    assert room < needs(2)
    check_fit(mini(device, 1), "train_step", room)
    with pytest.raises(
        UserError, match=r"brick train_step of mini needs .* bytes\) are available: it fits with --layers 1"
    ):
        check_fit(mini(device, 2), "train_step", room)
    with pytest.raises(UserError, match="not even one layer fits, so use a smaller model or fewer tokens"):
        check_fit(mini(device, 2), "train_step", 1000)
    assert device.allocated == before


def test_what_cannot_be_bound_is_said(device: Device) -> None:
    tokens = device.max_binding // (4 * 64) + 64
    for name in ("swiglu", "train_step"):
        with pytest.raises(UserError, match=r": lower --tokens\.$"):
            check_fit(mini(device, tokens=tokens), name)


def test_contexts(device: Device) -> None:
    assert Context.of(device).name == default_shape(device)
    keys = Context.of(device, "qwen2.5-0.5b", layers=1, rank=8).keys()
    assert (keys["num_hidden_layers"], keys["rank"], keys["hidden_size"]) == (1, 8, 896)
    assert keys["weight_bits"] == pytest.approx(4.127, abs=1e-3)
    assert 7.6e9 < Context.of(device, "qwen2.5-7b").keys()["parameters"] < 7.7e9


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shape": "zork"}, "The shape zork is not known: choose one of qwen2.5-0.5b"),
        ({"tokens": 0}, "--tokens is 0"),
        ({"rank": -1}, "--rank must be "),
        ({"tokens": 10**6}, "--tokens is 1000000: give 8 to 4096 for tiny-qwen3"),
        ({"base_dtype": "zork"}, "--base-dtype must be one of auto, nf4"),
        ({"compute_dtype": "zork"}, "--compute-dtype must be one of f32"),
        ({"layers": 9}, "--layers 9 is not possible"),
    ],
)
def test_contexts_that_cannot_be(device: Device, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Context.of(device, **{"shape": "tiny-qwen3", **wrong})


def test_a_model_of_its_own(device: Device) -> None:
    model = str(MODELS / "qwen2")
    context = Context.of(device, model=model, layers=1, tokens=8, rank=4)
    assert context.config.num_hidden_layers == 1
    ((measurement,), _) = bench(context, ["load"], 0.01, ceilings=CEILINGS)
    assert measurement.broken == []
    assert measurement.options["shape"] == model


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bandwidth", "code"), [(1e-6, 0), (1e12, 1)])
def test_the_exit_code_names_a_broken_contract(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, bandwidth: float, code: int
) -> None:
    ceilings = replace(CEILINGS, bandwidth_gbs=bandwidth)
    monkeypatch.setattr("wgpu_lora.bench.brick_run.measure_ceilings", lambda device: ceilings)
    command = import_module("wgpu_lora.cli.bench.bricks")  # the package has the function by this name
    monkeypatch.setattr(command, "_context", lambda *a, **k: mini(device, tokens=128))
    file = tmp_path / "a.jsonl"
    assert main(["bench", "--brick", "rope", "--time-limit", "0.01", "--json", str(file)]) == code
    out = capsys.readouterr().out
    assert ("failed    rope: reaches" in out) == bool(code)
    header, line = (json.loads(text) for text in file.read_text().splitlines())
    assert {name: header["device"][name] for name in ("name", "driver")} == {
        "name": device.info.name, "driver": device.info.driver,
    }  # fmt: skip
    assert (header["schema"], header["options"]["tokens"]) == ("wgpu-lora-bench/1", 128)
    assert header["ceilings"]["bandwidth_gbs"] == bandwidth
    assert {"wgpu-lora", "wgpu-native", "python"} <= set(header["versions"])
    assert (line["brick"], line["kind"], len(line["broken"])) == ("rope", "brick", code)
    assert ("noisy     rope: " in out) == (line["cv"] >= line["cv_asked"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give exactly one of --brick NAME, --all"),
        (["--all", "--list"], "Give exactly one of"),
        (["--brick", "zork"], "The brick 'zork' is not known: choose one of attention"),
        (["--brick", "rope", "--shape", "tiny-qwen3", "--model", "demo"], "--model and --shape are both given"),
        (["--brick", "rope", "--time-limit", "0"], "--time-limit is 0"),
        (["compare", "nowhere", "nowhere"], "The result file nowhere cannot be read"),
        (["training", "--shape", "tiny-qwen3", "--model", "demo"], "a shape has synthetic weights"),
        (["--brick", "rope", "--device", "zork"], "No device is named 'zork'"),
        (["--brick", "rope", "--rank", "16"], "--rank does nothing with the brick rope: leave it out."),
        (["--brick", "rope", "--retune"], "--retune does nothing with the brick rope: leave it out."),
        (["--brick", "lora_forward", "--no-tune", "--retune"], "--retune does nothing with --no-tune"),
        (
            ["--brick", "ttft", "--brick", "load", "--no-tune", "--tokens", "9"],
            "--tokens and --tune/--no-tune do nothing with the bricks ttft, load: leave them out.",
        ),
        (["--brick", "rope", "--brick", "optimizer", "--compute-dtype", "f32"], "--compute-dtype does nothing with"),
        (["--list", "--tokens", "9"], "--tokens does nothing with --list: leave it out."),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


# -- bricks ------------------------------------------------------------------------------------------------------------


def dependencies(device: Device, name: str, layers: int = 1, **changes: Any) -> Any:
    """All that measuring a brick depends on: what is counted, what is allocated, and what is dispatched."""
    context, contract, facts = mini(device, layers, brick=name, **changes), load_contract(name), []
    for workload in WORKLOADS[name](context):
        dims = contract.values({**context.keys(), **workload.keys})
        steps = [step for program in workload.programs() for step in program.dispatches]
        calls = [(step.kernel.name, sorted(step.constants.items()), step.present) for step in steps]
        tuned = any(step.kernel.tuning for step in steps) if context.tune else False
        facts.append((contract.operations(dims), contract.bytes(dims), workload.nbytes(), calls, tuned))
    return facts


@pytest.mark.parametrize("name", brick_names())
def test_a_contract_names_the_options_that_change_it(
    device: Device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(serving_bricks, "PROMPTS", (5, 9))
    changes = {"layers": 2, "tokens": 32, "rank": 8, "base_dtype": "f32", "compute_dtype": "bf16", "tune": True}
    assert tuple(changes) == OPTIONS
    plain = dependencies(device, name)
    dependent = [option for option, value in changes.items() if dependencies(device, name, **{option: value}) != plain]
    assert dependent == list(load_contract(name).options)


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in (*WORKLOADS, "tiny-qwen3"))


@pytest.mark.parametrize(
    "measured",
    [
        lambda device: fma_gflops(device, 64, 64),
        lambda device: bandwidth_gbs(device, 1 << 12),
        lambda device: decode_fma_gflops(device, 64, 4),
        lambda device: 1 / dispatch_seconds(device, 4),
    ],
)
def test_ceilings_are_measured(device: Device, measured: Callable[[Device], float]) -> None:
    assert 0 < measured(device) < float("inf")


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([(80.0, 100.0), (85.0, 100.0), (88.0, 95.0)], (88, 95)),
        ([(50.0, 100.0)] * 4 + [(50.0, 80.0)], (50, 80)),
    ],
)
def test_a_ceiling_is_measured_again_before_it_is_broken(
    monkeypatch: pytest.MonkeyPatch, measured: list[tuple[float, float]], expected: tuple[float, float]
) -> None:
    """Both sides, since other processes take the cores from either."""
    fma, numpy = (Mock(side_effect=side) for side in zip(*measured, strict=True))
    monkeypatch.setattr(device_ceilings.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(device_ceilings, "fma_gflops", fma)
    monkeypatch.setattr(device_ceilings, "numpy_gflops", numpy)
    assert device_ceilings.fma_and_numpy_gflops(Mock()) == expected
    assert fma.call_count == numpy.call_count == len(measured)


# -- several adapters --------------------------------------------------------------------------------------------------


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
    outcome = result(brick, extra=extra, budget=budget)
    judge(contract, outcome, {**names, **contract.values(names)}, "discrete")
    return outcome.broken


def measured(context: Context, workload: Any) -> Result:
    return measure(context, load_contract("multi_adapter_memory"), workload, CEILINGS, 0.01)


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("brick", "shape", "figures", "metric", "change"),
    [("multi_adapter_step", "tiny-qwen3", SPEEDS, name, -0.01) for name in SPEEDS]
    + [("multi_adapter_memory", "qwen2.5-7b", MEMORY, name, 1e-3 if MEMORY[name] else 1) for name in MEMORY],
)
def test_what_is_slower_or_larger_breaks_the_contract(
    device: Device, brick: str, shape: str, figures: dict[str, float], metric: str, change: float
) -> None:
    context = Context.of(device, shape)
    assert judged(brick, context, figures) == []
    (text,) = judged(brick, context, {**figures, metric: figures[metric] + change})
    assert text.startswith(f"{metric} is ")


# -- time --------------------------------------------------------------------------------------------------------------


def test_steps_of_equal_tokens_are_of_equal_rows(device: Device) -> None:
    step = MultiAdapterStep(Context.of(device, "tiny-qwen3", layers=1))
    assert {name: (part.tokens, [slot for slot, _ in part._rows]) for name, part in step.steps.items()} == {
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
    figures = step.extra(Timings.of([1.0] * 5))
    names = ("together_speedup", "same_updates_speedup", "short_speedup", "eight_of_three")
    assert [figures[name] for name in names] == pytest.approx([1.1, 2.0, 1.5, 0.9])
    assert figures["together_tokens_per_second"] == 55


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [8, 512])
def test_the_plan_of_a_7b_model(device: Device, tokens: int) -> None:
    figures = planned_figures(Context.of(device, "qwen2.5-7b", tokens=tokens))
    assert 1 < figures["memory_ratio"] <= 1.05
    assert [figures[name] for name in ("base_growth", "activation_growth", "base_reads_growth")] == [1, 1, 1]


def test_memory_that_grows_with_the_slots_is_found(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Session.memory

    def grown(session: Session) -> MemoryPlan:
        memory = plan(session)
        more = {"activations": 4 * len(session.adapters.specs)}
        return MemoryPlan({name: size + more.get(name, 0) for name, size in memory.groups.items()}, memory.loading)

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
    measurement = measured(context, MultiAdapterMemory(context))
    assert (measurement.broken, measurement.extra["allocated_layers"]) == ([], 1)
    assert measurement.extra["allocated_three_bytes"] < measurement.extra["memory_three_bytes"]
    context.close()
    assert device.allocated == before
