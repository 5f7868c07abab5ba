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
from pathlib import Path
from typing import Any

from wgpu_lora.bench.reference import (
    OurSide,
    Record,
    ReferenceWork,
    Side,
    answer,
    as_argument,
    compared,
    forget_peak,
    from_argument,
    peak_resident_bytes,
    resident_bytes,
    take_turns,
    timed_steps,
)
from wgpu_lora.bench.results import commit
from wgpu_lora.bench.step import LEARNING_RATE, SCALING, WARMUP, synthetic_rows
from wgpu_lora.cli.console import console, line
from wgpu_lora.errors import UserError
from wgpu_lora.models.config import module_of
from wgpu_lora.models.shapes import shape_config
from wgpu_lora.models.synthetic import SyntheticCheckpoint
from wgpu_lora.train.memory import readable
from wgpu_lora.weights.registry import BASE_FORMATS

SCHEMA = "wgpu-lora-bench-reference/1"
PACKAGES = ("torch", "transformers", "peft")
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


SIDES = {"ours": OurSide, "torch": TorchSide}


def side(kind: str, work: ReferenceWork, threads: int) -> Side:
    command = [sys.executable, str(Path(__file__).resolve()), "--side", kind, "--work", as_argument(work)]
    return Side(f"{kind} {work.base_dtype}", command, threads)


def compare(options: argparse.Namespace, rows: int) -> list[Record]:
    """One batch on every side: a row for each."""
    base = {"shape": options.shape, "layers": options.layers, "rows": rows, "tokens": options.tokens}
    base |= {"rank": options.rank}
    sides: dict[str, Side] = {}
    try:
        for dtype in options.ours:
            work = ReferenceWork(**base, base_dtype=dtype, device=options.device)
            sides[f"ours {dtype}"] = side("ours", work, options.threads)
        for dtype in options.torch:
            work = ReferenceWork(**base, base_dtype=dtype, device=options.torch_device)
            sides[f"torch {dtype}"] = side("torch", work, options.threads)
        found = take_turns(sides, options.rounds, options.steps)
    finally:
        for each in sides.values():
            each.close()
    return [{**base, **row} for row in compared(found, rows * options.tokens, f"torch {options.torch[0]}")]


def serving(options: argparse.Namespace, dtype: str) -> Record:
    work = ReferenceWork(options.shape, options.layers, 1, PROMPT, options.rank, dtype, options.device)
    row = {"base_dtype": dtype, "prompt": PROMPT, "new": NEW}
    child = side("ours", work, options.threads)
    try:
        return row | child.ask("serve", prompt=PROMPT, new=NEW, runs=options.rounds)
    except UserError as error:
        return row | {"not_run": str(error)}
    finally:
        child.close()


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


def measure(options: argparse.Namespace) -> int:
    """Compares, shows and writes; 1 where a side did not run."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if "nf4" in options.torch and importlib.util.find_spec("bitsandbytes") is None:
        missing.append("bitsandbytes")
    if missing:
        raise UserError(
            f"This compares with PyTorch + PEFT, but {', '.join(missing)} cannot be imported: install the 'reference' "
            "extra, as 'make bench-reference' does."
        )
    shape_config(options.shape, options.layers)  # refuses what there is not, before any process starts
    rows: list[Record] = []
    for count in options.rows:
        line("step", f"{count} x {options.tokens} tokens, {options.rounds} rounds of {options.steps} steps a side")
        rows += compare(options, count)
    console().print(table(rows))
    served = [] if options.no_serving else [serving(options, dtype) for dtype in options.ours]
    for row in served:
        said = row.get("not_run") or f"prefill {row['prefill']:,.0f}, decode {row['decode']:,.1f} tokens/s"
        line("serving", f"{row['base_dtype']}, {PROMPT} tokens then {NEW}: {said}")
    if options.json:
        values = {name: value for name, value in vars(options).items() if name not in ("side", "work", "json")}
        result = {"schema": SCHEMA, "commit": commit(), "options": values, "steps": rows, "serving": served}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
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
    parser.add_argument("--shape", default="tiny-qwen3", help="as 'wgpu-lora bench' names them")
    parser.add_argument("--layers", type=int, help="its first layers alone")
    parser.add_argument("--rows", type=numbers, default=[1, 4], help="rows a step, a comparison for each")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a row")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--ours", type=names(tuple(BASE_FORMATS)), default=["f32", "nf4"])
    parser.add_argument("--torch", type=names(TORCH_DTYPES), default=["f32"], help="the first is what ratios are of")
    parser.add_argument("--torch-device", default="cpu", help="cpu or cuda")
    parser.add_argument("--device", help="ours, as 'wgpu-lora info' lists them")
    parser.add_argument("--threads", type=int, default=2, help="of each side, on the processor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of a side in a round")
    parser.add_argument("--no-serving", action="store_true", help="leave out prefill and decode")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if not options.side:
            return measure(options)
        answer(SIDES[options.side](from_argument(options.work)))
    except UserError as error:
        print(f"bench-reference: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
