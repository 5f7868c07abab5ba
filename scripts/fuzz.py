"""Feeds mutated files to all readers of untrusted files, which may only raise UserError (`make fuzz`).

    python scripts/fuzz.py [--inputs 1000000] [--jobs 2] [--keep DIR] [TARGET ...]

Atheris (libFuzzer) mutates valid files, keeps inputs that reach new code, and stops at an exception, at an allocation
of more than 64 MiB and at an input that takes more than 10 s; instrumented code is several times slower. Inputs that
failed are kept, and `python scripts/fuzz.py TARGET --replay FILE` runs them again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
ALLOCATION_MB, SECONDS = 64, 10


def fuzz(target: str, inputs: int, keep: Path, replay: Path | None) -> None:
    """Fuzzes a target; for a process of its own, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["wgpu_lora"]):
        from support.fuzz import targets

    # In memory if possible: a target writes a file for every input.
    directory = Path(tempfile.mkdtemp(prefix="wgpu-lora-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    run, shaped = targets.TARGETS[target].open(directory), targets.TARGETS[target].mutate

    def test_one_input(data: bytes) -> None:
        try:
            run(data)
        except targets.UserError as error:
            str(error).encode("utf-8", "backslashreplace")

    if replay:
        return test_one_input(replay.read_bytes())
    corpus, words = directory / "corpus", directory / "words"
    corpus.mkdir()
    for number, seed in enumerate(targets.seeds(target)):
        (corpus / str(number)).write_bytes(seed)
    words.write_text("\n".join(json.dumps(word) for word in dictionary(corpus)) + "\n")
    keep.mkdir(parents=True, exist_ok=True)
    limits = [f"-runs={inputs}", f"-malloc_limit_mb={ALLOCATION_MB}", f"-timeout={SECONDS}", "-rss_limit_mb=2048"]
    options = [f"-dict={words}", f"-artifact_prefix={keep}/{target}-", "-print_final_stats=1", "-max_len=400000"]

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if shaped is None or rng.random() < 0.3:
            return atheris.Mutate(data, max_size)
        return shaped(data, rng)[:max_size]

    atheris.Setup([sys.argv[0], *limits, *options, str(corpus)], test_one_input, custom_mutator=mutate)
    atheris.Fuzz()


def dictionary(corpus: Path) -> list[str]:
    """Words of the valid inputs, and others that have broken readers before."""
    text = b" ".join(path.read_bytes() for path in corpus.iterdir())
    words = {word.decode() for word in re.findall(rb"[A-Za-z_][A-Za-z_.]{2,40}", text)}
    odd = ["NaN", "-1", "1e999", "null", "true", "[]", "{}", "[[", "9" * 30, "0.5", "../", "/dev/zero", "\\ud800", "{%",
           "{{", "%}", "}}", "for i in range(99999)", "endfor", "* 99999", "** 9999", "(a+)+$"]  # fmt: skip
    return sorted(words)[:400] + odd


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="by default all; a wrong name lists them")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for all targets together")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="directory for inputs that failed")
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child or args.replay:
        fuzz(args.targets[0], args.inputs, args.keep, args.replay)
        return 0
    from support.fuzz.targets import TARGETS

    targets = args.targets or list(TARGETS)
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"{', '.join(unknown)}: no such target; there are {', '.join(TARGETS)}")
    shares = {target: TARGETS[target].share for target in targets}

    def child(target: str) -> tuple[int, int]:
        """(inputs tried, exit code)"""
        budget = math.ceil(args.inputs * shares[target] / sum(shares.values()))
        command = [sys.executable, __file__, target, "--child", "--inputs", str(budget), "--keep", str(args.keep)]
        begin, log = time.monotonic(), args.keep / f"{target}.log"
        with log.open("w") as file:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        matches = re.findall(r"number_of_executed_units:\s*(\d+)", log.read_text())
        inputs, verdict = int(matches[-1]) if matches else 0, f"FAILED: {log}" if code else "ok"
        print(f"{target:20} {inputs:>10,} inputs {time.monotonic() - begin:>6.0f} s  {verdict}", flush=True)
        return inputs, code

    args.keep.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        counts, codes = zip(*pool.map(child, targets), strict=True)
    print(f"{'all':20} {sum(counts):>10,} inputs")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
