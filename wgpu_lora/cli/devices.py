"""wgpu-lora info: the available devices, and which one is used by default."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.command import Command, Group
from wgpu_lora.cli.console import console, line, print_json
from wgpu_lora.cli.finetune import Adapters, AdaptersConfig, BatchTokens, Schedule, job_of
from wgpu_lora.cli.parameters import Device, Json, given_options, refuse_unused, training_arguments
from wgpu_lora.cli.plan import Shape
from wgpu_lora.cli.training_progress import StartupProgress
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun

if TYPE_CHECKING:
    from wgpu_lora.gpu.device_list import DeviceInfo
    from wgpu_lora.gpu.memory_leases import LedgerEntry


def info(device: Device = None, as_json: Json = False) -> int:
    """List the devices.

    It shows their drivers, features and limits; * marks the device that is used by default.
    """
    from wgpu_lora.gpu.device import Device as OpenedDevice
    from wgpu_lora.gpu.device_list import list_devices
    from wgpu_lora.gpu.tuning_cache import ChoiceFile

    opened = OpenedDevice(device)
    devices, index, tilings = list_devices(opened.webgpu), opened.info.index, str(ChoiceFile(opened).path)
    if as_json:
        print_json(
            {
                "devices": [d.as_dict() for d in devices],
                "adapters": [d.as_dict() for d in devices],  # their name in 0.1; to be removed in the next version
                "used": index,
                "subgroup_size": opened.capabilities.subgroup_size,
                "webgpu": opened.webgpu.versions(),
                "max_binding": opened.max_binding,
                "max_buffer": opened.max_buffer,
                "tilings": tilings,
            }
        )
        return 0
    from rich.table import Table

    from wgpu_lora.train.memory import format_bytes

    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for name in ("", "#", "device and driver", "kind", "features", "limits"):
        table.add_column(name)
    for d in devices:
        limits = d.limits
        table.add_row(
            "*" if d.index == index else "",
            str(d.index),
            f"{d.name}\n{d.driver}",
            f"{d.kind}\n{d.backend}",
            "\n".join(d.features) or "none",
            f"buffer {format_bytes(limits['max-buffer-size'])}\n"
            f"binding {format_bytes(limits['max-storage-buffer-binding-size'])}\n"
            f"{limits['max-storage-buffers-per-shader-stage']} bindings per shader\n"
            f"workgroup {limits['max-compute-invocations-per-workgroup']} threads, "
            f"{format_bytes(limits['max-compute-workgroup-storage-size'])}",
        )
    console().print(table)
    library = " ".join(*opened.webgpu.versions().items())
    line("used", f"{index}: {opened.info.name}, {opened.capabilities.units}, {library}; choose another with --device")
    line("tilings", tilings, whole=True)
    return 0


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
    from wgpu_lora.gpu.device_list import list_devices
    from wgpu_lora.gpu.memory_leases import Budget, Ledger, budget_bytes, device_key, device_memory

    result: dict[Path, DeviceInfo | None] = {}
    listed = list_devices()
    for device_info in listed:  # several drivers may list the same device
        result.setdefault(Ledger(device_key(device_info, listed)).path, device_info)
    for ledger in Ledger.all():
        result.setdefault(ledger.path, None)
    devices = []
    for path, info in result.items():
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
                "held": sum(e.bytes for e in leases if e.is_of_this_host and not e.dead),
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
    from wgpu_lora.gpu.memory_leases import Ledger

    if (lease is None) is not dead:
        raise UserError("Give either a lease id, as shown by 'wgpu-lora share status', or --dead.")
    result = [(ledger, e) for ledger in Ledger.all() for e in ledger.read() if (e.dead if dead else e.id == lease)]
    if lease and not result:
        raise UserError(f"There is no lease '{lease}': 'wgpu-lora share status' lists the leases.")
    for ledger, entry in result:
        if not entry.dead and not entry.holds:
            raise UserError(f"'{lease}' holds no memory but is waiting: end {entry.owner} to remove it from the queue.")
        if not entry.dead and not force:
            raise UserError(
                f"'{lease}' belongs to {entry.owner}, which is alive: end it, or use --force if it no longer uses "
                "the device."
            )
        with ledger.changing() as entries:  # drops the dead
            # A live lease stays listed with 0 bytes: if it were removed, its owner's next renewal would restore it.
            entries[:] = [replace(e, bytes=0) if e.id == entry.id else e for e in entries]
        line("released", f"{count_noun(entry.bytes, 'byte')} of {entry.owner}")
    if not result:
        line("released", "nothing: all processes are alive")


@share.command(cls=Command)
def repair() -> None:
    """Rebuild damaged ledgers from their readable parts.

    A damaged file is kept beside the new one.
    """
    from wgpu_lora.gpu.memory_leases import Ledger

    repairs = [(ledger.path, ledger.repair()) for ledger in Ledger.all()]
    for path, result in repairs:
        if result:
            entries = count_noun(len(result.entries), "entry", "entries")
            line("repaired", f"{path}: kept {entries}; the damaged file is {result.damaged}")
    if not any(result for _, result in repairs):
        line("repaired", "nothing: no ledger is damaged")


def _facts(entry: LedgerEntry) -> dict[str, Any]:
    return {**asdict(entry), "alive": not entry.dead, "here": entry.is_of_this_host}


def _show(device: dict[str, Any]) -> None:
    from rich.table import Table

    from wgpu_lora.train.memory import format_bytes_exact

    def size(nbytes: int | None) -> str:
        return "unknown" if nbytes is None else format_bytes_exact(nbytes)

    line("device", device["device"])
    line("budget", f"{size(device['budget'])} for all runs of wgpu-lora together: {device['source']}")
    line("held", f"{size(device['held'])} by runs of wgpu-lora")
    if device["free_now"] is not None:
        line("free now", f"{size(device['free_now'])} of the device, whoever uses the rest")
    if device["budget"] is not None:
        remaining = max(0, device["budget"] - device["held"])
        room = size(min(remaining, device["free_now"] or remaining))
        line("left", f"{room} for another run, within the budget and what is free")
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


def tune(
    ctx: typer.Context,
    adapters: Adapters = None,
    adapters_config: AdaptersConfig = None,
    schedule: Schedule = "synchronized",
    batch_tokens: BatchTokens = None,
    shape: Shape = None,
    seconds: Annotated[float, typer.Option(help="Limit of tuning, in seconds. [x>0]")] = 300,
    clear: Annotated[bool, typer.Option("--clear", help="Forget what was timed and checked on the device.")] = False,
) -> int:
    """Time the kernel tilings of a run ahead, and keep the fastest.

    The options are those of 'finetune'. Sizes that a run had no time for are timed too; --retune times all again. No
    weights are loaded.
    """
    from wgpu_lora.gpu.device import Device
    from wgpu_lora.gpu.memory_leases import claim
    from wgpu_lora.gpu.tuner import Tuner
    from wgpu_lora.gpu.tuning_cache import ChoiceFile

    if clear:
        names = [parameter.name for parameter in ctx.command.params]
        refuse_unused(ctx, {*names} - {"clear", "device"}, "with --clear")
        file = ChoiceFile(Device(given_options(ctx).get("device")))
        file.clear()
        line("cleared", str(file.path), whole=True)
        return 0
    args, _ = training_arguments(ctx)
    if not 0 < seconds < math.inf:
        raise UserError(f"--seconds is {seconds:g}: give a number of seconds greater than 0.")
    if not args.tune:
        raise UserError("--no-tune contradicts 'wgpu-lora tune': leave it out.")
    job = job_of(args, adapters, adapters_config, schedule, batch_tokens, planning=True, shape=shape)
    session, programs = job.session, job.session.programs()
    tuner, watcher = Tuner(session.device, seconds, retune=args.retune, thorough=True), StartupProgress(job)
    if not tuner.estimate(programs).sizes:
        line("tuned", "every kernel size of this run was timed before; --retune times them again")
    else:
        with claim(session.device, session.needs(), "tune"):
            tuner.tune(programs, watcher)
    line("tilings", str(tuner.file.path), whole=True)
    return 0
