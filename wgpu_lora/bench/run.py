"""Runs bricks: the plan first, then for each case correctness, then time, then its contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime

import numpy as np

from wgpu_lora.bench.ceiling import Ceilings, measure_ceilings
from wgpu_lora.bench.contract import Bound, Contract, load_contract
from wgpu_lora.bench.results import SCHEMA, Header, Result, header
from wgpu_lora.bench.stats import Timings, repeat
from wgpu_lora.bench.step import ROW, check_room, own_words
from wgpu_lora.bench.workload import Context, Workload
from wgpu_lora.bench.workloads import WORKLOADS
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.gpu.tuner import Tuner
from wgpu_lora.share import budget_bytes, claim
from wgpu_lora.share.refusals import advising
from wgpu_lora.words import share

WHICH = {
    "fma": "compute",
    "bandwidth": "memory",
    "decode_fma": "decoding",
    "floor": "compute or memory",
    "lower": "decoding or memory",
}
NUMPY_SHARE = 0.9  # of NumPy's matmul that FMA chains on the same cores must reach, or they are no ceiling


def header_of(context: Context, ceilings: Ceilings) -> Header:
    """The first line of a result file."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return header(SCHEMA, context.device, time=now, options=context.options(), ceilings=asdict(ceilings))


def bench(
    context: Context, names: Sequence[str], time_limit: float | None = None, events: Events = SILENT
) -> tuple[list[Result], list[str]]:
    """Measures the device's ceilings, then each brick. Whether they fit is asked before, of `check_fit`.

    Args:
        events: told of `measuring`, and of `measured`: the header, then each result's record.

    Returns:
        The results, and what of the contracts does not hold.
    """
    ceilings = measure_ceilings(context.device)
    events.measured(header_of(context, ceilings))
    results = []
    for result in run_bricks(context, names, ceilings, time_limit, events):
        events.measured(result.record())
        results.append(result)
    return results, ceilings_broken(ceilings) + [f"{r.label}: {text}" for r in results for text in r.broken]


def run_bricks(
    context: Context,
    names: Sequence[str],
    ceilings: Ceilings,
    time_limit: float | None = None,
    events: Events = SILENT,
) -> Iterator[Result]:
    """Measures bricks one after the other; whether they fit is asked before, of `check_fit`.

    Args:
        time_limit: seconds of measuring a case, instead of the contract's own.
        events: told of `measuring`.

    Raises:
        UserError: a brick is not known, or cannot run on this device.
    """
    contracts = [load_contract(name) for name in names]
    try:
        for contract in contracts:
            with own_words(ROW), advising("max_length"):
                for workload in WORKLOADS[contract.name](context):
                    events.measuring(contract.name, workload.case)
                    yield measure(context, contract, workload, ceilings, time_limit)
    finally:
        context.close()


def measure(
    context: Context,
    contract: Contract,
    workload: Workload,
    ceilings: Ceilings,
    time_limit: float | None = None,
) -> Result:
    """Correctness, then time, then the contract, of one case."""
    keys = {**context.keys(), **workload.keys}
    dims = contract.values(keys)
    operations, nbytes = contract.operations(dims), contract.bytes(dims)
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    device = context.device
    lease = ExitStack()
    try:
        lease.enter_context(claim(device, workload.nbytes(), f"bench {contract.name}"))
        workload.open(Tuner(device).tune(workload.programs()) if context.tune else {})
        checked = workload.check(np.random.default_rng(seed))
        for _ in range(contract.measure.warmup):
            workload.run()
        limit = contract.measure.seconds if time_limit is None else time_limit
        seconds = repeat(workload.run, contract.measure.iterations, contract.measure.cv, limit)
        timings = Timings.of(seconds)
        extra = workload.extra(timings)
        clock = workload.clock
    finally:
        workload.close()
        lease.close()
    floors = floor_seconds(ceilings, operations, nbytes)
    result = Result(
        brick=contract.name,
        case=workload.case,
        options=context.options(),
        clock=clock,
        **asdict(timings),
        operations=operations,
        bytes=nbytes,
        gflops=operations / timings.seconds / 1e9,
        gbs=nbytes / timings.seconds / 1e9,
        floor_seconds=floors["floor"],
        share_of_floor=floors["floor"] / timings.seconds,
        budget={"of": contract.budget.of, "asked": None, "reached": floors[contract.budget.of] / timings.seconds},
        reference=asdict(checked) if checked else None,
        seed=seed,
        extra=extra,
        cv_asked=contract.measure.cv,
    )
    judge(contract, result, {**keys, **dims}, device.info.kind)
    return result


def floor_seconds(ceilings: Ceilings, operations: float, nbytes: float) -> dict[str, float]:
    """The least seconds that each ceiling allows."""
    fma, decode = operations / ceilings.fma_gflops / 1e9, operations / ceilings.decode_fma_gflops / 1e9
    stream = nbytes / ceilings.bandwidth_gbs / 1e9
    return {
        "fma": fma,
        "decode_fma": decode,
        "bandwidth": stream,
        "floor": max(fma, stream),
        "lower": max(decode, stream),
    }


def judge(contract: Contract, result: Result, names: dict[str, float], device_class: str) -> None:
    """Notes what the contract asks for on this device, and what of it does not hold."""
    broken = result.broken
    if contract.accuracy and result.reference:
        found, limit = result.reference["nmse"], contract.accuracy.nmse
        if not found <= limit:  # a NaN is wrong too
            broken.append(f"{result.reference['kernel']} is off its reference: NMSE {found:.2g}, at most {limit:.2g}")
    asked = contract.budget.share(device_class) if contract.applies(contract.budget.when, names) else None
    reached = result.budget["reached"]
    result.budget["asked"] = asked
    if asked is not None and reached < asked:
        short = f"{1 - reached / asked:.0%} short"
        ceiling = f"the device's {WHICH[contract.budget.of]} ceiling"
        broken.append(f"reaches {share(reached)} of {ceiling}, at least {share(asked)} ({short})")
    figures = {**result.extra, "seconds": result.seconds, "gflops": result.gflops, "gbs": result.gbs}
    for bound in contract.bounds:
        if bound.device in (None, device_class) and contract.applies(bound.when, names):
            broken += _bound_broken(bound, figures, contract)


def _bound_broken(bound: Bound, figures: dict[str, float], contract: Contract) -> list[str]:
    if bound.metric not in figures:
        known = ", ".join(sorted(figures))
        raise UserError(
            f"bricks/{contract.name}.toml bounds {bound.metric}, which is not measured: use one of {known}."
        )
    value = figures[bound.metric]
    if bound.at_most is not None and value > bound.at_most:
        return [f"{bound.metric} is {value:.4g}, at most {bound.at_most:g} ({value / bound.at_most - 1:.0%} over)"]
    if bound.at_least is not None and value < bound.at_least:
        return [f"{bound.metric} is {value:.4g}, at least {bound.at_least:g} ({1 - value / bound.at_least:.0%} short)"]
    return []


def ceilings_broken(ceilings: Ceilings) -> list[str]:
    """A ceiling below what the same cores do elsewhere is none."""
    if ceilings.numpy_gflops is None or ceilings.fma_gflops >= NUMPY_SHARE * ceilings.numpy_gflops:
        return []
    share = ceilings.fma_gflops / ceilings.numpy_gflops
    return [f"ceilings: FMA chains reach {share:.2f} of NumPy's matmul on the same cores, at least {NUMPY_SHARE:g}"]


def check_fit(context: Context, name: str, available: int | None = None) -> None:
    """Raises UserError, with the layers that fit, where the plan of a brick's case is larger than the device's memory.

    Args:
        available: bytes, instead of what the device has.
    """
    device = context.device

    def needs(layers: int) -> int:
        return device.allocated + max(case.nbytes() for case in WORKLOADS[name](context.with_layers(layers)))

    with own_words(ROW), advising("max_length"):
        room = budget_bytes(device.info, available).bytes
        check_room(f"The brick {name} of {context.name}", needs, context.config.num_hidden_layers, room)
