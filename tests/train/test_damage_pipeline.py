"""Damage to what a pipeline resumes from: its state, and every adapter's checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.training import model_dir
from test_pipeline import WEIGHTS, adapters, options

from wgpu_lora.api import finetune, load
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.adapter_tasks import tasks_of_request
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.pipeline_state import PipelineState, read_pipeline_state, write_pipeline_state
from wgpu_lora.train.run.resume import resumed_options
from wgpu_lora.train.run.run_checkpoint import FILES, MANIFEST
from wgpu_lora.train.run.run_state import STATE


@pytest.fixture(scope="module")
def model(device: Device) -> LoadedModel:
    return open_model(str(model_dir("qwen2")), device, "nf4")


@pytest.fixture(scope="module")
def stopped(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole`: a pipeline of four steps each. `run`: the same, interrupted after two."""
    place = tmp_path_factory.mktemp("pipeline")
    pipeline(model, place, "whole").train()
    begun = pipeline(model, place, "run")

    def interrupt(result: Any) -> None:
        if (result.adapter, result.step) == ("c", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begun.train(interrupt)
    return place


def pipeline(model: LoadedModel, place: Path, name: str, **changes: Any) -> MultiAdapterPipeline:
    tasks = adapters(place, name)
    how = options(max_steps=4, save_steps=1, output=str(place / name / "pipeline"), **changes)
    return MultiAdapterPipeline(tasks, model, **how)


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    for path in stopped.glob("*.jsonl"):
        shutil.copy(path, tmp_path)
    shutil.copytree(stopped / "run", tmp_path / "run")
    return tmp_path / "run"


def refused(model: LoadedModel, run: Path, *words: str) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as caught:
        pipeline(model, run.parent, run.name, resume=True).train()
    assert all(word in str(caught.value) for word in words), caught.value
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_whole_it_resumes(model: LoadedModel, stopped: Path, run: Path) -> None:
    """What a killed process left is also removed, in every directory."""
    for name in ("a/.last.previous", "a/..next.tmp", "b/.epoch-1.tmp", "b/.best.old", "b/..best.tmp.ab12_x9z.tmp"):
        (run / name).mkdir()
    (run / "pipeline" / ".state.json.ab12_x9z.tmp").write_text("x")
    (run / "pipeline" / ".mine").write_text("x")
    pipeline(model, run.parent, run.name, resume=True).train()
    for name in "abc":
        assert (run / name / WEIGHTS).read_bytes() == (stopped / "whole" / name / WEIGHTS).read_bytes()
    hidden = {path.relative_to(run).as_posix() for path in run.rglob(".*") if path.name not in (".lock", ".run.json")}
    assert hidden == {"pipeline/.mine"}


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_damaged_checkpoint_of_one_adapter(model: LoadedModel, run: Path, name: str) -> None:
    path = run / "b" / "last" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    refused(model, run, f"The checkpoint {run / 'b' / 'last'} is damaged", "" if name == MANIFEST else name)


def test_what_is_whole_is_offered(model: LoadedModel, run: Path) -> None:
    shutil.rmtree(run / "b" / "best")
    assert (run / "b" / "epoch-1").is_dir()
    (run / "b" / "last" / WEIGHTS).unlink()
    offer = f"{run / 'b' / 'epoch-1'}, which is intact"
    refused(model, run, "adapter_model.safetensors is missing", offer, "init_adapter")


def test_a_checkpoint_of_another_adapter(model: LoadedModel, run: Path) -> None:
    shutil.rmtree(run / "a" / "last")
    shutil.copytree(run / "c" / "last", run / "a" / "last")
    refused(model, run)


def test_a_flipped_bit_of_the_state(model: LoadedModel, run: Path) -> None:
    path = run / "pipeline" / STATE
    good = path.read_bytes()
    for place in np.linspace(0, len(good) - 3, 12).astype(int):
        data = bytearray(good)
        data[place] ^= 1
        path.write_bytes(data)
        refused(model, run, "The pipeline's state")


CHANGES: list[Callable[[dict[str, Any]], Any]] = [
    lambda said: said.update(step=-1),
    lambda said: said.update(step="2"),
    lambda said: said.update(step=None),
    lambda said: said.update(steps=[]),
    lambda said: said["steps"].update(a=1.0),
    lambda said: said.update(ended={"a": 1}),
    lambda said: said.update(identity=[]),
    lambda said: said.update(policy=None),
    lambda said: said.pop("policy"),
    lambda said: said.update(more=1),
    lambda said: said["request"].pop("schedule"),
    lambda said: said["request"].update(adapters=3),
    lambda said: said["request"].update(batch_tokens="64"),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_state_that_no_pipeline_has(model: LoadedModel, run: Path, number: int) -> None:
    """With a matching digest."""
    said = json.loads((run / "pipeline" / STATE).read_text())["state"]
    CHANGES[number](said)
    odd = PipelineState()
    odd.__dict__.clear()
    odd.__dict__.update(said)
    write_pipeline_state(run / "pipeline", odd)
    refused(model, run, "The pipeline's state")


@pytest.mark.parametrize("policy", [{"last": 1}, {"waited": {"0": "x"}}, {"unknown": 1}])
def test_what_a_policy_remembers_has_to_be_its_own(model: LoadedModel, run: Path, policy: dict[str, Any]) -> None:
    said = json.loads((run / "pipeline" / STATE).read_text())["state"]
    write_pipeline_state(run / "pipeline", PipelineState(**{**said, "policy": policy}))
    refused(model, run, "The pipeline's state")


@pytest.mark.parametrize("text", [b"", b"[]", b"[" * 100_000, b"\xff", b'{"step": 1}', b"null"], ids=range(6))
def test_a_state_that_is_none(model: LoadedModel, run: Path, text: bytes) -> None:
    (run / "pipeline" / STATE).write_bytes(text)
    refused(model, run, "The pipeline's state")


# -- paths in files ----------------------------------------------------------------------------------------------------

PATHS = ["a" * 300, "a/" * 3000, "a\0b", "\ud800", 3, ["x"], {"x": 1}, None, True]


@pytest.mark.parametrize("path", [*PATHS, "/tmp", "../nowhere", ""], ids=ascii)
def test_a_member_that_leads_nowhere(tmp_path: Path, path: object) -> None:
    (tmp_path / "member.json").write_text(json.dumps({"pipeline": path}))
    with pytest.raises(UserError):
        finetune(output=str(tmp_path), resume=True)


@pytest.mark.parametrize("path", PATHS, ids=ascii)
@pytest.mark.parametrize("name", ["data", "checkpoint", "eval_data", "init_adapter", "model", "directory"])
def test_a_recorded_path_that_is_none(run: Path, name: str, path: object) -> None:
    """With a digest that agrees."""
    said = json.loads((run / "pipeline" / STATE).read_text())["state"]
    request = said["request"]
    adapter = request["adapters"][0]
    places = {"model": request["options"], "directory": request, "data": adapter, "checkpoint": adapter}
    places.get(name, adapter["options"])[name] = path
    write_pipeline_state(run / "pipeline", PipelineState(**said))
    refusal = ""
    try:
        options = resumed_options({}, run / "pipeline", "it")
        tasks = tasks_of_request(read_pipeline_state(run / "pipeline").request, run / "pipeline")
        assert all(task.arguments(options) for task in tasks)
    except UserError as error:
        refusal = str(error)
    assert "The pipeline's state is damaged" not in refusal or path == "\ud800"
    assert len(refusal) < 400
    assert refusal or name == "directory" or path is None


@pytest.mark.parametrize("path", ["a" * 300, "a/" * 3000], ids=["name", "whole"])
def test_a_path_that_is_too_long_is_one_sentence(path: str) -> None:
    for refused in (lambda: load(path), lambda: read_adapter(path), lambda: TrainingArguments(output=path)):
        with pytest.raises(UserError, match="too long") as caught:
            refused()
        assert len(str(caught.value)) < 200
