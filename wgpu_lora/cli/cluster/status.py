"""wgpu-lora cluster status: machines, devices and runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from wgpu_lora.bounded import escape_unprintable
from wgpu_lora.cli.cluster.options import Address, ClusterToml, Here
from wgpu_lora.cli.console import console, line, print_json
from wgpu_lora.cli.console import table as made_table
from wgpu_lora.cli.parameters import Json
from wgpu_lora.installation import program

if TYPE_CHECKING:
    from wgpu_lora.cluster.facts import DeviceView, RunView, Snapshot, TaskView

LINES = 5  # of events
REASONS = 10  # of adapters
RUNS = 20


def status(address: Address = None, file: ClusterToml = None, local: Here = False, as_json: Json = False) -> int:
    """Show machines, devices, leases of their memory, runs and speeds."""
    from wgpu_lora.cluster.extra import check_ray

    check_ray()
    from wgpu_lora.cluster.client import status as facts
    from wgpu_lora.cluster.client.connect import connected, target
    from wgpu_lora.cluster.client.follow import snapshot_of
    from wgpu_lora.cluster.client.survey import SURVEY_SECONDS

    with connected(target(address, file, local)) as cluster:
        cluster.coordinator("nodes", seconds=SURVEY_SECONDS)  # as they are now
        seen = snapshot_of(cluster)
    if as_json:
        print_json(facts.as_json(seen))
    else:
        show(seen)
    return 0


def show(seen: Snapshot) -> None:
    """Print a table of devices, one of runs, and the newest events."""
    from rich.text import Text

    hosts = {node.address: node.host for node in seen.nodes}
    for node in seen.nodes:
        if not node.devices:
            line("host", f"{node.host} ({node.address}): no WebGPU device")
    if seen.devices:
        columns = ("device", "name", "backend", "state", "jobs", "tokens/s", "free", "of", "speed", "leases")
        rows = [_device(one, hosts.get(one.facts.address, one.facts.address)) for one in seen.devices]
        left = ("device", "name", "backend", "state", "jobs", "leases")
        console().print(made_table(columns, [[Text(escape_unprintable(cell)) for cell in row] for row in rows], left))
    else:
        line("devices", "none")
    for view in seen.devices:
        if view.state == "quarantined":
            place = f"{hosts.get(view.facts.address, view.facts.address)}:{view.facts.index}"
            again = f"'{program()} cluster release {place}' uses it again"
            line("aside", f"jobs failed on {place} {view.failures} times in a row: {again}")
    if seen.runs:
        print()
        of_runs = ("run", "by", "began", "adapters", "tokens/s", "results")
        rows = [_run(run, [task for task in seen.tasks if task.run == run.name]) for run in seen.runs[-RUNS:]]
        cells = [[Text(escape_unprintable(cell)) for cell in row] for row in rows]
        console().print(made_table(of_runs, cells, (*of_runs[:4], "results")))
    _explain(seen)
    if seen.events:
        print()
    for event in seen.events[-LINES:]:
        line("event", f"{time.strftime('%H:%M:%S', time.localtime(event.time))} {event.text}")


def _explain(seen: Snapshot) -> None:
    """Print what is said of adapters whose run goes on, or whose result has not been fetched."""
    from wgpu_lora.cli.cluster.reasons import reasons

    over = {run.name for run in seen.runs if run.over}
    named = [
        replace(task, name=f"{task.run}/{task.name}") for task in seen.tasks if task.run not in over or not task.fetched
    ]
    found = reasons(named)
    for state, why in found[:REASONS]:
        line(state, why)
    if len(found) > REASONS:
        line("and", f"{len(found) - REASONS:,} more reasons: see '{program()} cluster status --json'")


def _device(view: DeviceView, host: str) -> list[str]:
    from wgpu_lora.train.memory import format_bytes

    facts = view.facts
    return [
        f"{host}:{facts.index}",
        facts.name,
        facts.backend,
        view.state,
        ", ".join(view.units),
        "" if view.tokens_per_second is None else f"{view.tokens_per_second:,.0f}",
        "" if facts.free is None else format_bytes(facts.free),
        "" if facts.budget is None else format_bytes(facts.budget),
        "" if facts.speed is None else f"{facts.speed:,.0f}",
        "; ".join(lease.partition(" (")[0] for lease in facts.leases),  # without what for, which is long
    ]


def _run(run: RunView, tasks: Sequence[TaskView]) -> list[str]:
    from wgpu_lora.cli.cluster.table import ORDER

    count = {state: sum(task.state == state for task in tasks) for state in ORDER}
    speed = sum(task.progress.tokens_per_second or 0 for task in tasks if task.state == "running")
    here = "fetched" if all(task.fetched for task in tasks) else "to be fetched by 'attach'"
    return [
        run.name,
        run.by,
        time.strftime("%m-%d %H:%M", time.localtime(run.began)),
        ", ".join(f"{number:,} {state}" for state, number in count.items() if number),
        f"{speed:,.0f}" if speed else "",
        run.shared or (here if run.over else ""),
    ]
