"""Makes the embedded demo: tokenizer, base model, instruction rows, and a record of how they were made.

    nice -n 10 .venv/bin/python -m scripts.demo.make_demo           # everything, into wgpu_lora/demo
    .venv/bin/python -m scripts.demo.make_demo --data-only               # the two JSONL files only
    .venv/bin/python -m scripts.demo.make_demo --leaks-only              # the leak check against the whole corpus
    .venv/bin/python -m scripts.demo.verify_demo --nf4 --record          # fine-tune it with torch and PEFT

The README files beside model and data are written by hand, with the figures of training.json.

Needs the `reference` extra. Much faster with MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592 in
the environment, which keep freed tensors' memory in the process. The weights depend on the Python whose library is
read and on the CPU's arithmetic, so another machine gives a similar model, not the same bytes; tokenizer and rows
depend only on the seed and that library.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import platform
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from scripts.demo import demo_rows
from wgpu_lora.files.assets import ROOT

SEED = 20
TRAIN_ROWS = 400
HELDOUT_ROWS = 60
# More rows than a run reads: the leak check looks at all of them.
PRETRAINING_ROWS = 60_000
TOKENIZER_ROWS = 10_000
LEFT_OUT = {
    "site-packages", "test", "tests", "idle_test", "lib2to3", "idlelib", "turtledemo", "pydoc_data", "encodings",
}  # fmt: skip
LARGEST_FILE = 200_000


def library_sources() -> list[str]:
    """The source of the standard library's modules, in path order, without tests and generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        # Build-specific files (config-3.x, _sysconfigdata) differ between machines and are not code to learn from.
        left_out = LEFT_OUT & set(path.relative_to(root).parts) or path.name.startswith("_sysconfigdata")
        if not left_out and path.stat().st_size <= LARGEST_FILE:
            with suppress(UnicodeDecodeError):
                texts.append(path.read_text(encoding="utf-8"))
    return texts


def pretraining_rows() -> Iterator[dict]:
    """The instruction part of the corpus."""
    return demo_rows.pretraining_rows(SEED, PRETRAINING_ROWS)


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write rows as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def refuse_leaks(train: list[dict], heldout: list[dict], library: list[str]) -> None:
    """Stop if a held-out function occurs in the training rows, the pretraining rows or the library."""
    for name, sources in (
        ("the training rows", (demo_rows.answer(row) for row in train)),
        ("the pretraining rows", (demo_rows.answer(row) for row in pretraining_rows())),
        ("the library source", iter(library)),
    ):
        leaks = demo_rows.find_leaks(heldout, sources)
        if leaks:
            raise SystemExit(f"{len(leaks)} held-out answers leak into {name}, the first:\n{leaks[0]}")
        print(f"no held-out function occurs in {name}", flush=True)


def make_model(library: list[str], folder: Path, steps: int) -> None:
    """Train the tokenizer and the model, and write both with the record of the run."""
    from scripts.demo import pretrain

    spoken = (
        message["content"]
        for row in itertools.islice(pretraining_rows(), TOKENIZER_ROWS)
        for message in row["messages"]
    )
    bpe = pretrain.train_tokenizer(itertools.chain(library, spoken), pretrain.VOCABULARY)
    pretrain.save_tokenizer(bpe, folder, pretrain.CONTEXT)
    options = pretrain.Options(seed=SEED, steps=steps)
    record = pretrain.pretrain(bpe, library, pretraining_rows(), folder, options)
    record["library"] = {
        "python": platform.python_version(),
        "files": len(library),
        "characters": sum(map(len, library)),
        "sha256": hashlib.sha256("\0".join(library).encode()).hexdigest(),
    }
    record["versions"] = {name: version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")}
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Make what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "wgpu_lora" / "demo")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--data-only", action="store_true", help="write the rows and stop")
    parser.add_argument("--leaks-only", action="store_true", help="check for leaks and stop")
    args = parser.parse_args()
    train, heldout = demo_rows.demo_rows(SEED, TRAIN_ROWS, HELDOUT_ROWS)
    if not args.leaks_only:
        write_rows(args.out / "data" / "train.jsonl", train)
        write_rows(args.out / "data" / "heldout.jsonl", heldout)
    if args.data_only:
        return
    library = library_sources()
    refuse_leaks(train, heldout, library)
    if not args.leaks_only:
        make_model(library, args.out / "model", args.steps)
        print(f"update the figures in {args.out}/*/README.md from {args.out}/model/training.json")


if __name__ == "__main__":
    main()
