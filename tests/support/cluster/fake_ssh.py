"""An `ssh` that answers for hosts as a test says, and a cluster.toml for them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from wgpu_lora.cluster.cluster_file import ClusterFile, read_cluster_file

# Notes its arguments, and of commands of hosts also what they are sent. Prints what the file HOST.COMMAND.out has, or
# HOST.out, and fails as .code says with .err.
_SSH = """#!/bin/sh
printf '%s\\n' "$@" >> "$FAKE_SSH/arguments"
while [ "$1" != "--" ]; do shift; done
answer=$FAKE_SSH/$2
case "$3" in *node_commands*)
  command=${3##* }
  echo "$command $2" >> "$FAKE_SSH/commands"
  cat > "$answer.$command.in"
  [ ! -e "$answer.$command.out" ] || answer=$answer.$command ;;
esac
cat "$answer.out" 2>/dev/null
cat "$answer.err" >&2 2>/dev/null
exit $(cat "$answer.code" 2>/dev/null || echo 0)
"""


class FakeSsh:
    """The answers of hosts, by their names or by HOST.COMMAND."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.bin = folder / "answers", folder / "bin"
        self.folder.mkdir()
        self.bin.mkdir()
        self.program(_SSH)
        monkeypatch.setenv("FAKE_SSH", str(self.folder))
        monkeypatch.setenv("PATH", f"{self.bin}{os.pathsep}{os.environ['PATH']}")

    def program(self, text: str) -> None:
        """What `ssh` is from now on."""
        path = self.bin / "ssh"
        path.write_text(text)
        path.chmod(0o755)

    def answers(self, host: str, out: Any = "", err: str = "", code: int = 0) -> None:
        """What a host's commands print from now on; `out` may be an object for JSON."""
        text = out if isinstance(out, str) else json.dumps(out)
        for name, content in (("out", text + "\n"), ("err", err), ("code", str(code))):
            (self.folder / f"{host}.{name}").write_text(content)

    @property
    def arguments(self) -> list[str]:
        """Of all calls so far, in one list."""
        return self._lines("arguments")

    @property
    def commands(self) -> list[str]:
        """Of all hosts so far, such as `start one`; without `check` and `ports`, which change nothing."""
        return [line for line in self._lines("commands") if line.split()[0] in ("start", "stop")]

    def sent(self, host: str, command: str) -> dict[str, Any]:
        """What a command of a host was sent last."""
        message: dict[str, Any] = json.loads((self.folder / f"{host}.{command}.in").read_text())
        return message

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


def good(address: str, running: str | None = None, **versions: str) -> dict[str, Any]:
    """What `check` answers on a host where all is well."""
    from wgpu_lora.cluster.node_versions import own_versions

    token = "f" * 64 if running else None
    reply = {"versions": {**asdict(own_versions()), **versions}, "addresses": ["127.0.0.1", address]}
    return {**reply, "running": running, "token": token}


def cluster_file(folder: Path, *hosts: str, top: str = "") -> ClusterFile:
    """A cluster `lab` of hosts, each the text of its table."""
    path = folder / "cluster.toml"
    tables = "".join(f"[[host]]\n{host}\n" for host in hosts)
    path.write_text(f'name = "lab"\npython = "{sys.executable}"\n{top}\n{tables}')
    return read_cluster_file(path)
