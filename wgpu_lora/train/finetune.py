"""From options to a finished run: the one path that the command line and Python share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from wgpu_lora.data import Prepared, prepare, resolve_data
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.tuner import Tuner, wanted
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.load import Progress, table_dtype
from wgpu_lora.models.loaded import LoadedModel, open_model
from wgpu_lora.models.lora import AdapterSet, SlotSpec
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.memory import Replan, available_bytes, check_memory
from wgpu_lora.train.session import Session
from wgpu_lora.train.slot import AdapterRun, adapter_of, refuse_used, spec_of
from wgpu_lora.train.stream import DataStream
from wgpu_lora.train.trainer import Callback, Trainer

LOCK = ".lock"


@dataclass
class Job:
    """A run that has been read, checked and planned, with nothing allocated yet."""

    session: Session
    run: AdapterRun
    replan: Replan

    def check_memory(self) -> None:
        """Raises UserError, with the options that would make it fit, where the device has too little memory."""
        args = self.run.args
        available = available_bytes(self.session.device, args.budget())
        check_memory(self.session.memory().peak, available, args, self.replan)

    def train(self, callback: Callback = lambda result: None, progress: Progress = lambda name: None) -> dict[str, Any]:
        """Loads the weights, trains and writes the adapter; returns run.json's contents."""
        run, device = self.run, self.session.device
        self.check_memory()
        lock = FileLock(run.directory / LOCK)
        made = not run.directory.exists()
        try:
            run.directory.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"Another process is writing to {run.directory}: wait for it, or choose another --output."
            ) from None
        except OSError as error:
            raise UserError(f"The output directory {run.directory} cannot be made: {error.strerror}.") from error
        try:
            run.prepare_directory()
            device.peak_allocated = device.allocated  # of this run, not of what this process did before
            self._choose_tiles()
            self.session.allocate(progress)
            return self._train(callback)
        finally:
            self.session.close()
            lock.release()
            if made and {p.name for p in run.directory.iterdir()} <= {LOCK}:
                with suppress(OSError):  # the run ended before it left anything
                    (run.directory / LOCK).unlink(missing_ok=True)
                    run.directory.rmdir()

    def tuner(self) -> Tuner | None:
        """What will choose the kernels' tilings, or None where this run has its own or is to use the defaults."""
        args = self.run.args
        return Tuner(self.session.device) if wanted(args.tune) and not args.resume else None

    def _choose_tiles(self) -> None:
        tuner = self.tuner()
        if tuner:
            self.run.state.tiles = tuner.tune(self.session.programs())
        self.session.device.choices = self.run.state.tiles

    def _train(self, callback: Callback) -> dict[str, Any]:
        run = self.run
        try:
            run.place(self.session)
            return Trainer(self.session, [run], callback).train()[run.slot]
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
            reason = getattr(error, "strerror", None) or error
            where = getattr(error, "filename", None) or run.directory
            raise UserError(
                f"Writing to {where} failed ({reason}): earlier checkpoints are whole; "
                "make room and continue with --resume."
            ) from error


def with_demo_data(args: TrainingArguments) -> TrainingArguments:
    """Fills in what was left out: the demo model, and for it the demo's own data."""
    if args.data is None:
        if args.model not in (None, "demo"):
            raise UserError("--data is missing: give a JSONL file, or a folder with train.jsonl.")
        from wgpu_lora.demo import HELDOUT_FILE, TRAIN_FILE

        args = replace(args, data=str(TRAIN_FILE), eval_data=args.eval_data or str(HELDOUT_FILE))
    return replace(args, model=args.model or "demo")


def prepare_job(args: TrainingArguments, model: LoadedModel | None = None, *, planning: bool = False) -> Job:
    """Reads the data and the model's files and records the programs. Allocates nothing on the device.

    Args:
        model: an opened model to train on, instead of the one that the options name.
        planning: the job will not be run, so that --output may be in use.

    Raises:
        UserError: anything that a person can mend, from the data, the model, the options or the device.
    """
    args = with_demo_data(args)
    assert args.data is not None
    if not (planning or args.resume):
        refuse_used(Path(args.output))  # before the work of reading data, and again under the lock
    train_file, valid_file = resolve_data(Path(args.data))
    heldout_file = Path(args.eval_data) if args.eval_data else valid_file
    model = model or open_model(args.model or "demo", args.device, args.base_dtype)
    _check_length(args, model)
    args, adapter, initial = adapter_of(args, model.config)
    stream = DataStream(_prepare(args, model, train_file), args)
    heldout = _prepare(args, model, heldout_file) if heldout_file else None
    spec = spec_of(adapter, initial)

    def replan(changes: Mapping[str, Any]) -> int:
        other = replace(args, **changes)
        return (
            _session(other, _declared_as(model, other.base_dtype), DataStream(stream.prepared, other), heldout, spec)
            .memory()
            .peak
        )

    session = _session(args, model, stream, heldout, spec)
    run = AdapterRun(0, args, adapter, spec, initial, stream, heldout, model.checkpoint.digest())
    return Job(session, run, replan)


def _declared_as(model: LoadedModel, base_dtype: str) -> LoadedModel:
    """The same model for planning with another type of base weights."""
    decoder = model.decoder
    if decoder.base_dtype == base_dtype:
        return model
    other = Decoder.declare(model.config, base_dtype, table_dtype(model.checkpoint), model.device.max_binding)
    return replace(model, decoder=other, weights_loaded=False)


def _session(
    args: TrainingArguments, model: LoadedModel, stream: DataStream, heldout: Prepared | None, spec: SlotSpec
) -> Session:
    buckets = stream.buckets()
    return Session(
        model,
        AdapterSet.declare(model.config, [spec], model.device.max_binding),
        buckets,
        positions=max([*stream.prepared.lengths, *(heldout.lengths if heldout else [])]),
        dropout=args.lora_dropout > 0,
        recompute=args.gradient_checkpointing,
        compute_dtype=args.compute_dtype,
        eval_tokens=max(buckets[-1], *heldout.lengths) if heldout else 0,
    )


def _check_length(args: TrainingArguments, model: LoadedModel) -> None:
    limit = model.config.max_position_embeddings
    if args.max_length > limit:
        raise UserError(
            f"--max-length {args.max_length} is more than this model's {limit} positions: lower it to {limit}."
        )


def _prepare(args: TrainingArguments, model: LoadedModel, path: Path) -> Prepared:
    return prepare(
        path,
        model.tokenizer,
        max_length=args.max_length,
        completion_only_loss=args.completion_only_loss,
        on_overflow="drop" if args.on_overflow == "drop" else "truncate",
        chat_template_kwargs=args.template_kwargs(),
        vocab_size=model.config.vocab_size,
    )
