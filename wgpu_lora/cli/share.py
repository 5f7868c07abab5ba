"""wgpu-lora share: which processes hold how much of each device's memory, and repairs of that record."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.commands import Command, Group
from wgpu_lora.cli.console import console, line, print_json
from wgpu_lora.cli.options import Json
from wgpu_lora.errors import UserError
from wgpu_lora.words import counted

if TYPE_CHECKING:
    from wgpu_lora.gpu.devices import DeviceInfo
    from wgpu_lora.share import Entry

share = typer.Typer(
    cls=Group,
    name="share",
    help="Show who holds how much of each device's memory, and repair that record.",
    rich_markup_mode=None,
    invoke_without_command=True,
)


@share.callback()
def _root(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@share.command(cls=Command)
def status(as_json: Json = False) -> None:
    """Show each device's budget, the memory held, and who is waiting."""
    from wgpu_lora.gpu.devices import list_devices
    from wgpu_lora.share import Budget, Ledger, budget_bytes, device_key, device_memory

    found: dict[Path, DeviceInfo | None] = {}
    listed = list_devices()
    for one in listed:  # several drivers may list the same device
        found.setdefault(Ledger(device_key(one, listed)).path, one)
    for ledger in Ledger.all():
        found.setdefault(ledger.path, None)
    devices = []
    for path, info in found.items():
        entries = Ledger(path.stem).read()
        budget = budget_bytes(info) if info else Budget(None, "no device of this name is present")
        memory = device_memory(info) if info else None
        leases, queue = ([e for e in entries if e.holds is holds] for holds in (True, False))
        devices.append(
            {
                "device": info.name if info else path.stem,
                "ledger": str(path),
                "budget": budget.bytes,
                "source": budget.source,
                "free_now": memory.free if memory else None,  # with all programs on the machine
                "held": sum(e.bytes for e in leases if e.here and not e.dead),
                "leases": [_facts(e) for e in leases],
                "queue": [_facts(e) for e in queue],
            }
        )
    if as_json:
        print_json(devices)
        return
    for device in devices:
        _show(device)


@share.command(cls=Command)
def release(
    lease: Annotated[str | None, typer.Argument(metavar="ID", help="Lease id, as shown by 'status'.")] = None,
    dead: Annotated[bool, typer.Option("--dead", help="Release all leases whose processes have ended.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Release it even if its process is alive.")] = False,
) -> None:
    """Release the memory of a process that has ended.

    With --force, also that of a process that is alive but no longer uses the device.

    Memory of dead processes on this machine is also released automatically at the next request for memory.
    """
    from wgpu_lora.share import Ledger

    if (lease is None) is not dead:
        raise UserError("Give either a lease id, as shown by 'wgpu-lora share status', or --dead.")
    found = [(ledger, e) for ledger in Ledger.all() for e in ledger.read() if (e.dead if dead else e.id == lease)]
    if lease and not found:
        raise UserError(f"There is no lease '{lease}': 'wgpu-lora share status' lists the leases.")
    for ledger, entry in found:
        if not entry.dead and not entry.holds:
            raise UserError(f"'{lease}' holds no memory but is waiting: end {entry.who} to remove it from the queue.")
        if not entry.dead and not force:
            raise UserError(
                f"'{lease}' belongs to {entry.who}, which is alive: end it, or use --force if it no longer uses "
                "the device."
            )
        with ledger.changing() as entries:  # drops the dead
            # A live lease stays listed with 0 bytes: if it were removed, its owner's next renewal would restore it.
            entries[:] = [replace(e, bytes=0) if e.id == entry.id else e for e in entries]
        line("released", f"{counted(entry.bytes, 'byte')} of {entry.who}")
    if not found:
        line("released", "nothing: all processes are alive")


@share.command(cls=Command)
def repair() -> None:
    """Rebuild damaged ledgers from their readable parts.

    A damaged file is kept beside the new one.
    """
    from wgpu_lora.share import Ledger

    repairs = [(ledger.path, ledger.repair()) for ledger in Ledger.all()]
    for path, done in repairs:
        if done:
            line(
                "repaired",
                f"{path}: kept {counted(len(done.kept), 'entry', 'entries')}; the damaged file is {done.damaged}",
            )
    if not any(done for _, done in repairs):
        line("repaired", "nothing: no ledger is damaged")


def _facts(entry: Entry) -> dict[str, Any]:
    return {**asdict(entry), "alive": not entry.dead, "here": entry.here}


def _show(device: dict[str, Any]) -> None:
    from rich.table import Table

    from wgpu_lora.train.memory import both

    def size(nbytes: int | None) -> str:
        return "unknown" if nbytes is None else both(nbytes)

    line("device", device["device"])
    line("budget", f"{size(device['budget'])} for all runs of wgpu-lora together: {device['source']}")
    line("held", f"{size(device['held'])} by runs of wgpu-lora")
    if device["free_now"] is not None:
        line("free now", f"{size(device['free_now'])} of the device, whoever uses the rest")
    if device["budget"] is not None:
        left = max(0, device["budget"] - device["held"])
        line(
            "left", f"{size(min(left, device['free_now'] or left))} for another run, within the budget and what is free"
        )
    entries = [*device["leases"], *device["queue"]]
    if not entries:
        return
    table = Table(box=None, pad_edge=False)
    for name in ("id", "state", "bytes", "pid", "what", "since"):
        table.add_column(name, justify="right" if name == "bytes" else "left")
    for e in entries:
        state = "ended" if not e["alive"] else "in use" if e["holds"] else "waiting"
        since = datetime.fromtimestamp(e["since"]).strftime("%Y-%m-%d %H:%M:%S")
        host = "" if e["here"] else f" on {e['host']}"
        table.add_row(e["id"], state, f"{e['bytes']:,}", f"{e['pid']}{host}", e["what"], since)
    console().print(table)
