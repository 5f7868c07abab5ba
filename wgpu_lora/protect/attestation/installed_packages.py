"""The installed packages that this one needs, and whether their files are those that were installed.

An installed package lists its files with their digests in RECORD (PyPA, "Recording installed projects").
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from wgpu_lora import assets
from wgpu_lora.atomic import file_digest, sha256
from wgpu_lora.installation import NAME

HASHES = {"sha256", "sha384", "sha512"}
BY_INSTALLERS = ("INSTALLER", "REQUESTED", "direct_url.json", "RECORD")  # in .dist-info; they differ between machines
INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
MOST_NAMED = 10  # files of a package that are named as changed


def _prefix(path: str | Path) -> str:
    """What the paths of files below a directory start with."""
    return os.path.normcase(os.path.realpath(path)) + os.sep


PACKAGE_PREFIX = _prefix(assets.DEMO_MODEL.parent.parent)
STANDARD = tuple(_prefix(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


@dataclass
class InstalledPackage:
    """An installed package.

    Attributes:
        claims: version; sha256: over the contents of the files that came with it, the same on every machine;
            record_sha256: of RECORD; intact: whether all files are as RECORD says; changed: the first that are not.
        files: that RECORD lists, as absolute paths in the real directory of the installation.
    """

    claims: dict[str, Any]
    files: set[str] = field(default_factory=set)


def installed_packages() -> dict[str, InstalledPackage]:
    """All packages that this one requires, directly or not, and all others that this process has loaded, by their
    normalised names (PEP 503)."""
    found = {name: _measure(one) for name, one in _required().items()}
    listed = {path for one in found.values() for path in one.files}
    missing = {path for file in loaded_files() if not accounted(file, listed) for path in _spellings(file)}
    for other in distributions() if missing else ():
        name = canonicalize_name(other.name or "")
        if name and name not in found and name != NAME and not missing.isdisjoint(_files(other)):
            found[name] = _measure(other)
    return found


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
        return _files(distribution(NAME))
    except PackageNotFoundError:
        return set()


def loaded_files() -> list[str]:
    """The files of all modules that are loaded."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted({file for file in files if isinstance(file, str)})


def _required() -> dict[str, Distribution]:
    """What is installed of this package's requirements and of theirs, with the extras that they ask for."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(NAME, frozenset({"protect", "tpm"}))]
    while waiting:
        name, extras = one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        try:
            found[name] = here = distribution(name)
        except PackageNotFoundError:  # not required here, or installed in another way: it is missing from the claims
            continue
        for text in here.requires or ():
            waiting += _applicable(text, extras)
    found.pop(NAME, None)  # `measurements.package` reads all of its files
    return found


def _applicable(text: str, extras: Iterable[str]) -> list[tuple[str, frozenset[str]]]:
    """A requirement, if its marker applies with one of the extras."""
    try:
        need = Requirement(text)
    except InvalidRequirement:
        return []
    if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
        return [(canonicalize_name(need.name), frozenset(need.extras))]
    return []


def _record(one: Distribution) -> dict[str, tuple[str, str]]:
    """RECORD: name -> (absolute path, hash as it is written). Empty if there is none.

    `Distribution.files` would leave missing files out.
    """
    root = os.path.realpath(str(one.locate_file("")))
    rows = csv.reader((one.read_text("RECORD") or "").splitlines())
    return {row[0]: (os.path.normcase(os.path.normpath(os.path.join(root, row[0]))), row[1]) for row in rows if row[1:]}


def _files(one: Distribution) -> set[str]:
    return {path for path, _ in _record(one).values()}


def _measure(one: Distribution) -> InstalledPackage:
    record, total, changed = _record(one), hashlib.sha256(), []
    for name, (path, expected) in sorted(record.items()):
        if not expected:  # compiled files, and RECORD itself
            continue
        found, stated = _digests(path, expected.partition("=")[0])
        if stated != expected:
            changed.append(name)
        if not name.startswith("..") and Path(name).name not in BY_INSTALLERS:
            total.update(f"{found}  {name}\n".encode("utf-8", "surrogateescape"))
    claims: dict[str, Any] = {"version": one.version, "intact": bool(record) and not changed}
    text = one.read_text("RECORD")
    if text is None:
        changed = ["RECORD"]
    else:
        claims |= {"sha256": total.hexdigest(), "record_sha256": sha256(text.encode())}
    if changed:
        claims["changed"] = changed[:MOST_NAMED]
    return InstalledPackage(claims, {path for path, _ in record.values()})


def _digests(path: str, kind: str) -> tuple[str, str]:
    """A file's SHA-256 in hexadecimal, and its digest in RECORD's form by another hash; ("missing", "") if neither is
    possible."""
    try:
        found = file_digest(Path(path))
        if kind not in HASHES:
            return "missing", ""
        with open(path, "rb") as file:
            raw = bytes.fromhex(found) if kind == "sha256" else hashlib.file_digest(file, kind).digest()
    except OSError:
        return "missing", ""
    return found, f"{kind}={base64.urlsafe_b64encode(raw).rstrip(b'=').decode()}"
