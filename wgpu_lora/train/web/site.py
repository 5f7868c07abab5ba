"""wgpu-lora export web: a page that trains an adapter of one model, as files for any static host."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.data.unread_columns import HARMLESS, HARMLESS_ENDS, HARMLESS_STARTS
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.files.assets import DEMO_TRAIN, ORDERS_TRAIN
from wgpu_lora.files.atomic import new_directory
from wgpu_lora.formats.peft_adapter import CONFIG, WEIGHTS, adapter_files, tensor_name
from wgpu_lora.formats.tokenizer.chat_template import TemplateError
from wgpu_lora.formats.tokenizer.tokenizer import TEMPLATE, Tokenizer
from wgpu_lora.gpu.memory_leases import claim
from wgpu_lora.gpu.program import Program, allocate, missing_bytes, release
from wgpu_lora.gpu.struct import struct_fields
from wgpu_lora.gpu.tensor import Storage, Tensor
from wgpu_lora.infer.engine_programs import EngineLimits, Programs, Step
from wgpu_lora.models.batch_inputs import StepInputs
from wgpu_lora.models.blocks.attention_block import KeyRanges
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.row_inputs import RowInput
from wgpu_lora.names.spelling import flag
from wgpu_lora.ops.attention.attention import BLOCK
from wgpu_lora.train.optimizers.adamw import Hyper
from wgpu_lora.train.options.training_arguments import ROWS_PER_BATCH, TrainingArguments
from wgpu_lora.train.prepare_run import trainable_for
from wgpu_lora.train.prepare_session import trainable_parameters
from wgpu_lora.train.run.run_outcome import FEW as FEW_STEPS
from wgpu_lora.train.run.trained_weights import TrainableAdapter, adapter_tensors
from wgpu_lora.train.session.batch import Batch
from wgpu_lora.train.session.optimizer_update import SlotUpdate
from wgpu_lora.train.session.session import Session
from wgpu_lora.train.training_data import FEW, ROWS
from wgpu_lora.train.web.recording import Recording, web_capabilities

SCHEMA, VERSION = "wgpu-lora web", 1
PAGE = Path(__file__).parent
SHELL = (".html", ".css", ".js", ".mjs", ".svg", ".txt")
PREFILL = (16, 128)  # rows of a prompt that are computed together
EXAMPLE_ROWS = 200
# Texts whose ids, and conversations whose renderings, the page compares with its own, since its tokenizer and template
# engine are other implementations.
SAMPLES = (
    "Hello, world! The year is 2026, isn't it?",
    "  naïve CAFÉ — 12345.67 %\n\n\tx = f(a[1], 'b')  # ok\r\n",
    "日本語の文 한국어 Привет مرحبا 🙂👍🏽 e\u0301",
)
_WORDS = ("Hi <b>&amp; \"you\" 'all' {{ x }}", "\n\t a \n\n", "<think>\nb\n</think>\n\n  c \n", "日本語 1 % 2\u00a0")
CONVERSATIONS = (
    *([{"role": "user", "content": text}] for text in _WORDS),
    *(
        [{"role": "user", "content": text}, {"role": "assistant", "content": text}, {"role": "user", "content": "d"},
         {"role": "assistant", "content": text}] for text in _WORDS
    ),
    [{"role": "system", "content": " s\n"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
)  # fmt: skip
LAST_BLOCK = 0x3240  # of 16 code points: those of letters; above are unassigned and private ones


@dataclass(frozen=True)
class WebOptions:
    """rows, tokens: of a batch. context: tokens of a prompt with its answer. subgroup_sizes: to export beside none."""

    rows: int = ROWS_PER_BATCH
    tokens: int = 256
    context: int = 512
    subgroup_sizes: tuple[int, ...] = ()

    def arguments(self, model: LoadedModel, lora_r: int) -> TrainingArguments:
        """The options of the same training by `wgpu-lora finetune`."""
        if self.rows < 1 or min(self.tokens, self.context) < 16:
            names = f"{flag('rows')} must be at least 1, {flag('tokens')} and {flag('context')}"
            raise UserError(f"{names} at least 16: raise them.")
        positions = model.config.max_position_embeddings
        if max(self.tokens, self.context) > positions:
            raise UserError(
                f"The model has {positions} positions: lower {flag('tokens')} and {flag('context')} to that."
            )
        rate = TrainingArguments(model=model.name).rate_for(model.config.hidden_size)
        return TrainingArguments(
            model=model.name,
            learning_rate=rate,
            max_length=self.tokens,
            per_device_train_batch_size=None if self.rows == ROWS_PER_BATCH else self.rows,
            gradient_accumulation_steps=1,
            base_dtype=model.decoder.base_dtype,
            lora_r=lora_r,
            lora_alpha=2 * lora_r,
        )


class WebModel:
    """The programs of a page: a training step, the held-out loss, prefill and decoding. Recording allocates nothing.

    Raises:
        UserError: the model needs what the page cannot compute, or has no tokenizer.
    """

    def __init__(self, model: LoadedModel, args: TrainingArguments, options: WebOptions):
        self.model, self.args, self.options = model, args, options
        unknown = [item for item in model.config.row_inputs() if not isinstance(item, KeyRanges)]
        if unknown:
            raise UserError(
                f"{model.name} ({model.config.architecture}) cannot be exported for the web, since its page would have "
                f"to compute {type(unknown[0]).__name__.lower()} of each batch: choose a model of plain attention."
            )
        if model.tokenizer is None:
            raise UserError(f"{model.name} has no tokenizer, which the page needs: add a tokenizer.json.")
        self.tokenizer = model.tokenizer
        _, trainable = trainable_for(args, model)
        assert isinstance(trainable, TrainableAdapter)
        self.trainable = trainable
        trained = trainable_parameters(model, [trainable])
        tokens = -(-options.rows * options.tokens // 16) * 16
        self.session = Session(model, trained, [tokens], positions=options.tokens, eval_tokens=tokens)
        blocks = -(-options.context // BLOCK)
        limits = EngineLimits(1, BLOCK * blocks, blocks, tuple(size for size in PREFILL if size <= options.context))
        self.engine = Programs(model.device, model.decoder, self.session.adapters, limits)
        [self.batch] = self.session.steps.values()
        self.recording = Recording(self.programs())

    def programs(self) -> dict[str, Program]:
        assert self.session.heldout
        prefill = {f"prefill {size}": step.program for size, step in self.engine.prefill.items()}
        return {
            "train": self.batch.program,
            "update": self.session.optimizer.program,
            "heldout": self.session.heldout.program,
            "shared": self.engine.shared,
            **prefill,
            "decode": self.engine.decode[1].program,
            "choose": self.engine.heads[1].choose,
        }

    # -- contents of the buffers -------------------------------------------------------------------------------------

    def load(self, events: Events = SILENT) -> None:
        """Fill all buffers on the device as they are before the first step."""
        session, device = self.session, self.model.device
        self.model.load_weights(events)
        allocate(device, self.storages())
        session.trained.upload_constants(device)
        session.optimizer.initialise(device)
        for tables in (session.tables, self.engine.state.tables):
            tables.upload(device)
        self.trainable.place_initial(session, 0)
        first = {0: SlotUpdate(1, self.args.rate, self.args)}
        device.write(session.optimizer.clips.storage.buffer, session.optimizer.settings(first)[session.optimizer.clips])
        for program in self.recording.programs.values():
            for storage, table in program.uniforms():
                device.write(storage.buffer, table)

    def storages(self) -> set[Storage]:
        uniforms = {storage for program in self.recording.programs.values() for storage, _ in program.uniforms()}
        return self.session.storages() | self.engine.storages() | uniforms | set(self.recording.numbers)

    def close(self) -> None:
        release(self.model.device, self.storages())
        self.session.close()

    # -- the document ------------------------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """What the page reads, without the files of weights."""
        recording, config = self.recording, self.model.config
        sizes = (0, *self.options.subgroup_sizes)
        described = {"training": self._training(), "adapter": self._adapter(), "generation": self._generation()}
        replays = {size: recording.replays(web_capabilities(size)) for size in sorted(set(sizes))}
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "model": {
                "name": self.model.name,
                "architecture": config.architecture,
                "layers": config.num_hidden_layers,
                "hidden_size": config.hidden_size,
                "vocab_size": config.vocab_size,
                "base_dtype": self.model.decoder.base_dtype,
            },
            "limits": recording.limits(replays.values()),
            **described,
            "tokenizer": tokenizer_facts(self.tokenizer),
            "bricks": self._bricks(),
            "buffers": recording.buffers,
            "variants": [{"subgroup_size": size, "programs": programs} for size, programs in replays.items()],
            "shaders": list(recording.shaders),
        }

    def _location(self, tensor: Tensor) -> list[int]:
        return self.recording.location(tensor)

    def _rows(self, inputs: StepInputs) -> dict[str, Any]:
        """The inputs that every step has."""

        def window(item: RowInput) -> int | None:
            assert isinstance(item, KeyRanges)
            return item.window

        return {
            "size": inputs.tokens,
            "ids": self._location(inputs.ids),
            "positions": self._location(inputs.positions),
            "keys": [{"window": window(item), "place": self._location(tensor)} for item, tensor in inputs.rows.items()],
            "slot_ranges": self._location(inputs.slot_ranges),
        }

    def _batch(self, batch: Batch) -> dict[str, Any]:
        [scoring] = batch.scoring.values()
        targets = batch.inputs.targets
        return self._rows(batch.inputs) | {
            "target_rows": self._location(targets.rows),
            "targets": self._location(targets.ids),
            "target_count": self._location(targets.count),
            "weights": self._location(scoring.weights),
            "loss_ranges": self._location(scoring.ranges),
        }

    def _training(self) -> dict[str, Any]:
        session, args = self.session, self.args
        optimizer = session.optimizer
        assert session.heldout
        names = ("adam_beta1", "adam_beta2", "adam_epsilon")
        rule = {name.removeprefix("adam_"): getattr(optimizer.rule, name) for name in names}
        state = [*session.trained.params, *(tensor for page in optimizer.state.pages for tensor in page)]
        return {
            "rows": self.options.rows,
            "small": {"steps": FEW, "rows": [args.per_device_train_batch_size or count for count in ROWS]},
            "few_steps": FEW_STEPS,
            "tokens": self.options.tokens,
            "batch": self._batch(self.batch),
            "heldout": self._batch(session.heldout),
            "loss": self._location(session.totals.loss),
            "report": self._location(optimizer.report),
            "hyper": {"place": self._location(optimizer.hyper), "fields": list(struct_fields(Hyper)), **rule},
            "weight_decay": args.weight_decay,
            "schedule": {
                "kind": args.lr_scheduler_type,
                "learning_rate": args.rate,
                "warmup_ratio": args.warmup_ratio,
                "least": args.lr_scheduler_min,
            },
            "seed": args.seed,
            "epochs": args.num_train_epochs,
            "pages": len(session.trained.params),
            "state": [self._location(tensor) for tensor in state],
        }

    def _adapter(self) -> dict[str, Any]:
        adapters, config, shapes = self.session.adapters, self.trainable.config, self.model.config.lora_modules
        zeros = {
            module: (np.zeros((config.r, size_in), np.float32), np.zeros((out, config.r), np.float32))
            for module, (out, size_in) in shapes.items()
            if module in adapters.numbers
        }
        tensors = []
        for module, pair in zeros.items():
            for part, matrix in zip("AB", pair, strict=True):
                buffer, offset, size = self._location(adapters.of_slot(module, part, 0))
                assert size == matrix.nbytes
                name = tensor_name(module, part)
                tensors.append({"name": name, "shape": list(matrix.shape), "buffer": buffer, "offset": offset})
        text = adapter_files(adapter_tensors(zeros, config), config)[CONFIG].decode()
        return {"files": {"config": CONFIG, "weights": WEIGHTS}, "config": text, "tensors": tensors}

    def _generation(self) -> dict[str, Any]:
        state = self.engine.state

        def step(forward: Step) -> dict[str, Any]:
            locations = {
                "cache_rows": self._location(forward.cache_rows),
                "picked": self._location(forward.logits_indices),
            }
            return self._rows(forward.inputs) | locations

        return {
            "context": state.limits.tokens,
            "block": BLOCK,
            "prefill": [step(forward) for forward in self.engine.prefill.values()],
            "decode": step(self.engine.decode[1]),
            "blocks": self._location(state.blocks),
            "params": self._location(state.params),
            "ids": self._location(state.ids),
        }

    def _bricks(self) -> list[dict[str, Any]]:
        """The heavy dispatches of a training step, one of each shape: products and attention."""
        result: dict[Any, dict[str, Any]] = {}
        for index, step in enumerate(self.batch.program.dispatches):
            if step.kernel.tuning:
                name, key = step.kernel.name, (step.kernel.name, step.dims, step.alike)
                shape = " ".join(
                    f"{size} {step.constants[size]}" for size in step.kernel.tuning.sizes if step.constants.get(size)
                )
                work = step.kernel.tuning.work(step.constants)
                new = {"kernel": name, "dims": shape, "dispatch": index, "work": work, "calls": 0}
                result.setdefault(key, new)["calls"] += 1
        return list(result.values())


def tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """What the page needs to know of a tokenizer beside its file."""
    files = tokenizer.files()
    return {
        "config": json.loads(files["tokenizer_config.json"]),
        "template": files.get(TEMPLATE),
        "eos_id": tokenizer.eos_id,
        "eos_text": tokenizer.eos_text,
        "stop_ids": sorted(tokenizer.stop_ids),
        "special_ids": sorted(tokenizer.special_ids),
        "special_texts": list(tokenizer.special_texts),
        "end_texts": list(tokenizer.end_texts),
        "prefix_ids": tokenizer.prefix_ids,
        "samples": list(zip(SAMPLES, tokenizer.encode_all(list(SAMPLES)), strict=True)),
        "conversations": _renderings(tokenizer),
        "blocks": block_digests(tokenizer),
        "harmless": {"names": sorted(HARMLESS), "ends": sorted(HARMLESS_ENDS), "starts": sorted(HARMLESS_STARTS)},
    }


def _renderings(tokenizer: Tokenizer) -> list[tuple[list[dict[str, str]], bool, str | None]]:
    """Conversations with their texts, None where the chat template refuses one."""
    result: list[tuple[list[dict[str, str]], bool, str | None]] = []
    for messages in CONVERSATIONS if tokenizer.has_chat_template else ():
        prompting = messages[-1]["role"] == "user"
        try:
            result.append((messages, prompting, tokenizer.render(list(messages), None, prompting)))
        except TemplateError:
            result.append((messages, prompting, None))
    return result


def block_digests(tokenizer: Tokenizer) -> str:
    """A digest of the ids of each block's characters, eight hexadecimal digits each."""
    ids_of_blocks = tokenizer.encode_all([_block_text(block) for block in range(LAST_BLOCK)])
    return "".join(f"{_digest(ids):08x}" for ids in ids_of_blocks)


def _block_text(block: int) -> str:
    """Every character of a block of 16 code points, beside itself, a letter, a digit and a space."""
    points = range(block << 4, (block + 1) << 4)
    return "".join("{0}{0}a{0}1 {0}".format(chr(point)) for point in points if not 0xD800 <= point <= 0xDFFF)


def _digest(ids: list[int]) -> int:
    """A polynomial of token ids, modulo 2^32."""
    factors = np.full(len(ids), 0x01000193, np.uint32)
    factors[:1] = 1
    powers = np.cumprod(factors, dtype=np.uint32)[::-1]
    return int((powers * (np.array(ids, np.uint32) + 1)).sum(dtype=np.uint32))


def write_site(model: LoadedModel, options: WebOptions, output: Path, lora_r: int = 16, events: Events = SILENT) -> int:
    """Write the page and all that it loads into a new directory; returns the bytes of weights.

    The model's device must be a `recording.web_device`.

    Raises:
        UserError: the model cannot be exported, or the directory cannot be written.
    """
    web = WebModel(model, options.arguments(model, lora_r), options)
    need = missing_bytes(web.storages()) + model.bytes_to_load()
    with new_directory(output, "--output") as directory, claim(model.device, need, "an export for the web"):
        try:
            web.load(events)
            copy_shell(directory)
            document = web.document()
            document["files"] = web.recording.write_contents(model.device, directory)
        finally:
            web.close()
        text = web.tokenizer.files()["tokenizer.json"].encode()
        (directory / "tokenizer.json").write_bytes(text)
        document["tokenizer"] |= {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        examples = DEMO_TRAIN if model.name == "demo" else ORDERS_TRAIN
        rows = examples.read_text(encoding="utf-8").splitlines()[:EXAMPLE_ROWS]
        (directory / "example.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        (directory / "model.json").write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
        stamp_worker(directory)
    return sum(file["bytes"] for file in document["files"])


def copy_shell(directory: Path) -> None:
    """Copy the page, its modules, and the libraries with their licences."""
    for path in sorted(PAGE.rglob("*")):
        if path.suffix in SHELL:
            target = directory / path.relative_to(PAGE)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def stamp_worker(directory: Path) -> None:
    """Name the files of this site, and a digest of them, in the worker that keeps them for use without a network."""
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\n".encode() + hashlib.sha256((directory / name).read_bytes()).digest())
    worker = directory / "worker.js"
    front = f"const SITE = {json.dumps(digest.hexdigest())};\nconst FILES = {json.dumps(names)};\n"
    worker.write_text(front + worker.read_text(encoding="utf-8"), encoding="utf-8")
