"""What `scripts/fuzz.py` feeds, and the valid inputs that it begins with."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from fuzz_mutators import of_json, of_parts, of_rows, of_safetensors, of_template
from fuzz_tokenizers import of_tokenizer

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "tests" / "fixtures" / "models"
DEMO = ROOT / "wgpu_lora" / "demo" / "model"
TEMPLATES = ROOT / "tests" / "fixtures" / "data"
ROWS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": [],
     "chat_template_kwargs": {"enable_thinking": False}},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"prompt": "a", "completion": "b"}, {"instruction": "a", "input": "", "output": "b"}, {"text": "a b c d"},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]},
]  # fmt: skip
Target = Callable[[bytes], None]


def safetensors_header(place: Path) -> Target:
    from wgpu_lora.formats.checkpoint import read_header

    path = place / "model.safetensors"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        read_header(path)

    return run


def shard_index(place: Path) -> Target:
    from wgpu_lora.formats.checkpoint import INDEX, Checkpoint

    for shard in (MODELS / "llama").glob("*.safetensors"):
        shutil.copy(shard, place)

    def run(data: bytes) -> None:
        (place / INDEX).write_bytes(data)
        Checkpoint(place)

    return run


def model_config(place: Path) -> Target:
    from wgpu_lora.models.architectures import load_config
    from wgpu_lora.models.rope import inv_freq

    def run(data: bytes) -> None:
        (place / "config.json").write_bytes(data)
        config = load_config(place)
        if config.num_hidden_layers < 100 and config.head_dim < 1000:
            config.parameter_shapes()
            inv_freq(config)

    return run


def adapter(place: Path) -> Target:
    """The two files of an adapter, one after the other in the input."""
    from wgpu_lora.formats.peft import CONFIG, WEIGHTS, read_adapter

    def run(data: bytes) -> None:
        config, _, weights = data.partition(b"\n\n")
        (place / CONFIG).write_bytes(config)
        (place / WEIGHTS).write_bytes(weights)
        read_adapter(place)

    return run


def packed_model(place: Path) -> Target:
    from wgpu_lora.formats.bitsandbytes import PackedCheckpoint
    from wgpu_lora.models.architectures import load_config

    config = load_config(MODELS / "qwen2")

    def run(data: bytes) -> None:
        (place / "model.safetensors").write_bytes(data)
        PackedCheckpoint(place).check_against(config.parameter_shapes(), config.matrices())

    return run


def tokenizer(place: Path) -> Target:
    """The settings beside a tokenizer.json, template included."""
    from wgpu_lora.data import Tokenizer
    from wgpu_lora.tokens.backend import Local

    shutil.copy(DEMO / "tokenizer.json", place)
    backend = Local.opened((place / "tokenizer.json").read_text())

    def run(data: bytes) -> None:
        config, _, generation = data.partition(b"\n\n")
        (place / "tokenizer_config.json").write_bytes(config)
        (place / "generation_config.json").write_bytes(generation)
        # Reading the vocabulary anew for every input would be all that is tested.
        with patch.object(Local, "opened", lambda text: backend):
            found = Tokenizer.load(place)
        if found is not None:
            _ = found.stop_ids, found.eos_id, found.bos_id, found.pad_id

    return run


def tokenizer_json(place: Path) -> Target:
    """The pipeline itself, which the tokenizers library reads; and texts by it, at once and at little cost."""
    from wgpu_lora.data import tokenizer
    from wgpu_lora.tokens.backend import Local

    def run(data: bytes) -> None:
        # In a child, what is wrong would only be found slowly: the checks are to leave little to its limits.
        with patch.object(tokenizer, "Child", Local.opened):
            _use_tokenizer(place, data)

    return run


def tokenizer_child(place: Path) -> Target:
    """The same as it is in use."""

    def run(data: bytes) -> None:
        _use_tokenizer(place, data)

    return run


def _use_tokenizer(place: Path, data: bytes) -> None:
    from wgpu_lora.data import Tokenizer

    (place / "tokenizer.json").write_bytes(data)
    found = Tokenizer.load(place)
    if found is not None:
        found.encode_with_offsets(["a" * 300, " " * 300 + "x"])
        found.decode(found.encode("Hi <|im_end|> 12\n", add_special_tokens=True)[:9])
        found.files()


def chat_template(place: Path) -> Target:
    from wgpu_lora.data import sandbox, template

    sandbox.MAX_WORK = 1 << 14  # what has no end is ended sooner, and more inputs are tried
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi <there>"}]

    def run(data: bytes) -> None:
        template.render(data.decode("utf-8", "replace"), messages, None, True, {"bos_token": "<s>"})

    return run


def gguf(place: Path) -> Target:
    from wgpu_lora.data import gguf_tokenizer as tokenizer
    from wgpu_lora.models.files import read_model
    from wgpu_lora.tokens.backend import Local

    path = place / "model.gguf"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        with patch.object(tokenizer, "Child", Local.opened):
            read_model(path)

    return run


def rows(place: Path) -> Target:
    """Training data of any format, by its bytes, through formats, template and masks."""
    from wgpu_lora.data import Tokenizer, prepare
    from wgpu_lora.errors import UserError

    for path in DEMO.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, place)
    found = Tokenizer.load(place)

    def run(data: bytes) -> None:
        for name in ("rows.csv", "rows.json"):
            (place / name).write_bytes(data)
        with suppress(UserError):
            prepare(place / "rows.csv", found, max_length=32)
        prepare(place / "rows.json", found, max_length=32)

    return run


TARGETS: dict[str, Callable[[Path], Target]] = {
    made.__name__: made
    for made in (
        safetensors_header,
        shard_index,
        model_config,
        adapter,
        packed_model,
        tokenizer,
        tokenizer_json,
        tokenizer_child,
        chat_template,
        rows,
        gguf,
    )
}


# These get a quarter of the others' inputs, and what starts a process for each a hundredth.
SLOW = ("packed_model", "tokenizer_json", "tokenizer_child", "chat_template", "rows", "gguf")
PROCESSES = ("tokenizer_child",)
# What keeps an input's shape; the others are mutated byte by byte alone.
MUTATORS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "safetensors_header": of_safetensors,
    "shard_index": of_json,
    "model_config": of_json,
    "adapter": of_parts,
    "packed_model": of_safetensors,
    "tokenizer": of_parts,
    "tokenizer_json": of_tokenizer,
    "tokenizer_child": of_tokenizer,
    "rows": of_rows,
    "chat_template": of_template,
}


def seeds(target: str) -> list[bytes]:
    """Valid inputs of a target."""
    if target == "safetensors_header":
        return [path.read_bytes() for path in MODELS.glob("llama/*.safetensors")]
    if target == "shard_index":
        return [path.read_bytes() for path in MODELS.glob("*/*.index.json")]
    if target == "model_config":
        return [path.read_bytes() for path in [*MODELS.glob("*/config.json"), DEMO / "config.json"]]
    if target == "tokenizer":
        parts = [(DEMO / name).read_bytes() for name in ("tokenizer_config.json", "generation_config.json")]
        return [b"\n\n".join(parts)]
    if target == "chat_template":
        return [path.read_bytes() for path in [*TEMPLATES.glob("*.jinja"), DEMO / "chat_template.jinja"]]
    if target == "rows":
        table = b'prompt,completion,tools\r\n"a, b","c ""d""\ne",\r\nf,g,[]\r\n'
        return [b"\n".join(json.dumps(row).encode() for row in ROWS), json.dumps(ROWS, indent=1).encode(), table]
    with tempfile.TemporaryDirectory() as directory:
        return _made(target, Path(directory))


def _made(target: str, place: Path) -> list[bytes]:
    import numpy as np

    if target == "adapter":
        from wgpu_lora.formats.peft import CONFIG, WEIGHTS, AdapterConfig, tensor_name, write_adapter

        shapes = {"A": (2, 3), "B": (4, 2)}
        tensors = {
            tensor_name("model.layers.0.self_attn.q_proj", kind): np.ones(shape, np.float32)
            for kind, shape in shapes.items()
        }
        write_adapter(place / "a", tensors, AdapterConfig(r=4, rank_pattern={"q_proj": 2}, alpha_pattern={".*v": 3}))
        return [(place / "a" / CONFIG).read_bytes().strip() + b"\n\n" + (place / "a" / WEIGHTS).read_bytes()]
    if target in ("tokenizer_json", "tokenizer_child"):
        return [small_tokenizer()]
    if target == "packed_model":
        from wgpu_lora.cli import main

        main(["import", str(MODELS / "qwen2"), "--output", str(place / "p")])
        return [(place / "p" / "model.safetensors").read_bytes()]
    from wgpu_lora.cli import main

    model = place / "model"
    shutil.copytree(MODELS / "qwen3", model)
    shutil.copy(DEMO / "tokenizer_config.json", model)
    shutil.copy(DEMO / "chat_template.jinja", model)
    (model / "tokenizer.json").write_bytes(small_tokenizer())
    main(["export", "gguf", "--model", str(model), "--output", str(place / "m.gguf"), "--quantize", "q4_0"])
    return [(place / "m.gguf").read_bytes()]


def small_tokenizer() -> bytes:
    """The demo's tokenizer.json, cut to the vocabulary of the smallest model."""
    stated = json.loads((DEMO / "tokenizer.json").read_text())
    part = stated["model"]
    part["vocab"] = {token: number for token, number in part["vocab"].items() if number < 266}
    part["merges"] = [pair for pair in part["merges"] if "".join(pair) in part["vocab"]]
    for number, token in enumerate(stated["added_tokens"]):
        token["id"] = 266 + number
    return json.dumps(stated).encode()
