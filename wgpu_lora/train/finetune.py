"""From options to a finished run: the one path that the command line and Python share."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from wgpu_lora.data import Prepared, prepare, resolve_data
from wgpu_lora.errors import UserError
from wgpu_lora.models.load import Progress
from wgpu_lora.models.loaded import LoadedModel, open_model
from wgpu_lora.models.lora import AdapterSet
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.session import Session
from wgpu_lora.train.slot import AdapterRun, adapter_of, spec_of
from wgpu_lora.train.stream import DataStream
from wgpu_lora.train.trainer import Callback, Trainer

LOCK = ".lock"


@dataclass
class Job:
    """A run that has been read, checked and planned, with nothing allocated yet."""

    session: Session
    run: AdapterRun

    def train(self, callback: Callback = lambda result: None, progress: Progress = lambda name: None) -> dict[str, Any]:
        """Loads the weights, trains and writes the adapter; returns run.json's contents."""
        run = self.run
        run.directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(run.directory / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"Another process is writing to {run.directory}: wait for it, or choose another --output.") from None
        try:
            run.prepare_directory()
            self.session.allocate(progress)
            run.place(self.session)
            return Trainer(self.session, run, callback).train()
        finally:
            self.session.close()
            lock.release()
            with suppress(OSError):
                (run.directory / LOCK).unlink()


def with_demo_data(args: TrainingArguments) -> TrainingArguments:
    """Fills in what was left out: the demo model, and for it the demo's own data."""
    if args.data is None:
        if args.model not in (None, "demo"):
            raise UserError("--data is missing: give a JSONL file, or a folder with train.jsonl.")
        from wgpu_lora.demo import HELDOUT_FILE, TRAIN_FILE

        args = replace(args, data=str(TRAIN_FILE), eval_data=args.eval_data or str(HELDOUT_FILE))
    return replace(args, model=args.model or "demo")


def prepare_job(args: TrainingArguments, model: LoadedModel | None = None) -> Job:
    """Reads the data and the model's files and records the programs. Allocates nothing on the device.

    Args:
        model: an opened model to train on, instead of the one that the options name.

    Raises:
        UserError: anything that a person can mend, from the data, the model, the options or the device.
    """
    args = with_demo_data(args)
    assert args.data is not None
    train_file, valid_file = resolve_data(Path(args.data))
    heldout_file = Path(args.eval_data) if args.eval_data else valid_file
    model = model or open_model(args.model or "demo", args.device, args.base_dtype)
    _check_length(args, model)
    stream = DataStream(_prepare(args, model, train_file), args)
    heldout = _prepare(args, model, heldout_file) if heldout_file else None
    adapter, initial = adapter_of(args, model.config)
    spec = spec_of(adapter, initial)
    buckets = stream.buckets()
    session = Session(
        model,
        AdapterSet.declare(model.config, [spec], model.device.max_binding),
        buckets,
        positions=max([*stream.prepared.lengths, *(heldout.lengths if heldout else [])]),
        dropout=args.lora_dropout > 0,
        recompute=args.gradient_checkpointing,
        eval_tokens=max(buckets[-1], *heldout.lengths) if heldout else 0,
    )
    run = AdapterRun(0, args, adapter, spec, initial, stream, heldout, model.checkpoint.digest())
    return Job(session, run)


def _check_length(args: TrainingArguments, model: LoadedModel) -> None:
    limit = model.config.max_position_embeddings
    if args.max_length > limit:
        raise UserError(f"--max-length {args.max_length} is more than this model's {limit} positions: lower it to {limit}.")


def _prepare(args: TrainingArguments, model: LoadedModel, path: Path) -> Prepared:
    return prepare(
        path, model.tokenizer, max_length=args.max_length, completion_only_loss=args.completion_only_loss,
        on_overflow="drop" if args.on_overflow == "drop" else "truncate", chat_template_kwargs=args.template_kwargs(),
        vocab_size=model.config.vocab_size,
    )
