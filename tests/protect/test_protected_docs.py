"""docs/protected.md does what it says: its commands, as written, in one shell."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from wgpu_lora.files.assets import DEMO_TRAIN

PAGE = ROOT / "docs" / "protected.md"
PORT = "8713"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.rare
def test_every_command_works(tmp_path: Path) -> None:
    text = PAGE.read_text().partition("## A run's directory")[0]
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert script.count("wgpu-lora ") >= 9
    port = free_port()
    ready = f"until curl -s http://127.0.0.1:{port}/v1/health > health; do sleep 0.2; done"
    script = script.replace("max_steps = 40", "max_steps = 3")
    script = script.replace(PORT, str(port)).replace("owner/broker.pem &", f"owner/broker.pem --port {port} &\n{ready}")
    command = tmp_path / "bin" / "wgpu-lora"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m wgpu_lora "$@"\n')
    command.chmod(0o755)
    script = f"PATH={command.parent}:$PATH\ntrap 'kill %1' EXIT\n{script}"
    (tmp_path / "train.jsonl").write_bytes(DEMO_TRAIN.read_bytes())
    own = {"HOME": str(tmp_path), "WGPU_LORA_DATA_DIR": str(tmp_path / "data"), "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=os.environ | own,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "verified  proven, by the broker's key " in process.stdout
    run = tmp_path / "run"
    listed = re.findall(r"^\| `(.*?)` \|", PAGE.read_text().partition("## A run's directory")[2], re.MULTILINE)
    named = {name.strip("`") for cell in listed for name in cell.replace("`", "").split(", ")}
    assert {"evidence.jsonl", "adapter.tar.age", "statement.json", "cleanup.json"} <= named
    for name in ("job.toml", "evidence.jsonl", "evidence-1.json", "release-1.jwt", "adapter.tar.age", "statement.json"):
        assert (run / name).stat().st_size, name
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert (tmp_path / "adapter" / "model.sig").exists()
