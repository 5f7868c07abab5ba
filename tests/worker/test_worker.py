"""`wgpu-lora worker`: jobs in, events out, and whoever starts one."""

from __future__ import annotations

import inspect
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args, get_type_hints

import psutil
import pytest
from support.cli import QWEN2, SMALL, write_rows

from wgpu_lora.cluster.worker.job_file import KINDS, Job, arguments, read_job
from wgpu_lora.cluster.worker.job_process import EventWriter
from wgpu_lora.cluster.worker.worker import PROGRAM, Worker, WorkerFailed
from wgpu_lora.errors import UserError
from wgpu_lora.models.model_files import config_of
from wgpu_lora.names.spelling import IN_JSON, naming
from wgpu_lora.train.run.records import RunRecord

WINDOWS = pytest.mark.skipif(sys.platform == "win32", reason="has no SIGINT for another process")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_rows(tmp_path_factory.mktemp("worker") / "rows.jsonl"))


def test_jobs_run_and_tell(rows: str, tmp_path: Path) -> None:
    options = {**SMALL, "model": QWEN2, "data": rows, "eval_data": rows, "output": str(tmp_path / "out")}
    with Worker("finetune", options, directory=tmp_path) as worker:
        events = list(worker.events())
        result = worker.result()
    assert {event["schema"] for event in events} == {1}
    kinds = [event["event"] for event in events]
    assert (kinds[0], kinds[-1], kinds.count("step")) == ("begin", "result", 2)
    assert {"loading", "evaluating", "saved"} <= set(kinds)
    assert next(event for event in events if event["event"] == "step")["step"] == 1
    record = RunRecord.from_json(result)
    assert record == RunRecord.read(tmp_path / "out")
    lines = (tmp_path / "finetune.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == events
    evaluated = {"model": QWEN2, "data": rows, "adapter": str(tmp_path / "out")}
    with Worker("evaluate", {**evaluated, "turns": True}, interactive=True) as worker:
        assert worker.ask("prepare") == {}
        assert worker.ask("evaluate")["loss"] == pytest.approx(record.eval_loss, rel=1e-5)
    assert worker.wait() == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("zork", "cannot be read as JSON"),
        ('{"request": "__init__"}', "is not known: choose one of twice."),
        ('{"count": 1}', "The request None is not known"),
        ('{"request": "twice"}', r"'twice' cannot be answered \(missing a required argument: 'count'\)"),
        (
            '{"request": "twice", "count": "1"}',
            r"'twice' cannot be answered \('count' must be a whole number, not \"1\"\)",
        ),
        ('{"request": "twice", "count": 0}', r"'twice' cannot be answered \('count' must be at least 1, not 0\)"),
    ],
)
def test_requests_that_cannot_be(line: str, message: str) -> None:
    class Side:
        def twice(self, count: int) -> dict[str, int]:
            return {"twice": 2 * count}

    out = io.StringIO()
    with pytest.raises(UserError, match=message):
        EventWriter(out, io.StringIO('{"request": "twice", "count": 2}\n' + line)).answer(Side())
    assert json.loads(out.getvalue())["twice"] == 4


def test_a_job_on_standard_input_that_cannot_be() -> None:
    process = subprocess.run([*PROGRAM, "-"], input='{"job": "zork"}', capture_output=True, text=True, timeout=300)
    (event,) = map(json.loads, process.stdout.splitlines())
    assert (process.returncode, event["event"], event["kind"]) == (2, "error", "UserError")
    assert process.stderr == f"wgpu-lora: {event['message']}\n"


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"job": "zork"}, "has an unknown kind 'zork': choose one of finetune, pipeline, plan, "),
        ({"job": "evaluate"}, "lacks 'data': the job 'evaluate' requires it."),
        ({"job": "evaluate", "options": {"data": "x", "max_lenght": 3}}, "did you mean 'max_length'?"),
        ({"job": "evaluate", "options": {"data": 3}}, "'data' must be text or a list, not 3."),
        ({"job": "bench", "options": {"device": True}}, "'device' must be text or a whole number, not true."),
        ({"job": "bench", "options": {"bricks": [3]}}, "'bricks[0]' must be text, not 3."),
        ({"job": "finetune", "options": {"events": 3}}, "has an unknown option 'events'"),
        ({"job": "finetune", "options": {"port": 3}}, "has an unknown option 'port'"),
        (
            {"job": "finetune", "options": {"where": 3}},
            "takes recipe, requests and the options in 'wgpu-lora finetune --help-all'.",
        ),
        (
            {"job": "generate", "options": {"prompts": ["a"], "where": 3}},
            "'where': the job 'generate' takes prompts, model, adapter, device, base_dtype, batch, system, ",
        ),
        ({"job": "finetune", "options": {"max_steps": "2"}}, "job.json: 'max_steps' must be a whole number, not '2'."),
        ({"job": "finetune", "options": {"output": ""}}, "job.json: 'output' is empty"),
        ({"job": "evaluate", "options": {"data": "x", "base_dtype": "fp8"}}, '"base_dtype": "fp8" is not known'),
        ({"job": "bench", "options": {"bricks": []}}, "'bricks' is empty: give it a value, or leave it out."),
        ({"job": "bench", "options": {"shape": " "}}, "'shape' is empty: give it a value, or leave it out."),
        ({"job": "bench", "options": {"time_limit": 0}}, "'time_limit' must be greater than 0, not 0.0."),
        (
            {"job": "bench", "options": {"shape": "tiny-qwen3", "layers": 9}},
            '"layers": 9 is not possible: this model has',
        ),
        (
            {"job": "bench-training", "options": {"shape": "tiny-qwen3", "tokens": 1}},
            "'tokens' must be at least 2, not 1.",
        ),
        ({"job": "bench-training", "options": {"shape": "tiny-qwen3", "rank": 10**9}}, '"rank": 1000000000'),
        ({"job": "bench-training", "options": {"layers": 1}}, "'layers' goes with 'shape': a recipe trains"),
        ({"job": "generate", "options": {"prompts": []}}, "'prompts' is empty: give it a value."),
        ({}, "'job' is missing: add it."),
        ({"job": "finetune", "options": {"data": "x", "lora_r": -1}}, "'lora_r' must be greater than 0, not -1."),
        ({"job": "generate", "options": {"prompts": ["a"], "zork": 1}}, "has an unknown option 'zork'"),
        ({"job": "bench", "options": []}, "'options' must be an object, not []."),
        ({"schema": 2, "job": "bench"}, "has the schema 2, but this version supports 1: update wgpu-lora."),
        ({"jobs": []}, "'jobs' is not known: did you mean 'job'?"),
        ("[", "cannot be read as JSON"),
        (None, "cannot be read (No such file or directory)."),
    ],
)
def test_a_job_that_cannot_be_is_one_sentence(job: object, message: str, tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    if job is not None:
        file.write_text(job if isinstance(job, str) else json.dumps(job))
    with naming(IN_JSON), pytest.raises(UserError) as raised:
        done_here(str(file))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def done_here(source: str) -> None:
    job = read_job(source)
    run = KINDS[job.kind]
    run(EventWriter(io.StringIO()), **arguments(run, job))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("proof-")])
def test_a_number_of_nothing_is_refused(kind: str) -> None:
    """Rather than doing nothing and ending as if all were well."""
    parameters = inspect.signature(KINDS[kind]).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name != "where"]
    lists: dict[str, list[Any]] = {"prompts": ["x"], "adapters": [{}], "tasks": [{}]}
    options = {name: lists.get(name, "x") for name in names}
    for name, hint in get_type_hints(KINDS[kind]).items():
        kinds = {hint, *get_args(hint)}
        for wrong in (0, -1) if kinds & {int, float} and name != "device" else ():
            with pytest.raises(UserError, match=f"^it: '{name}' must be (at least 1|greater than 0), not {wrong}"):
                arguments(KINDS[kind], Job(kind, {**options, name: wrong}, "it"))


def test_an_import_tells_what_it_loads_and_writes(tmp_path: Path) -> None:
    out, output = io.StringIO(), tmp_path / "packed"
    KINDS["import"](EventWriter(out), model=QWEN2, output=str(output))
    messages = [json.loads(line) for line in out.getvalue().splitlines()]
    names = list(config_of(Path(QWEN2)).parameter_shapes())
    for event in ("loading", "written"):
        counts = [(fact["done"], fact["total"]) for fact in messages if fact["event"] == event]
        assert counts == [(number, len(names)) for number in range(1, len(names) + 1)]
    with naming(IN_JSON), pytest.raises(UserError, match="exists already: give 'output' another name, or remove it"):
        KINDS["import"](EventWriter(io.StringIO()), model="nobody/nothing", output=str(output))


@WINDOWS
def test_a_signal_ends_a_run_with_a_checkpoint_and_its_number(rows: str, tmp_path: Path) -> None:
    options = {**SMALL, "model": QWEN2, "data": rows, "output": str(tmp_path / "out"), "max_steps": 10**6}
    with Worker("finetune", options) as worker:
        for event in worker.events():
            if event["event"] == "step":
                worker.process.send_signal(signal.SIGTERM)
                break
        assert worker.wait() == 128 + signal.SIGTERM, worker.failure_reason()
        assert (worker.last["event"], worker.last["code"]) == ("result", 128 + signal.SIGTERM)
        assert RunRecord.from_json(worker.last["result"]).signal == "SIGTERM"
        with pytest.raises(WorkerFailed, match="finetune ended with exit code 143: a signal or Ctrl-C"):
            worker.result()
    assert list((tmp_path / "out" / "checkpoints").iterdir())


SLEEPER = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
SLEEPER += 'print(\'{"event": "begin"}\', flush=True)\ntime.sleep(99)'


def test_one_that_is_out_of_time_is_ended_with_its_children() -> None:
    with Worker("sleep", {}, program=[sys.executable, "-c", SLEEPER], timeout=60) as worker:
        assert next(worker.events()) == {"event": "begin"}
        family = [psutil.Process(worker.process.pid), *psutil.Process(worker.process.pid).children()]
        assert len(family) == 2
        worker._timeout = 0.0
        with pytest.raises(WorkerFailed, match="it took more than 0 s"):
            worker.result()
    deadline = time.monotonic() + 10
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.stderr.write('a\\nlast words\\n'); sys.exit(3)", "exit code 3: last words"),
        ('print(\'{"event": "error", "message": "why"}\'); raise SystemExit(2)', "exit code 2: why"),
        ('print(\'{"event": "result"\'[:9])', "exit code 0: no message"),  # cut short
    ],
)
def test_what_a_worker_ended_of_is_told(code: str, message: str) -> None:
    with (
        Worker("job", {}, name="it", program=[sys.executable, "-c", code]) as worker,
        pytest.raises(WorkerFailed, match=f"^it ended with {message}$"),
    ):
        worker.result()


def test_nobody_has_to_listen(rows: str, tmp_path: Path) -> None:
    options = {**SMALL, "model": QWEN2, "data": rows, "output": str(tmp_path / "out")}
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"job": "finetune", "options": options}))
    process = subprocess.Popen([*PROGRAM, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    assert RunRecord.read(tmp_path / "out").outcome == "finished"
