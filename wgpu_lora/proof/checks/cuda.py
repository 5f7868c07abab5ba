"""6. No CUDA: not mapped, not opened, not named, not imported, not run, not required."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path, PurePath
from typing import Any

from wgpu_lora.proof import maps
from wgpu_lora.proof.commands import compiler_in
from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.cuda import Libraries, classify, cuda_packages, imported, is_cuda, required
from wgpu_lora.proof.finding import Finding, NotRun
from wgpu_lora.proof.native import NAMES, look_into, ours
from wgpu_lora.proof.watch import Seen
from wgpu_lora.words import counted
from wgpu_lora.worker.parent import Worker

PACKAGE = "wgpu-lora"


def no_cuda(proof: Proof) -> Finding:
    """Judges all processes that were watched, so it comes after every other check."""
    why = maps.unreadable()
    if why:
        raise NotRun(why)
    used = proof.devices()["used"]
    started, seen = proof.children.started, proof.children.watcher.stop()
    accounts = {child.name: _witness(proof.children.witness(child.name)) for child in started}
    said = {name: account for name, account in accounts.items() if account}
    mapped = mapped_by(started, seen, said)
    sorted_out = {name: classify(paths, os.environ.get("LD_PRELOAD", "")) for name, paths in mapped.items()}
    paths: set[str] = set().union(*mapped.values())
    native = ours(paths)
    naming, unread = look_into(native)
    opened = {name: account["opened"] for name, account in said.items()}
    modules = {name for account in said.values() for name in imported(account["modules"])} | set(imported(sys.modules))
    commands = [one.command for one in seen] + [c for account in said.values() for c in account["commands"]]
    try:
        names = required(PACKAGE)
    except PackageNotFoundError:
        raise NotRun(f"{PACKAGE} is not installed as a package, so its requirements are not known") from None
    explained = processes_by_library(sorted_out)
    kinds = {
        "mapped": sorted({path for found in sorted_out.values() for path in found.forbidden}),
        "opened by Python": [f"{lib} ({name})" for name, libs in opened.items() for lib in libs if is_cuda(lib)],
        "named in packages' libraries": [f"{', '.join(found)} in {_file(path)}" for path, found in naming.items()],
        "not readable, so not searched for CUDA's names": unread,
        "imported": sorted(modules),
        "run": [f"{word} ({_short(command)})" for command in commands if (word := compiler_in(command))],
        "required by the package": cuda_packages(names),
        "never looked at": unwatched(started, seen),
        "ended without saying what it opened": [n for n, account in accounts.items() if not account and explained],
    }
    faults = [f"{what}: {', '.join(found)}" for what, found in kinds.items() if found]
    if not faults and not used:
        raise NotRun("there is no device (check 1), so no process did what could have been CUDA's")
    drivers = sorted({_file(path) for found in sorted_out.values() if found.explained for path in found.icds})
    figures: dict[str, Any] = {
        "processes": [{"pid": s.pid, "parent": s.parent, "command": s.command, "looks": s.looks} for s in seen],
        "looks": sum(one.looks for one in seen),
        "libraries": sorted(paths),
        "cuda_of_the_driver": {
            "libraries": explained,
            "why": reason_for(drivers, opened, native, clean=not faults) if explained else None,
        },
        "nvidia_driver": sorted({path for found in sorted_out.values() for path in found.own}),
        "opened_by_python": opened,
        "searched": {"names": [name.decode() for name in NAMES], "libraries": native, "found": naming},
        "requirements": sorted(names),
        "commands_run_by_children": sorted({_short(c) for account in said.values() for c in account["commands"]}),
    }
    watched = sum(bool(one.looks) for one in seen)
    driver = f" but {len(explained)} mapped beside NVIDIA's Vulkan driver" if explained else ""
    processes = counted(watched, "process", "processes")
    children = counted(len(said), "child process", "child processes")
    reason = (
        f"{len(paths)} libraries in {processes}, looked at {figures['looks']} times: none is CUDA's{driver}; "
        f"{children} opened none by ctypes or cffi, none is named in {len(native)} native libraries "
        f"of installed packages, none of {len(names)} required packages is CUDA's; no nvcc was run"
    )
    return Finding.of(faults, reason, figures)


def mapped_by(started: list[Worker], seen: list[Seen], said: Mapping[str, Any]) -> dict[str, set[str]]:
    """What each process had mapped, by its name and number: as it was seen from outside, and as it said itself."""
    names = {child.process.pid: child.name for child in started}
    found = {f"{names.get(one.pid) or _short(one.command)} ({one.pid})": set(one.libraries) for one in seen}
    for name, account in said.items():
        found.setdefault(f"{name} ({account['pid']})", set()).update(account["libraries"])
    return found


def processes_by_library(sorted_out: Mapping[str, Libraries]) -> dict[str, list[str]]:
    """The driver's side of CUDA, by path: the processes that an NVIDIA Vulkan driver was mapped in too."""
    paths = sorted({path for found in sorted_out.values() for path in found.explained})
    return {path: [name for name, found in sorted_out.items() if path in found.explained] for path in paths}


def reason_for(drivers: list[str], opened: Mapping[str, list[str]], native: list[str], clean: bool) -> str:
    """Why these libraries are put down to the driver: what was looked at, and no more than that."""
    if not clean:
        return f"mapped beside {', '.join(drivers)}, but the check failed: whose doing it was is not shown"
    heard = sorted({_file(name) for names in opened.values() for name in names})
    return (
        f"each was mapped only where {', '.join(drivers)} was too; of {len(opened)} child processes none opened such a "
        f"library by ctypes or cffi, heard before site was imported (they opened {', '.join(heard) or 'nothing'}); "
        f"and none of {', '.join(name.decode() for name in NAMES)} stands in the {len(native)} mapped libraries of "
        f"installed packages ({', '.join(map(_file, native))}). The driver's own files were not searched."
    )


def unwatched(started: list[Worker], seen: list[Seen]) -> list[str]:
    """The children that no look found."""
    looked_at = {one.pid for one in seen if one.looks}
    return [child.name for child in started if child.process.pid not in looked_at]


def _witness(path: Path) -> dict[str, Any] | None:
    """What a child said of itself; None where it was ended before it could."""
    return json.loads(path.read_text()) if path.is_file() else None


def _file(path: str) -> str:
    return PurePath(path.replace("\\", "/")).name


def _short(command: list[str]) -> str:
    """A command line for people: without the text of what python -c runs."""
    return " ".join(" ".join(word.split())[:60] for word in command[:6])
