"""What a cluster costs on one device: a plain run and the same run by `cluster run`, in turns.

    python scripts/bench_cluster.py --rounds 5 --steps 60 --json FILE -- --model demo --data rows.jsonl [OPTIONS]

Ray is started once, before (`--local`), since a cluster runs on between runs. Medians of the time of a step and of all
steps, from each run's log.jsonl without its first ones, and of the time of the whole command, which includes what a
cluster checks before and fetches after a run. Ratios are of the two runs of a round, which follow each other, so that
other load of the machine falls on both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from wgpu_lora.processes.child_process import python

WARM = 5  # steps at the beginning, which compile


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--mirror-steps", type=int, default=50)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("options", nargs="*", help="options of finetune, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wgpu-lora-bench-") as directory:
        result = measure_rounds(args, Path(directory))
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return 0


def measure_rounds(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Rounds of both kinds, their medians and their ratios."""
    environment = {
        **os.environ,
        "WGPU_LORA_CLUSTER_DIR": str(directory / "cluster"),
        "WGPU_LORA_CLUSTER_LOCAL_DIR": str(directory / "state"),
        "WGPU_LORA_NO_RUN_LOG": "1",
    }
    options = [*args.options, "--max-steps", str(args.steps), "--logging-steps", "1"]
    of_cluster = ["--local", "--mirror-steps", str(args.mirror_steps)]
    # Jobs of a cluster save checkpoints to be copied, so plain runs save as often.
    of_plain = ["--save-steps", str(args.mirror_steps)]
    rounds: list[dict[str, dict[str, float]]] = []
    try:
        # A long run that stays: while it is known, Ray is not ended after each of the others.
        stays = ["--detach", "--name", "keep", "--output", str(directory / "keep")]
        command(["cluster", "run", *of_cluster, *stays, *options], environment)
        wait_for(environment, "keep")
        for number in range(args.rounds):
            round_times = {}
            kinds = ("plain", "cluster") if number % 2 == 0 else ("cluster", "plain")
            for kind in kinds:
                output = directory / f"{kind}-{number}"
                words = ["finetune", *of_plain] if kind == "plain" else ["cluster", "run", *of_cluster]
                seconds = command([*words, "--output", str(output), *options], environment)
                round_times[kind] = {**times(output), "whole": seconds}
            rounds.append(round_times)
            print(json.dumps(round_times), file=sys.stderr, flush=True)
    finally:
        command(["cluster", "down", "--local"], environment)
    return {"machine": platform.platform(), "options": options, "rounds": rounds, **summary(rounds)}


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians in seconds, and of the ratios of each round."""
    result: dict[str, Any] = {}
    for metric in ("step", "training", "whole"):
        for kind in ("plain", "cluster"):
            result[f"{kind}_{metric}"] = statistics.median(entry[kind][metric] for entry in rounds)
        ratios = sorted(entry["cluster"][metric] / entry["plain"][metric] for entry in rounds)
        result[f"{metric}_ratio"] = statistics.median(ratios)
        result[f"{metric}_ratios"] = [ratios[0], ratios[-1]]
    return result


def command(words: list[str], environment: dict[str, str]) -> float:
    """Seconds that a command takes. Raises SystemExit with what it said if it fails."""
    begin = time.perf_counter()
    process = subprocess.run(
        python("-m", "wgpu_lora", *words), env=environment, capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}\n{process.stdout}{process.stderr}")
    return time.perf_counter() - begin


def wait_for(environment: dict[str, str], run: str) -> None:
    """Wait until a run has ended; its results stay on the cluster."""
    words = python("-m", "wgpu_lora", "cluster", "status", "--local", "--json")
    while True:
        process = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        if any(entry["name"] == run and entry["over"] for entry in json.loads(process.stdout)["runs"]):
            return
        time.sleep(1)


def times(output: Path) -> dict[str, float]:
    """Of a run without its first steps: the median seconds of a step, and those of all, saving included."""
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    at = [line["elapsed_seconds"] for line in lines if line["step"] >= WARM]
    steps = [after - before for before, after in pairwise(at)]
    return {"step": statistics.median(steps), "training": at[-1] - at[0]}


if __name__ == "__main__":
    raise SystemExit(main())
