"""The Python door."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import ROOT
from support.cli import QWEN2, SMALL, write_rows
from support.events import hearing
from support.models import FIXTURES, save_golden_adapter

import wgpu_lora
from wgpu_lora.api import notebook_progress
from wgpu_lora.files import installation
from wgpu_lora.files.atomic import numbered
from wgpu_lora.infer.generation_options import GenerationOptions
from wgpu_lora.train.options.training_arguments import TrainingArguments


def test_importing_is_cheap():
    code = "import sys, wgpu_lora, wgpu_lora.cli.app; sys.exit('wgpu' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names():
    assert wgpu_lora.__version__
    with pytest.raises(AttributeError, match="no attribute 'zork'"):
        _ = wgpu_lora.zork


def test_finetune_and_evaluate(tmp_path: Path):
    data = write_rows(tmp_path / "rows.jsonl")
    model = wgpu_lora.load(QWEN2)
    records = []
    options = {**SMALL, "learning_rate": np.float32(1e-2), "seed": np.int64(42)}
    before = wgpu_lora.evaluate(model, data, max_length=16)
    allocated = model.device.allocated
    result = wgpu_lora.finetune(model, data=data, output=tmp_path / "out", callback=records.append, **options)
    after = wgpu_lora.evaluate(model, data, adapter=tmp_path / "out", max_length=16)
    assert result.stop_reason == "max steps"
    assert [r.step for r in records] == [1, 2]
    assert records[0].loss > 0
    assert after.loss < before.loss
    assert model.device.allocated == allocated  # the base stays, and nothing else


def test_a_model_is_merged_exported_and_saved(tmp_path: Path):
    architecture = "qwen2"
    adapter = save_golden_adapter(architecture, tmp_path / "adapter")
    model = wgpu_lora.load(FIXTURES / "models" / architecture)
    assert isinstance(model, wgpu_lora.Model)
    assert (model.merge(adapter, tmp_path / "merged", dtype="f32") / "model.safetensors").is_file()
    assert wgpu_lora.load(model.save(tmp_path / "saved")).config.packed == "nf4"
    with pytest.raises(wgpu_lora.UserError, match="lora=True writes an adapter alone"):
        model.export_gguf(tmp_path / "a.gguf", lora=True)
    demo = wgpu_lora.load("demo")
    assert demo.export_gguf(tmp_path / "demo.gguf", quantize="q8_0").nbytes == (tmp_path / "demo.gguf").stat().st_size
    for push in (wgpu_lora.push, model.push):
        with pytest.raises(wgpu_lora.UserError, match="is not a directory"):
            push(tmp_path / "nothing", "owner/name")


def test_prompts_must_be_text():
    for prompt in (None, 5, [5], [["a"]], "a\udcff", [{"role": "user", "content": "a\udcff"}]):
        with pytest.raises(wgpu_lora.UserError, match=r"The prompt (must be text|is not valid UTF-8)"):
            wgpu_lora.generate("demo", prompt)
    for prompts in ("a", None):
        with pytest.raises(wgpu_lora.UserError, match="The prompts must be a list of texts"):
            wgpu_lora.answer("demo", prompts)
    assert wgpu_lora.answer("demo", []) == wgpu_lora.generate("demo", np.array([])) == []


@pytest.mark.slow
def test_generate_with_the_demo():
    model = wgpu_lora.load("demo")
    pieces: list[str] = []
    prompts = ["Write a Python function f(xs)."]
    (answer,) = wgpu_lora.answer(model, prompts, max_new_tokens=4, events=hearing(text=pieces.append))
    assert "".join(pieces) == answer.text
    assert len(answer.token_ids) <= 4
    answers = wgpu_lora.answer(model, ["Write a Python function f(xs).", "Hello"], max_new_tokens=4, batch=2)
    assert answers[0].token_ids == answer.token_ids


def test_signatures_are_real():
    listed = inspect.signature(wgpu_lora.finetune).parameters
    assert set(listed) >= {f.name for f in fields(TrainingArguments)} | {"model", "callback", "progress_bar", "recipe"}
    assert listed["lora_r"].default == TrainingArguments().lora_r
    assert "\n    lora_r (int, default 16): " in inspect.getdoc(wgpu_lora.finetune)
    for function in (wgpu_lora.generate, wgpu_lora.answer, wgpu_lora.compare):
        assert set(inspect.signature(function).parameters) >= {f.name for f in fields(GenerationOptions)}
        assert "repetition_penalty (float, default 1.0): " in function.__doc__
    assert "--" not in inspect.getdoc(wgpu_lora.finetune)  # they are arguments here
    assert dir(wgpu_lora) == sorted(wgpu_lora.__all__)


def test_models_and_answers_show_themselves_in_a_line():
    model, answer = wgpu_lora.load(QWEN2), wgpu_lora.Answer("p" * 500, "t\n" * 500, list(range(500)), "length", 1.0)
    assert repr(answer) == f"Answer({('t' + chr(10)) * 28 + 't...'!r}, 500 tokens, stop_reason='length')"
    assert repr(model).startswith("LoadedModel('")
    assert "not yet on" in repr(model)
    assert all("\n" not in repr(value) and len(repr(value)) < 300 for value in (model, answer))


def test_progress_is_shown_where_it_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = write_rows(tmp_path / "rows.jsonl")
    for shown in (None, True):  # here stderr is no terminal
        wgpu_lora.finetune(QWEN2, data=data, output=tmp_path / str(shown), progress_bar=shown, **SMALL)
        out, err = capsys.readouterr()
        assert not out
        assert ("training" in err and "2/2" in err and "loss " in err and "loading" in err) is bool(shown)


def test_a_notebook_is_told_by_its_kernel(monkeypatch: pytest.MonkeyPatch):
    for config, expected in (({"IPKernelApp": {}}, True), ({}, False)):
        shell = types.SimpleNamespace(config=config)
        monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert notebook_progress.in_notebook() is expected
        assert notebook_progress.shows_progress(None) is expected
        assert not notebook_progress.shows_progress(False)


def test_what_version_0_1_0_called_by_functions_has_a_note(tmp_path: Path):
    data, tensors, rows = write_rows(tmp_path / "rows.jsonl"), [], []
    with pytest.warns(DeprecationWarning, match=r"(progress|on_rows) is now a method of Events"):
        wgpu_lora.evaluate(QWEN2, data, progress=tensors.append, on_rows=lambda *counts: rows.append(counts))
    assert "model.norm.weight" in tensors
    assert rows[0][0] == 0 < rows[-1][0] == rows[-1][1]
    with pytest.raises(TypeError, match="unexpected keyword argument 'zork'"):
        wgpu_lora.evaluate(QWEN2, data, zork=1)


def test_training_arguments_are_taken_whole(tmp_path: Path):
    args = wgpu_lora.TrainingArguments(
        model=QWEN2, data=str(write_rows(tmp_path / "rows.jsonl")), output=str(tmp_path / "out"), **SMALL
    )
    record = wgpu_lora.finetune(args=args, seed=7)
    assert (record.steps, record.loss) == (2, record.state.last_loss)
    assert (record.options.seed, record.options.lora_r) == (7, args.lora_r)
    again = wgpu_lora.finetune(None, wgpu_lora.TrainingArguments(output=args.output, resume=True, max_steps=3))
    assert (again.steps, again.options.seed) == (3, 7)
    for arguments, options, message in (
        ((QWEN2, {"lora_r": 2}), {}, "args must be"),
        ((None, args), {"recipe": "demo"}, "one of them"),
    ):
        with pytest.raises(wgpu_lora.UserError, match=message):
            wgpu_lora.finetune(*arguments, **options)


def test_how_the_model_and_the_device_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []

    class Reached(Exception):
        pass

    def stop(args, model=None, rows=None):
        calls.append((args.model, args.device, model))
        raise Reached

    monkeypatch.setattr("wgpu_lora.api.prepare_job", stop)
    loaded = wgpu_lora.load(QWEN2)
    for arguments, options in (
        (("demo",), {"model": None, "device": 0}),
        ((), {"model": QWEN2}),
        ((), {"model": Path(QWEN2), "device": "0"}),
        ((), {"model": loaded}),
    ):
        with pytest.raises(Reached):
            wgpu_lora.finetune(*arguments, data="rows.jsonl", **options)
    assert calls == [("demo", "0", None), (QWEN2, None, None), (QWEN2, "0", None), (QWEN2, None, loaded)]
    for arguments, options, message in (
        (("demo",), {"model": "demo"}, "two models"),
        (("demo",), {"device": True}, "device must be text"),
        (("demo",), {"output": ""}, "'output' is empty"),
        (("",), {}, "'model' is empty"),
    ):
        with pytest.raises(wgpu_lora.UserError, match=message):
            wgpu_lora.finetune(*arguments, data="rows.jsonl", **options)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: wgpu_lora.MultiAdapterPipeline(["a.jsonl"], "demo"), "^Adapter 1 is a string, but must be a dict"),
        (lambda: wgpu_lora.MultiAdapterPipeline("a.jsonl", "demo"), "^The adapters must be a list of dicts"),
        (lambda: wgpu_lora.MultiAdapterPipeline([], "demo", output=""), "'output' is empty"),
        (lambda: wgpu_lora.generate("demo", "Hello", adapter=""), "^adapter is empty"),
        (lambda: wgpu_lora.generate("demo", "Hello", adapter="", stream=True), "^adapter is empty"),
        (lambda: wgpu_lora.answer("demo", ["Hello"], adapter=5), "^adapter must be a directory, not 5"),
        (lambda: wgpu_lora.compare("demo", "Hello", {"a": None}), "^adapter must be a directory, not None"),
        (lambda: wgpu_lora.evaluate("demo", "a.jsonl", adapter=""), "^adapter is empty"),
        (lambda: wgpu_lora.evaluate("demo", ""), "^data is empty"),
        (lambda: wgpu_lora.load(""), "^model is empty"),
        (lambda: wgpu_lora.generate(wgpu_lora.load(QWEN2), "Hello"), r"no tokenizer\.json"),
        (lambda: wgpu_lora.finetune(wgpu_lora.load(QWEN2), base_dtype="f32"), "loaded with base_dtype 'nf4'"),
        (lambda: wgpu_lora.finetune("demo", callback=3), "must be"),
        (lambda: wgpu_lora.finetune("demo", events=print), "must be"),
        (lambda: wgpu_lora.generate("demo", "Hello", batch="2"), "^A batch of '2' prompts"),
    ],
)
def test_values_that_mean_nothing_are_refused(wrong: Callable[[], object], message: str):
    with pytest.raises(wgpu_lora.UserError, match=message):
        wrong()


def test_the_demo_finds_a_fresh_directory(tmp_path: Path):
    directory = tmp_path / "demo-run"
    assert numbered(directory) == directory
    directory.mkdir()
    assert numbered(directory) == directory
    (directory / "log.jsonl").write_text("")
    (tmp_path / "demo-run-2").mkdir()
    (tmp_path / "demo-run-2" / "x").write_text("")
    assert numbered(directory) == tmp_path / "demo-run-3"


# -- how the package was installed -------------------------------------------------------------------------------------


HERE = ROOT


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A virtual environment with a pip, in a directory that is the current one; returns what sets direct_url.json."""
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    for name in ("python", "pip", "wgpu-lora"):
        (scripts / name).write_text("")
        (scripts / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setattr(sys, "prefix", str(scripts.parent))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)

    def came(direct_url):
        text = None if direct_url is None else json.dumps(direct_url)
        monkeypatch.setattr(installation, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))

    return came


def test_a_checkout(environment, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("")
    environment({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    assert installation.pip_line("plot") == ".venv/bin/pip install -e '.[plot]'"
    assert installation.program() == ".venv/bin/wgpu-lora"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert installation.pip_line("plot") == f"{tmp_path}/.venv/bin/pip install -e '{tmp_path}[plot]'"
    monkeypatch.setenv("PATH", str(tmp_path / ".venv" / "bin"))  # activated
    assert installation.pip_line("plot") == f"pip install -e '{tmp_path}[plot]'"
    assert installation.program() == "wgpu-lora"


def test_a_path_with_a_space_and_a_copy_that_is_not_in_place(environment, tmp_path):
    place = tmp_path / "my code"
    place.mkdir()
    (place / "pyproject.toml").write_text("")
    environment({"url": place.as_uri(), "dir_info": {}})
    assert shlex.split(installation.pip_line("nvml")) == [".venv/bin/pip", "install", f"{place}[nvml]"]
    (place / "pyproject.toml").unlink()  # the checkout is gone
    assert installation.pip_line("nvml") == ".venv/bin/pip install 'wgpu-lora[nvml]'"


@pytest.mark.parametrize(
    ("direct_url", "requirement"),
    [
        (None, "wgpu-lora[plot]"),
        ({"url": "file:///tmp/wgpu_lora-0.1-py3-none-any.whl", "archive_info": {}}, "wgpu-lora[plot]"),
        (
            {"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "wgpu-lora[plot] @ git+https://host/x.git@abc",
        ),
        ({"url": 3}, "wgpu-lora[plot]"),
        ({"nothing": 1}, "wgpu-lora[plot]"),
    ],
)
def test_other_origins(environment, direct_url, requirement):
    environment(direct_url)
    assert shlex.split(installation.pip_line("plot"))[-1] == requirement


@pytest.mark.parametrize(
    ("mark", "command"),
    [("uv-receipt.toml", "uv tool install"), ("pipx_metadata.json", "pipx install --force")],
)
def test_tools_of_their_own_environment(environment, tmp_path, mark, command):
    environment(None)
    (tmp_path / ".venv" / mark).write_text("")
    assert installation.pip_line("plot") == f"{command} 'wgpu-lora[plot]'"


def test_run_from_its_source(environment, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installation, "distribution", missing)
    assert installation.pip_line("plot") == f".venv/bin/pip install -e '{HERE}[plot]'"


# -- docs/tutorial.md does what it says --------------------------------------------------------------------------------

TUTORIAL = ROOT / "docs" / "tutorial.md"


@pytest.mark.rare
def test_every_command_works(tmp_path: Path) -> None:
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```$", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE))
    assert script.count("wgpu-lora ") >= 8
    environment = {name: value for name, value in os.environ.items() if name != "WGPU_LORA_NO_TUNE"}
    process = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env=environment | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    before, _, after = process.stdout.partition("finished ")
    bodies = {"double_even": "x * 2 for x in xs if x % 2 == 0", "add_numbers": "x + 1 for x in xs if x > 3"}
    for name, value in bodies.items():
        answer = f"def {name}(xs: list[int]) -> list[int]:\n    return [{value}]"
        assert answer not in before
        assert answer in after
    place = tmp_path / "house-style"
    assert len((place / "train.jsonl").read_text().splitlines()) == 50
    state = json.loads((place / "house-style" / "run.json").read_text())["state"]
    assert state["step"] == 150
    assert state["first_eval_loss"] > 5
    assert state["last_eval_loss"] < 0.4
    answers = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
    assert sum(row["response"] == row["messages"][-1]["content"] for row in answers) > 5
    for name in ("report/report.html", "house-style.gguf", "house-style/README.md", "house-style/tokenizer.json"):
        assert (place / name).stat().st_size > 1000, name
