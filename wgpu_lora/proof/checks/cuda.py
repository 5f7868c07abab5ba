"""6. No CUDA: not mapped, not opened, not named, not imported, not run, not required."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError
from typing import Any

from wgpu_lora.proof import cuda
from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import Finding, NotRun
from wgpu_lora.proof.watch import UNREADABLE
from wgpu_lora.words import counted

PACKAGE = "wgpu-lora"


def no_cuda(proof: Proof, finding: Finding) -> str:
    """Judges all processes that were watched, so it comes after every other check."""
    if UNREADABLE:
        raise NotRun(UNREADABLE)
    used, started, seen = proof.devices()["used"], proof.children.started, proof.children.watcher.stop()
    # What children said of themselves; one that was ended before it could is left out.
    files = {child.name: proof.children.witness(child.name) for child in started}
    said: dict[str, Any] = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    # The libraries that each process had mapped: as seen from outside, and as it said itself.
    names = {child.process.pid: child.name for child in started}
    mapped = {f"{names.get(one.pid) or short(one.command)} ({one.pid})": set(one.libraries) for one in seen}
    for name, account in said.items():
        mapped.setdefault(f"{name} ({account['pid']})", set()).update(account["libraries"])
    judged = {name: cuda.classify(paths, os.environ.get("LD_PRELOAD", "")) for name, paths in mapped.items()}
    paths = sorted(set().union(*mapped.values()))
    native = cuda.ours(paths)
    naming, unread = cuda.look_into(native)
    opened = {name: account["opened"] for name, account in said.items()}
    modules = {*sys.modules, *(module for account in said.values() for module in account["modules"])}
    ran = [command for account in said.values() for command in account["commands"]]
    try:
        requirements = sorted(cuda.required(PACKAGE))
    except PackageNotFoundError:
        raise NotRun(f"{PACKAGE} is not installed as a package, so its requirements are not known") from None
    # CUDA's driver side, by path: the processes that an NVIDIA Vulkan driver was mapped in too.
    explained = {path: [name for name, found in judged.items() if path in found.explained] for path in paths}
    explained = {path: processes for path, processes in explained.items() if processes}
    looked_at, looks = {one.pid for one in seen if one.looks}, sum(one.looks for one in seen)
    kinds = {
        "mapped": [path for path in paths if any(path in found.forbidden for found in judged.values())],
        "opened by Python": [f"{lib} ({name})" for name, libs in opened.items() for lib in libs if cuda.is_cuda(lib)],
        "named in packages' libraries": [f"{', '.join(n)} in {cuda.file_name(path)}" for path, n in naming.items()],
        "not readable, so not searched for CUDA's names": unread,
        "imported": cuda.imported(modules),
        "run": [
            f"{word} ({short(command)})"
            for command in (*(one.command for one in seen), *ran)
            if (word := cuda.compiler_in(command))
        ],
        "required by the package": cuda.cuda_packages(requirements),
        "never looked at": [name for pid, name in names.items() if pid not in looked_at],
        "ended without saying what it opened": [name for name in files if explained and name not in said],
    }
    for what, items in kinds.items():
        finding.expect(not items, f"{what}: {', '.join(items)}")
    drivers = {cuda.file_name(path) for found in judged.values() if found.explained for path in found.icds}
    why = reason_for(drivers, opened, native, clean=not finding.faults) if explained else None
    finding.figures = {
        "processes": [{"pid": s.pid, "parent": s.parent, "command": s.command, "looks": s.looks} for s in seen],
        "looks": looks,
        "libraries": paths,
        "cuda_of_the_driver": {"libraries": explained, "why": why},
        "nvidia_driver": sorted({path for found in judged.values() for path in found.own}),
        "opened_by_python": opened,
        "searched": {"names": [name.decode() for name in cuda.NAMES], "libraries": native, "found": naming},
        "requirements": requirements,
        "commands_run_by_children": sorted({short(command) for command in ran}),
    }
    if not used:
        raise NotRun("there is no device (check 1), so no process did what could have been CUDA's")
    driver = f" but {len(explained)} mapped beside NVIDIA's Vulkan driver" if explained else ""
    return (
        f"{len(paths)} libraries in {counted(len(looked_at), 'process', 'processes')}, looked at {looks} times: none "
        f"is CUDA's{driver}; {counted(len(said), 'child process', 'child processes')} opened none by ctypes or cffi, "
        f"none is named in {len(native)} native libraries of installed packages, none of {len(requirements)} required "
        "packages is CUDA's; no nvcc was run"
    )


def reason_for(drivers: Iterable[str], opened: Mapping[str, list[str]], native: list[str], clean: bool) -> str:
    """Why these libraries are attributed to the driver: what was looked at, and no more than that."""
    beside = ", ".join(sorted(drivers))
    if not clean:
        return f"mapped beside {beside}, but the check failed: whose doing it was is not shown"
    heard = sorted({cuda.file_name(name) for names in opened.values() for name in names})
    names = ", ".join(name.decode() for name in cuda.NAMES)
    return (
        f"each was mapped only where {beside} was too; of {len(opened)} child processes none opened such a "
        f"library by ctypes or cffi, heard before site was imported (they opened {', '.join(heard) or 'nothing'}); "
        f"and none of {names} stands in the {len(native)} mapped libraries of "
        f"installed packages ({', '.join(map(cuda.file_name, native))}). The driver's own files were not searched."
    )


def short(command: list[str]) -> str:
    """A command line for people: without the text of what python -c runs."""
    return " ".join(" ".join(word.split())[:60] for word in command[:6])
