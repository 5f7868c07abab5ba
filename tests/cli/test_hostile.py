"""Files that are damaged, or made to harm: each is refused by a sentence, at little cost."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from support.fuzz import targets as fuzz
from support.hostile import refused
from support.models import FIXTURES, save_golden_adapter

from wgpu_lora.atomic import replace_directory
from wgpu_lora.cli import main
from wgpu_lora.data import Tokenizer
from wgpu_lora.errors import UserError
from wgpu_lora.export.adapter_merge import merge_adapter
from wgpu_lora.formats.hub_upload import prepare
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.formats.safetensors_checkpoint import Checkpoint
from wgpu_lora.formats.safetensors_header import read_header
from wgpu_lora.models.architectures import load_config

LAYER = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.weight"
QWEN2 = FIXTURES / "models" / "qwen2"


def write_header(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[object, int | None, str]] = {
    "length beyond the file": ({}, 2**63, "not a complete safetensors file"),
    "length of the whole file": ({"a": entry(0, 4, [1])}, 2**20, "not a complete safetensors file"),
    "many megabytes": (b'{"a":"' + b"x" * (9 << 20) + b'"}', None, "longer than"),
    "many values": (b'{"a":[' + b"[]," * 300_000 + b"[]]}", None, "more than 200,000 values"),
    "many keys": (json.dumps({str(i): {} for i in range(250_000)}).encode(), None, "more than 200,000 values"),
    "nested": (b'{"a":' + b"[" * 90_000 + b"]" * 90_000 + b"}", None, "nested too deeply"),
    "twice a name": (b'{"a":' + json.dumps(entry(0, 4, [1])).encode() + b',"a":{}}', None, "'a' is repeated"),
    "not an object": (b"[1]", None, "JSON list"),
    "half a character": (b'{"\\ud800":{}}', None, "surrogates"),
    "overlapping": ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, None, "overlap"),
    "beyond the end": ({"a": entry(0, 4000, [1000])}, None, "truncated"),
    "a shape that does not fit": ({"a": entry(0, 12, [2])}, None, "is invalid for a"),
    "an absurd shape": ({"a": entry(0, 0, [2**62, 2**62, 0])}, None, "is invalid for a"),
    "too many dimensions": ({"a": entry(0, 4, [1] * 99)}, None, "is invalid for a"),
    "a negative offset": ({"a": entry(-4, 0, [1])}, None, "is invalid for a"),
    "a number of many digits": (b'{"a":{"dtype":"F32","shape":[' + b"9" * 9000 + b"]}}", None, "JSON"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADERS)
def test_safetensors_headers(tmp_path: Path, kind: str) -> None:
    header, length, words = HEADERS[kind]
    path = write_header(tmp_path / "model.safetensors", header, b"\0" * 12, length)
    refused(lambda: read_header(path), words)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    refused(lambda: load_config(tmp_path), "not a regular file")
    os.mkfifo(tmp_path / "model.safetensors")
    refused(lambda: Checkpoint(tmp_path), "not a regular file")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("/dev/zero")
    refused(lambda: Checkpoint(tmp_path), "not a regular file")


def test_a_link_out_of_a_model_is_not_copied(tmp_path: Path) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    model, secret = tmp_path / "model", tmp_path / "secret"
    model.mkdir()
    for path in QWEN2.iterdir():
        (model / path.name).symlink_to(path) if path.suffix == ".safetensors" else (model / path.name).write_bytes(
            path.read_bytes()
        )
    secret.write_text("key")
    (model / "notes.txt").symlink_to(secret)
    refused(lambda: merge_adapter(model, adapter, tmp_path / "merged"), "link to a file outside")
    assert not (tmp_path / "merged").exists()
    (model / "notes.txt").unlink()
    merge_adapter(model, adapter, tmp_path / "merged")  # weights may be kept elsewhere


def test_files_of_the_hubs_cache_are_linked(tmp_path: Path) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in QWEN2.iterdir():
        (blobs / path.name).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    merge_adapter(snapshot, adapter, tmp_path / "merged")
    assert (tmp_path / "merged" / "generation_config.json").is_file()


def test_replacing_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    precious, link, new = tmp_path / "precious", tmp_path / "best", tmp_path / "new"
    precious.mkdir()
    (precious / "a").write_text("a")
    link.symlink_to(precious)
    new.mkdir()
    replace_directory(new, link)
    assert (precious / "a").read_text() == "a"
    assert not link.is_symlink()


ODD = [7, [1], {"a": 1}, True, 1.5, "a\0b", "\udcff"]
FINE = [("target_modules", "a\0b"), ("target_modules", "\udcff"), ("lora_alpha", 7), ("lora_alpha", 1.5)]
FINE += [("rank_pattern", {"a": 1})]  # type: ignore[list-item]
KEYS = ("base_model_name_or_path", "lora_alpha", "r", "target_modules", "rank_pattern")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        *((key, value, ".") for key in KEYS for value in ODD if (key, value) not in FINE or value is True),
        *(("lora_alpha", value, "lora_alpha") for value in (10**400, 1e300, 1e-46, 0, -1.0, float("nan"))),
        ("rank_pattern", {"(" * 5000: 4}, "bad pattern"),
        ("rank_pattern", {"(?=(([a-z_.0-9]+)+)+!)": 4}, "exceeded its computation limit"),
        ("alpha_pattern", {f"m{i}": 1 for i in range(3000)}, "more than 2,000 patterns"),
        ("r", 10**30, "do not fit rank|must be at most 2147483648"),
        ("lora_alpha", float("inf"), "must be a whole number or a finite number"),
    ],
)
def test_adapter_configs(tmp_path: Path, key: str, value: object, words: str) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    stated = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(stated | {key: value}))
    refused(lambda: prepare(adapter) if words == "." else read_adapter(adapter), words)


def test_a_pattern_that_backtracks_is_only_a_pattern(tmp_path: Path) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    stated = json.loads((adapter / "adapter_config.json").read_text())
    patterns = {"(([a-z_.0-9]+)+)+!": 4, "(a|a)*(a|a)*b": 4, "((a{1000}){1000}){1000}": 4}
    (adapter / "adapter_config.json").write_text(json.dumps(stated | {"rank_pattern": patterns}))
    assert read_adapter(adapter)[1]


@pytest.mark.parametrize("name", ["../../x", LAYER.format("9" * 20), LAYER.format("\u0663")])
def test_names_of_adapters_tensors(tmp_path: Path, name: str) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    write_header(adapter / "adapter_model.safetensors", {name: entry(0, 4, [1, 1])}, b"\0" * 4)
    refused(lambda: read_adapter(adapter), "not a LoRA factor|holds only lora_A")


def test_a_name_does_not_reach_the_terminal_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    write_header(adapter / "adapter_model.safetensors", {"\x1b[2Jx\u202e": entry(0, 4, [1, 1])}, b"\0" * 4)
    arguments = ["merge", "--model", str(QWEN2), "--adapter", str(adapter), "--output", str(tmp_path / "m")]
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert "\\x1b[2Jx\\u202e" in shown
    assert "\x1b" not in shown


def test_a_tokenizer_or_template_of_any_size(tmp_path: Path) -> None:
    for name, most in (("tokenizer.json", 65 << 20), ("chat_template.jinja", 2 << 20)):
        if name != "tokenizer.json":
            (tmp_path / "tokenizer.json").write_bytes(fuzz.small_tokenizer())
        with (tmp_path / name).open("wb") as file:
            file.truncate(most)
        refused(lambda: Tokenizer.load(tmp_path), "regular file of at most")
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        refused(lambda: Tokenizer.load(tmp_path), "regular file of at most")
        (tmp_path / name).unlink()


def test_a_token_id_that_is_far_off(tmp_path: Path) -> None:
    stated = json.loads((FIXTURES.parent.parent / "wgpu_lora/demo/model/tokenizer.json").read_text())
    stated["model"]["vocab"]["!"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(stated))
    refused(lambda: Tokenizer.load(tmp_path), "token id beyond")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
@pytest.mark.parametrize("text", [b'{"a": 1, "a": 2}', b"[" * 100_000, b"\xff", b"[]", b'{"a": "' + b"x" * (9 << 20)])
def test_a_tokenizers_settings(tmp_path: Path, name: str, text: bytes) -> None:
    demo = FIXTURES.parent.parent / "wgpu_lora" / "demo" / "model"
    (tmp_path / "tokenizer.json").write_bytes((demo / "tokenizer.json").read_bytes())
    (tmp_path / name).write_bytes(text)
    with pytest.raises(UserError, match=name):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_nothing_but_user_errors_comes_out(tmp_path: Path, target: str) -> None:
    """A few of the inputs that `make fuzz` makes, and without its guidance."""
    fuzzed, seeds, rng = fuzz.TARGETS[target], fuzz.seeds(target), random.Random(target)
    run, shaped = fuzzed.open(tmp_path), fuzzed.mutate
    for _ in range(60 if fuzzed.share <= fuzz.SLOW else 250):
        data = bytearray(rng.choice(seeds))
        kind = rng.random()
        if shaped and kind < 0.6:
            data = bytearray(shaped(bytes(data), rng))
        elif kind < 0.7:
            del data[rng.randrange(len(data)) :]
        else:
            for at in (rng.randrange(min(len(data), 4000)) for _ in range(rng.randint(1, 8))):
                data[at] = rng.randrange(256)
        try:
            run(bytes(data))
        except UserError:
            continue
    run(seeds[0])  # what is valid is taken
