"""Flipped bits of adapters and packed bases, and of the files beside them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.models import words_model
from support.training.training import model_dir

from wgpu_lora import api
from wgpu_lora.errors import UserError
from wgpu_lora.formats.file_digests import COMPANION, check_digests, files_in
from wgpu_lora.formats.peft_adapter import CONFIG, WEIGHTS, read_adapter, tensor_name, write_adapter
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.export.quantized_model import write_packed
from wgpu_lora.models.loaded_model import open_model

FLIPS = 100


def flipped_bits(path: Path, everywhere: bool = False) -> Iterator[int]:
    """Flips bits of a file one after the other, all of them or a drawn sample; it is whole again afterwards."""
    data = path.read_bytes()
    bits = range(8 * len(data))
    for bit in bits if everywhere else random.Random(0).sample(bits, min(FLIPS, len(bits))):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        yield bit
    path.write_bytes(data)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    modules = ["model.layers.0.self_attn.q_proj"]
    shapes = {"A": (2, 4), "B": (4, 2)}
    rng = np.random.default_rng(0)
    tensors = {tensor_name(m, f): rng.standard_normal(s).astype(np.float32) for m in modules for f, s in shapes.items()}
    write_adapter(
        tmp_path / "adapter", tensors, AdapterConfig(2, 2, target_modules="q_proj", base_model_name_or_path="some/base")
    )
    return tmp_path / "adapter"


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_every_flipped_bit_of_an_adapter_is_noticed(adapter: Path, name: str) -> None:
    base = adapter / CONFIG
    place = base.read_bytes().index(b"some/base")
    for bit in flipped_bits(adapter / name, everywhere=True):
        if name == CONFIG and place <= bit // 8 < place + len("some/base"):
            continue  # it may be changed to a hub id
        with pytest.raises(UserError):
            read_adapter(adapter)
    read_adapter(adapter)


def test_the_base_of_an_adapter_may_be_renamed_and_peft_may_save_it_again(adapter: Path) -> None:
    facts = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**facts, "base_model_name_or_path": "Org/Model"}))
    assert read_adapter(adapter)[0].base_model_name_or_path == "Org/Model"
    with safe_open(adapter / WEIGHTS, "np") as file:
        assert file.metadata()["format"] == "pt"
    save_file(load_file(adapter / WEIGHTS), adapter / WEIGHTS, {"format": "pt"})  # as PEFT does
    (adapter / CONFIG).write_text(json.dumps({**facts, "lora_alpha": 7}))
    assert read_adapter(adapter)[0].lora_alpha == 7


def test_the_tokenizer_of_a_finished_adapter_is_covered(device: Device, tmp_path: Path) -> None:
    model = words_model(tmp_path / "model")
    rows = [{"prompt": f"w{i}", "completion": "w3 w4"} for i in range(4)]
    run = tmp_path / "run"
    how = {"max_steps": 2, "max_length": 16, "eval_data": rows, "eval_steps": 1, "tune": False}
    api.finetune(str(model), data=rows, output=str(run), **how)
    for place in (run, run / "best"):
        covered = [name for name in files_in(place) if name != CONFIG]
        assert "tokenizer.json" in covered
        for name in covered:
            for _ in flipped_bits(place / name):
                with pytest.raises(UserError, match=r"is not the file that was written with adapter_model.safetensors"):
                    check_digests(place / WEIGHTS)
        read_adapter(place)
        shutil.copytree(place, place / "copy", ignore=lambda directory, names: {*names} - {WEIGHTS, CONFIG})
        read_adapter(place / "copy")  # as checkpoints are, without a tokenizer


def test_files_beside_a_packed_base_are_covered(device: Device, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    write_packed(open_model(str(model_dir("qwen2")), device, "nf4"), packed, max_shard_bytes=100_000)
    names = [path.name for path in packed.iterdir() if COMPANION.fullmatch(path.name)]
    assert {"config.json", "model.safetensors.index.json"} <= {*names}
    for name in names:
        for _ in flipped_bits(packed / name):
            with pytest.raises(UserError):
                check_digests(sorted(packed.glob("*.safetensors"))[0])
    open_model(str(packed), device).load_weights()
