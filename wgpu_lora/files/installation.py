"""How this package was installed, so that commands in messages work as printed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from wgpu_lora.files.assets import ROOT

NAME = "wgpu-lora"


def pip_line(extra: str) -> str:
    """The command that adds an optional dependency to this installation, such as `pip install -e '.[plot]'`.

    Args:
        extra: a name in `[project.optional-dependencies]` of pyproject.toml.
    """
    options, target = _source(extra)
    return " ".join([*_installer(target.startswith(NAME)), *options, _quoted(target)])


def program(name: str = NAME) -> str:
    """The command that runs a program of this environment from the current directory: its name if it is on PATH, else
    its path, such as `.venv/bin/wgpu-lora`."""
    script = _script(name)
    if script is None:
        return name
    result = shutil.which(name)
    if result and Path(result).resolve() == script.resolve():
        return name
    with suppress(FileNotFoundError, ValueError):  # the folder is gone, or elsewhere
        script = script.relative_to(Path.cwd())
    return _quoted(str(script))


def _source(extra: str) -> tuple[list[str], str]:
    """pip's options and requirement: the recorded origin of the package (PEP 610), else its name."""
    origin, editable = _origin()
    if origin is None:
        return [], f"{NAME}[{extra}]"
    if isinstance(origin, Path):
        directory = "." if origin == Path.cwd() else str(origin)
        return ["-e"] if editable else [], f"{directory}[{extra}]"
    return [], f"{NAME}[{extra}] @ {origin}"


def _origin() -> tuple[Path | str | None, bool]:
    """(directory or URL that the package was installed from, whether editable); (None, False) for a package index."""
    try:
        text = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:  # run from source, not installed
        return (ROOT, True) if (ROOT / "pyproject.toml").is_file() else (None, False)
    try:
        recorded: dict[str, Any] = json.loads(text or "{}")
        url, information = str(recorded["url"]), recorded.get("dir_info")
        if information is not None:
            directory = Path(url2pathname(unquote(urlsplit(url).path)))
            whole = (directory / "pyproject.toml").is_file()
            return (directory, bool(information.get("editable"))) if whole else (None, False)
        if "vcs_info" in recorded:
            version = recorded["vcs_info"]
            return f"{version['vcs']}+{url}@{version.get('requested_revision') or version['commit_id']}", False
        remote = "archive_info" in recorded and not url.startswith("file:")
        return (url if remote else None), False
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, False


def _installer(by_name: bool) -> list[str]:
    """The command that installs packages into this Python's environment."""
    prefix = Path(sys.prefix)
    if by_name and (prefix / "uv-receipt.toml").is_file():
        return ["uv", "tool", "install"]
    if by_name and (prefix / "pipx_metadata.json").is_file():
        return ["pipx", "install", "--force"]
    if _script("pip"):
        return [program("pip"), "install"]
    if sys.prefix != sys.base_prefix and shutil.which("uv"):
        return ["uv", "pip", "install", "--python", _quoted(sys.executable)]
    return ["pip", "install"]


def _script(name: str) -> Path | None:
    """Path of a program beside this Python. Links are not followed, since they lead out of a virtual environment."""
    directory = Path(sys.executable).absolute().parent
    names = (f"{name}.exe", f"Scripts/{name}.exe") if os.name == "nt" else (name,)
    return next((directory / file_name for file_name in names if (directory / file_name).is_file()), None)


def _quoted(text: str) -> str:
    """Quote a text as one word for this system's shell."""
    if os.name != "nt":
        return shlex.quote(text)
    return f'"{text}"' if any(mark in text for mark in " []&@") else text
