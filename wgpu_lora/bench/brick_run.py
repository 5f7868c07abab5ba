"""Measures bricks: for each case correctness, then time, then whether its contract holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

import numpy as np

from wgpu_lora.bench.brick import Context, Workload
from wgpu_lora.bench.brick_results import SCHEMA, Result, header
from wgpu_lora.bench.bricks import WORKLOADS
from wgpu_lora.bench.contract import Bound, Contract, load_contract
from wgpu_lora.bench.device_ceilings import NUMPY_SHARE, PAUSES, Ceilings, measure_ceilings
from wgpu_lora.bench.timing import Timings, repeat
from wgpu_lora.bench.training_step import ROW, benchmark_option_names, check_room
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.gpu.device_errors import with_option_advice
from wgpu_lora.gpu.memory_leases import budget_bytes, claim
from wgpu_lora.gpu.tuner import AHEAD, SECONDS, Tuner
from wgpu_lora.gpu.tuning_cache import NO_CHOICES, Choices
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.names.text import percent
from wgpu_lora.train.track.run_log import run_name
from wgpu_lora.train.track.run_recorder import device_facts, note_failure, recorded

WHICH = {
    "fma": "compute",
    "bandwidth": "memory",
    "decode_fma": "decoding",
    "floor": "compute or memory",
    "lower": "decoding or memory",
}


def bench(
    context: Context,
    names: Sequence[str],
    time_limit: float | None = None,
    events: Events = SILENT,
    ceilings: Ceilings | None = None,
) -> tuple[list[Result], list[str]]:
    """Measure the device's ceilings, then bricks one after the other, if the device has enough memory for all of them.

    Args:
        time_limit: seconds to measure a case, instead of the contract's.
        events: gets `measured` for the header and each result, and `measuring` before each case.
        ceilings: of the device, if known.

    Returns:
        The results, and the violations of their contracts.

    Raises:
        UserError: a brick is unknown, or cannot run on this device.
    """
    contracts = [load_contract(name) for name in names]
    for name in names:
        check_fit(context, name)
    name = run_name(context.name, context.base_dtype, True, False, "bricks", context.compute_dtype)
    facts = {"device": device_facts(context.device.info), "config": {**context.options(), "bricks": list(names)}}
    with recorded("bench", name, objective="bricks", **facts) as entry:
        results, broken = _measure_contracts(context, contracts, time_limit, events, ceilings)
        metrics = ("seconds", "gflops", "gbs")
        figures = {
            r.label: {name: getattr(r, name) for name in metrics} | {"share": r.budget["reached"]} for r in results
        }
        entry["results"] = {"bricks": figures, "broken": broken}
        note_failure(entry, broken)
    return results, broken


def _measure_contracts(
    context: Context,
    contracts: Sequence[Contract],
    time_limit: float | None,
    events: Events,
    ceilings: Ceilings | None,
) -> tuple[list[Result], list[str]]:
    results = []
    ceilings = ceilings or measure_ceilings(context.device)
    now, options = datetime.now(UTC).isoformat(timespec="seconds"), context.options()
    events.measured(header(SCHEMA, context.device, time=now, options=options, ceilings=asdict(ceilings)))
    try:
        for contract in contracts:
            with (
                benchmark_option_names(ROW),
                with_option_advice("max_length"),
                verdicts_of(context.device).reported_to(events),
            ):
                for workload in WORKLOADS[contract.name](context):
                    events.measuring(contract.name, workload.case)
                    results.append(measure(context, contract, workload, ceilings, time_limit))
                    events.measured(results[-1].record())
    finally:
        context.close()
    return results, ceilings_broken(ceilings) + [f"{r.label}: {text}" for r in results for text in r.broken]


def measure(
    context: Context,
    contract: Contract,
    workload: Workload,
    ceilings: Ceilings,
    time_limit: float | None = None,
) -> Result:
    """Check and time a case, and judge it by its contract."""
    keys = {**context.keys(), **workload.keys}
    dims = contract.values(keys)
    operations, nbytes = contract.operations(dims), contract.bytes(dims)
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    limits, device = contract.measure, context.device
    with claim(device, workload.nbytes(), f"bench {contract.name}"):
        try:
            choices = measured_choices(context, workload)
            workload.open(choices)
            checked = workload.check(np.random.default_rng(seed))
            for _ in range(limits.warmup):
                workload.run()
            limit = limits.seconds if time_limit is None else time_limit
            timings = Timings.of(repeat(workload.run, limits.iterations, limits.cv, limit))
            extra = workload.extra(timings)
        finally:
            workload.close()
    floors = floor_seconds(ceilings, operations, nbytes)
    result = Result(
        brick=contract.name,
        case=workload.case,
        options=context.options() | {"tuned": choices is not NO_CHOICES},
        clock=workload.clock,
        **asdict(timings),
        operations=operations,
        bytes=nbytes,
        gflops=operations / timings.seconds / 1e9,
        gbs=nbytes / timings.seconds / 1e9,
        budget={"of": contract.budget.of, "asked": None, "reached": floors[contract.budget.of] / timings.seconds},
        reference=asdict(checked) if checked else None,
        seed=seed,
        extra=extra,
        cv_asked=limits.cv,
    )
    judge(contract, result, {**keys, **dims}, device.info.kind)
    return result


def measured_choices(context: Context, workload: Workload) -> Choices:
    """The tilings of a case; none, so that all have their defaults, if it compares programs of which some were not
    timed."""
    tuner = Tuner(context.device, AHEAD if context.retune else SECONDS, retune=context.retune)
    choices = tuner.tune(workload.programs()) if context.tune else NO_CHOICES
    return NO_CHOICES if workload.compares and not tuner.complete else choices


def floor_seconds(ceilings: Ceilings, operations: float, nbytes: float) -> dict[str, float]:
    """The least time that each ceiling allows, in seconds."""
    fma, decode = operations / ceilings.fma_gflops / 1e9, operations / ceilings.decode_fma_gflops / 1e9
    stream = nbytes / ceilings.bandwidth_gbs / 1e9
    return {
        "fma": fma,
        "decode_fma": decode,
        "bandwidth": stream,
        "floor": max(fma, stream),
        "lower": max(decode, stream),
    }


def judge(contract: Contract, result: Result, names: Mapping[str, float], device_class: str) -> None:
    """Record the share of the ceiling that the contract requires on this device, and all its violations."""
    broken = result.broken
    if contract.accuracy and result.reference:
        value, limit = result.reference["nmse"], contract.accuracy.nmse
        if not value <= limit:  # also if it is NaN
            broken.append(f"{result.reference['kernel']} is off its reference: NMSE {value:.2g}, at most {limit:.2g}")
    share = contract.budget.share(device_class) if contract.applies(contract.budget.when, names) else None
    reached = result.budget["reached"]
    result.budget["asked"] = share
    if share is not None and reached < share:
        short = f"{1 - reached / share:.0%} short"
        ceiling = f"the device's {WHICH[contract.budget.of]} ceiling"
        broken.append(f"reaches {percent(reached)} of {ceiling}, at least {percent(share)} ({short})")
    figures = {**result.extra, "seconds": result.seconds, "gflops": result.gflops, "gbs": result.gbs}
    for bound in contract.bounds:
        if bound.metric in result.impossible:
            continue
        if bound.device in (None, device_class) and contract.applies(bound.when, names):
            broken += _bound_broken(bound, figures, contract)


def _bound_broken(bound: Bound, figures: dict[str, float], contract: Contract) -> list[str]:
    if bound.metric not in figures:
        metrics = ", ".join(sorted(figures))
        raise UserError(
            f"bricks/{contract.name}.toml bounds {bound.metric}, which is not measured: use one of {metrics}."
        )
    value = figures[bound.metric]
    if bound.at_most is not None and value > bound.at_most:
        return [f"{bound.metric} is {value:.4g}, at most {bound.at_most:g} ({value / bound.at_most - 1:.0%} over)"]
    if bound.at_least is not None and value < bound.at_least:
        return [f"{bound.metric} is {value:.4g}, at least {bound.at_least:g} ({1 - value / bound.at_least:.0%} short)"]
    return []


def ceilings_broken(ceilings: Ceilings) -> list[str]:
    """A ceiling below what the same cores reach with NumPy, measured several times, is not one."""
    if ceilings.numpy_gflops is None or ceilings.fma_gflops >= NUMPY_SHARE * ceilings.numpy_gflops:
        return []
    share = ceilings.fma_gflops / ceilings.numpy_gflops
    times = f"in {len(PAUSES)} attempts, at least {NUMPY_SHARE:g}"
    return [f"ceilings: FMA chains reach {share:.2f} of NumPy's matmul on the same cores {times}"]


def check_fit(context: Context, name: str, available: int | None = None) -> None:
    """Raise UserError, with the layers that fit, if a case of a brick needs more memory than the device has.

    Args:
        available: bytes, instead of the device's memory.
    """
    device = context.device

    def needs(layers: int) -> int:
        return device.allocated + max(case.nbytes() for case in WORKLOADS[name](context.with_layers(layers)))

    with benchmark_option_names(ROW), with_option_advice("max_length"):
        room = budget_bytes(device.info, available).bytes
        check_room(f"The brick {name} of {context.name}", needs, context.config.num_hidden_layers, room)
