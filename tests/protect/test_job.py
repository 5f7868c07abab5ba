"""Job files: what is read, and what is refused in one sentence."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.protect.protected import Hospital

from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.protect.runs import protected_job as jobs
from wgpu_lora.protect.runs.protected_job import ProtectedJob
from wgpu_lora.protect.runs.protected_run import _check_other_models

URL = "http://127.0.0.1:1"


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return Hospital(tmp_path / "ward")


def read(hospital: Hospital, own: str = "", broker: str | None = URL, **options: Any) -> ProtectedJob:
    return jobs.read_job(hospital.job("job", broker, own, **options))


def test_paths_are_relative_to_the_file_and_digests_state_the_record(hospital: Hospital) -> None:
    job = read(hospital, learning_rate=3e-4)
    assert job.name == "job"
    assert job.arguments.data == str(hospital.place / "train.jsonl.age")
    assert job.output == hospital.place / "job"
    assert job.arguments.learning_rate == job.options["learning_rate"] == 3e-4
    assert not {"data", "output", "model", "save_steps", "device"} & set(job.options)
    digests = job.digests()
    assert list(digests) == ["data"]
    assert digests["data"]["rows"] == 12
    named = read(hospital, 'name = "ward 7"\nca = "ca.pem"')
    assert named.name == "ward 7"
    assert named.ca == hospital.place / "ca.pem"


def test_digests_of_recipes_are_of_what_is_trained(hospital: Hospital) -> None:
    job = read(hospital)
    same = read(hospital, save_steps=3, goal="another", device="0")
    assert same.recipe_sha256 == job.recipe_sha256
    assert read(hospital, lora_r=8).recipe_sha256 != job.recipe_sha256
    changed = job.with_options({"lora_r": 8})
    assert changed.recipe_sha256 == read(hospital, lora_r=8).recipe_sha256
    assert changed.options["lora_r"] == 8
    assert job.with_options({}) is job


def test_the_digest_of_a_job_is_of_all_that_it_is_given(hospital: Hospital) -> None:
    job = read(hospital)
    assert job.sha256 == file_digest(job.path)
    assert job.with_options({"device": "0"}).sha256 == job.sha256
    job_variants = [job.with_options({"lora_r": 8}), job.with_options({"lora_r": 16})]
    for rank in (2, 3):
        (hospital.place / "mine.toml").write_text(f"lora_r = {rank}\nlearning_rate = 0.5\n")
        job_variants.append(read(hospital, recipe="mine.toml"))
    assert len({job.sha256, *(changed_job.sha256 for changed_job in job_variants)}) == 5
    assert b'# Options of the command line: {"lora_r": 8}' in job_variants[0].content
    bundled = read(hospital, recipe="demo")
    assert bundled.sha256 == file_digest(bundled.path)


def test_a_recipe_below_the_options(hospital: Hospital) -> None:
    (hospital.place / "mine.toml").write_text("lora_r = 2\nlearning_rate = 0.5\n")
    job = read(hospital, recipe="mine.toml", learning_rate=0.1)
    assert (job.arguments.lora_r, job.arguments.learning_rate) == (4, 0.1)  # the helper's own options come on top
    bundled = read(hospital, recipe="demo")
    assert bundled.arguments.data == str(hospital.place / "train.jsonl.age")
    assert bundled.arguments.eval_data is None
    (hospital.place / "mine.toml").write_text('init_adapter = "somewhere"\n')
    with pytest.raises(UserError, match="seal it"):
        read(hospital, recipe="mine.toml")


OPTIONS: list[dict[str, Any]] = [
    {"data": "rows.jsonl"}, {"eval_data": "rows.jsonl"}, {"init_adapter": "a"}, {"output": "b"}, {"resume": True},
    {"report_to": "tensorboard"}, {"teacher_cache": "a"}, {"eval_teacher_cache": "a"}, {"split": "train"},
    {"eval_split": "x"}, {"dataset_config": "x"}, {"train": "quant-scales", "base_dtype": "lut2"},
    {"lerning_rate": 1.0}, {"learning_rate": -1.0}, {"max_steps": "many"}, {"recipe": 3}, {"recipe": "nowhere"},
]  # fmt: skip


def test_options_that_do_not_go_with_sealed_data(hospital: Hospital) -> None:
    for options in OPTIONS:
        with pytest.raises(UserError) as refused:
            read(hospital, **options)
        assert len(refused.value.lines) == 1
        if "recipe" not in options and "lerning_rate" not in options:
            with pytest.raises(UserError):
                read(hospital).with_options(options)


DATA, KEY, BROKER = 'data = "train.jsonl.age"', 'broker_key = "broker.pub"', f'broker = "{URL}"'
CHANGES = [
    *((DATA, f"data = {value}") for value in ('"train.jsonl"', '"other.jsonl.age"', "3", '""', '"a\\u0000.jsonl.age"')),
    (DATA, ""), ('output = "job"', ""), (KEY, 'broker_key = "train.jsonl.age"'), (KEY, 'broker_key = "nowhere.pub"'),
    (BROKER, ""), (BROKER, f'{BROKER}\nfiles = "exchange"'), ('recipients = ["', 'recipients = ["x'),
    ("recipients = [", "recipients = [3, "), ("recipients = ", "recipient = "), ("[protected]", "[protect]"),
    ("[protected]", 'adapters = "x"\n[protected]'), ("[protected]", '[protected]\nname = "a\\nb"'),
    ("[protected]", f'[protected]\nname = "{"x" * 101}"'), ("[protected]", '[protected]\narguments = "x"'),
    ("[protected]", "[protected"), ("[training]", "[training.more]"),
]  # fmt: skip


def test_files_that_are_no_job(hospital: Hospital, capsys: pytest.CaptureFixture[str]) -> None:
    path = hospital.job("job", URL)
    text = path.read_text()
    for before, after in CHANGES:
        assert before in text
        path.write_text(text.replace(before, after))
        with pytest.raises(UserError) as refused:
            jobs.read_job(path)
        assert len(refused.value.lines) == 1
        assert main(["finetune", "--protected", str(path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
        assert not (hospital.place / "job").exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "job.toml", tmp_path / ("x" * 300)):
        with pytest.raises(UserError):
            jobs.read_job(path)


def test_a_record_of_another_file(hospital: Hospital) -> None:
    job = read(hospital)
    data = job.sealed["data"]
    with data.open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="is not the file that"):
        job.digests()
    data.with_name(f"{data.name}.json").unlink()
    assert "rows" not in job.digests()["data"]


def test_models_beside_the_base_are_measured(hospital: Hospital) -> None:
    adapter = hospital.place / "reference"
    (adapter / "more").mkdir(parents=True)
    for name in ("b.json", "a.safetensors", "more/c"):
        (adapter / name).write_text(name)
    job = read(hospital, objective="dpo", reference_adapter="reference")
    lines = [f"{file_digest(adapter / name)}  {name}\n" for name in ("a.safetensors", "b.json", "more/c")]
    digests = job.digests()
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    assert digests["reference_adapter"] == {"name": "reference", "sha256": digest, "bytes": 25}
    attested: Any = SimpleNamespace(job=job, data=digests)
    _check_other_models(attested)
    (adapter / "more" / "c").write_text("another")
    with pytest.raises(UserError, match="changed since it was attested"):
        _check_other_models(attested)
    shutil.rmtree(adapter)
    with pytest.raises(UserError, match="cannot be attested"):
        job.digests()
    taught = read(hospital, objective="kd", teacher="demo").digests()["teacher"]
    assert (taught["name"], len(taught["sha256"])) == ("model", 64)
