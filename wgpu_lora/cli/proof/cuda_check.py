"""6. No CUDA: not mapped, not opened, not named, not imported, not run, not required."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path, PurePath
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from wgpu_lora.cli.proof.proof_context import Finding, NotRun, Proof
from wgpu_lora.cli.proof.watched_workers import UNREADABLE
from wgpu_lora.names.text import count_noun

PACKAGE = "wgpu-lora"


def no_cuda(proof: Proof, finding: Finding) -> str:
    """Judges all processes that were watched, so it comes after every other check."""
    if UNREADABLE:
        raise NotRun(UNREADABLE)
    indices, workers, records = proof.devices["used"], proof.children.workers, proof.children.watcher.stop()
    # The children's own accounts; one that was ended early has none.
    files = {child.name: proof.children.witness(child.name) for child in workers}
    reports: dict[str, Any] = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    # The libraries that each process had mapped, as read from outside and by its own account.
    names = {child.process.pid: child.name for child in workers}
    accounts = [(names.get(record.pid) or short(record.command), record.pid, record.libraries) for record in records]
    accounts += [(name, account["pid"], account["libraries"]) for name, account in reports.items()]
    mapped: dict[str, set[str]] = {}
    for name, pid, libraries in accounts:
        mapped.setdefault(f"{name} ({pid})", set()).update(libraries)
    verdicts = {name: classify(paths, os.environ.get("LD_PRELOAD", "")) for name, paths in mapped.items()}
    paths = sorted(set().union(*mapped.values()))
    native = package_libraries(paths)
    naming = look_into(native)
    opened = {name: account["opened"] for name, account in reports.items()}
    modules = {*sys.modules, *(module for account in reports.values() for module in account["modules"])}
    child_commands = [command for account in reports.values() for command in account["commands"]]
    commands = [*(record.command for record in records), *child_commands]
    requirements = sorted(required(PACKAGE))
    # CUDA's driver side, by path: the processes in which NVIDIA's Vulkan driver was mapped too.
    explained = {path: where for path in paths if (where := [n for n, (_, of) in verdicts.items() if path in of])}
    looked_at, looks = {record.pid for record in records if record.looks}, sum(record.looks for record in records)
    kinds = {
        "mapped": [path for path in paths if any(path in forbidden for forbidden, _ in verdicts.values())],
        "opened by Python": [f"{lib} ({name})" for name, libs in opened.items() for lib in libs if is_cuda(lib)],
        "named in packages' libraries": [f"{', '.join(n)} in {file_name(path)}" for path, n in naming.items()],
        "imported": cuda_packages(modules),
        "run": [f"{word} ({short(command)})" for command in commands if (word := compiler_in(command))],
        "required by the package": cuda_packages(requirements),
        "never looked at": [name for pid, name in names.items() if pid not in looked_at],
        "ended without an account of what it opened": [name for name in files if explained and name not in reports],
    }
    for kind, items in kinds.items():
        finding.expect(not items, f"{kind}: {', '.join(items)}")
    drivers = ", ".join(sorted({file_name(path) for path in paths if NVIDIA_ICD.match(file_name(path))}))
    why = attribution(drivers, opened, native) if explained else None
    if why and finding.faults:
        why = f"mapped beside {drivers}, but the check failed, so it is not shown what loaded them"
    finding.figures = {
        "processes": [{"pid": r.pid, "parent": r.parent, "command": r.command, "looks": r.looks} for r in records],
        "looks": looks,
        "libraries": paths,
        "cuda_of_the_driver": {"libraries": explained, "why": why},
        "nvidia_driver": sorted(path for path in paths if NVIDIA_OWN.match(file_name(path))),
        "opened_by_python": opened,
        "searched": {"names": [name.decode() for name in NAMES], "libraries": native, "found": naming},
        "requirements": requirements,
        "commands_run_by_children": sorted({short(command) for command in child_commands}),
    }
    if not requirements:
        raise NotRun(f"{PACKAGE} is not installed as a package, so its requirements are not known")
    if not indices:
        raise NotRun("there is no device (check 1), so no process had a reason to use CUDA")
    driver = f" except {len(explained)} mapped beside NVIDIA's Vulkan driver" if explained else ""
    return (
        f"{len(paths)} libraries in {count_noun(len(looked_at), 'process', 'processes')}, examined {looks} times: none "
        f"belongs to CUDA{driver}; {count_noun(len(reports), 'child process', 'child processes')} opened none through "
        f"ctypes or cffi, {len(native)} native libraries of installed packages name none, none of {len(requirements)} "
        "requirements belongs to CUDA, and nvcc was not run"
    )


def attribution(drivers: str, opened: Mapping[str, list[str]], native: list[str]) -> str:
    """Why CUDA's libraries are attributed to the driver: what was examined, and no more than that."""
    libraries = ", ".join(sorted({file_name(name) for names in opened.values() for name in names})) or "nothing"
    return (
        f"each was mapped only beside {drivers}; none of {len(opened)} child processes opened it through "
        f"ctypes or cffi, which were audited before site was imported (they opened {libraries}); and none of "
        f"{', '.join(name.decode() for name in NAMES)} occurs in the {len(native)} mapped libraries of installed "
        "packages. The driver's own files were not searched."
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
COMPILERS = re.compile(r"^(nvcc|cicc|ptxas|nvlink|fatbinary|cudafe\+\+|nvrtc)(\.exe)?$", re.IGNORECASE)
SHELLS = re.compile(r"^(sh|bash|dash|ash|zsh|ksh|cmd)(\.exe)?$", re.IGNORECASE)
SCRIPT = re.compile(r"^(-[a-z]*c|/c)$", re.IGNORECASE)
QUOTED = re.compile(r"""(?s)["'](?:([^\s"';&|()`]+)|[^"']*)["']""")
# The first word of a command in a script, after words that commands follow.
BEFORE = r"(?:(?:env|exec|nice|nohup|time|command|if|then|else|do|while|until|!|{|\w+=\S*)\s+)*"
COMMAND = re.compile(rf"(?:^|[;&|()`\n])\s*{BEFORE}([^\s;&|()`]+)")


def file_name(path: str) -> str:
    return PurePath(path.replace("\\", "/").removesuffix(" (deleted)")).name


def classify(mapped: Iterable[str], preloaded: str = "") -> tuple[list[str], list[str]]:
    """(CUDA's libraries among those that a process has mapped, those that NVIDIA's Vulkan driver beside them explains).

    preloaded: the process's LD_PRELOAD, which no driver is responsible for.
    """
    names = {path: file_name(path) for path in sorted(mapped)}
    has_driver = any(NVIDIA_ICD.match(name) for name in names.values())
    driver = [path for path, name in names.items() if DRIVER.match(name)]
    explained = [path for path in driver if has_driver and names[path] not in preloaded]
    toolkit = [path for path, name in names.items() if TOOLKIT.match(name)]
    return [*toolkit, *(path for path in driver if path not in explained)], explained


def is_cuda(opened: str) -> bool:
    """Whether a library, as named when it is opened (with or without its ending), is the toolkit's or the driver's."""
    name = file_name(opened)
    return any(kind.match(name + ending) for kind in (TOOLKIT, DRIVER) for ending in ("", ".so", ".dll"))


def package_libraries(mapped: Iterable[str]) -> list[str]:
    """The libraries of installed packages among mapped ones, except NVIDIA's; and wgpu-native wherever it is."""

    def installed(path: str) -> bool:
        return bool(INSTALLED & set(PurePath(path.replace("\\", "/")).parts)) or "wgpu_native" in file_name(path)

    return sorted(path for path in mapped if installed(path) and not NVIDIA_OWN.match(file_name(path)))


def look_into(paths: Iterable[str]) -> dict[str, list[str]]:
    """The NAMES that files contain, by path, where there are any. Raises OSError."""
    contents = {path: Path(path).read_bytes() for path in paths}
    return {p: names for p, text in contents.items() if (names := [n.decode() for n in NAMES if n in text])}


def cuda_packages(names: Iterable[str]) -> list[str]:
    """The CUDA packages among the names of distributions or of modules, submodules included."""
    return sorted({top for name in names if PACKAGES.match(top := name.partition(".")[0])})


def required(package: str) -> set[str]:
    """A package and everything that is installed with it here; extras only where they are requested.

    Empty if the package is not installed.
    """
    result: set[tuple[str, str]] = set()  # names and extras
    todo = {(package, "")}
    while todo:
        name, extra = item = todo.pop()
        result.add(item)
        try:
            requirements = map(Requirement, requires(name) or [])
        except PackageNotFoundError:  # an optional one that is left out
            requirements = map(Requirement, ())
        for requirement in requirements:
            if not requirement.marker or requirement.marker.evaluate({"extra": extra}):
                todo |= {
                    (canonicalize_name(requirement.name), requested_extra)
                    for requested_extra in ("", *requirement.extras)
                } - result
    return {name for name, _ in result} if result != {(package, "")} else set()


def compiler_in(command: Sequence[str]) -> str | None:
    """The word that names a compiler: the program, or a command in the script of sh -c. Arguments don't count."""
    words = list(command[:1])
    if words and SHELLS.match(file_name(words[0])):
        at = next((i for i, word in enumerate(command) if SCRIPT.match(word)), len(command))
        # Without quoted texts, which are arguments, but with single quoted words, which may be a program.
        words += COMMAND.findall(QUOTED.sub(r"\1", " ".join(command[at + 1 : at + 2])))
    return next((word for word in words if COMPILERS.match(file_name(word))), None)
