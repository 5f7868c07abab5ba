"""Compare training steps with PyTorch + PEFT: tokens/s, their ratio, and memory.

python -m scripts.bench.reference [--rows 1,4] [--tokens 128] [--ours f32,nf4] [--torch f32] [--json FILE]

Both sides train the same weights on the same rows, but for types of GGUF files, which are random blocks of their own.
Each is in a process of its own, and they take turns. Results are medians over all rounds, without the steps that
include compilation. Needs the `reference` extra.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import psutil

from wgpu_lora.bench.brick_results import Writer, commit
from wgpu_lora.bench.timing import run_seconds
from wgpu_lora.bench.training_step import (
    LEARNING_RATE,
    ROW,
    SCALING,
    WARMUP,
    TrainingStep,
    benchmark_option_names,
    chosen_model,
    synthetic_rows,
)
from wgpu_lora.cli.app import main as command_line
from wgpu_lora.cli.console import console, line, table
from wgpu_lora.cluster.worker.job_file import KINDS
from wgpu_lora.cluster.worker.job_process import EventWriter, JobResult
from wgpu_lora.cluster.worker.worker import Worker, WorkerFailed
from wgpu_lora.errors import UserError
from wgpu_lora.files.typed_json import read_as
from wgpu_lora.gpu.device import Device
from wgpu_lora.infer.generator import Generator
from wgpu_lora.models.model_config import module_of
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.models.synthetic_models import SyntheticCheckpoint
from wgpu_lora.names.aliases import real_names
from wgpu_lora.train.memory import format_bytes
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.training_log import environment
from wgpu_lora.weights.base_formats import BASE_FORMATS, GGUF

SCHEMA = "wgpu-lora-bench-reference/1"
HALVES = ("bf16", "f16")
TORCH_DTYPES = ("f32", "bf16", "nf4")
PACKAGES = ("torch", "transformers", "peft")
THREADS = ("LP_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PROGRAM = (sys.executable, "-m", "scripts.bench.reference", "worker")  # with the jobs of this file
HAS_CUDA = "import sys, torch; sys.exit(not torch.cuda.is_available())"
PROMPT, NEW = 128, 64  # tokens
Record = dict[str, Any]
# Of a model's config, by transformers' names.
CONFIG = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class ReferenceWork:
    """A step of `rows` rows of `tokens` tokens, with a loss on every token and adapters on all linear layers.

    base_dtype: storage type of the frozen weights. compute_dtype: of our products' inputs.
    """

    shape: str
    layers: int | None
    rows: int
    tokens: int
    rank: int
    base_dtype: str
    device: str | int | None = None
    compute_dtype: str = "f32"


class OurSide:
    """This package's side of a reference comparison: training steps, and serving the same model."""

    def __init__(self, work: ReferenceWork):
        self._after_imports = resident_bytes()
        self._work = work
        self._model = chosen_model(None, work.shape, work.layers, Device(work.device), work.base_dtype)
        with benchmark_option_names({**ROW, "per_device_train_batch_size": "rows"}):
            args = TrainingArguments(
                per_device_train_batch_size=work.rows,
                max_length=work.tokens,
                lora_r=work.rank,
                compute_dtype=work.compute_dtype,
            )
            self._step = TrainingStep.fitting(self._model, args)

    def prepare(self) -> Record:
        """Load the model and take the steps that include compilation. first_loss is of the untrained adapter."""
        device = self._model.device
        self._model.load_weights()
        forget_peak()
        device.peak_allocated = device.allocated
        self._step.allocate()
        loss = self._step.run()
        self._step.seconds(WARMUP - 1)
        return {"first_loss": loss, "environment": asdict(environment(device))}

    def steps(self, count: int) -> Record:
        return {"seconds": self._step.seconds(count)}

    def memory(self) -> Record:
        """planned, allocated: bytes on the device. resident: growth of the process, including a software device."""
        planned_bytes = self._step.session.memory().training
        allocated = self._model.device.peak_allocated
        return {
            "planned": planned_bytes,
            "allocated": allocated,
            "resident": peak_resident_bytes() - self._after_imports,
        }

    def serve(self, prompt: int, new: int, runs: int) -> Record:
        """Tokens/s of a prompt of `prompt` tokens and of `new` generated ones, medians of `runs` after two more."""
        (ids,) = synthetic_rows(1, prompt, self._model.config.vocab_size).tolist()
        prefill, decode = [], []
        with Generator(self._model, capacity=prompt + new, buckets=(prompt,)) as generator:
            for run in range(2 + runs):
                (result,) = generator.generate([ids], max_new_tokens=new)
                if run >= 2:
                    prefill.append(result.prefill_speed)
                    decode.append(result.decode_speed)
        return {"prefill": statistics.median(prefill), "decode": statistics.median(decode), "runs": runs}


class TorchSide:
    """PyTorch + PEFT: in f32, in bf16 with autocast, or in bitsandbytes' NF4 with bf16 products."""

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
        """The model with our side's weights; in NF4, the matrices of its blocks are double-quantised."""
        torch, config, base_dtype = self._torch, self._config, self._work.base_dtype
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}  # a scaled one takes the same time
        values = {name: getattr(config, name) for name in CONFIG}
        values |= {"rope_parameters": rope, "use_cache": False}
        torch_config = self._transformers.AutoConfig.for_model(config.architecture, **values)
        dtype = torch.float32 if base_dtype == "f32" else torch.bfloat16
        with self._device:
            model = self._transformers.AutoModelForCausalLM.from_config(
                torch_config, dtype=dtype, attn_implementation="sdpa"
            )
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
        return {"seconds": [run_seconds(self._step) for _ in range(count)]}

    def memory(self) -> Record:
        record = {"resident": peak_resident_bytes() - self._after_imports}
        if self._device.type == "cuda":
            record["allocated"] = self._torch.cuda.max_memory_allocated()
        return record


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def forget_peak() -> None:
    """Reset `peak_resident_bytes`, where the system (Linux) can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """The maximum memory of this process so far."""
    status = Path("/proc/self/status")
    if status.is_file() and (match := re.search(r"VmHWM:\s+(\d+)", status.read_text())):
        return 1024 * int(match[1])
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def processor_name() -> str:
    """As the system names it."""
    with suppress(OSError):
        if match := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            return f"{match[1].strip()}, {psutil.cpu_count()} threads"
    return platform.processor() or platform.machine()


POWERCAP = Path("/sys/class/powercap")


def processor_joules() -> float | None:
    """The counters of energy of all processor packages (Linux's powercap), in joules; None where they are not readable.

    A counter begins again at 0 once in some hours.
    """
    try:
        counters = [int(path.read_text()) for path in POWERCAP.glob("intel-rapl:?/energy_uj")]
    except (OSError, ValueError):
        return None
    return sum(counters) / 1e6 if counters else None


def take_turns(sides: Mapping[str, Worker], rounds: int, steps: int) -> dict[str, Record]:
    """Prepare every side, then let each take `steps` steps per round, one side at a time.

    Returns:
        side -> its answers, with `seconds` of all its steps; `not_run`, the reason, for a side that failed.
    """
    answers: dict[str, Record] = {name: {"seconds": []} for name in sides}
    requests: list[tuple[str, Record]] = [("prepare", {}), *[("steps", {"count": steps})] * rounds, ("memory", {})]
    for request, values in requests:
        for name in [name for name in sides if "not_run" not in answers[name]]:
            try:
                before = processor_joules()
                answer = sides[name].ask(request, **values)
                after = processor_joules()
                if before is not None and after is not None and after >= before and request == "steps":
                    answers[name]["joules"] = answers[name].get("joules", 0.0) + after - before
                answers[name] |= answer | {"seconds": answers[name]["seconds"] + answer.get("seconds", [])}
            except WorkerFailed as error:
                answers[name] = {"not_run": str(error)}
    return answers


def compared(sides: Mapping[str, Record], tokens: int, reference: str) -> list[Record]:
    """A row per side: median time of a step, tokens/s, and its speed relative to the reference side, if that ran."""
    medians = {name: statistics.median(side["seconds"]) for name, side in sides.items() if "not_run" not in side}
    rows = [{"side": name, **side} for name, side in sides.items()]
    for row in rows:
        if seconds := medians.get(row["side"]):
            ratio = medians[reference] / seconds if reference in medians else None
            row |= {"step_seconds": seconds, "tokens_per_second": tokens / seconds, "ratio": ratio}
            row["steps"] = len(row["seconds"])
            if "joules" in row:  # of the processor, while this side had its turns
                row["joules_per_token"] = row["joules"] / (tokens * row["steps"])
    return rows


@dataclass(frozen=True)
class Comparison:
    """The options of this script and of its job `comparison`."""

    shape: Annotated[str, "a shape that 'wgpu-lora bench --list' lists"] = "tiny-qwen3"
    layers: Annotated[int | None, "use only this many layers, the shape's first"] = None
    rows: Annotated[list[int], "rows per step; a comparison for each number"] = field(default_factory=lambda: [1, 4])
    tokens: Annotated[int, "tokens per row"] = 128
    rank: Annotated[int, "LoRA rank"] = 8
    ours: Annotated[list[str], "our base formats; nf4+bf16: in bf16"] = field(default_factory=lambda: ["f32", "nf4"])
    torch: Annotated[list[str], "f32, bf16, nf4; speeds relative to the first"] = field(default_factory=lambda: ["f32"])
    torch_device: Annotated[str, "cpu or cuda"] = "cpu"
    device: Annotated[str | None, "our device: index or part of its name, as 'wgpu-lora info' lists them"] = None
    threads: Annotated[int, "CPU threads of each side"] = 2
    rounds: Annotated[int, "rounds; each side has one turn per round"] = 5
    steps: Annotated[int, "steps per turn"] = 3

    def check(self) -> None:
        """Raises UserError if it cannot run, before any process starts."""
        for unknown in set(self.torch) - set(TORCH_DTYPES):
            raise UserError(f"--torch has {unknown!r}, which is not one of {', '.join(TORCH_DTYPES)}.")
        for name in self.ours:
            base, _, compute = name.partition("+")
            if base not in BASE_FORMATS or base == GGUF or (name != base and compute not in HALVES):
                formats = ", ".join(item for item in BASE_FORMATS if item != GGUF)
                raise UserError(
                    f"--ours has {name!r}, which is not one of {formats} or a type of GGUF files such as q4_k, each "
                    f"also with {' or '.join(f'+{half}' for half in HALVES)}."
                )
        sizes = {"rows": min(self.rows, default=0), "threads": self.threads, "rounds": self.rounds, "steps": self.steps}
        for name, value in sizes.items():
            if value < 1:
                raise UserError(f"--{name} must be at least 1, not {value}.")
        packages = (*PACKAGES, "bitsandbytes") if "nf4" in self.torch else PACKAGES
        if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
            raise UserError(
                f"This compares with PyTorch + PEFT, but {', '.join(missing)} cannot be imported: install the "
                "'reference' extra, as 'make bench-reference' does."
            )
        if self.torch_device == "cuda" and subprocess.run([sys.executable, "-c", HAS_CUDA]).returncode:
            raise UserError("--torch-device cuda is not possible: PyTorch finds no such device.")
        shape_config(self.shape, self.layers)

    def side(self, kind: str, dtypes: str, rows: int, tokens: int) -> Worker:
        """A side as a worker. kind: `ours` or `torch`. dtypes: 'nf4', or with a compute dtype 'nf4+bf16'."""
        job, device = {"ours": ("step", self.device), "torch": ("torch-step", self.torch_device)}[kind]
        base, _, compute = dtypes.partition("+")
        work = asdict(ReferenceWork(self.shape, self.layers, rows, tokens, self.rank, base, device, compute or "f32"))
        threads, name = dict.fromkeys(THREADS, str(self.threads)), f"{kind} {dtypes}"
        return Worker(job, work, name=name, program=PROGRAM, environment=threads, interactive=True)

    def of(self, rows: int) -> list[Record]:
        """One batch on every side: a record for each."""
        base = {"shape": self.shape, "layers": self.layers, "rows": rows, "tokens": self.tokens, "rank": self.rank}
        base["work"] = f"{rows} x {self.tokens}"
        with ExitStack() as stack:
            kinds = [("ours", dtype) for dtype in self.ours] + [("torch", dtype) for dtype in self.torch]
            workers = [stack.enter_context(self.side(*kind, rows, self.tokens)) for kind in kinds]
            answers = take_turns({worker.name: worker for worker in workers}, self.rounds, self.steps)
        return [{**base, **row} for row in compared(answers, rows * self.tokens, f"torch {self.torch[0]}")]

    def serving(self, base_dtype: str) -> Record:
        """Prefill and decoding on our side."""
        row = {"side": f"ours {base_dtype}", "work": "serving", "base_dtype": base_dtype, "prompt": PROMPT, "new": NEW}
        with self.side("ours", base_dtype, 1, PROMPT) as worker:
            try:
                return row | worker.ask("serve", prompt=PROMPT, new=NEW, runs=self.rounds)
            except WorkerFailed as error:
                return row | {"not_run": str(error)}


def step(port: EventWriter, *, where: str, **options: Any) -> None:
    """The job `step`: answers `prepare`, `steps`, `memory` and `serve`, until the input ends."""
    port.answer(OurSide(read_as(ReferenceWork, options, where)))


def torch_step(port: EventWriter, *, where: str, **options: Any) -> None:
    """The job `torch-step`: the same by PyTorch, without `serve`."""
    port.answer(TorchSide(read_as(ReferenceWork, options, where)))


def comparison(port: EventWriter, *, where: str, **options: Any) -> JobResult:
    """The job `comparison`; its exit code is 1 if a side failed."""
    names = [item.name for item in fields(Comparison)]
    request = read_as(Comparison, real_names(options, names, where, otherwise=f"there are {', '.join(names)}."), where)
    request.check()
    rows = [row for count in request.rows for row in request.of(count)]
    for row in rows:
        port.measured(row)
    failed = failures(rows)
    return JobResult({"sides": len(rows)}, int(bool(failed)), "; ".join(failed))


def failures(rows: list[Record]) -> list[str]:
    return [f"{row['side']}, {row['work']}, did not run: {row['not_run']}" for row in rows if "not_run" in row]


def cells(row: Record) -> list[str]:
    texts = [row["work"], row["side"]]
    if "not_run" in row:
        return [*texts, "not run"]
    ratio, device = row["ratio"], row.get("planned", row.get("allocated"))
    texts += [f"{row['step_seconds']:.4f}", f"{row['tokens_per_second']:,.0f}", "" if ratio is None else f"{ratio:.3f}"]
    joules = row.get("joules_per_token")
    return [
        *texts,
        "" if device is None else format_bytes(device),
        format_bytes(row["resident"]),
        "" if joules is None else f"{1000 * joules:.1f}",
        f"{row['first_loss']:.5f}",
    ]


def measure(request: Comparison, no_serving: bool, file: Path | None) -> int:
    """Compare, show and write; 1 if a side did not run."""
    request.check()
    with Writer(file) as writer:  # refuses what cannot be written
        rows, served = _measure(request, no_serving)
        result = {
            "schema": SCHEMA,
            "commit": commit(),
            "processor": processor_name(),
            "options": asdict(request),
            "steps": rows,
            "serving": served,
        }
        writer.text(json.dumps(result, indent=1) + "\n")
    for failure in (failed := failures(rows + served)):
        print(f"bench-reference: {failure}", file=sys.stderr)
    return int(bool(failed))


def _measure(request: Comparison, no_serving: bool) -> tuple[list[Record], list[Record]]:
    """Steps and serving, as they are shown."""
    rows: list[Record] = []
    for count in request.rows:
        line("step", f"{count} x {request.tokens} tokens, {request.rounds} rounds of {request.steps} steps per side")
        rows += request.of(count)
    head = (
        "step",
        "side",
        "s a step",
        "processed tokens/s",
        "of torch",
        "device",
        "process",
        "mJ a token",
        "first loss",
    )
    console().print(table(head, map(cells, rows), text_columns=head[:2]))
    served = [] if no_serving else [request.serving(dtype) for dtype in request.ours if "+" not in dtype]
    for row in served:
        text = row.get("not_run") or f"prefill {row['prefill']:,.0f}, decode {row['decode']:,.1f} tokens/s"
        line("serving", f"{row['base_dtype']}, {PROMPT} tokens then {NEW}: {text}")
    return rows, served


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    kinds = {int: int, int | None: int, list[int]: numbers, list[str]: lambda text: text.split(",")}
    for name, hint in get_type_hints(Comparison, include_extras=True).items():
        parse = kinds.get(hint.__origin__, str)
        parser.add_argument(f"--{name}".replace("_", "-"), type=parse, help=hint.__metadata__[0])
    parser.add_argument("--no-serving", action="store_true", help="leave out prefill and decoding")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.set_defaults(**asdict(Comparison()))
    options = vars(parser.parse_args())
    no_serving, file = options.pop("no_serving"), options.pop("json")
    try:
        return measure(Comparison(**options), no_serving, file)
    except UserError as error:
        print(f"bench-reference: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:  # with this script's jobs
        KINDS["step"], KINDS["torch-step"], KINDS["comparison"] = step, torch_step, comparison
        sys.exit(command_line(sys.argv[1:3]))
    sys.exit(main())
