"""6. No CUDA: not mapped, not imported, not run, not required."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import PackageNotFoundError
from typing import Any

from wgpu_lora.proof import maps
from wgpu_lora.proof.children import Child
from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.cuda import classify, cuda_packages, imported, is_compiler, required
from wgpu_lora.proof.finding import Finding, NotRun
from wgpu_lora.proof.watch import Seen

PACKAGE = "wgpu-lora"
BY_DRIVER = "NVIDIA's Vulkan driver maps these for itself; nothing of ours names or calls them"


def no_cuda(proof: Proof) -> Finding:
    """Judges all processes that were watched, so it comes after every other check."""
    why = maps.unreadable()
    if why:
        raise NotRun(why)
    used = proof.devices()["used"]
    seen = proof.children.watcher.stop()
    said = {child.name: _witness(child) for child in proof.children.started}
    preloaded = os.environ.get("LD_PRELOAD", "")
    mapped = {f"{one.pid} {_short(one.command)}": one.libraries for one in seen}
    mapped |= {name: set(found["libraries"]) for name, found in said.items() if found}
    sorted_out = {name: classify(paths, preloaded) for name, paths in mapped.items()}
    modules = {"this process": imported(sys.modules)}
    modules |= {name: imported(found["modules"]) for name, found in said.items() if found}
    commands = [one.command for one in seen] + [c for found in said.values() if found for c in found["commands"]]
    try:
        names = required(PACKAGE)
    except PackageNotFoundError:
        raise NotRun(f"{PACKAGE} is not installed as a package, so its requirements are not known") from None
    faults = _faults(
        {library for found in sorted_out.values() for library in found.forbidden},
        {name for found in modules.values() for name in found},
        [_short(command) for command in commands if is_compiler(command)],
        cuda_packages(names),
        unwatched(proof.children.started, seen),
    )
    if not faults and not used:
        raise NotRun("there is no device (check 1), so no process did what could have been CUDA's")
    explained = sorted({path for found in sorted_out.values() for path in found.explained})
    own = sorted({path for found in sorted_out.values() for path in found.own})
    paths = set().union(*mapped.values())
    figures: dict[str, Any] = {
        "processes": [{"pid": s.pid, "parent": s.parent, "command": s.command, "looks": s.looks} for s in seen],
        "looks": sum(one.looks for one in seen),
        "libraries": sorted(paths),
        "cuda_of_the_driver": {"libraries": explained, "why": BY_DRIVER if explained else None},
        "nvidia_driver": own,
        "requirements": sorted(names),
        "commands_run_by_children": sorted({_short(c) for found in said.values() if found for c in found["commands"]}),
    }
    watched = sum(bool(one.looks) for one in seen)
    driver = f"; {len(explained)} of CUDA's driver mapped by NVIDIA's Vulkan driver itself" if explained else ""
    reason = (
        f"{len(paths)} libraries in {watched} processes, looked at {figures['looks']} times, and "
        f"{len(names)} required packages: none is CUDA's{driver}; no nvcc was run"
    )
    return Finding.of(faults, reason, figures)


def unwatched(started: list[Child], seen: list[Seen]) -> list[str]:
    """The children that no look found."""
    looked_at = {one.pid for one in seen if one.looks}
    return [child.name for child in started if child.process.pid not in looked_at]


def _faults(
    libraries: set[str], modules: set[str], compilers: list[str], packages: list[str], missed: list[str]
) -> list[str]:
    kinds = {
        "mapped": sorted(libraries),
        "imported": sorted(modules),
        "run": compilers,
        "required by the package": packages,
        "never looked at": missed,
    }
    return [f"{what}: {', '.join(names)}" for what, names in kinds.items() if names]


def _witness(child: Child) -> dict[str, Any] | None:
    """What a child said of itself; None where it was ended before it could."""
    return json.loads(child.witness.read_text()) if child.witness.is_file() else None


def _short(command: list[str]) -> str:
    """A command line for people: without the text of what python -c runs."""
    return " ".join(" ".join(word.split())[:60] for word in command[:6])
