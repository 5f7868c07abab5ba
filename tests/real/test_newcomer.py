"""A newcomer's first hour with SmolLM2: from rows to a server, by the commands that each command prints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import wgpu_lora

CITIES = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo"}


def row(country: str, city: str) -> str:
    messages = [
        {"role": "user", "content": f"Capital of {country}?"},
        {"role": "assistant", "content": f"It is {city}!"},
    ]
    return json.dumps({"messages": messages}) + "\n"


def wgpu(folder: Path, *arguments: str, text: str = "") -> str:
    """What a command prints. The printed ones begin with the program, in whatever words it was started."""
    command = [sys.executable, "-m", "wgpu_lora", *arguments]
    done = subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done
    return done.stdout


def commands(output: str) -> list[list[str]]:
    """The arguments of the commands that follow, one a line."""
    after = output[output.index("\nnext ") + 1 :]
    return [re.split(r"wgpu[-_]lora ", line)[-1].split() for line in after.splitlines()]


def test_each_command_names_the_next(model: wgpu_lora.Model, tmp_path: Path) -> None:
    rows = [row(*item) for item in CITIES.items()]
    (tmp_path / "rows.jsonl").write_text("".join(rows[:3]))
    (tmp_path / "held.jsonl").write_text(rows[3])
    options = [
        "--max-length",
        "64",
        "--max-steps",
        "4",
        "--eval-steps",
        "4",
        "--per-device-train-batch-size",
        "3",
        "--no-tune",
    ]
    options += ["--gradient-accumulation-steps", "1", "--no-packing", "--lora-r", "8", "--learning-rate", "4e-3"]
    files = ["--data", "rows.jsonl", "--eval-data", "held.jsonl", "--output", "capitals"]
    output = wgpu(tmp_path, "finetune", "--model", "smollm2", *files, *options)
    assert "held-out token accuracy" in output
    assert "of 1 held-out row, the greedy answer equals the row's own" in output
    config = json.loads((tmp_path / "capitals/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in (tmp_path / "capitals/README.md").read_text()
    chat, serve, export = commands(output)
    assert (chat[0], serve[0], export[:2]) == ("chat", "serve", ["export", "gguf"])
    question = "Capital of France?\n"
    answer = wgpu(tmp_path, *chat, "--max-new-tokens", "8", text=question)
    command = [
        sys.executable,
        "-m",
        "wgpu_lora",
        *serve,
        "--port",
        "0",
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "2",
    ]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        printed = "".join(server.stdout.readline() for _ in range(4))
        try:
            assert "\nmodels    smollm2, capitals\n" in printed
            curl = printed[printed.index("curl ") :].splitlines()[0].replace("Hello", question.strip())
            reply = json.loads(subprocess.run(curl, shell=True, capture_output=True, check=True, timeout=300).stdout)
            assert reply["choices"][0]["message"]["content"] == answer.strip()
            assert wgpu(tmp_path, *commands(printed)[1], "--max-new-tokens", "8", text=question) == answer
        finally:
            server.send_signal(signal.SIGINT if os.name != "nt" else signal.SIGTERM)
