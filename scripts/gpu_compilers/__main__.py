"""Ask the compilers of GPUs what they make of the kernels: python -m scripts.gpu_compilers (`make gpu-compilers`).

Exit codes: 1 if --check finds a kernel that spills or whose bound fell, 2 if a compiler is missing or options are
wrong.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scripts.gpu_compilers.compiler_report import (
    amount,
    label,
    losses,
    predictions_json,
    read_predictions,
    show,
    to_json,
    write_predictions,
)
from scripts.gpu_compilers.compiler_report import tiling as tiling_words
from scripts.gpu_compilers.compiler_run import Answers, ask
from scripts.gpu_compilers.gpus import GPUS, ROOT, Gpu, environment_of
from scripts.gpu_compilers.predicted_step import report
from scripts.gpu_compilers.recorded_kernels import Selection
from wgpu_lora.bench.brick_results import Writer
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.gpu.backends import DAWN, WGPU
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.models.published_shapes import SHAPES
from wgpu_lora.weights.base_formats import DEFAULT_FORMAT

DEFAULT_SHAPES = ("qwen2.5-0.5b", "qwen2.5-7b", "qwen3-0.6b", "llama-3.2-1b")
HEAD_DIMS = (80, 96, 256)  # attention alone: those shapes have heads of 64 and 128
WITH_MATRICES = ("rdna3", "rdna4")  # GPUs whose compilers have matrix units of f16


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def tokens(text: str) -> int:
    value = count(text)
    if value < 2:
        raise argparse.ArgumentTypeError("must be at least 2: the first token predicts the second")
    return value


def batch(text: str) -> tuple[int, int]:
    """4x512 as (4, 512)."""
    rows, times, length = text.partition("x")
    if not times:
        raise argparse.ArgumentTypeError(f"must be rows and tokens, such as 4x512, not {text}")
    return count(rows), tokens(length)


def head_dim(text: str) -> int:
    value = count(text)
    if value % 2:
        raise argparse.ArgumentTypeError(f"must be even, not {value}: rotary embedding needs pairs")
    return value


def tiling(text: str) -> dict[str, Any]:
    try:
        return Tiling.from_json(json.loads(text)).to_json()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def writable(text: str) -> Path:
    """A file, which is known to be writable before hours of compiling."""
    try:
        with Writer(text):
            pass
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def directory(text: str) -> Path:
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"the directory {text} cannot be created: {error.strerror}") from error
    return Path(text)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "gpu_compilers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gpu", action="append", choices=GPUS, help="a GPU; repeatable (default: all)")
    parser.add_argument("--subgroup-size", type=count, action="append", help="only with this one; repeatable")
    parser.add_argument("--shape", action="append", choices=SHAPES, help=f"repeatable (default: {DEFAULT_SHAPES})")
    parser.add_argument("--head-dim", type=head_dim, action="append", help=f"attention alone; repeatable ({HEAD_DIMS})")
    parser.add_argument("--tokens", type=tokens, default=512, help="of the training step and the prefill")
    parser.add_argument("--rank", type=count, default=16)
    parser.add_argument("--compute-dtype", choices=("f32", "bf16", "f16"), default="f32")
    parser.add_argument("--activation-dtype", choices=("f32", "bf16", "f16"), default="f32")
    parser.add_argument("--base-dtype", default=DEFAULT_FORMAT, help="of the frozen matrices")
    parser.add_argument(
        "--backend", choices=(WGPU, DAWN), default=WGPU, help=f"{DAWN} has matrix units (--compute-dtype f16)"
    )
    parser.add_argument("--default-only", action="store_true", help="leave out tilings that only the tuner chooses")
    parser.add_argument("--kernel", action="append", default=[], help="part of a name; repeatable (default: all)")
    parser.add_argument("--tiling", type=tiling, help="another tiling for tuned kernels, as JSON; see gpu/tiling.py")
    parser.add_argument("--details", action="store_true", help="a line for each compute pipeline")
    parser.add_argument("--json", type=writable, help="write everything to this file")
    parser.add_argument(
        "--predictions", type=writable, help="write the default tilings' figures to this file, for bench-gpu"
    )
    parser.add_argument("--raw", type=directory, help="write what the compilers print to files in this directory")
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail if a kernel spills, or its bound fell by more than 5%% below predictions.json",
    )
    parser.add_argument("--step", choices=SHAPES, help="predict the time of a training step in f32 and in f16, instead")
    parser.add_argument("--batch", type=batch, default=(4, 512), help="of --step: rows x tokens (default: 4x512)")
    parser.add_argument("--in-root", action="store_true", help="use the root's newer Mesa for all GPUs")
    parser.add_argument("--root", type=Path, default=ROOT, help=f"of the newest Debian (default: {ROOT})")
    parser.add_argument("--jobs", type=count, default=2)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = options()
    args = parser.parse_args(argv)
    if args.step and (args.check or args.json or args.predictions):
        parser.error("--step prints its table alone: leave out --check, --json and --predictions.")
    gpus = [GPUS[name] for name in args.gpu or (WITH_MATRICES if args.step else GPUS)]
    explicit = args.shape is not None or args.head_dim is not None
    selection = Selection(
        tuple(args.shape or (() if explicit else DEFAULT_SHAPES)),
        tuple(args.head_dim or (() if explicit else HEAD_DIMS)),
        args.tokens,
        args.rank,
        args.compute_dtype,
        not args.default_only,
        tuple(args.kernel),
        args.tiling,
        args.activation_dtype,
        args.base_dtype,
        args.backend,
    )
    try:
        if args.step:
            return predict(gpus, selection, args, shlex.join(sys.argv[1:] if argv is None else argv))
        answers = ask_all(gpus, args.subgroup_size, selection, args.root.resolve(), args.in_root, args.jobs, args.raw)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    show(answers, args.details)
    if args.json:
        content = json.dumps(to_json(answers, asdict(selection)), indent=1)
        write_bytes_atomic(args.json, content.encode())
    if args.predictions:
        write_predictions(args.predictions, predictions_json(answers))
    sentences = violations(answers, read_predictions()) if args.check else []
    for sentence in sentences:
        print(sentence, file=sys.stderr)
    return int(bool(sentences))


def predict(gpus: list[Gpu], selection: Selection, args: argparse.Namespace, command: str) -> int:
    """Print the predicted step of each GPU, in f32 and in f16 on Dawn, which has matrix units."""
    rows, length = args.batch
    of = replace(selection, shapes=(args.step,), head_dims=(), batch=rows, tokens=length)
    answers: dict[str, list[Answers]] = {}
    for dtype, backend in (("f32", WGPU), ("f16", DAWN)):
        dtype_selection = replace(of, compute_dtype=dtype, backend=backend)
        answers[dtype] = [
            ask(gpu, size, environment_of(gpu, args.root.resolve(), args.in_root), dtype_selection, args.raw)
            for gpu in gpus
            for size in args.subgroup_size or gpu.subgroups[:1]
        ]
    print(report(answers, of, command))
    return 0


def ask_all(
    gpus: list[Gpu],
    sizes: list[int] | None,
    selection: Selection,
    root: Path,
    in_root: bool,
    jobs: int,
    raw: Path | None,
) -> list[Answers]:
    environments = {gpu.name: environment_of(gpu, root, in_root) for gpu in gpus}
    pairs = [(gpu, size) for gpu in gpus for size in sizes or gpu.subgroups]
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(ask, gpu, size, environments[gpu.name], selection, raw) for gpu, size in pairs]
        return [future.result() for future in futures]


def violations(answers: Sequence[Answers], predicted: dict[str, Any]) -> list[str]:
    """A sentence for each compute pipeline that breaks the rules, and each compiler that compiled nothing."""
    sentences = []
    for answer in answers:
        where = f"{answer.gpu.title}, subgroups of {answer.subgroup_size}"
        if not answer.rows:
            sentences.append(f"{where}: nothing was compiled")
        for row in answer.rows:
            if row.spills and not row.repeated:
                tiling_text = "its default tiling" if row.call["default"] else "a tiling that the tuner may choose"
                shapes = ", ".join(row.call["used_by"])
                sentences.append(
                    f"{where}: {label(row)} ({shapes}) spills in {tiling_text}, {tiling_words(row)}: {amount(row)}"
                )
        sentences += losses(answer, predicted)
    return sentences


if __name__ == "__main__":
    sys.exit(main())
