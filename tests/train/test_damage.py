"""Damaged checkpoints, states, logs and base weights are refused or ignored, never trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import path_of
from support.training.shared_runs import (
    WEIGHTS,
    edit_json,
    files_of,
    killed_run,
    multi_adapter_options,
    multi_adapter_tasks,
    result,
    run_options,
)
from support.training.training import model_dir

from wgpu_lora.api import finetune, load
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.adapter_tasks import tasks_of_request
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.multi_adapter_state import (
    MultiAdapterState,
    read_multi_adapter_state,
    write_multi_adapter_state,
)
from wgpu_lora.train.run.resume import resumed_options
from wgpu_lora.train.run.run_checkpoint import FILES, MANIFEST, METADATA, OPTIMIZER, ORIGIN, write_manifest
from wgpu_lora.train.run.run_state import STATE
from wgpu_lora.train.run.training_log import LOG, read_log

INTACT = "resume from step-2, which is intact"


def refused(place: Path, resume: Callable[[], object], *words: str) -> None:
    """Resuming ends in one sentence with these words, and changes no file in `place`."""
    before = files_of(place)
    with pytest.raises(UserError) as caught:
        resume()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert files_of(place) == before


class Run:
    """A copy of a run that was killed, with checkpoints of steps 2 and 4."""

    def __init__(self, model: LoadedModel, place: Path):
        self.model, self.place, self.newest = model, place, place / "checkpoints" / "step-4"

    def resume(self, **changes: Any) -> Any:
        return finetune(self.model, output=str(self.place), resume=True, **changes)

    def refused(self, *words: str) -> None:
        refused(self.place, self.resume, f"The checkpoint {self.newest} is damaged: ", *words)

    def refuses(self, name: str, contents: list[bytes], *words: str) -> None:
        """Each of these contents of a file is refused, although the manifest matches."""
        good = (self.newest / name).read_bytes()
        for content in contents:
            (self.newest / name).write_bytes(content)
            sign(self.newest)
            self.refused(name, *words)
        (self.newest / name).write_bytes(good)


def sign(directory: Path) -> None:
    (directory / MANIFEST).unlink()
    write_manifest(directory)


@pytest.fixture
def run(qwen2: LoadedModel, finished_run: Path, tmp_path: Path) -> Run:
    return Run(qwen2, killed_run(finished_run, tmp_path))


# -- checkpoints of a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, WEIGHTS, MANIFEST])
def test_damage_to_a_file_is_found_wherever_it_is(run: Run, name: str) -> None:
    path = run.newest / name
    good = path.read_bytes()
    flipped = [bytearray(good) for _ in range(4)]
    for data, place in zip(flipped, np.linspace(0, len(good) - 1, 4).astype(int), strict=True):
        data[place] ^= 1 << int(place) % 7
    older = (run.newest.with_name("step-2") / name).read_bytes()
    for content in (*flipped, good[:-1], *([] if name == MANIFEST else [older])):
        path.write_bytes(content)
        run.refused(name, INTACT)
    path.unlink()
    run.refused(name, "is missing", INTACT)
    path.mkdir()
    run.refused(name, INTACT)


def test_the_advice_leads_to_the_same_result(run: Run, finished_run: Path) -> None:
    (run.newest / OPTIMIZER).write_bytes(b"")
    run.refused(OPTIMIZER, INTACT)
    shutil.rmtree(run.newest)
    run.resume()
    assert result(run.place) == result(finished_run / "run")


def test_advice_where_no_checkpoint_is_intact(run: Run) -> None:
    for step in ("step-2", "step-4"):
        (run.newest.with_name(step) / STATE).write_text("{}")
    run.refused(STATE, "start again in another directory")
    shutil.copytree(run.newest, run.place / "best")
    run.refused(STATE, "start again in another directory")


def test_checkpoints_that_are_not_the_runs(run: Run, finished_run: Path) -> None:
    """One under another name, one of another run; but a run of a version without ids is resumed."""
    good = shutil.copytree(run.newest, run.place.parent / "good")
    shutil.rmtree(run.newest)
    shutil.copytree(run.newest.with_name("step-2"), run.newest)
    run.refused("state.json says step 2")
    shutil.rmtree(run.newest)
    shutil.copytree(good, run.newest)
    facts = json.loads((run.newest / METADATA).read_text())
    assert facts["run"].keys() == {"id", "options_sha256"}
    edit_json(run.newest / METADATA, run=facts["run"] | {"id": "0" * 32})
    sign(run.newest)
    with pytest.raises(UserError, match=f"^The checkpoint {run.newest} is of another run than {run.place}: remove it"):
        run.resume()
    (run.place / ORIGIN).unlink()
    for step in run.newest.parent.iterdir():
        (step / METADATA).write_text(json.dumps({name: value for name, value in facts.items() if name != "run"}))
        sign(step)
    run.resume()
    assert result(run.place) == result(finished_run / "run")


DEEP = json.loads("[" * 500 + "]" * 500)
FIELDS: list[tuple[str, Any]] = [
    *[("step", value) for value in (7, 2, 6.5, None, "4", True, -4, 1 << 60, [4], {})],
    *[("epoch", value) for value in (-1, 0, 7, 1.0, None, "1")],
    *[("index", value) for value in (-1, 0, 2, 1e9, None)],
    *[("total_steps", value) for value in (0, 6, 8, 7.0, None, 1 << 70)],
    *[("pending", value) for value in ({}, "x", None, [None], ["1"], [1e400], [True], [0.5] * 99)],
    *[("tiles", value) for value in ([], {"k": 1}, {"k": {"rows": -1}}, {"k": {"rows": "8"}})],
    ("calibrated", 1), ("ending", None), ("elapsed_seconds", -1), ("warmed_seconds", "0"),
    ("tokens", 1.5), ("seconds", -1), ("seconds", float("nan")), ("best_eval_loss", "0.1"),
    ("last_loss", float("inf")), ("pending_tokens", None), ("unknown", 0),
]  # fmt: skip
SHAPES: list[Any] = [{}, {"state": None}, {"state": {}, "identity": {}}, {"state": DEEP}]
IDENTITIES: list[Any] = [[], None, {}, {"options": []}, {"options": {}, "data": 1, "base": "x"}]
NO_JSON = [b"[" * 100_000, b'{"state":' * 50_000, b"1" * 5000, b'{"a":1,"a":2}', b"\xed\xa0\x80"]


def test_a_state_that_no_run_has(run: Run) -> None:
    """The values of fields are checked too: the manifest matches."""
    good = json.loads((run.newest / STATE).read_text())
    odd = [good | {"state": good["state"] | {name: value}} for name, value in FIELDS]
    odd += [*SHAPES, *(good | {"identity": identity} for identity in IDENTITIES)]
    run.refuses(STATE, [*(json.dumps(facts).encode() for facts in odd), *NO_JSON])


def test_a_manifest_of_another_shape(run: Run) -> None:
    path = run.newest / MANIFEST
    leading_out = json.loads(path.read_text())
    leading_out["sha256"]["../../run.json"] = "0" * 64
    for text in ("", "[]", "{}", '{"sha256": []}', '{"sha256": {}}', '{"sha256": {"../x": "0"}}', "[" * 100_000, "\0",
                 json.dumps(leading_out)):  # fmt: skip
        path.write_text(text)
        run.refused(MANIFEST, INTACT)


MOMENT = f"{path_of(1, 'q_proj')}.B.second_moment"
TENSORS: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = [
    (OPTIMIZER, lambda t: t | {MOMENT: t[MOMENT].astype(np.float64)}),
    (OPTIMIZER, lambda t: t | {MOMENT: t[MOMENT].astype(np.float16)}),
    (OPTIMIZER, lambda t: t | {MOMENT: t[MOMENT].astype(ml_dtypes.bfloat16)}),
    (OPTIMIZER, lambda t: t | {MOMENT: np.ascontiguousarray(t[MOMENT].T)}),
    (OPTIMIZER, lambda t: t | {MOMENT: t[MOMENT].reshape(-1)}),
    (OPTIMIZER, lambda t: t | {MOMENT: np.ascontiguousarray(t[MOMENT][:-1])}),
    (OPTIMIZER, lambda t: t | {MOMENT: np.where(t[MOMENT] == t[MOMENT].max(), np.float32("nan"), t[MOMENT])}),
    (OPTIMIZER, lambda t: t | {MOMENT: t[MOMENT] - np.float32(1)}),
    (OPTIMIZER, lambda t: {name: values for name, values in t.items() if name != MOMENT}),
    (OPTIMIZER, lambda t: t | {"9.q_proj.A.first_moment": np.zeros((4, 52), np.float32)}),
    (WEIGHTS, lambda t: {name: values.astype(ml_dtypes.bfloat16) for name, values in t.items()}),
]


def test_tensors_that_are_not_the_runs(run: Run, tmp_path: Path) -> None:
    for name, change in TENSORS:
        save_file(change(load_file(run.newest / name)), tmp_path / "changed")
        run.refuses(name, [(tmp_path / "changed").read_bytes()])


def test_a_damaged_checkpoint_is_no_adapter_to_begin_with(qwen2: LoadedModel, run: Run, tmp_path: Path) -> None:
    def begin(name: str) -> None:
        arguments = run_options(tmp_path, name, init_adapter=str(run.newest), max_steps=1, eval_data=None)
        finetune(qwen2, **{option: value for option, value in arguments.items() if option != "model"})

    path = run.newest / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=f"The adapter {run.newest} is damaged: adapter_model"):
        begin("one")
    (run.newest / MANIFEST).unlink()
    with pytest.raises(UserError, match="is damaged, since its values are not those that were written"):
        begin("two")
    save_file(load_file(path), path)  # as another program does
    begin("two")


LINES = [b"\xff", b"[" * 100_000, b'{"step":"a"}', b'{"step":1.5,"epoch":1,"loss":1}', b"{}", b"[]", b"null", b"NaN",
         b'{"step":1,"epoch":1,"loss":NaN}', b'{"step":1,"epoch":{},"loss":1}', b'{"step":1e999,"epoch":1,"loss":1}',
         b'{"step":' + b"9" * 5000 + b"}", b"\x00" * 50, b'{"step":true,"epoch":1,"loss":1}']  # fmt: skip


def test_a_damaged_line_of_the_log_costs_that_line(run: Run, finished_run: Path) -> None:
    path = run.place / LOG
    good = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([good[0], *(line + b"\n" for line in LINES), *good[2:]]))
    assert [line["step"] for line in read_log(path)] == [0, *range(2, 8)]
    assert run.resume().damaged_log_lines == len(LINES)
    assert result(run.place)[1] == [line for line in result(finished_run / "run")[1] if line["step"] != 1]


def test_leftovers_of_killed_processes_are_swept(run: Run, finished_run: Path) -> None:
    """And what had stepped aside is put back; files of the user stay."""
    (run.place / ".best.previous").mkdir()
    (run.place / ".best.previous" / "mark").write_text("x")
    other = TrainingArguments(**run_options(finished_run, output=str(run.place), resume=True, learning_rate=1.0))
    with pytest.raises(UserError, match="needs the same options"):
        prepare_job(other, run.model).train()
    assert (run.place / "best" / "mark").read_text() == "x"
    shutil.rmtree(run.place / "best")
    steps = run.newest.parent
    for directory in (steps / ".step-6.tmp", steps / ".step-2.old", steps / "..step-6.tmp.ab12_x9z.tmp",
                      run.place / ".best.tmp", run.place / "..best.tmp.ab12_x9z.tmp", run.place / ".epoch-1.previous",
                      run.place / "epoch-1"):  # fmt: skip
        directory.mkdir()
    for name in (".log.jsonl.ab12_x9z.tmp", ".adapter_model.safetensors.ab12_x9z.tmp", ".README.md.ab12_x9z.tmp"):
        (run.place / name).write_text("x")
    own = (".mine.tmp", ".notes.md.ab12_x9z.tmp", ".hidden", "x.tmp", "checkpoints/.mine.old", ".train.jsonl.old",
           ".notes.json.tmp", ".plot.png.old", ".best.old", ".README.md.old", ".data.json.previous")  # fmt: skip
    for name in own:
        (run.place / name).write_text("kept")
    run.resume(save_total_limit=1, save_steps=0)
    hidden = {path.relative_to(run.place).as_posix() for path in run.place.rglob(".*")} - {".lock", ".run.json"}
    assert hidden == {*own} - {"x.tmp"}
    assert all((run.place / name).read_text() == "kept" for name in own)
    assert [path.name for path in steps.glob("step-*")] == ["step-7"], "more than the limit allows"


# -- pipelines ---------------------------------------------------------------------------------------------------------


class MultiAdapterRun:
    """A copy of a pipeline."""

    def __init__(self, model: LoadedModel, place: Path):
        self.model, self.place, self.run, self.home = model, place, place / "run", place / "run" / "pipeline"
        self.state = json.loads((self.home / STATE).read_text())["state"]

    def resume(self) -> None:
        how = multi_adapter_options(max_steps=4, save_steps=1, output=str(self.home), resume=True)
        MultiAdapterPipeline(multi_adapter_tasks(self.place, "run"), self.model, **how).train()

    def refused(self, *words: str) -> None:
        refused(self.run, self.resume, *words)

    def write(self, state: dict[str, Any]) -> None:
        """With a digest that agrees."""
        odd = MultiAdapterState()
        odd.__dict__.clear()
        odd.__dict__.update(state)
        write_multi_adapter_state(self.home, odd)


@pytest.fixture
def multi_adapter_run(qwen2: LoadedModel, finished_multi_adapter_run: Path, tmp_path: Path) -> MultiAdapterRun:
    return MultiAdapterRun(qwen2, Path(shutil.copytree(finished_multi_adapter_run, tmp_path / "place")))


def test_leftovers_in_a_pipeline_are_swept(multi_adapter_run: MultiAdapterRun) -> None:
    for name in ("a/.last.previous", "a/..next.tmp", "b/.epoch-1.tmp", "b/.best.old", "b/..best.tmp.ab12_x9z.tmp"):
        (multi_adapter_run.run / name).mkdir()
    (multi_adapter_run.home / ".state.json.ab12_x9z.tmp").write_text("x")
    (multi_adapter_run.home / ".mine").write_text("x")
    multi_adapter_run.resume()
    hidden = {path.name for path in multi_adapter_run.run.rglob(".*")} - {".lock", ".run.json"}
    assert hidden == {".mine"}


def test_a_damaged_checkpoint_of_one_adapter(multi_adapter_run: MultiAdapterRun) -> None:
    last = multi_adapter_run.run / "b" / "last"
    for name in (*FILES, MANIFEST):
        good = (last / name).read_bytes()
        middle = len(good) // 2
        (last / name).write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
        multi_adapter_run.refused(f"The checkpoint {last} is damaged", "" if name == MANIFEST else name)
        (last / name).write_bytes(good)
    shutil.rmtree(multi_adapter_run.run / "b" / "best")
    (last / WEIGHTS).unlink()
    offer = f"{multi_adapter_run.run / 'b' / 'epoch-2'}, which is intact"
    multi_adapter_run.refused("adapter_model.safetensors is missing", offer, "init_adapter")
    shutil.rmtree(last)
    shutil.copytree(multi_adapter_run.run / "c" / "last", last)
    multi_adapter_run.refused()


def test_a_state_that_no_pipeline_has(multi_adapter_run: MultiAdapterRun) -> None:
    record, path = multi_adapter_run.state, multi_adapter_run.home / STATE
    good, request = path.read_bytes(), record["request"]
    texts = [b"", b"[]", b"[" * 100_000, b"\xff", b'{"step": 1}', b"null"]
    for place in np.linspace(0, len(good) - 3, 12).astype(int):
        texts.append(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    for text in texts:
        path.write_bytes(text)
        multi_adapter_run.refused("The pipeline's state")
    odd = [record | change for change in (
        {"step": -1}, {"step": "2"}, {"step": None}, {"steps": []}, {"steps": {**record["steps"], "a": 1.0}},
        {"ended": {"a": 1}}, {"identity": []}, {"policy": None}, {"more": 1}, {"policy": {"last": 1}},
        {"policy": {"waited": {"0": "x"}}}, {"policy": {"unknown": 1}},
        {"request": {name: value for name, value in request.items() if name != "schedule"}},
        {"request": request | {"adapters": 3}}, {"request": request | {"batch_tokens": "64"}},
    )]  # fmt: skip
    for state in (*odd, {name: value for name, value in record.items() if name != "policy"}):
        multi_adapter_run.write(state)
        multi_adapter_run.refused("The pipeline's state")


PATHS = ["a" * 300, "a/" * 3000, "a\0b", "\ud800", 3, ["x"], {"x": 1}, None, True]


def test_recorded_paths_that_lead_nowhere(multi_adapter_run: MultiAdapterRun, tmp_path: Path) -> None:
    for path in (*PATHS, "/tmp", "../nowhere", ""):
        (tmp_path / "member.json").write_text(json.dumps({"pipeline": path}))
        with pytest.raises(UserError):
            finetune(output=str(tmp_path), resume=True)
    request = multi_adapter_run.state["request"]
    adapter = request["adapters"][0]
    places = {"model": request["options"], "directory": request, "data": adapter, "checkpoint": adapter}
    for name in ("data", "checkpoint", "eval_data", "init_adapter", "model", "directory"):
        place = places.get(name, adapter["options"])
        before = dict(place)
        for path in PATHS:
            place[name] = path
            multi_adapter_run.write(multi_adapter_run.state)
            refusal = ""
            try:
                options = resumed_options({}, multi_adapter_run.home, "it")
                tasks = tasks_of_request(
                    read_multi_adapter_state(multi_adapter_run.home).request, multi_adapter_run.home
                )
                assert all(task.arguments(options) for task in tasks)
            except UserError as error:
                refusal = str(error)
            assert "The pipeline's state is damaged" not in refusal or path == "\ud800"
            assert len(refusal) < 400
            assert refusal or name == "directory" or path is None, (name, path)
        place.clear()
        place.update(before)


def test_a_path_that_is_too_long_is_one_sentence() -> None:
    for path in ("a" * 300, "a/" * 3000):
        for read in (load, read_adapter, lambda path: TrainingArguments(output=path)):
            with pytest.raises(UserError, match="too long") as caught:
                read(path)
            assert len(str(caught.value)) < 200


# -- the base ----------------------------------------------------------------------------------------------------------

CONFIGS: list[dict[str, Any]] = [
    {"rms_norm_eps": 1e-3},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 3},
]


@pytest.mark.parametrize("base_dtype", ["nf4", "f32"])
def test_a_base_that_has_changed_is_refused(qwen2: LoadedModel, tmp_path: Path, base_dtype: str) -> None:
    """Also if only the middle of a shard has changed, which only its values show."""
    base = Path(shutil.copytree(model_dir("qwen2"), tmp_path / "base"))
    arguments = run_options(tmp_path, model=str(base), base_dtype=base_dtype, max_steps=2, eval_data=None)
    finetune(**arguments)
    config, weights = base / "config.json", base / "model.safetensors"
    good = config.read_text()
    for change in CONFIGS:
        edit_json(config, **change)
        with pytest.raises(UserError, match=f"The configuration of {base} has changed since the run in"):
            finetune(output=arguments["output"], resume=True)
    config.write_text(good)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UserError, match=f"The weights of {base} have changed since the run in"):
        finetune(output=arguments["output"], resume=True)


@pytest.mark.parametrize("base_dtype", ["nf4", "bf16", "f16", "f32"])
def test_a_base_that_is_not_finite_is_refused_by_name(qwen2: LoadedModel, tmp_path: Path, base_dtype: str) -> None:
    base, device = Path(shutil.copytree(model_dir("qwen2"), tmp_path / "base")), qwen2.device
    good = load_file(base / "model.safetensors")
    for value in (np.nan, np.inf, -np.inf):
        for name in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight",
                     "model.layers.0.self_attn.q_proj.bias"):  # fmt: skip
            values = good[name].copy()
            values.reshape(-1)[values.size // 2] = value
            save_file(good | {name: values}, base / "model.safetensors", metadata={"format": "pt"})
            allocated = device.allocated
            with pytest.raises(UserError, match=f"^{name} holds values that are NaN or infinite"):
                open_model(str(base), device, base_dtype).load_weights()
            assert device.allocated == allocated
