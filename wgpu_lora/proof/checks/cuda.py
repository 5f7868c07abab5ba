"""6. No CUDA: not mapped, not opened, not named, not imported, not run, not required."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError
from typing import Any

from wgpu_lora.proof import cuda
from wgpu_lora.proof.children import Children
from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import Finding, NotRun
from wgpu_lora.proof.watch import UNREADABLE
from wgpu_lora.words import counted

PACKAGE = "wgpu-lora"


def no_cuda(proof: Proof, finding: Finding) -> str:
    """Judges all processes that were watched, so it comes after every other check."""
    if UNREADABLE:
        raise NotRun(UNREADABLE)
    used, children = proof.devices()["used"], proof.children
    seen = children.watcher.stop()
    said = accounts(children)
    mapped = mapped_by(children, said)
    sorted_out = {name: cuda.classify(paths, os.environ.get("LD_PRELOAD", "")) for name, paths in mapped.items()}
    paths = sorted(set().union(*mapped.values()))
    native = cuda.ours(paths)
    naming, unread = cuda.look_into(native)
    opened = {name: account["opened"] for name, account in said.items()}
    modules = {*sys.modules, *(module for account in said.values() for module in account["modules"])}
    started, ran = [one.command for one in seen], [c for account in said.values() for c in account["commands"]]
    try:
        requirements = sorted(cuda.required(PACKAGE))
    except PackageNotFoundError:
        raise NotRun(f"{PACKAGE} is not installed as a package, so its requirements are not known") from None
    # CUDA's driver side, by path: the processes that an NVIDIA Vulkan driver was mapped in too.
    explained: dict[str, list[str]] = {}
    for name, found in sorted_out.items():
        for path in found.explained:
            explained.setdefault(path, []).append(name)
    looked_at = {one.pid for one in seen if one.looks}
    kinds = {
        "mapped": sorted({path for found in sorted_out.values() for path in found.forbidden}),
        "opened by Python": [f"{lib} ({name})" for name, libs in opened.items() for lib in libs if cuda.is_cuda(lib)],
        "named in packages' libraries": [
            f"{', '.join(found)} in {cuda.file_name(path)}" for path, found in naming.items()
        ],
        "not readable, so not searched for CUDA's names": unread,
        "imported": cuda.imported(modules),
        "run": [f"{word} ({short(c)})" for c in (*started, *ran) if (word := cuda.compiler_in(c))],
        "required by the package": cuda.cuda_packages(requirements),
        "never looked at": [child.name for child in children.started if child.process.pid not in looked_at],
        "ended without saying what it opened": [c.name for c in children.started if explained and c.name not in said],
    }
    for what, items in kinds.items():
        finding.expect(not items, f"{what}: {', '.join(items)}")
    drivers = {cuda.file_name(path) for found in sorted_out.values() if found.explained for path in found.icds}
    why = reason_for(drivers, opened, native, clean=not finding.faults) if explained else None
    looks = sum(one.looks for one in seen)
    finding.figures = {
        "processes": [{"pid": s.pid, "parent": s.parent, "command": s.command, "looks": s.looks} for s in seen],
        "looks": looks,
        "libraries": paths,
        "cuda_of_the_driver": {"libraries": explained, "why": why},
        "nvidia_driver": sorted({path for found in sorted_out.values() for path in found.own}),
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


def accounts(children: Children) -> dict[str, dict[str, Any]]:
    """What children said of themselves, by name; one that was ended before it could is left out."""
    files = {child.name: children.witness(child.name) for child in children.started}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


def mapped_by(children: Children, said: Mapping[str, Any]) -> dict[str, set[str]]:
    """The libraries that each process had mapped, by its name and pid: as seen from outside, and as it said itself."""
    names = {child.process.pid: child.name for child in children.started}
    seen = children.watcher.seen.values()
    found = {f"{names.get(one.pid) or short(one.command)} ({one.pid})": set(one.libraries) for one in seen}
    for name, account in said.items():
        found.setdefault(f"{name} ({account['pid']})", set()).update(account["libraries"])
    return found


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
