"""A training step of this package next to PyTorch + PEFT: tokens/s, their ratio, and memory.

python scripts/bench_reference.py [--rows 1,4] [--tokens 128] [--ours f32,nf4] [--torch f32] [--json FILE]

Both sides train the same weights on the same rows, each in its own process, and take turns: while one computes, the
other waits. Results are medians over all rounds, without the steps that compile. Needs the `reference` extra.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from wgpu_lora.bench.reference import ReferenceWork, compared, forget_peak, peak_resident_bytes, resident_bytes
from wgpu_lora.bench.results import commit
from wgpu_lora.bench.stats import timed
from wgpu_lora.bench.step import LEARNING_RATE, SCALING, WARMUP, synthetic_rows
from wgpu_lora.cli import main as command_line
from wgpu_lora.cli.console import console, line, table
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

SCHEMA = "wgpu-lora-bench-reference/1"
TORCH_DTYPES = ("f32", "bf16", "nf4")
PACKAGES = ("torch", "transformers", "peft")
THREADS = ("LP_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
THEIRS = (sys.executable, str(Path(__file__).resolve()), "worker")
PROMPT, NEW = 128, 64  # tokens
Record = dict[str, Any]
# Of a model's config, by transformers' names.
CONFIG = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip


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
        self._config = shape_config(work.shape, work.layers)
        self._after_imports = resident_bytes()

    def prepare(self) -> Record:
        torch, work = self._torch, self._work
        lora = self._peft.LoraConfig(
            r=work.rank, lora_alpha=int(SCALING * work.rank), target_modules="all-linear", task_type="CAUSAL_LM"
        )
        self._trained = self._peft.get_peft_model(self._model(), lora)
        self._trained.train()
        self._parameters = [p for p in self._trained.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=LEARNING_RATE, weight_decay=0.0)
        ids = synthetic_rows(work.rows, work.tokens, self._config.vocab_size)
        self._ids = torch.from_numpy(ids.astype("int64")).to(self._device)
        forget_peak()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        loss = self._step()
        self.steps(WARMUP - 1)
        versions = {name: sys.modules[name].__version__ for name in (*PACKAGES, "bitsandbytes") if name in sys.modules}
        where = torch.cuda.get_device_name() if self._device.type == "cuda" else str(self._device)
        return {"first_loss": loss, "versions": versions, "device": where, "threads": torch.get_num_threads()}

    def _model(self) -> Any:
        """The model with the same weights as our side's; in NF4, its blocks' matrices are double-quantised."""
        torch, config, base_dtype = self._torch, self._config, self._work.base_dtype
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}  # a scaled one takes the same time
        values = {name: getattr(config, name) for name in CONFIG}
        values |= {"rope_parameters": rope, "use_cache": False}
        theirs = self._transformers.AutoConfig.for_model(config.architecture, **values)
        dtype = torch.float32 if base_dtype == "f32" else torch.bfloat16
        with self._device:
            model = self._transformers.AutoModelForCausalLM.from_config(theirs, dtype=dtype, attn_implementation="sdpa")
        checkpoint = SyntheticCheckpoint(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(checkpoint.read_f32(name)))
        if base_dtype == "nf4":
            from bitsandbytes.nn import Linear4bit

            for path in map(module_of, config.matrices()):
                dense = model.get_submodule(path)
                sizes = (dense.in_features, dense.out_features, dense.bias is not None)
                packed = Linear4bit(*sizes, compute_dtype=torch.bfloat16, quant_type="nf4")
                packed.load_state_dict(dense.state_dict())
                model.set_submodule(path, packed.to(self._device))
            model.is_loaded_in_4bit = True  # PEFT asks for it
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
        return {"seconds": [timed(self._step) for _ in range(count)]}

    def memory(self) -> Record:
        found = {"resident": peak_resident_bytes() - self._after_imports}
        if self._device.type == "cuda":
            found["allocated"] = self._torch.cuda.max_memory_allocated()
        return found


def take_turns(sides: Mapping[str, Worker], rounds: int, steps: int) -> dict[str, Record]:
    """Prepares every side, then has each take `steps` steps in every round, one side at a time.

    Returns:
        side -> its answers, with `seconds` of all its steps; `not_run` and why, for a side that ended.
    """
    found: dict[str, Record] = {name: {"seconds": []} for name in sides}

    def ask(request: str, **values: Any) -> None:
        for name, side in sides.items():
            if "not_run" not in found[name]:
                try:
                    answer = side.ask(request, **values)
                    found[name] |= answer | {"seconds": found[name]["seconds"] + answer.get("seconds", [])}
                except WorkerFailed as error:
                    found[name] = {"not_run": str(error)}

    ask("prepare")
    for _ in range(rounds):
        ask("steps", count=steps)
    ask("memory")
    return found


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Comparison:
    """What is compared; the options of this script and of the job `comparison`."""

    shape: str = option("tiny-qwen3", "as 'wgpu-lora bench' names them")
    layers: int | None = option(None, "its first layers only")
    rows: list[int] = field(default_factory=lambda: [1, 4], metadata={"help": "rows per step, a comparison for each"})
    tokens: int = option(128, "tokens per row")
    rank: int = option(8, "of the adapters")
    ours: list[str] = field(default_factory=lambda: ["f32", "nf4"], metadata={"help": "base formats of our side"})
    torch: list[str] = field(default_factory=lambda: ["f32"], metadata={"help": "f32, bf16, nf4; the first is 1.0"})
    torch_device: str = option("cpu", "cpu or cuda")
    device: str | None = option(None, "ours, as 'wgpu-lora info' lists them")
    threads: int = option(2, "of each side, on the CPU")
    rounds: int = option(5, "turns of each side")
    steps: int = option(3, "steps of a side per round")

    def check(self) -> None:
        """Raises UserError if it cannot run, before any process starts."""
        for name, allowed in (("ours", tuple(BASE_FORMATS)), ("torch", TORCH_DTYPES)):
            for unknown in set(getattr(self, name)) - set(allowed):
                raise UserError(f"--{name} has {unknown!r}, which is none of {', '.join(allowed)}.")
        packages = (*PACKAGES, "bitsandbytes") if "nf4" in self.torch else PACKAGES
        if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
            raise UserError(
                f"This compares with PyTorch + PEFT, but {', '.join(missing)} cannot be imported: install the "
                "'reference' extra, as 'make bench-reference' does."
            )
        shape_config(self.shape, self.layers)

    def side(self, kind: str, base_dtype: str, rows: int, tokens: int) -> Worker:
        """A side as a worker, `ours` or `torch`."""
        jobs = {"ours": ("step", PROGRAM, self.device), "torch": ("torch-step", THEIRS, self.torch_device)}
        job, program, device = jobs[kind]
        work = asdict(ReferenceWork(self.shape, self.layers, rows, tokens, self.rank, base_dtype, device))
        threads, name = dict.fromkeys(THREADS, str(self.threads)), f"{kind} {base_dtype}"
        return Worker(job, {**work, "turns": True}, name=name, program=program, environment=threads, asked=True)

    def of(self, rows: int) -> list[Record]:
        """One batch on every side: a record for each."""
        base = {"shape": self.shape, "layers": self.layers, "rows": rows, "tokens": self.tokens, "rank": self.rank}
        with ExitStack() as stack:
            kinds = [("ours", dtype) for dtype in self.ours] + [("torch", dtype) for dtype in self.torch]
            workers = [stack.enter_context(self.side(*kind, rows, self.tokens)) for kind in kinds]
            found = take_turns({worker.name: worker for worker in workers}, self.rounds, self.steps)
        return [{**base, **row} for row in compared(found, rows * self.tokens, f"torch {self.torch[0]}")]

    def serving(self, base_dtype: str) -> Record:
        """Prefill and decode on our side."""
        row = {"base_dtype": base_dtype, "prompt": PROMPT, "new": NEW}
        with self.side("ours", base_dtype, 1, PROMPT) as worker:
            try:
                return row | worker.ask("serve", prompt=PROMPT, new=NEW, runs=self.rounds)
            except WorkerFailed as error:
                return row | {"not_run": str(error)}


def torch_step(port: Port, *, where: str, **options: Any) -> None:
    """A job `torch-step`: as `step`, in turns, on the other side."""
    port.answer(TorchSide(typed(ReferenceWork, options, where)))


def comparison(port: Port, *, where: str, **options: Any) -> Ended:
    """A job `comparison`; a side that did not run ends it with 1."""
    known = [item.name for item in fields(Comparison)]
    try:
        asked = typed(Comparison, real_names(options, known, where, otherwise=f"there are {', '.join(known)}."))
    except ValueError as error:
        raise UserError(f"{where}: {error}.") from None
    asked.check()
    rows = [row for count in asked.rows for row in asked.of(count)]
    for row in rows:
        port.measured(row)
    failed = failures(rows)
    return Ended({"sides": len(rows)}, int(bool(failed)), "; ".join(failed))


def failures(rows: list[Record]) -> list[str]:
    return [f"{r['side']} at {r['rows']} rows did not run: {r['not_run']}" for r in rows if "not_run" in r]


def cells(row: Record) -> list[str]:
    said = [f"{row['rows']} x {row['tokens']}", row["side"]]
    if "not_run" in row:
        return [*said, "not run"]
    ratio, device = row["ratio"], row.get("planned", row.get("allocated"))
    said += [f"{row['step_seconds']:.4f}", f"{row['tokens_per_second']:,.0f}", "" if ratio is None else f"{ratio:.3f}"]
    return [*said, "" if device is None else readable(device), readable(row["resident"]), f"{row['first_loss']:.5f}"]


def measure(asked: Comparison, no_serving: bool, file: Path | None) -> int:
    """Compares, shows and writes; 1 if a side did not run."""
    asked.check()
    rows: list[Record] = []
    for count in asked.rows:
        line("step", f"{count} x {asked.tokens} tokens, {asked.rounds} rounds of {asked.steps} steps a side")
        rows += asked.of(count)
    head = ("step", "side", "s a step", "processed tokens/s", "of torch", "device", "process", "first loss")
    console().print(table(head, map(cells, rows), left=head[:2]))
    served = [] if no_serving else [asked.serving(dtype) for dtype in asked.ours]
    for row in served:
        said = row.get("not_run") or f"prefill {row['prefill']:,.0f}, decode {row['decode']:,.1f} tokens/s"
        line("serving", f"{row['base_dtype']}, {PROMPT} tokens then {NEW}: {said}")
    if file:
        result = {"schema": SCHEMA, "commit": commit(), "options": asdict(asked), "steps": rows, "serving": served}
        file.write_text(json.dumps(result, indent=1) + "\n")
    for failure in failures(rows):
        print(f"bench-reference: {failure}", file=sys.stderr)
    return int(bool(failures(rows)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    kinds = {"int": int, "int | None": int, "list[int]": numbers, "list[str]": lambda text: text.split(",")}
    for item in fields(Comparison):
        parser.add_argument(f"--{item.name}".replace("_", "-"), type=kinds.get(item.type, str), **item.metadata)
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


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:  # which knows the other side's job, and the whole comparison too
        KINDS["torch-step"], KINDS["comparison"] = torch_step, comparison
        sys.exit(command_line(sys.argv[1:3]))
    sys.exit(main())
