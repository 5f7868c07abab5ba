"""6. No CUDA: not mapped, not opened, not named, not imported, not run, not required."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path, PurePath
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from wgpu_lora.proof.proof_context import Finding, NotRun, Proof
from wgpu_lora.proof.watched_workers import UNREADABLE
from wgpu_lora.words import count_noun

PACKAGE = "wgpu-lora"


def no_cuda(proof: Proof, finding: Finding) -> str:
    """Judges all processes that were watched, so it comes after every other check."""
    if UNREADABLE:
        raise NotRun(UNREADABLE)
    used, started, seen = proof.devices()["used"], proof.children.started, proof.children.watcher.stop()
    # The children's own accounts; one that was ended early has none.
    files = {child.name: proof.children.witness(child.name) for child in started}
    reports: dict[str, Any] = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    # The libraries that each process had mapped, as seen from outside and by its own account.
    names = {child.process.pid: child.name for child in started}
    accounts = [(names.get(one.pid) or short(one.command), one.pid, one.libraries) for one in seen]
    accounts += [(name, account["pid"], account["libraries"]) for name, account in reports.items()]
    mapped: dict[str, set[str]] = {}
    for name, pid, libraries in accounts:
        mapped.setdefault(f"{name} ({pid})", set()).update(libraries)
    judged = {name: classify(paths, os.environ.get("LD_PRELOAD", "")) for name, paths in mapped.items()}
    paths = sorted(set().union(*mapped.values()))
    native = package_libraries(paths)
    naming, unread = look_into(native)
    opened = {name: account["opened"] for name, account in reports.items()}
    modules = {*sys.modules, *(module for account in reports.values() for module in account["modules"])}
    ran = [command for account in reports.values() for command in account["commands"]]
    requirements = sorted(required(PACKAGE))
    # CUDA's driver side, by path: the processes in which NVIDIA's Vulkan driver was mapped too.
    explained = {path: where for path in paths if (where := [n for n, of in judged.items() if path in of.explained])}
    looked_at, looks = {one.pid for one in seen if one.looks}, sum(one.looks for one in seen)
    kinds = {
        "mapped": [path for path in paths if any(path in item.forbidden for item in judged.values())],
        "opened by Python": [f"{lib} ({name})" for name, libs in opened.items() for lib in libs if is_cuda(lib)],
        "named in packages' libraries": [f"{', '.join(n)} in {file_name(path)}" for path, n in naming.items()],
        "not readable, so not searched for CUDA's names": unread,
        "imported": imported(modules),
        "run": [
            f"{word} ({short(command)})"
            for command in (*(one.command for one in seen), *ran)
            if (word := compiler_in(command))
        ],
        "required by the package": cuda_packages(requirements),
        "never looked at": [name for pid, name in names.items() if pid not in looked_at],
        "ended without saying what it opened": [name for name in files if explained and name not in reports],
    }
    for what, items in kinds.items():
        finding.expect(not items, f"{what}: {', '.join(items)}")
    drivers = sorted({file_name(path) for item in judged.values() if item.explained for path in item.icds})
    why = reason_for(drivers, opened, native, clean=not finding.faults) if explained else None
    finding.figures = {
        "processes": [{"pid": s.pid, "parent": s.parent, "command": s.command, "looks": s.looks} for s in seen],
        "looks": looks,
        "libraries": paths,
        "cuda_of_the_driver": {"libraries": explained, "why": why},
        "nvidia_driver": sorted({path for item in judged.values() for path in item.own}),
        "opened_by_python": opened,
        "searched": {"names": [name.decode() for name in NAMES], "libraries": native, "found": naming},
        "requirements": requirements,
        "commands_run_by_children": sorted({short(command) for command in ran}),
    }
    if not requirements:
        raise NotRun(f"{PACKAGE} is not installed as a package, so its requirements are not known")
    if not used:
        raise NotRun("there is no device (check 1), so no process had a reason to use CUDA")
    driver = f" except {len(explained)} mapped beside NVIDIA's Vulkan driver" if explained else ""
    return (
        f"{len(paths)} libraries in {count_noun(len(looked_at), 'process', 'processes')}, examined {looks} times: none "
        f"belongs to CUDA{driver}; {count_noun(len(reports), 'child process', 'child processes')} opened none through "
        "ctypes "
        f"or cffi, {len(native)} native libraries of installed packages name none, none of {len(requirements)} "
        "requirements belongs to CUDA, and nvcc was not run"
    )


def reason_for(drivers: Sequence[str], opened: Mapping[str, list[str]], native: list[str], clean: bool) -> str:
    """Why these libraries are attributed to the driver: what was examined, and no more than that."""
    beside = ", ".join(drivers)
    if not clean:
        return f"mapped beside {beside}, but the check failed, so it is not shown what loaded them"
    heard = sorted({file_name(name) for names in opened.values() for name in names})
    names = ", ".join(name.decode() for name in NAMES)
    return (
        f"each was mapped only in processes with {beside}; none of {len(opened)} child processes opened such a library "
        "through ctypes or cffi, which were audited before site was imported "
        f"(they opened {', '.join(heard) or 'nothing'}); and none of {names} occurs in the {len(native)} mapped "
        f"libraries of installed packages ({', '.join(map(file_name, native))}). The driver's own files were not "
        "searched."
    )


def short(command: list[str]) -> str:
    """The beginning of a command line, with words cut short."""
    return " ".join(" ".join(word.split())[:60] for word in command[:6])


# The toolkit's and its companions' libraries: libcublas.so.12, cublas64_12.dll, libtorch_cuda.so ...
TOOLKIT = re.compile(
    r"^(lib)?(cudart|cublas|cublaslt|nvrtc|nvrtc-builtins|cudnn\w*|cufft|cufftw|cufile|curand|cusolver|cusolvermg|"
    r"cusparse|cusparselt|cupti|nvjitlink|nvptxcompiler|nvvm|nccl|nvblas|npp\w*|nvjpeg|cutensor|nvinfer|torch_cuda\w*|"
    r"c10_cuda|bitsandbytes_cuda\w*)(64|32)?([-_.\d]|$)",
    re.IGNORECASE,
)
# The driver's side of CUDA, which only NVIDIA's Vulkan driver may map, for itself.
DRIVER = re.compile(r"^(libcuda\.so|libcudadebugger\.so|nvcuda\.dll|nvcuda64\.dll)", re.IGNORECASE)
# NVIDIA's Vulkan, OpenGL and DX12 drivers, and all libraries that come with them.
NVIDIA_ICD = re.compile(r"^(libGLX_nvidia|libEGL_nvidia|libnvidia-vulkan|nvoglv|nvwgf2um|nvldumd)", re.IGNORECASE)
NVIDIA_OWN = re.compile(r"^(libGLX_nvidia|libEGL_nvidia|libnvidia-|nvoglv|nvwgf2um|nvldumd|nvapi|nvml)", re.IGNORECASE)
# Names that a library contains if it opens CUDA by itself.
NAMES = (b"libcuda", b"libcudart", b"libcublas", b"libnvrtc", b"nvcuda.dll")
# Packages that contain CUDA or exist to use it, by the names of modules and of distributions.
PACKAGES = re.compile(
    r"^(nvidia|cuda|pycuda|torch(vision|audio)?|triton|numba|(cupy|tensorflow|jax|tensorrt|cudf|cuml|nvmath)\w*|"
    r"bitsandbytes|cutlass|pynvjitlink|skcuda|scikit-cuda|xformers|flash[-_]attn)([-_].*)?$"
)
INSTALLED = {"site-packages", "dist-packages"}
EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")
COMPILERS = re.compile(r"^(nvcc|cicc|ptxas|nvlink|fatbinary|cudafe\+\+|nvrtc)(\.exe)?$", re.IGNORECASE)
SHELLS = re.compile(r"^(sh|bash|dash|ash|zsh|ksh|cmd)(\.exe)?$", re.IGNORECASE)
SCRIPT = re.compile(r"^(-[a-z]*c|/c)$", re.IGNORECASE)
# After these words of a script, a command follows, not an argument.
BEFORE = re.compile(r"^(env|exec|nice|nohup|time|command|if|then|else|do|while|until|!|{|\w+=.*)$")
BREAKS = ";&|()`"


def file_name(path: str) -> str:
    return PurePath(path.replace("\\", "/").removesuffix(" (deleted)")).name


@dataclass(frozen=True)
class Libraries:
    """forbidden; explained: CUDA's driver side, next to an NVIDIA Vulkan driver; own: that driver's, with `icds`."""

    forbidden: list[str]
    explained: list[str]
    own: list[str]
    icds: list[str]


def classify(mapped: Iterable[str], preloaded: str = "") -> Libraries:
    """Sorts the libraries that a process has mapped. preloaded: its LD_PRELOAD, which no driver is responsible for."""
    names = {path: file_name(path) for path in sorted(mapped)}
    icds = [path for path, name in names.items() if NVIDIA_ICD.match(name)]
    driver = {path: bool(icds) and name not in preloaded for path, name in names.items() if DRIVER.match(name)}
    return Libraries(
        [path for path, name in names.items() if TOOLKIT.match(name) or not driver.get(path, True)],
        [path for path, explained in driver.items() if explained],
        [path for path, name in names.items() if NVIDIA_OWN.match(name)],
        icds,
    )


def is_cuda(opened: str) -> bool:
    """Whether a library, as named when it is opened (with or without its ending), is the toolkit's or the driver's."""
    name = file_name(opened)
    return any(kind.match(name + ending) for kind in (TOOLKIT, DRIVER) for ending in ("", ".so", ".dll"))


def package_libraries(mapped: Iterable[str]) -> list[str]:
    """The libraries of installed packages among mapped ones, except NVIDIA's; and wgpu-native wherever it is."""

    def installed(path: str) -> bool:
        return bool(INSTALLED & set(PurePath(path.replace("\\", "/")).parts)) or "wgpu_native" in file_name(path)

    return sorted(path for path in mapped if installed(path) and not NVIDIA_OWN.match(file_name(path)))


def look_into(paths: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """(the NAMES that files contain, by path, where there are any; paths that could not be read)."""
    result: dict[str, list[str]] = {}
    unread = []
    for path in paths:
        try:
            content = Path(path).read_bytes()
        except OSError:
            unread.append(path)
        else:
            result[path] = [name.decode() for name in NAMES if name in content]
    return {path: names for path, names in result.items() if names}, unread


def imported(modules: Iterable[str]) -> list[str]:
    """The CUDA packages among the names of loaded modules."""
    return cuda_packages({name.partition(".")[0] for name in modules})


def cuda_packages(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if PACKAGES.match(name))


def required(package: str) -> set[str]:
    """A package and everything that is installed with it, on any platform; extras only where they are requested.

    Empty if the package is not installed.
    """
    seen: set[tuple[str, str]] = set()
    todo = {(package, "")}
    while todo:
        name, extra = item = todo.pop()
        seen.add(item)
        try:
            requirements = map(Requirement, requires(name) or [])
        except PackageNotFoundError:
            if name == package:
                return set()
            continue  # required on other platforms only
        for one in requirements:
            extras = EXTRA.findall(str(one.marker or ""))
            if not extras or extra in extras:
                todo |= {(canonicalize_name(one.name), wanted) for wanted in ("", *one.extras)} - seen
    return {name for name, _ in seen}


def compiler_in(command: Sequence[str]) -> str | None:
    """The word that names a compiler: the program, or a command in the script of sh -c. Arguments don't count."""
    words = [command[0], *_scripted(command)] if command else []
    return next((word for word in words if COMPILERS.match(file_name(word))), None)


def _scripted(command: Sequence[str]) -> Iterator[str]:
    """The commands in the script that is passed to a shell."""
    if not SHELLS.match(file_name(command[0])):
        return
    at = next((i for i, word in enumerate(command[1:], 1) if SCRIPT.match(word)), len(command))
    for line in " ".join(command[at + 1 : at + 2]).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=BREAKS)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation that ends on another line
            words = line.split()
        expected = True
        for word in words:
            broken = bool(word) and set(word) <= set(BREAKS)
            if expected and not broken:
                yield word
            expected = broken or (expected and bool(BEFORE.match(word)))
