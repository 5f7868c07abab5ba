"""Measurements of the program that attests: files, libraries, system, environment and what is loaded, as claims.

They are taken by the process that they describe. They show a file that was changed and a library that was swapped to
whoever runs an unchanged program; a changed program can state what it likes (`claims.LEVELS`).
Everything is read anew: no digest is kept on disk, where it could be edited.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import marshal
import os
import platform
import re
import site
import struct
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, version
from pathlib import Path
from types import CodeType
from typing import Any

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import DEMO_MODEL, PACKAGE, combined, package_files, walk
from wgpu_lora.files.atomic import file_digest, sha256
from wgpu_lora.files.installation import NAME
from wgpu_lora.gpu.backends import WGPU, backend
from wgpu_lora.protect.memory_protection import environment_at_start, system_file

HASHES = {"sha256", "sha384", "sha512"}
BY_INSTALLERS = ("INSTALLER", "REQUESTED", "direct_url.json", "RECORD")  # in .dist-info; they differ between machines
INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
MOST_CHANGED = 10  # files of a package that are named as changed
FLAGS = ("optimize", "isolated", "no_site", "ignore_environment")
STANDARD_FINDERS = {"BuiltinImporter", "FrozenImporter", "PathFinder"}
MAX_PYC, HEADER = 32 << 20, 16
MOST_NAMED = 500  # files of each kind
# Variables of this package, Python, the loader, the Vulkan loader, drivers, wgpu, NumPy's libraries and the network.
BEHAVIOUR = re.compile(
    "(WGPU|PYTHON|LD|DYLD|VK|MESA|LIBGL|GALLIUM|LP|LVP|RADV|ANV|INTEL|NVK|NIR|ACO|AMD|DRI|D3D12|MTL|CUDA|NVIDIA"
    "|__GL|__NV|__EGL|RUST|MALLOC|OMP|OPENBLAS|MKL|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|SSL|OPENSSL|REQUESTS|CURL"
    "|TPM2TOOLS|TSS2|XDG)_?.*|(ZINK|NOUVEAU|NAK|HK|TU|FD|IR3|PAN|VN|AGX|ASAHI|V3D|V3DV|EGL|VULKAN)_.*"
    "|GLIBC_TUNABLES|GCONV_PATH|LOCPATH|PATH|HOME|TMPDIR|TEMP|TMP|(https?|no|all)_proxy",
    re.IGNORECASE | re.DOTALL,
)


def measurements() -> dict[str, Any]:
    """All measurements, by the names of their claims. It reads the files of all dependencies.

    Raises:
        UserError: a file of this package or of Python cannot be read.
    """
    try:
        package_claims, (dependencies, listed) = package(), installed_packages()
        return {
            "package": package_claims,
            "wgpu": {
                "version": version("wgpu"),
                "native_version": backend(WGPU).versions()["wgpu-native"],
                "native_sha256": file_digest(backend(WGPU).library()),
            },
            "python": python(),
            "dependencies": dependencies,
            "process": loaded_code(listed | own_files()),
            "kernel": kernel(),
            "environment": environment(environment_at_start() | dict(os.environ)),
        }
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be measured ({error.strerror}): make it readable, or install it again."
        ) from None


def package() -> dict[str, Any]:
    """This package: its version, the SHA-256 of each of its files, and `sha256` over them all.

    The names, and so the digest, are the same for a checkout and for the wheel that is built from it.
    """
    digests = {name: file_digest(path) for name, path in package_files(PACKAGE).items()}
    try:
        package_version = version(NAME)
    except PackageNotFoundError:  # run from source
        package_version = "0"
    return {"version": package_version, "sha256": combined(digests), "files": digests}


def python() -> dict[str, Any]:
    """The interpreter: its executable, its standard library, and flags that change what code means."""
    files: dict[str, Path] = {}
    for name in ("stdlib", "platstdlib"):
        files |= dict(walk(Path(sysconfig.get_path(name)), ("site-packages", "dist-packages", "test")))
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "sha256": file_digest(Path(sys.executable).resolve()),
        "library_sha256": combined({name: file_digest(path) for name, path in sorted(files.items())}),
        "flags": {name: int(getattr(sys.flags, name)) for name in FLAGS},
    }


def kernel() -> dict[str, Any]:
    """The operating system (without the machine's name) and, on Linux, what guards a process from its administrator."""
    system = platform.uname()
    facts = {name: getattr(system, name) for name in ("system", "release", "version", "machine")}
    guards = {
        "ptrace_scope": "/proc/sys/kernel/yama/ptrace_scope",
        "tainted": "/proc/sys/kernel/tainted",
        "lockdown": "/sys/kernel/security/lockdown",
    }
    facts |= {name: system_file(path).strip()[:80] for name, path in guards.items()}
    return {name: value for name, value in facts.items() if value}


def environment(values: Mapping[str, str]) -> dict[str, str]:
    """SHA-256 of the values of the variables that change behaviour."""
    return {
        name: sha256(value.encode("utf-8", "surrogateescape"))
        for name, value in sorted(values.items())
        if BEHAVIOUR.fullmatch(name)
    }


# -- installed packages, whose files are listed with their digests in RECORD (PyPA, "Recording installed projects") ----


def _prefix(path: str | Path) -> str:
    """What the paths of files below a directory start with."""
    return os.path.normcase(os.path.realpath(path)) + os.sep


PACKAGE_PREFIX = _prefix(DEMO_MODEL.parent.parent)
STANDARD = tuple(_prefix(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def installed_packages() -> tuple[dict[str, dict[str, Any]], set[str]]:
    """Claims of all packages that this one requires, directly or not, and of all others that this process has loaded,
    by their normalised names (PEP 503); and the files that their RECORDs list.

    Claims are version; sha256: over the contents of the files that came with it, the same on every machine;
    record_sha256: of RECORD; intact: whether all files are as RECORD says; changed: the first that are not.
    """
    packages = {name: (dist, _record(dist)) for name, dist in _required().items()}
    listed = {path for _, record in packages.values() for path, _ in record.values()}
    missing = {path for file in loaded_files() if not accounted(file, listed) for path in _spellings(file)}
    for candidate in distributions() if missing else ():
        name, record = canonicalize_name(candidate.name or ""), _record(candidate)
        files = {path for path, _ in record.values()}
        if name and name not in packages and name != NAME and not missing.isdisjoint(files):
            packages[name] = candidate, record
            listed |= files
    return {name: _measure(*entry) for name, entry in sorted(packages.items())}, listed


def accounted(file: str, listed: Collection[str]) -> bool:
    """Whether a file is one of those listed in RECORDs, or of this package or Python's standard library, all of whose
    files `measurements` digests."""
    spelt = _spellings(file)
    inside = spelt[-1].startswith(STANDARD) and not any(name in spelt[-1] for name in INSTALLED)
    return inside or spelt[-1].startswith(PACKAGE_PREFIX) or any(path in listed for path in spelt)


def _spellings(file: str) -> tuple[str, str]:
    """A file's absolute path, with links (installers may link files to a cache) and without."""
    return os.path.normcase(os.path.abspath(file)), os.path.normcase(os.path.realpath(file))


def own_files() -> set[str]:
    """What RECORD lists of this package itself; nothing if it is run from source."""
    try:
        return {path for path, _ in _record(distribution(NAME)).values()}
    except PackageNotFoundError:
        return set()


def loaded_files() -> list[str]:
    """The files of all modules that are loaded."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted({file for file in files if isinstance(file, str)})


def _required() -> dict[str, Distribution]:
    """What is installed of this package's requirements and of theirs, with the extras that they ask for."""
    packages: dict[str, Distribution] = {}
    visited: set[tuple[str, frozenset[str]]] = set()
    queue = [(NAME, frozenset({"protect", "tpm"}))]
    while queue:
        name, extras = requirement = queue.pop()
        if requirement in visited:
            continue
        visited.add(requirement)
        try:
            packages[name] = current = distribution(name)
        except PackageNotFoundError:  # not required here, or installed in another way: it is missing from the claims
            continue
        for text in current.requires or ():
            with suppress(InvalidRequirement):
                need = Requirement(text)
                if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                    queue.append((canonicalize_name(need.name), frozenset(need.extras)))
    packages.pop(NAME, None)  # `package` reads all of its files
    return packages


def _record(dist: Distribution) -> dict[str, tuple[str, str]]:
    """RECORD: name -> (absolute path, hash as it is written). Empty if there is none.

    `Distribution.files` would leave missing files out.
    """
    root = os.path.realpath(str(dist.locate_file("")))
    rows = csv.reader((dist.read_text("RECORD") or "").splitlines())
    return {row[0]: (os.path.normcase(os.path.normpath(os.path.join(root, row[0]))), row[1]) for row in rows if row[1:]}


def _measure(dist: Distribution, record: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    total, changed_names, text = hashlib.sha256(), [], dist.read_text("RECORD")
    for name, (path, expected) in sorted(record.items()):
        if not expected:  # compiled files, and RECORD itself
            continue
        content_digest, record_hash = _file_digests(path, expected.partition("=")[0])
        if record_hash != expected:
            changed_names.append(name)
        if not name.startswith("..") and Path(name).name not in BY_INSTALLERS:
            total.update(f"{content_digest}  {name}\n".encode("utf-8", "surrogateescape"))
    claims: dict[str, Any] = {"version": dist.version, "intact": bool(record) and not changed_names}
    if text is None:
        changed_names = ["RECORD"]
    else:
        claims |= {"sha256": total.hexdigest(), "record_sha256": sha256(text.encode())}
    return claims | ({"changed": changed_names[:MOST_CHANGED]} if changed_names else {})


def _file_digests(path: str, kind: str) -> tuple[str, str]:
    """A file's SHA-256 in hexadecimal, and its digest in RECORD's form by another hash; ("missing", "") if neither is
    possible."""
    try:
        digest = file_digest(Path(path))
        if kind not in HASHES:
            return "missing", ""
        with open(path, "rb") as file:
            raw = bytes.fromhex(digest) if kind == "sha256" else hashlib.file_digest(file, kind).digest()
    except OSError:
        return "missing", ""
    return digest, f"{kind}={base64.urlsafe_b64encode(raw).rstrip(b'=').decode()}"


# -- what this process has loaded that no list of files accounts for ---------------------------------------------------


def loaded_code(listed: Collection[str]) -> dict[str, Any]:
    """What is loaded now.

    Args:
        listed: files that the dependencies' RECORDs account for, as absolute paths.

    Returns:
        unlisted: SHA-256, by path, of loaded modules and .pth files that belong to no package.
        fileless: modules without a file that are not Python's own: parts of compiled ones, or made at run time.
        compiled_otherwise: modules that are loaded, or of this package, whose compiled file is not what their source
            compiles to.
        libraries: SHA-256, by path, of native libraries that belong to no package; absent where they cannot be listed.
        import_hooks: types of finders other than Python's own. traced: whether a debugger or tracer is attached.
    """
    modules, tracer = loaded_files(), re.search(r"^TracerPid:\s*[1-9]", system_file("/proc/self/status"), re.MULTILINE)
    claims: dict[str, Any] = {
        "unlisted": _digests([*modules, *_pth_files()], listed),
        "fileless": sorted(
            name
            for name, module in list(sys.modules.items())
            if name not in sys.builtin_module_names
            and not isinstance(getattr(module, "__file__", None), str)
            and not hasattr(module, "__path__")
        ),
        "compiled_otherwise": sorted(path for path in {*modules, *_own_modules()} if _compiled_otherwise(path)),
        "import_hooks": sorted({_name(hook) for hook in sys.meta_path} - STANDARD_FINDERS),
        "traced": sys.gettrace() is not None or sys.getprofile() is not None or bool(tracer),
    }
    libraries = _libraries()
    if libraries is not None:
        claims["libraries"] = _digests(libraries, listed)
    return claims


def _own_modules() -> list[str]:
    """All modules of this package, of which some are loaded later."""
    return [str(path) for path in Path(PACKAGE_PREFIX).rglob("*.py")]


def _digests(paths: Iterable[str], listed: Collection[str]) -> dict[str, str]:
    """SHA-256 of files that nothing accounts for: the first, and one over all others, so that evidence stays short."""
    digests = {path: _digest(path) for path in paths if not accounted(path, listed)}
    lines = [f"{value}  {name}\n" for name, value in list(digests.items())[MOST_NAMED:]]
    first = dict(list(digests.items())[:MOST_NAMED])
    summary = {f"and {len(lines)} more": sha256("".join(lines).encode("utf-8", "surrogateescape"))} if lines else {}
    return first | summary


def _digest(path: str) -> str:
    try:
        return file_digest(Path(path))
    except OSError:
        return "unreadable"


def _compiled_otherwise(source: str) -> bool:
    """Whether Python would load, for a module, a compiled file that is not what its source compiles to.

    RECORD has no digests of compiled files, and Python trusts one that states the time and size of the source.
    """
    if not source.endswith(".py"):
        return False
    try:
        with open(importlib.util.cache_from_source(source), "rb") as file:
            cached = file.read(MAX_PYC)
        if not _would_be_loaded(cached, os.stat(source)):
            return False
    except (OSError, NotImplementedError):
        return False  # there is none
    try:
        code = marshal.loads(cached[HEADER:])
        expected = compile(Path(source).read_bytes(), source, "exec", dont_inherit=True, optimize=sys.flags.optimize)
    except (OSError, ValueError, EOFError, TypeError, SyntaxError):
        return True
    return not isinstance(code, CodeType) or code != expected


def _would_be_loaded(cached: bytes, source: os.stat_result) -> bool:
    """Whether a compiled file's header (PEP 552) fits this Python and its source; one by hash is taken to do so."""
    if len(cached) < HEADER or cached[:4] != importlib.util.MAGIC_NUMBER:
        return False
    flags, timestamp, size = struct.unpack("<3I", cached[4:HEADER])
    return bool(flags) or (timestamp, size) == (int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)


def _libraries() -> list[str] | None:
    """The native libraries and programs that are mapped into this process to be executed, gone ones too.

    Memory that a driver shares by a name of its own, such as lavapipe's /memfd:allocation, is none.
    """
    try:
        maps = psutil.Process().memory_maps(grouped=False)
    except (AttributeError, psutil.Error, OSError):  # macOS
        return None
    return sorted({region.path for region in maps if "x" in region.perms and os.path.isabs(region.path)})


def _pth_files() -> list[str]:
    """Files whose lines Python runs when it starts (`site`)."""
    folders = {*site.getsitepackages(), site.getusersitepackages()} if hasattr(site, "getsitepackages") else set()
    return sorted(str(path) for folder in folders for path in Path(folder).glob("*.pth"))


def _name(hook: object) -> str:
    return (hook if isinstance(hook, type) else type(hook)).__name__
