"""6. No CUDA: not mapped, not opened, not named, not imported, not run, not required."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
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
    # The children's own accounts; one that was ended early has none.
    files = {child.name: proof.children.witness(child.name) for child in started}
    said: dict[str, Any] = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    # The libraries that each process had mapped, as seen from outside and by its own account.
    names = {child.process.pid: child.name for child in started}
    accounts = [(names.get(one.pid) or short(one.command), one.pid, one.libraries) for one in seen]
    accounts += [(name, account["pid"], account["libraries"]) for name, account in said.items()]
    mapped: dict[str, set[str]] = {}
    for name, pid, libraries in accounts:
        mapped.setdefault(f"{name} ({pid})", set()).update(libraries)
    judged = {name: cuda.classify(paths, os.environ.get("LD_PRELOAD", "")) for name, paths in mapped.items()}
    paths = sorted(set().union(*mapped.values()))
    native = cuda.ours(paths)
    naming, unread = cuda.look_into(native)
    opened = {name: account["opened"] for name, account in said.items()}
    modules = {*sys.modules, *(module for account in said.values() for module in account["modules"])}
    ran = [command for account in said.values() for command in account["commands"]]
    requirements = sorted(cuda.required(PACKAGE))
    # CUDA's driver side, by path: the processes in which NVIDIA's Vulkan driver was mapped too.
    explained = {path: where for path in paths if (where := [n for n, of in judged.items() if path in of.explained])}
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
    drivers = sorted({cuda.file_name(path) for found in judged.values() if found.explained for path in found.icds})
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
    if not requirements:
        raise NotRun(f"{PACKAGE} is not installed as a package, so its requirements are not known")
    if not used:
        raise NotRun("there is no device (check 1), so no process had a reason to use CUDA")
    driver = f" except {len(explained)} mapped beside NVIDIA's Vulkan driver" if explained else ""
    return (
        f"{len(paths)} libraries in {counted(len(looked_at), 'process', 'processes')}, examined {looks} times: none "
        f"belongs to CUDA{driver}; {counted(len(said), 'child process', 'child processes')} opened none through ctypes "
        f"or cffi, {len(native)} native libraries of installed packages name none, none of {len(requirements)} "
        "requirements belongs to CUDA, and nvcc was not run"
    )


def reason_for(drivers: Sequence[str], opened: Mapping[str, list[str]], native: list[str], clean: bool) -> str:
    """Why these libraries are attributed to the driver: what was examined, and no more than that."""
    beside = ", ".join(drivers)
    if not clean:
        return f"mapped beside {beside}, but the check failed, so it is not shown what loaded them"
    heard = sorted({cuda.file_name(name) for names in opened.values() for name in names})
    names = ", ".join(name.decode() for name in cuda.NAMES)
    return (
        f"each was mapped only in processes with {beside}; none of {len(opened)} child processes opened such a library "
        "through ctypes or cffi, which were audited before site was imported "
        f"(they opened {', '.join(heard) or 'nothing'}); and none of {names} occurs in the {len(native)} mapped "
        f"libraries of installed packages ({', '.join(map(cuda.file_name, native))}). The driver's own files were not "
        "searched."
    )


def short(command: list[str]) -> str:
    """The beginning of a command line, with words cut short."""
    return " ".join(" ".join(word.split())[:60] for word in command[:6])
