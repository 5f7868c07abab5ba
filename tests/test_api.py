"""The Python door."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import QWEN2, SMALL, share_device, write_rows

import wgpu_lora
from wgpu_lora.demo.compare import fresh_directory
from wgpu_lora.gpu.device import Device


@pytest.fixture(autouse=True)
def _one_device(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    share_device(device, monkeypatch)


def test_importing_is_cheap():
    code = "import sys, wgpu_lora, wgpu_lora.cli; sys.exit('wgpu' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names():
    assert wgpu_lora.__version__
    with pytest.raises(AttributeError, match="no attribute 'zork'"):
        _ = wgpu_lora.zork


def test_finetune_and_evaluate(tmp_path: Path):
    data = write_rows(tmp_path / "rows.jsonl")
    model = wgpu_lora.load(QWEN2)
    seen = []
    options = {**SMALL, "learning_rate": 1e-2}
    before = wgpu_lora.evaluate(model, data, max_length=16)
    allocated = model.device.allocated
    result = wgpu_lora.finetune(model, data=data, output=tmp_path / "out", callback=seen.append, **options)
    after = wgpu_lora.evaluate(model, data, adapter=tmp_path / "out", max_length=16)
    assert result["stop_reason"] == "max steps"
    assert [r.step for r in seen] == [1, 2]
    assert seen[0].loss > 0
    assert after.loss < before.loss
    assert model.device.allocated == allocated  # the base stays, and nothing else


def test_generate_without_a_tokenizer():
    with pytest.raises(wgpu_lora.UserError, match=r"no tokenizer\.json"):
        wgpu_lora.generate(wgpu_lora.load(QWEN2), "Hello")


def test_prompts_must_be_text():
    for prompt in (None, 5, ["a"], "a\udcff"):
        with pytest.raises(wgpu_lora.UserError, match=r"The prompt (must be text|is not valid UTF-8)"):
            wgpu_lora.generate("demo", prompt)
    for prompts in ("a", None):
        with pytest.raises(wgpu_lora.UserError, match="The prompts must be a list of texts"):
            wgpu_lora.answer("demo", prompts)
    assert wgpu_lora.answer("demo", []) == []


@pytest.mark.slow
def test_generate_with_the_demo():
    model = wgpu_lora.load("demo")
    pieces: list[str] = []
    (found,) = wgpu_lora.answer(model, ["Write a Python function f(xs)."], max_new_tokens=4, on_text=pieces.append)
    assert "".join(pieces) == found.text
    assert len(found.token_ids) <= 4
    both = wgpu_lora.answer(model, ["Write a Python function f(xs).", "Hello"], max_new_tokens=4, batch=2)
    assert both[0].token_ids == found.token_ids


def test_options_are_checked(tmp_path: Path):
    model = wgpu_lora.load(QWEN2)
    with pytest.raises(wgpu_lora.UserError, match=r"unknown option 'lerning_rate': did you mean learning_rate\?"):
        wgpu_lora.finetune(model, lerning_rate=1)
    with pytest.raises(wgpu_lora.UserError, match="loaded with base_dtype 'nf4'"):
        wgpu_lora.finetune(model, base_dtype="f32")


def test_how_the_model_and_the_device_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []

    class Reached(Exception):
        pass

    def stop(args, model=None):
        seen.append((args.model, args.device, model))
        raise Reached

    monkeypatch.setattr("wgpu_lora.api.prepare_job", stop)
    loaded = wgpu_lora.load(QWEN2)
    for given, options in (
        (("demo",), {"model": None, "device": 0}),
        ((), {"model": QWEN2}),
        ((), {"model": Path(QWEN2), "device": "0"}),
        ((), {"model": loaded}),
    ):
        with pytest.raises(Reached):
            wgpu_lora.finetune(*given, data="rows.jsonl", **options)
    assert seen == [("demo", "0", None), (QWEN2, None, None), (QWEN2, "0", None), (QWEN2, None, loaded)]
    for given, options, message in (
        (("demo",), {"model": "demo"}, "two models"),
        (("demo",), {"device": True}, "device must be str"),
        (("demo",), {"output": ""}, "'output' is empty"),
        (("",), {}, "'model' is empty"),
    ):
        with pytest.raises(wgpu_lora.UserError, match=message):
            wgpu_lora.finetune(*given, data="rows.jsonl", **options)


def test_the_demo_finds_a_fresh_directory(tmp_path: Path):
    wanted = tmp_path / "demo-run"
    assert fresh_directory(wanted) == wanted
    wanted.mkdir()
    assert fresh_directory(wanted) == wanted
    (wanted / "log.jsonl").write_text("")
    (tmp_path / "demo-run-2").mkdir()
    (tmp_path / "demo-run-2" / "x").write_text("")
    assert fresh_directory(wanted) == tmp_path / "demo-run-3"
