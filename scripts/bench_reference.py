"""This package beside PyTorch + PEFT on the same training step, in one run: tokens/s, their ratio, and memory.

python scripts/bench_reference.py [--rows 1,4] [--tokens 128] [--ours f32,nf4] [--torch f32] [--json FILE]

Both sides train the same weights on the same rows, each in its own process, and take turns: while one computes, the
other waits. Medians over all rounds; the steps that compile are not among them. Needs the `reference` extra.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from wgpu_lora.bench.reference import (
    Record,
    ReferenceWork,
    compared,
    forget_peak,
    peak_resident_bytes,
    resident_bytes,
    timed_steps,
)
from wgpu_lora.bench.results import commit
from wgpu_lora.bench.step import LEARNING_RATE, SCALING, WARMUP, synthetic_rows
from wgpu_lora.cli import main as command_line
from wgpu_lora.cli.console import console, line
from wgpu_lora.errors import UserError
from wgpu_lora.models.config import module_of
from wgpu_lora.models.shapes import shape_config
from wgpu_lora.models.synthetic import SyntheticCheckpoint
from wgpu_lora.names.aliases import real_names
from wgpu_lora.strict_json import typed
from wgpu_lora.train.memory import readable
from wgpu_lora.weights.registry import BASE_FORMATS
from wgpu_lora.worker.child import Ended, Port
from wgpu_lora.worker.parent import PROGRAM, Worker, WorkerFailed
from wgpu_lora.worker.registry import KINDS
from wgpu_lora.worker.turns import take_turns

SCHEMA = "wgpu-lora-bench-reference/1"
PACKAGES = ("torch", "transformers", "peft")
THREADS = ("LP_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
TORCH_DTYPES = ("f32", "bf16", "nf4")
PROMPT, NEW = 128, 64


class TorchSide:
    """PyTorch + PEFT: f32, or bf16 under autocast, or bitsandbytes' NF4 with bf16 products."""

    def __init__(self, work: ReferenceWork):
        import peft
        import torch
        import transformers

        self._torch, self._peft, self._transformers = torch, peft, transformers
        if work.base_dtype == "nf4":
            import bitsandbytes  # noqa: F401 - before memory is counted
        self._work, self._device = work, torch.device(work.device or "cpu")
        self._after_imports = resident_bytes()

    def prepare(self) -> Record:
        torch, work = self._torch, self._work
        model = self._model()
        config = self._peft.LoraConfig(
            r=work.rank,
            lora_alpha=int(SCALING * work.rank),
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        self._trained = self._peft.get_peft_model(model, config)
        self._trained.train()
        self._parameters = [p for p in self._trained.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=LEARNING_RATE, weight_decay=0.0)
        ids = synthetic_rows(work.rows, work.tokens, model.config.vocab_size)
        self._ids = torch.from_numpy(ids.astype("int64")).to(self._device)
        forget_peak()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        loss = self._step()
        timed_steps(self._step, WARMUP - 1)
        versions = {name: sys.modules[name].__version__ for name in (*PACKAGES, "bitsandbytes") if name in sys.modules}
        where = torch.cuda.get_device_name() if self._device.type == "cuda" else str(self._device)
        return {"first_loss": loss, "versions": versions, "device": where, "threads": torch.get_num_threads()}

    def _model(self) -> Any:
        """The model with the very weights that our side has."""
        torch, work, config = self._torch, self._work, shape_config(self._work.shape, self._work.layers)
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings")
        values = {name: getattr(config, name) for name in names}
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}  # a scaled one takes the same time
        theirs = self._transformers.AutoConfig.for_model(
            config.architecture, rope_parameters=rope, use_cache=False, **values
        )
        dtype = torch.float32 if work.base_dtype == "f32" else torch.bfloat16
        with self._device:
            model = self._transformers.AutoModelForCausalLM.from_config(theirs, dtype=dtype, attn_implementation="sdpa")
        checkpoint = SyntheticCheckpoint(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(checkpoint.read_f32(name)))
        return self._packed(model) if work.base_dtype == "nf4" else model

    def _packed(self, model: Any) -> Any:
        """The same with the blocks' matrices in NF4, double-quantised."""
        import bitsandbytes as bnb

        torch = self._torch
        for path in map(module_of, shape_config(self._work.shape, self._work.layers).matrices()):
            parent, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
            dense = getattr(parent, name)
            packed = bnb.nn.Linear4bit(
                dense.in_features,
                dense.out_features,
                bias=dense.bias is not None,
                compute_dtype=torch.bfloat16,
                compress_statistics=True,
                quant_type="nf4",
            )
            packed.weight = bnb.nn.Params4bit(
                dense.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True
            )
            packed.bias = dense.bias
            setattr(parent, name, packed.to(self._device))
        model.is_loaded_in_4bit = True  # what PEFT asks
        return model

    def _step(self) -> float:
        torch = self._torch
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._work.base_dtype != "f32"):
            loss = self._trained(input_ids=self._ids, labels=self._ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())  # waits for the device

    def steps(self, count: int) -> Record:
        return {"seconds": timed_steps(self._step, count)}

    def memory(self) -> Record:
        found = {"resident": peak_resident_bytes() - self._after_imports}
        if self._device.type == "cuda":
            found["allocated"] = self._torch.cuda.max_memory_allocated()
        return found


def run_torch_step(
    port: Port,
    *,
    shape: str,
    layers: int | None,
    rows: int,
    tokens: int,
    rank: int,
    base_dtype: str,
    device: str | None,
    turns: bool,
) -> Record:
    """A job `torch-step`: as `step`, on the other side."""
    assert turns, "it is asked"
    port.answer(TorchSide(ReferenceWork(shape, layers, rows, tokens, rank, base_dtype, device)))
    return {}


def side(kind: str, work: ReferenceWork, threads: int) -> Worker:
    """A side as a worker, on so many threads."""
    jobs = {"ours": "step", "torch": "torch-step"}
    program = [sys.executable, str(Path(__file__).resolve()), "worker"] if kind == "torch" else PROGRAM
    return Worker(
        jobs[kind],
        {**asdict(work), "turns": True},
        name=f"{kind} {work.base_dtype}",
        program=program,
        environment=dict.fromkeys(THREADS, str(threads)),
        asked=True,
    )


@dataclass(frozen=True)
class Comparison:
    """rows: of a step, a comparison for each. ours, torch: what a side's weights are; ratios are of the first `torch`.

    threads: of each side, on the processor. steps: of a side in a round.
    """

    shape: str = "tiny-qwen3"
    layers: int | None = None
    rows: list[int] = field(default_factory=lambda: [1, 4])
    tokens: int = 128
    rank: int = 8
    ours: list[str] = field(default_factory=lambda: ["f32", "nf4"])
    torch: list[str] = field(default_factory=lambda: ["f32"])
    torch_device: str = "cpu"
    device: str | None = None
    threads: int = 2
    rounds: int = 5
    steps: int = 3

    def check(self) -> None:
        """Raises UserError where it cannot be made, before any process starts."""
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        if "nf4" in self.torch and importlib.util.find_spec("bitsandbytes") is None:
            missing.append("bitsandbytes")
        if missing:
            raise UserError(
                f"This compares with PyTorch + PEFT, but {', '.join(missing)} cannot be imported: install the "
                "'reference' extra, as 'make bench-reference' does."
            )
        shape_config(self.shape, self.layers)

    def of(self, rows: int) -> list[Record]:
        """One batch on every side: a record for each."""
        base = {"shape": self.shape, "layers": self.layers, "rows": rows, "tokens": self.tokens, "rank": self.rank}
        with ExitStack() as stack:
            sides: dict[str, Worker] = {}
            for kind, dtypes, device in (("ours", self.ours, self.device), ("torch", self.torch, self.torch_device)):
                for dtype in dtypes:
                    work = ReferenceWork(**base, base_dtype=dtype, device=device)
                    sides[f"{kind} {dtype}"] = stack.enter_context(side(kind, work, self.threads))
            found = take_turns(sides, self.rounds, self.steps)
        return [{**base, **row} for row in compared(found, rows * self.tokens, f"torch {self.torch[0]}")]

    def serving(self, dtype: str) -> Record:
        """Prefill and decode on our side."""
        work = ReferenceWork(self.shape, self.layers, 1, PROMPT, self.rank, dtype, self.device)
        row = {"base_dtype": dtype, "prompt": PROMPT, "new": NEW}
        with side("ours", work, self.threads) as child:
            try:
                return row | child.ask("serve", prompt=PROMPT, new=NEW, runs=self.rounds)
            except WorkerFailed as error:
                return row | {"not_run": str(error)}


def run_comparison(port: Port, *, where: str, **options: Any) -> Ended:
    """A job `comparison`: the fields of Comparison; a side that did not run ends it with 1."""
    known = [f.name for f in fields(Comparison)]
    try:
        comparison = typed(Comparison, real_names(options, known, where, otherwise=f"there are {', '.join(known)}."))
    except ValueError as error:
        raise UserError(f"{where}: {error}.") from None
    comparison.check()
    rows = [row for count in comparison.rows for row in comparison.of(count)]
    for row in rows:
        port.measured(row)
    failed = [f"{row['side']}: {row['not_run']}" for row in rows if "not_run" in row]
    return Ended({"sides": len(rows)}, int(bool(failed)), "; ".join(failed))


def table(rows: list[Record]) -> Any:
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    made.add_column("step")
    made.add_column("side")
    for name in ("s a step", "processed tokens/s", "of torch", "device", "process", "first loss"):
        made.add_column(name, justify="right")
    for row in rows:
        name = f"{row['rows']} x {row['tokens']}"
        if "not_run" in row:
            made.add_row(name, row["side"], "not run")
            continue
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        device = row.get("planned", row.get("allocated"))
        numbers = (f"{row['step_seconds']:.4f}", f"{row['tokens_per_second']:,.0f}", ratio)
        memory = ("" if device is None else readable(device), readable(row["resident"]))
        made.add_row(name, row["side"], *numbers, *memory, f"{row['first_loss']:.5f}")
    return made


def measure(comparison: Comparison, no_serving: bool, file: Path | None) -> int:
    """Compares, shows and writes; 1 where a side did not run."""
    comparison.check()
    rows: list[Record] = []
    for count in comparison.rows:
        steps = f"{comparison.rounds} rounds of {comparison.steps} steps a side"
        line("step", f"{count} x {comparison.tokens} tokens, {steps}")
        rows += comparison.of(count)
    console().print(table(rows))
    served = [] if no_serving else [comparison.serving(dtype) for dtype in comparison.ours]
    for row in served:
        said = row.get("not_run") or f"prefill {row['prefill']:,.0f}, decode {row['decode']:,.1f} tokens/s"
        line("serving", f"{row['base_dtype']}, {PROMPT} tokens then {NEW}: {said}")
    if file:
        result = {"schema": SCHEMA, "commit": commit(), "options": asdict(comparison), "steps": rows, "serving": served}
        file.write_text(json.dumps(result, indent=1) + "\n")
    failed = [row for row in rows if "not_run" in row]
    for row in failed:
        print(f"bench-reference: {row['side']} at {row['rows']} rows did not run: {row['not_run']}", file=sys.stderr)
    return 1 if failed else 0


def names(allowed: tuple[str, ...]) -> Any:
    def read(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return found

    return read


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="as 'wgpu-lora bench' names them")
    parser.add_argument("--layers", type=int, help="its first layers alone")
    parser.add_argument("--rows", type=numbers, help="rows a step, a comparison for each")
    parser.add_argument("--tokens", type=int, help="tokens a row")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ours", type=names(tuple(BASE_FORMATS)))
    parser.add_argument("--torch", type=names(TORCH_DTYPES), help="the first is what ratios are of")
    parser.add_argument("--torch-device", help="cpu or cuda")
    parser.add_argument("--device", help="ours, as 'wgpu-lora info' lists them")
    parser.add_argument("--threads", type=int, help="of each side, on the processor")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="steps of a side in a round")
    parser.add_argument("--no-serving", action="store_true", help="leave out prefill and decode")
    parser.add_argument("--json", type=Path)
    parser.set_defaults(**asdict(Comparison()))
    options = vars(parser.parse_args())
    no_serving, file = options.pop("no_serving"), options.pop("json")
    try:
        return measure(Comparison(**options), no_serving, file)
    except UserError as error:
        print(f"bench-reference: {error}", file=sys.stderr)
        return 2


def worker(job: str) -> int:
    """This script as a worker, which knows the other side's job and the whole comparison too."""
    KINDS["torch-step"], KINDS["comparison"] = run_torch_step, run_comparison
    return command_line(["worker", job])


if __name__ == "__main__":
    sys.exit(worker(sys.argv[2]) if sys.argv[1:2] == ["worker"] else main())
