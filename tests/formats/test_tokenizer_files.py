"""The tokenizer beside an adapter: the base's own files, whole, or none."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from support.cli import flags
from support.models import save_golden_adapter, words_model
from support.rows.data import small_tokenizer

from wgpu_lora.cli.app import main
from wgpu_lora.data import Tokenizer
from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import DEMO_MODEL
from wgpu_lora.formats.hub_upload import prepare
from wgpu_lora.formats.tokenizer.tokenizer_files import tokenizer_files, write_tokenizer
from wgpu_lora.models.model_files import read_model

DEMO = DEMO_MODEL
WRITTEN = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base with every kind of file, and what is no tokenizer's."""
    directory = tmp_path / "base"
    directory.mkdir()
    for name in WRITTEN:
        shutil.copy(DEMO / name, directory)
    (directory / "tokenizer.model").write_bytes(bytes(range(256)))
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_text("weights")
    (directory / "tokenizer_notes.json").write_text("{}")
    return directory


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter").mkdir()
    return tmp_path / "adapter"


def names(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_a_run_leaves_what_its_base_has(tmp_path: Path):
    model, data, run = words_model(tmp_path / "model", "{{ messages }}"), tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text('{"text": "w1 w2 w3"}\n{"text": "w4 w5"}\n')
    options = {"model": model, "data": data, "eval_data": data, "output": run, "max_steps": 1, "max_length": 16}
    assert main(["finetune", *flags(**options)]) == 0
    assert main(["finetune", *flags(**options, resume=True)]) == 0  # the same again over what is there
    for place in (run, run / "best"):
        for name in ("tokenizer.json", "chat_template.jinja"):
            assert (place / name).read_bytes() == (model / name).read_bytes()
        # which this base lacks, and transformers would ask a config.json for
        assert json.loads((place / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert Tokenizer.load(place).encode("w7 w9") == [7, 9]
    assert set(prepare(run).files) >= WRITTEN
    assert not WRITTEN & set(os.listdir(run / "checkpoints" / "step-1"))


def test_files_are_copied_byte_for_byte(base: Path, adapter: Path):
    write_tokenizer(adapter, tokenizer_files(base, Tokenizer.load(base)))
    assert names(adapter) == WRITTEN | {"tokenizer.model", "additional_chat_templates/tool_use.jinja"}
    for name in names(adapter):
        assert (adapter / name).read_bytes() == (base / name).read_bytes()


def test_a_link_out_of_the_base_is_not_followed(base: Path, adapter: Path, tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    tokenizer = Tokenizer.load(base)
    (base / "tokenizer.model").unlink()
    (base / "tokenizer.model").symlink_to(tmp_path / "secret")
    os.mkfifo(base / "vocab.json")
    write_tokenizer(adapter, tokenizer_files(base, tokenizer))
    assert names(adapter) == WRITTEN | {"additional_chat_templates/tool_use.jinja"}


def test_other_files_of_these_names_stay_as_they_are(base: Path, adapter: Path):
    (adapter / "tokenizer_config.json").write_text("mine")
    write_tokenizer(adapter, tokenizer_files(base, Tokenizer.load(base)))
    assert names(adapter) == {"tokenizer_config.json"}
    assert (adapter / "tokenizer_config.json").read_text() == "mine"


def test_of_a_base_that_has_changed_what_was_read_is_written(base: Path, adapter: Path):
    tokenizer = Tokenizer.load(base)
    ids = tokenizer.encode("def f(xs):")
    (base / "tokenizer.json").write_text((base / "tokenizer.json").read_text() + "\n")
    write_tokenizer(adapter, tokenizer_files(base, tokenizer))
    assert names(adapter) == WRITTEN | {"additional_chat_templates/tool_use.jinja"}
    assert Tokenizer.load(adapter).encode("def f(xs):") == ids


def test_a_gguf_file_leaves_what_was_made_of_it(adapter: Path, tmp_path: Path):
    tokenizer = small_tokenizer("chatml")
    write_tokenizer(adapter, tokenizer_files(tmp_path / "model.gguf", tokenizer))
    assert names(adapter) == WRITTEN
    again = Tokenizer.load(adapter)
    messages = [{"role": "user", "content": "Why?"}]
    assert again.render(messages) == tokenizer.render(messages)
    assert again.encode("The sky") == tokenizer.encode("The sky")
    write_tokenizer(tmp_path / "nowhere", tokenizer_files(tmp_path / "model.gguf", tokenizer))
    write_tokenizer(adapter, tokenizer_files(tmp_path / "model.gguf", None))
    assert not (tmp_path / "nowhere").exists()


def test_an_adapter_is_no_model(tmp_path: Path):
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    write_tokenizer(adapter, tokenizer_files(DEMO, Tokenizer.load(DEMO)))
    with pytest.raises(UserError, match="is an adapter, not a model: give it as adapter, or as init_adapter"):
        read_model(adapter)


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["demo", "bare", "gguf"])
def test_transformers_opens_it_alone(adapter: Path, tmp_path: Path, kind: str):
    from transformers import AutoTokenizer

    if kind == "demo":
        base, tokenizer = DEMO, Tokenizer.load(DEMO)
    else:
        base, tokenizer = tmp_path / "bare", small_tokenizer("chatml")
        base.mkdir()
        if kind == "bare":  # as old checkpoints are: a tokenizer.json and nothing that names its class
            (base / "tokenizer.json").write_text(tokenizer.files()["tokenizer.json"])
            (base / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
            (base / "chat_template.jinja").write_text(tokenizer.files()["chat_template.jinja"])
            tokenizer = Tokenizer.load(base)
    write_tokenizer(adapter, tokenizer_files(base if kind != "gguf" else base / "x.gguf", tokenizer))
    theirs = AutoTokenizer.from_pretrained(adapter)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == tokenizer.render(messages, None, True)
    assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    assert theirs.eos_token_id == tokenizer.eos_id
