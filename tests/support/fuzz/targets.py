"""What `scripts/fuzz.py` feeds, and the valid inputs that it begins with.

This module imports all that is fuzzed, so that it is the one to import while atheris instruments.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from safetensors.numpy import load_file, save, save_file

from support import FIXTURES, MODELS
from support.fuzz import evidence
from support.fuzz.mutators import of_json, of_parts, of_rows, of_safetensors, of_template
from support.fuzz.tokenizers import of_tokenizer
from support.rows.preferences import Preferences
from wgpu_lora.data import Tokenizer, tokenize_source
from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import DEMO_MODEL as DEMO
from wgpu_lora.formats import peft_adapter, peft_config
from wgpu_lora.formats.safetensors_checkpoint import INDEX, Checkpoint, PackedCheckpoint
from wgpu_lora.formats.safetensors_header import read_header
from wgpu_lora.formats.tokenizer import gguf_tokenizer, tokenizer, tokenizer_process
from wgpu_lora.formats.tokenizer.local_tokenizer import LocalTokenizer
from wgpu_lora.models.architectures import load_config
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.models.model_files import read_model
from wgpu_lora.models.rotary_embedding import inv_freq
from wgpu_lora.processes.child_process import Limits
from wgpu_lora.protect.sealed import archive
from wgpu_lora.weights.base import Packed
from wgpu_lora.weights.lowbit.lowbit import LowBitFiles, quantised
from wgpu_lora.weights.lowbit.lowbit_layout import pack, scheme_of

WEIGHTS, LOW_BIT = "model.safetensors", "q3a8-g16"
ROWS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": [],
     "chat_template_kwargs": {"enable_thinking": False}},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"prompt": "a", "completion": "b"}, {"instruction": "a", "input": "", "output": "b"}, {"text": "a b c d"},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]},
]  # fmt: skip
SLOW, PROCESSES = 1.0, 0.04  # shares of what is slow, and of what starts a process for each input
Run = Callable[[bytes], object]


@dataclass(frozen=True)
class Target:
    """Something that reads other people's files.

    Attributes:
        open: a directory of its own -> what takes one input.
        seeds: valid inputs; it may write into the directory.
        mutate: keeps an input's shape; without one, inputs are mutated byte by byte alone.
        share: of all inputs, beside the other targets' shares.
    """

    open: Callable[[Path], Run]
    seeds: Callable[[Path], list[bytes]]
    mutate: Callable[[bytes, random.Random], bytes] | None = None
    share: float = 4.0


def reading(read: Callable[[Path], object], *names: str, beside: Iterable[Path] = ()) -> Callable[[Path], Run]:
    """What writes an input into files of these names, their parts a blank line apart, and reads the directory."""

    def opened(place: Path) -> Run:
        for path in beside:
            shutil.copy(path, place)

        def run(data: bytes) -> None:
            parts = [*data.split(b"\n\n", len(names) - 1), *[b""] * len(names)]
            for name, part in zip(names, parts, strict=False):
                (place / name).write_bytes(part)
            read(place)

        return run

    return opened


def files(*patterns: str, demo: str | None = None) -> Callable[[Path], list[bytes]]:
    """Fixtures, and a file of the demo model."""
    paths = [path for pattern in patterns for path in sorted(FIXTURES.glob(pattern))]
    return lambda place: [path.read_bytes() for path in [*paths, *([DEMO / demo] if demo else [])]]


def model_config(place: Path) -> None:
    config = load_config(place)
    if config.num_hidden_layers < 100 and config.head_dim < 1000:
        config.parameter_shapes()
        inv_freq(config)


@cache
def qwen2() -> ModelConfig:
    return load_config(MODELS / "qwen2")


def packed_model(place: Path) -> None:
    config = qwen2()
    PackedCheckpoint(place, "nf4").check_against(config.parameter_shapes(), config.matrices())


def low_bit_model(place: Path) -> None:
    """Read to the end, as codes are only looked at when they are loaded."""
    config = qwen3()
    checkpoint = PackedCheckpoint(place, LOW_BIT)
    checkpoint.check_against(config.parameter_shapes(), config.matrices())
    for name in sorted(config.matrices()):
        if weight := checkpoint.packed(name):
            weight.read()


@cache
def qwen3() -> ModelConfig:
    return load_config(MODELS / "qwen3")


@cache
def demo_backend() -> LocalTokenizer:
    """Read once: reading the vocabulary anew for every input would be all that is tested."""
    return LocalTokenizer.open((DEMO / "tokenizer.json").read_text())


def settings(place: Path) -> None:
    """What stands beside a tokenizer.json, template included."""
    with patch.object(tokenizer, "TokenizerProcess", lambda *_: demo_backend()):
        vocabulary = Tokenizer.load(place)
    if vocabulary is not None:
        _ = vocabulary.stop_ids, vocabulary.eos_id, vocabulary.bos_id, vocabulary.pad_id


def whole_tokenizer(place: Path) -> None:
    """As it is in use: in a child, texts by it too."""
    vocabulary = Tokenizer.load(place)
    if vocabulary is not None:
        vocabulary.encode_with_offsets("a" * 300 + " " * 300 + "x")
        vocabulary.decode(vocabulary.encode("Hi <|im_end|> 12\n", add_special_tokens=True)[:9])
        vocabulary.files()


def gguf(place: Path) -> None:
    """Header, a row of each tensor, and the tokenizer."""
    with patch.object(gguf_tokenizer, "TokenizerProcess", LocalTokenizer.open):
        files = read_model(place / "model.gguf")
    for name in files.checkpoint.names():
        files.checkpoint.read_raw(name, 0, 1)
    if files.tokenizer:
        files.tokenizer.decode(files.tokenizer.encode("abc </s>", add_special_tokens=True))


def chat_template(place: Path) -> Run:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi <there>"}]
    limits = Limits(memory=300 << 20, seconds=1.0)  # what has no end is ended sooner, and more inputs are tried
    with patch.object(tokenizer_process, "LIMITS", limits):
        backend = tokenizer_process.TokenizerProcess((DEMO / "tokenizer.json").read_text())

    def run(data: bytes) -> None:
        with patch.object(tokenizer_process, "LIMITS", limits):
            source = data.decode("utf-8", "replace")
            Tokenizer(backend, chat_templates={"default": source}).render(messages, None, True, {"x": 1})

    return run


def rows(place: Path) -> Run:
    """Training data of any format, by its bytes, through formats, template and masks."""
    demo = Tokenizer.load(DEMO)

    def run(data: bytes) -> None:
        for name in ("rows.csv", "rows.json"):
            (place / name).write_bytes(data)
        with suppress(UserError):
            tokenize_source(place / "rows.csv", demo, max_length=32)
        with suppress(UserError):
            tokenize_source(place / "rows.csv", demo, max_length=32, formats=Preferences.formats, parts=2)
        tokenize_source(place / "rows.json", demo, max_length=32)

    return run


# -- valid inputs ------------------------------------------------------------------------------------------------------


def run_cli(*arguments: object) -> None:
    from wgpu_lora.cli.app import main  # not instrumented

    assert main(list(map(str, arguments))) == 0


def an_adapter(place: Path) -> list[bytes]:
    shapes = {"A": (2, 3), "B": (4, 2)}
    tensors = {
        peft_adapter.tensor_name("model.layers.0.self_attn.q_proj", kind): np.ones(shape, np.float32)
        for kind, shape in shapes.items()
    }
    config = peft_config.AdapterConfig(r=4, rank_pattern={"q_proj": 2}, alpha_pattern={".*v": 3})
    peft_adapter.write_adapter(place / "a", tensors, config)
    return [
        (place / "a" / peft_adapter.CONFIG).read_bytes().strip()
        + b"\n\n"
        + (place / "a" / peft_adapter.WEIGHTS).read_bytes()
    ]


def a_packed_model(place: Path) -> list[bytes]:
    run_cli("import", MODELS / "qwen2", "--output", place / "p")
    return [(place / "p" / WEIGHTS).read_bytes()]


def a_low_bit_model(place: Path) -> list[bytes]:
    tensors, form = load_file(MODELS / "qwen3" / WEIGHTS), LowBitFiles()
    for name in sorted(qwen3().matrices()):
        scheme, w = scheme_of(LOW_BIT, name), tensors[name].astype(np.float32)
        codes, *constants = quantised(w, scheme)
        arrays = [pack(codes, scheme.bits), *(part for part in constants if part is not None)]
        arrays[0] = arrays[0].view(np.int8) if scheme.bits == 8 else arrays[0]
        parts = ("codes", "table", "scales") if len(arrays) == 3 else ("codes", "scales")
        tensors |= form.tensors(name, Packed(scheme.name, w.shape, parts, partial(tuple, arrays)), "bfloat16")
    return [save(tensors, {"format": "pt"})]


def a_gguf(place: Path) -> list[bytes]:
    def exported(name: str) -> bytes:
        model, output = place / name, place / f"{name}.gguf"
        shutil.copytree(MODELS / name, model)
        for file in ("tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(DEMO / file, model)
        (model / "tokenizer.json").write_bytes(small_tokenizer())
        config = json.loads((model / "config.json").read_text())
        usual: dict[str, Any] = {
            "rms_norm_eps": 1e-6,
            "linear_value_head_dim": config.get("linear_key_head_dim"),
            "vocab_size": 300,
        }
        (model / "config.json").write_text(json.dumps(config | usual))
        weights = {item: np.zeros(shape, np.float32) for item, shape in load_config(model).parameter_shapes().items()}
        save_file(weights, model / WEIGHTS, metadata={"format": "pt"})
        run_cli("export", "gguf", "--model", model, "--output", output, "--quantize", "q4_0")
        return output.read_bytes()

    return [exported("qwen3"), exported("qwen3_5_text")]


def some_rows(place: Path) -> list[bytes]:
    table = b'prompt,completion,tools\r\n"a, b","c ""d""\ne",\r\nf,g,[]\r\n'
    pairs = b'prompt,chosen,rejected,weight\n"[{""role"": ""user"", ""content"": ""a""}]",b,c,1\na,b,c,\n'
    return [b"\n".join(json.dumps(row).encode() for row in ROWS), json.dumps(ROWS, indent=1).encode(), table, pairs]


def some_settings(place: Path) -> list[bytes]:
    return [b"\n\n".join((DEMO / name).read_bytes() for name in ("tokenizer_config.json", "generation_config.json"))]


def some_archives(place: Path) -> list[bytes]:
    return [archive.pack({"adapter_model.safetensors": bytes(range(256)) * 5, "a/b/deep.json": b"{}", "empty": b""})]


def small_tokenizer() -> bytes:
    """The demo's tokenizer.json, cut to the vocabulary of the smallest model."""
    stated = json.loads((DEMO / "tokenizer.json").read_text())
    part = stated["model"]
    part["vocab"] = {token: number for token, number in part["vocab"].items() if number < 266}
    part["merges"] = [pair for pair in part["merges"] if "".join(pair) in part["vocab"]]
    for number, token in enumerate(stated["added_tokens"]):
        token["id"] = 266 + number
    return json.dumps(stated).encode()


def seeds(target: str) -> list[bytes]:
    """Valid inputs of a target."""
    with tempfile.TemporaryDirectory() as place:
        return TARGETS[target].seeds(Path(place))


TOKENIZER = (lambda place: [small_tokenizer()], of_tokenizer)
TARGETS = {
    "safetensors_header": Target(
        reading(lambda place: read_header(place / WEIGHTS), WEIGHTS),
        files("models/llama/*.safetensors"),
        of_safetensors,
    ),
    "shard_index": Target(
        reading(Checkpoint, INDEX, beside=sorted((MODELS / "llama").glob("*.safetensors"))),
        files("models/*/*.index.json"),
        of_json,
    ),
    "model_config": Target(
        reading(model_config, "config.json"), files("models/*/config.json", demo="config.json"), of_json
    ),
    "adapter": Target(
        reading(peft_adapter.read_adapter, peft_adapter.CONFIG, peft_adapter.WEIGHTS), an_adapter, of_parts
    ),
    "packed_model": Target(reading(packed_model, WEIGHTS), a_packed_model, of_safetensors, SLOW),
    "low_bit_model": Target(reading(low_bit_model, WEIGHTS), a_low_bit_model, of_safetensors, SLOW),
    "tokenizer": Target(
        reading(settings, "tokenizer_config.json", "generation_config.json", beside=[DEMO / "tokenizer.json"]),
        some_settings,
        of_parts,
    ),
    "tokenizer_child": Target(reading(whole_tokenizer, "tokenizer.json"), *TOKENIZER, PROCESSES),
    "chat_template": Target(chat_template, files("data/*.jinja", demo="chat_template.jinja"), of_template, SLOW),
    "rows": Target(rows, some_rows, of_rows, SLOW),
    "evidence": Target(lambda place: evidence.read, evidence.statements, of_json),
    "archive": Target(lambda place: archive.unpack, some_archives),
    "gguf": Target(reading(gguf, "model.gguf"), a_gguf, None, SLOW),
}
