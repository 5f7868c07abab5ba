"""Golden models on the device: what the tests of logits, evaluation and generation share.

All forward passes here have ROWS rows, so that the tests of one process share their compiled kernels.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import load_file
from tokenizers import models, pre_tokenizers

from support import FIXTURES, path_of
from wgpu_lora.formats.peft_adapter import tensor_name, write_adapter
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Arena, Program, allocate
from wgpu_lora.gpu.tensor import Storage, persistent
from wgpu_lora.models.adapter_set import AdapterSet
from wgpu_lora.models.batch_inputs import Segment, StepInputs, Tables
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.ops.embedding import head_logits
from wgpu_lora.ops.recorder import Recorder

ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral", "smollm3", "phi3", "gemma2", "gemma3_text", "gemma3")
ARCHITECTURES += ("ministral", "ministral3", "qwen3_5_text")
ROWS = 40  # three golden rows of at most 13 tokens, and padding


def golden(architecture: str) -> dict[str, np.ndarray]:
    return load_file(FIXTURES / "golden" / f"{architecture}.safetensors")


def golden_rows(tensors: dict[str, np.ndarray], name: str) -> list[np.ndarray]:
    """`name`'s rows without their padding."""
    return [row[:length] for row, length in zip(tensors[name], tensors["lengths"], strict=True)]


def load(architecture: str, device: Device, base_dtype: str = "f32") -> LoadedModel:
    model = open_model(str(FIXTURES / "models" / architecture), device, base_dtype)
    model.load_weights()
    return model


def words_model(directory: Path, template: str | None = None) -> Path:
    """The golden mistral with a tokenizer of words, w0 to w210."""
    shutil.copytree(FIXTURES / "models" / "mistral", directory)
    words = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(directory / "tokenizer.json"))
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def words_and_adapters(directory: Path, template: str | None = None) -> Path:
    """The same in `model`, and two adapters of it, a and b, whose ranks differ."""
    base = {"base_model_name_or_path": str(words_model(directory / "model", template))}
    save_golden_adapter("mistral", directory / "a", **base)
    save_golden_adapter("mistral", directory / "b", -2.0, rank=2, **base)
    return directory


def save_golden_adapter(
    architecture: str, directory: Path, scale: float = 1.0, rank: int = 4, modules: Sequence[str] = (), **config: object
) -> Path:
    """The golden adapter as PEFT has it, of some modules or all; with a smaller rank, its first rows and columns."""
    tensors = {}
    for name, value in golden(architecture).items():
        if name.startswith("adapter."):
            _, layer, module, factor = name.split(".")
            if modules and module not in modules:
                continue
            part = value[:rank] if factor == "A" else value[:, :rank] * scale
            tensors[tensor_name(path_of(layer, module, architecture), factor)] = np.ascontiguousarray(part, np.float32)
            if config.get("use_dora") and factor == "B":  # rows of these weights have norms of about 1
                tensors[tensor_name(path_of(layer, module, architecture), "M")] = np.linspace(
                    0.8, 1.3, len(part), dtype=np.float32
                )
    write_adapter(directory, tensors, AdapterConfig(r=rank, lora_alpha=8, **config))
    return directory


@contextmanager
def allocated(device: Device, program: Program, storages: set[Storage]) -> Iterator[Arena]:
    """What a program needs, for as long as a test uses it."""
    mine = {s for s in storages | program.persistent_storages() if s.buffer is None}
    allocate(device, mine)
    arena = Arena(device, program.plan().sizes)
    yield arena
    arena.free()
    for storage in mine:
        device.free(storage.buffer)
        storage.buffer = None


def full_logits(
    model: LoadedModel, segments: Sequence[Segment], adapters: AdapterSet | None = None
) -> list[np.ndarray]:
    """Logits [length, vocab] of each segment, all in one pass without a cache. Segments are ordered by slot."""
    device, config, head = model.device, model.config, model.decoder.head
    tables = Tables.declare(config.tables(), ROWS)
    slots = len(adapters.specs) if adapters else 1
    inputs = StepInputs.declare(config.row_inputs(), ROWS, slots, tables)
    program = Program(device)
    hidden = model.decoder.hidden(Recorder(program), inputs, adapters.bind(inputs) if adapters else {})
    chunks = dict(head.chunks())
    stops = [*chunks, config.vocab_size][1:]
    logits = [persistent((ROWS, stop - i), "f32", "workspace", "logits") for i, stop in zip(chunks, stops, strict=True)]
    for part, tensor in zip(chunks.values(), logits, strict=True):
        head_logits(program.dispatch, hidden, head, part, tensor)
    with allocated(device, program, inputs.storages()) as arena:
        program.build(arena)
        tables.upload(device)
        inputs.upload(device, segments)
        program.run()
        rows = np.hstack([device.read(t.storage.buffer).view(np.float32).reshape(t.shape) for t in logits])
    stops = np.cumsum([len(segment.input_ids) for segment in segments])
    return [rows[stop - len(segment.input_ids) : stop] for stop, segment in zip(stops, segments, strict=True)]


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The greatest difference, as a share of the greatest expected value."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
