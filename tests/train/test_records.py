"""Records of this version, of the one before, and of a later one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support import FIXTURES
from support.cli import Run, commands
from support.gguf_files import DEMO
from support.training.shared_runs import edit_json

from wgpu_lora.cli.report.finished_runs import read_runs
from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import DEMO_TRAIN
from wgpu_lora.train.objectives import OBJECTIVES
from wgpu_lora.train.optimizers import OPTIMIZERS
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.multi_adapter_state import read_multi_adapter_state
from wgpu_lora.train.run.records import RUN, PipelineRecord, RunRecord
from wgpu_lora.train.run.resume import merge_resumed_options
from wgpu_lora.train.run.run_checkpoint import MANIFEST, write_manifest
from wgpu_lora.train.run.run_state import SCHEMA, STATE, NewerSchemaError
from wgpu_lora.weights.base_formats import BASE_FORMATS

RUNS = FIXTURES / "runs"  # of schema 1
SINGLE = RUNS / "expected" / "single"


def test_a_record_of_the_version_before_is_read_and_written_as_todays(tmp_path: Path) -> None:
    record = RunRecord.read(SINGLE)
    assert (record.steps, record.outcome, record.options.lora_r) == (7, "finished", 2)
    assert record.eval_loss == record.state.last_eval_loss == pytest.approx(7.5377, abs=1e-4)
    assert record.environment.device.kind == "software"
    record.write(tmp_path)
    output = json.loads((tmp_path / RUN).read_text())
    assert output.pop("schema") == SCHEMA
    before = json.loads((SINGLE / RUN).read_text())
    before["environment"]["device"] |= {"miscompiled": [], "units": ""}  # not known then
    before["data"]["prompt_format"], before["warnings"] = None, []
    before["memory"]["host"], before["state"]["unrounded_eval_loss"] = 0, None
    del before["state"]["heldout_seconds"]
    before["state"] |= {"elapsed_seconds": 0.0, "step_seconds": 0.0, "warming_seconds": 0.0, "warmed_seconds": None}
    before["state"] |= {"warmed_step": 0, "between_seconds": {}, "ending": False, "schedule_start": 0, "postponed": []}
    assert output["options"] == TrainingArguments().as_dict() | before["options"]
    assert output | {"options": None} == before | {"options": None}
    assert RunRecord.read(tmp_path) == record
    assert read_runs([SINGLE])[0].record == record


def test_what_an_earlier_version_did_not_know_has_its_default(tmp_path: Path) -> None:
    facts = json.loads((SINGLE / RUN).read_text())
    del facts["options"]["compute_dtype"], facts["state"]["processed_tokens"]
    record = RunRecord.from_json(facts)
    assert (record.options.compute_dtype, record.state.processed_tokens) == ("f32", 0)
    checkpoint = shutil.copytree(run_checkpoint.latest_checkpoint(RUNS / "single"), tmp_path / "step-4")
    state = json.loads((checkpoint / STATE).read_text())
    seconds = state["state"]["seconds"]
    del state["state"]["processed_tokens"]
    for schema in (1, 2):
        (checkpoint / STATE).write_text(json.dumps(state | {"schema": schema}))
        checkpoint_state = run_checkpoint.read_state(checkpoint)[0]
        assert (
            checkpoint_state.processed_tokens,
            checkpoint_state.elapsed_seconds,
            checkpoint_state.warmed_seconds,
        ) == (0, seconds, None)
    assert seconds > 0
    state["schema"] = SCHEMA  # today's has them all
    (checkpoint / STATE).write_text(json.dumps(state))
    with pytest.raises(ValueError, match="heldout_seconds' is not known"):
        run_checkpoint.read_state(checkpoint)


NEWER = f"was written by a newer version of wgpu-lora (schema {SCHEMA + 1}, and this version reads up"


@pytest.mark.parametrize(
    ("name", "schema", "words"),
    [
        (STATE, SCHEMA + 1, f"{STATE} {NEWER}"),
        (run_checkpoint.METADATA, SCHEMA + 1, f"{run_checkpoint.METADATA} {NEWER}"),
        (
            run_checkpoint.METADATA,
            "x",
            "is damaged: the schema of metadata.json is 'x'; remove that directory to resume from best",
        ),
    ],
)
def test_the_schema_of_a_checkpoint(name: str, schema: object, words: str, tmp_path: Path, run: Run) -> None:
    """Of a newer version it is not called damaged."""
    shutil.copytree(RUNS / "single", tmp_path / "run")
    newest = run_checkpoint.latest_checkpoint(tmp_path / "run")
    edit_json(newest / name, schema=schema)
    (newest / MANIFEST).unlink()
    write_manifest(newest)
    assert words in run("finetune", "--output", tmp_path / "run", "--resume").refusal()


def test_other_records_of_a_newer_version(tmp_path: Path) -> None:
    shutil.copytree(SINGLE, tmp_path / "run")
    edit_json(tmp_path / "run" / RUN, schema=SCHEMA + 1)
    with pytest.raises(NewerSchemaError):
        RunRecord.read(tmp_path / "run")
    shutil.copytree(RUNS / "pipeline", tmp_path / "pipeline")
    assert read_multi_adapter_state(tmp_path / "pipeline" / "first").steps
    edit_json(tmp_path / "pipeline" / "first" / STATE, schema=SCHEMA + 1)
    with pytest.raises(NewerSchemaError):
        read_multi_adapter_state(tmp_path / "pipeline" / "first")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("schema", 0, "the schema of run.json is 0"),
        ("schema", "2", "the schema of run.json is '2'"),
        ("trainable_parameters", "5", "'trainable_parameters' must be a whole number, not \"5\""),
        (
            "memory",
            {"groups": {"base": None}, "peak": 1, "peak_allocated": 1},
            "'memory.groups.base' must be a whole",
        ),
        ("eval_data", [], r"'eval_data' must be an object, not \[\]"),
        ("options", {"lora_r": -1}, "must be greater than 0"),
        ("state", {"seconds": 10**400}, "'state.seconds' must be a finite number, not 1000"),
        ("state", {"seconds": float("nan")}, "'state.seconds' must be a finite number, not NaN"),
    ],
)
def test_a_record_that_cannot_be_is_one_sentence(tmp_path: Path, name: str, value: object, message: str) -> None:
    facts = json.loads((SINGLE / RUN).read_text())
    (tmp_path / RUN).write_text(json.dumps(facts | {name: value}))
    with pytest.raises(UserError, match=message) as raised:
        RunRecord.read(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("option", "what", "choices"),
    [
        ("objective", "objective", ", ".join(OBJECTIVES)),
        ("optim", "optimizer", ", ".join(OPTIMIZERS)),
        ("base_dtype", "base format", ", ".join(BASE_FORMATS)),
    ],
)
def test_a_run_of_something_that_is_not_registered_here(tmp_path: Path, option: str, what: str, choices: str) -> None:
    """Reading the run and resuming it both say that it is the run's."""
    facts = json.loads((SINGLE / RUN).read_text())
    facts["options"][option] = "mine"
    (tmp_path / RUN).write_text(json.dumps(facts))
    message = (
        f"The run in {tmp_path} was trained with {what} 'mine', which is not registered here: the registered ones "
    )
    message += f"are {choices}."
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        RunRecord.read(tmp_path)
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        merge_resumed_options({}, facts["options"], None, tmp_path, "Here")


def test_a_pipelines_record_of_the_version_before() -> None:
    run = RunRecord.read(SINGLE)
    record = PipelineRecord(7, None, "round-robin", 64, run.options, [], run.memory, run.environment)
    facts = json.loads(json.dumps(record.to_json()))
    assert PipelineRecord.from_json(facts) == record
    del facts["schema"]
    facts["options"] |= {name: facts.pop(name) for name in ("schedule", "batch_tokens")}
    assert PipelineRecord.from_json(facts) == record
    for damaged in ({}, {"options": []}, facts | {"options": {}}):
        with pytest.raises(ValueError, match="is missing"):
            PipelineRecord.from_json(damaged)


def test_a_record_is_still_a_mapping_with_a_note() -> None:
    record = RunRecord.read(SINGLE)
    with pytest.warns(DeprecationWarning, match=r"result\.state instead of result\['state'\]"):
        assert record["state"]["last_loss"] == record.loss
    options = TrainingArguments(output="o")
    assert repr(replace(record, options=options)) == (
        "RunRecord(stop_reason='max steps', steps=7, loss=7.3260, eval_loss=7.5377, output='o')"
    )


# -- model cards -------------------------------------------------------------------------------------------------------


BLOCK = re.compile(r"```(sh|python)\n(.*?)```", re.DOTALL)


@pytest.fixture(params=["base", "base.gguf"])
def card(
    request: pytest.FixtureRequest, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> tuple[list[tuple[str, str]], Run]:  # fmt: skip
    """The snippets of the card of a short run on a directory or a GGUF file, and what runs commands."""
    run = commands(capsys)
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "path" / "to" / request.param
    base.parent.mkdir(parents=True)
    if base.suffix:
        assert run("export", "gguf", "--model", DEMO, "--output", base).code == 0
    else:
        base.symlink_to(DEMO)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(DEMO_TRAIN.open(encoding="utf-8").readlines()[:4]), encoding="utf-8")
    run("finetune", "--model", base, "--data", rows, "--max-steps", 1, "--output", "out", "--no-tune").output()
    return BLOCK.findall((tmp_path / "out" / "README.md").read_text()), run


def run_shell(blocks: list[tuple[str, str]], run: Run) -> list[str]:
    """Run the commands of wgpu-lora; return the first words of all commands."""
    programs = []
    for line in (line for kind, text in blocks if kind == "sh" for line in text.splitlines()):
        program, *arguments = shlex.split(line)
        programs.append(program)
        if program == "wgpu-lora":
            more = ["--max-new-tokens", "1"] if arguments[0] == "generate" else []
            run(*arguments, *more).output()
        else:
            files = [argument for argument in arguments if argument.endswith(".gguf")]
            assert files, line
            assert all(Path(file).is_file() for file in files), line
    return programs


def test_commands_run(card: tuple[list[tuple[str, str]], Run]) -> None:
    programs = run_shell(*card)
    assert programs.count("llama-cli") == 1
    assert programs.count("wgpu-lora") >= 2


@pytest.mark.reference
def test_python_runs(card: tuple[list[tuple[str, str]], Run]) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make test-reference does that")
    blocks, run = card
    run_shell(blocks, run)
    [source] = [text for kind, text in blocks if kind == "python"]
    names: dict[str, object] = {}
    exec(source, names)
    model, tokenizer = names["model"], names["tokenizer"]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], return_tensors="pt", return_dict=True)  # type: ignore[attr-defined]
    assert model(**ids).logits.shape[0] == 1  # type: ignore[operator]
