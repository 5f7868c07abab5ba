"""An `ssh` that answers for hosts as a test says, and a cluster.toml for them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from wgpu_lora.cluster.cluster_file import ClusterFile, read_cluster_file
from wgpu_lora.cluster.messages import to_plain

# Prints what the file HOST.out has, fails as HOST.code says with HOST.err, and notes its arguments.
_SSH = """#!/bin/sh
printf '%s\\n' "$@" >> "$FAKE_SSH/arguments"
while [ $# -gt 0 ] && [ "$1" != "--" ]; do shift; done
cat "$FAKE_SSH/$2.out" 2>/dev/null
cat "$FAKE_SSH/$2.err" >&2 2>/dev/null
exit $(cat "$FAKE_SSH/$2.code" 2>/dev/null || echo 0)
"""


class FakeSsh:
    """The answers of hosts, by their names."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.bin = folder / "answers", folder / "bin"
        self.folder.mkdir()
        self.bin.mkdir()
        self.program("ssh", _SSH)
        self.program("rsync", '#!/bin/sh\nprintf \'%s\\n\' rsync "$@" >> "$FAKE_SSH/arguments"\n')
        monkeypatch.setenv("FAKE_SSH", str(self.folder))
        monkeypatch.setenv("PATH", f"{self.bin}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))

    def program(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def answers(self, host: str, out: Any = "", err: str = "", code: int = 0) -> None:
        """What a host's commands print from now on; `out` may be an object for JSON."""
        text = out if isinstance(out, str) else json.dumps(out)
        for name, content in (("out", text + "\n"), ("err", err), ("code", str(code))):
            (self.folder / f"{host}.{name}").write_text(content)

    @property
    def arguments(self) -> list[str]:
        """Of all calls so far, in one list."""
        path = self.folder / "arguments"
        return path.read_text().splitlines() if path.exists() else []


def good(address: str, running: str | None = None, **versions: str) -> dict[str, Any]:
    """What `launcher.node check` answers on a host where all is well."""
    from wgpu_lora.cluster.node_versions import own_versions

    return {"versions": {**to_plain(own_versions()), **versions}, "addresses": ["127.0.0.1", address], "rsync": True,
            "running": running}  # fmt: skip


def cluster_file(folder: Path, *hosts: str, top: str = "") -> ClusterFile:
    """A cluster `lab` of hosts, each the text of its table."""
    path = folder / "cluster.toml"
    tables = "".join(f"[[host]]\n{host}\n" for host in hosts)
    path.write_text(f'name = "lab"\npython = "{sys.executable}"\n{top}\n{tables}')
    return read_cluster_file(path)
