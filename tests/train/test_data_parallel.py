"""Data-parallel training: parts of steps on several devices give what one device gives, to float rounding."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.events import hearing
from support.models import save_golden_adapter
from support.processes.sharing import Reply, replicas
from support.rows.sources import write_source
from support.sampling import sample
from support.training.training import golden_arguments, model_dir, random_rows

from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.data_parallel import gradient_messages, leader
from wgpu_lora.train.data_parallel.leader import (
    SETTLING,
    SHARE_STEPS,
    DataParallelLeader,
    LoadBalance,
    RemoteWorker,
    check_shared,
    split_by_share,
)
from wgpu_lora.train.job import Job
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.train.run.training_log import LOG, read_log

VOCAB = 301
Case = Callable[[Path], dict[str, Any]]


@pytest.fixture(scope="module")
def replicas_device() -> Device:
    return Device()


def answers(path: Path, kind: str, count: int = 7) -> str:
    rng = np.random.default_rng(0)

    def ids(least: int, most: int) -> list[int]:
        return rng.integers(0, VOCAB, rng.integers(least, most)).tolist()

    def row(number: int) -> dict[str, Any]:
        if kind == "kto":
            return {"prompt_ids": ids(1, 5), "completion_ids": ids(2, 7), "label": bool(number % 2)}
        return {"prompt_ids": ids(1, 5), "chosen_ids": ids(2, 7), "rejected_ids": ids(2, 7)}

    return str(write_source(path / f"{kind}.jsonl", [row(i) for i in range(count)]))


CASES: dict[str, Case] = {
    "dropout": lambda path: {"lora_dropout": 0.1, "gradient_accumulation_steps": 2},
    "packed": lambda path: {"packing": True},
    "a single row": lambda path: {"per_device_train_batch_size": 1},
    "dpo, precomputed": lambda path: {
        "objective": "dpo",
        "data": answers(path, "dpo"),
        "precompute_ref_log_probs": True,
        "reference_adapter": str(save_golden_adapter("qwen2", path / "frozen", scale=2.0)),
    },
    "kto": lambda path: {"objective": "kto", "data": answers(path, "kto")},
    "kd": lambda path: {
        "objective": "kd",
        "teacher": str(model_dir("qwen2")),
        "teacher_adapter": str(save_golden_adapter("qwen2", path / "teacher", scale=4.0)),
        "teacher_top_k": 8,
    },
    "dora": lambda path: {"init_adapter": None, "use_dora": True, "lora_r": 4},
    "pissa": lambda path: {"init_adapter": None, "init_lora_weights": "pissa", "lora_r": 4},
}


def arguments(path: Path, case: str = "dropout", **changes: Any) -> TrainingArguments:
    path.mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "base_dtype": "f32",
        "data": str(random_rows(path / "rows.jsonl", 9, VOCAB)),
        "per_device_train_batch_size": 4,
    }
    return golden_arguments(path, "qwen2", **options | CASES[case](path) | changes)


def prepared(device: Device, args: TrainingArguments, sharing: DataParallelLeader | None = None) -> Job[Any]:
    return prepare_job(args, open_model(str(args.model), device, "f32"), sharing=sharing)


def sums(job: Job[Any], sharing: DataParallelLeader, count: int = 3) -> list[dict[str, np.ndarray]]:
    """Gradients and totals of the first steps, without updates between them."""
    gradients, steps = [], job.run.stream.steps()
    for _ in range(count):
        sharing.accumulate(job.session, job.run, next(steps))
        gradients.append(gradient_messages.read_gradients(job.session))
        gradient_messages.clear_gradients(job.session)
    return gradients


def assert_close(gradients: dict[str, np.ndarray], expected: dict[str, np.ndarray], case: str) -> None:
    assert gradients.keys() == expected.keys()
    for name, values in expected.items():
        assert np.abs(values).max() > 0, case
        np.testing.assert_allclose(gradients[name], values, rtol=0, atol=2e-6 * np.abs(values).max(), err_msg=case)


OFTEN = ("dropout", "dpo, precomputed", "kto")


@pytest.mark.parametrize("case", sample(list(CASES), 1 / 4, OFTEN.__contains__))
def test_parts_sum_to_the_gradients_of_one_device(
    device: Device, replicas_device: Device, tmp_path: Path, case: str
) -> None:
    args = arguments(tmp_path, case)
    with replicas(args, 2 if case == "dropout" else 1, replicas_device) as (sharing, links):
        job = prepared(device, args, sharing)
        job.session.allocate()
        job.run.prepare_directory()
        job.run.place(job.session)
        job.run.precompute(job.session)
        alone = sums(job, DataParallelLeader([]))
        together = sums(job, sharing)
        job.session.close()
    assert not any(link.refusal for link in links)
    assert sum(link.questions for link in links) >= 2
    for gradients, expected in zip(together, alone, strict=True):
        assert_close(gradients, expected, case)


# -- whole runs --------------------------------------------------------------------------------------------------------


def trained(
    device: Device, args: TrainingArguments, sharing: DataParallelLeader | None = None, events: Events = SILENT
) -> RunRecord:
    return prepared(device, args, sharing).train(events)


def whole(path: Path, output: str, **changes: Any) -> TrainingArguments:
    """Six steps with all that a leader alone has: clipping, LoRA+, 8-bit states, held-out rows, checkpoints."""
    options: dict[str, Any] = {
        "max_steps": 6,
        "eval_data": str(random_rows(path / "heldout.jsonl", 3, VOCAB, seed=1)),
        "optim": "adamw_8bit",
        "loraplus_lr_ratio": 4.0,
        "max_grad_norm": 0.5,
        "save_steps": 2,
    }
    return arguments(path, **options | changes, output=str(path / output))


def assert_same_run(actual: RunRecord, expected: RunRecord) -> None:
    """To the rounding of a few steps."""
    assert (actual.outcome, actual.steps, actual.state.tokens) == (
        expected.outcome,
        expected.steps,
        expected.state.tokens,
    )
    assert actual.loss == pytest.approx(expected.loss, rel=1e-4)
    assert actual.eval_loss == pytest.approx(expected.eval_loss, rel=1e-4)
    (_, own), (_, other) = (read_adapter(record.directory) for record in (actual, expected))
    for module, pair in other.items():
        for a, b in zip(own[module], pair, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-3 * max(np.abs(b).max(), 1e-3))


@pytest.fixture(scope="module")
def alone(device: Device, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return trained(device, whole(tmp_path_factory.mktemp("alone"), "run"))


def shares(record: RunRecord) -> list[list[float]]:
    lines = [line for line in read_log(record.directory / LOG) if line["step"]]
    return [[line[name] for name in sorted(line) if name.startswith("share/")] for line in lines]


def test_a_shared_run_ends_as_alone_and_resumes(
    device: Device, replicas_device: Device, tmp_path: Path, alone: RunRecord
) -> None:
    """Its first four steps have equal shares, so that they give the same bytes twice."""
    args = whole(tmp_path, "run")
    first = []
    for output in ("again", "run"):
        with replicas(args, 1, replicas_device) as (sharing, _):
            first.append(
                trained(
                    device,
                    replace(args, output=str(tmp_path / output)),
                    sharing,
                    hearing(step=lambda result: result.step == 4),
                )
            )
    assert first[0].adapter_sha256 == first[1].adapter_sha256
    with replicas(args, 1, replicas_device) as (sharing, links):
        record = trained(device, replace(args, resume=True), sharing)
    assert_same_run(record, alone)
    assert links[0].questions == 2
    assert all(len(parts) == 2 and sum(parts) == pytest.approx(1, abs=1e-3) for parts in shares(record))


def test_what_a_replica_does_not_compute_its_leader_does(
    device: Device, replicas_device: Device, tmp_path: Path, alone: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first replica is lost at its second part and comes back; the second one's values are not finite."""
    monkeypatch.setattr(leader, "RETRY_SECONDS", 0.0)
    calls = dict.fromkeys((1, 2), 0)

    def wrong(number: int, reply: Reply) -> Reply:
        def answer(question: bytes) -> bytes:
            calls[number] += 1
            if (number, calls[number]) == (1, 2):
                raise ConnectionError("its process has ended")
            header, arrays = gradient_messages.read_message(reply(question))
            if number == 2:
                arrays["sums 0"] = np.where(np.arange(arrays["sums 0"].size) == 7, np.nan, arrays["sums 0"])
            return gradient_messages.message(header, {name: np.float32(values) for name, values in arrays.items()})

        return answer

    args = whole(tmp_path, "run")
    with (
        replicas(args, 2, replicas_device, wrong) as (sharing, _),
        pytest.warns(UserWarning, match="replica 2 .* answers with values that are not finite"),
    ):
        record = trained(device, args, sharing)
    assert_same_run(record, alone)
    members = [len(parts) for parts in shares(record)]
    assert members == [2, 1, 2, 2, 2, 2]
    assert calls == {1: 6, 2: 1}


def test_replicas_of_another_run_refuse_and_the_leader_goes_on(
    device: Device, replicas_device: Device, tmp_path: Path, alone: RunRecord
) -> None:
    args = whole(tmp_path, "run")
    other = replace(args, data=str(random_rows(tmp_path / "others.jsonl", 9, VOCAB, seed=5)))
    with replicas(other, 1, replicas_device) as (sharing, links):
        record = trained(device, args, sharing)
    assert "This machine does not have the rows of the leader" in links[0].refusal
    assert_same_run(record, alone)
    assert shares(record) == [[1.0]] * 6


def test_scales_of_a_base_are_not_shared() -> None:
    with pytest.raises(UserError, match="train='quant-scales' cannot be trained on several devices at once"):
        check_shared(TrainingArguments(train="quant-scales"))


# -- how steps are divided among devices, and their messages -----------------------------------------------------------


def test_parts_follow_each_other_and_their_shares(rng: np.random.Generator) -> None:
    for members in (1, 2, 3, 5):
        sizes = rng.integers(1, 100, 40).tolist()
        speeds = rng.uniform(0.5, 4, members).tolist()
        spans = split_by_share(sizes, speeds)
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == 40
        for (begin, end), speed in zip(spans, speeds, strict=True):
            assert sum(sizes[begin:end]) == pytest.approx(sum(sizes) * speed / sum(speeds), abs=100)
    assert split_by_share([5], [0.4, 0.6]) == [(0, 0), (0, 1)]


def test_shares_follow_speeds_and_are_kept() -> None:
    balance = LoadBalance()
    assert balance.of([0, 1]) == [0.5, 0.5]
    for _ in range(SETTLING - 1):
        balance.record(0, 100, 1.0)
        balance.record(1, 100, 3.0)
        assert balance.of([0, 1]) == [0.5, 0.5]
    earlier = balance.of([0, 1])
    assert earlier == pytest.approx([0.75, 0.25])
    for _ in range(SHARE_STEPS - 1):
        balance.record(0, 100, 10.0)
        assert balance.of([0, 1]) == earlier
    idle = 2 * 100 / 3.0  # it counts as twice as fast as it was
    assert balance.of([0, 1]) == pytest.approx([10 / (10 + idle), idle / (10 + idle)])
    assert balance.of([0, 1, 2])[2] == pytest.approx(1 / 3)  # a new one as the mean
    assert balance.patience(0, 100, leader_seconds=1.0) > 40
    assert balance.patience(2, 100, leader_seconds=1.0) == 40


class ManualLink:
    """A link whose futures a test completes."""

    def __init__(self) -> None:
        self.loaded, self.answered = Future[Any](), Future[bytes]()

    def ready(self) -> Future[Any]:
        return self.loaded

    def compute(self, question: bytes) -> Future[bytes]:
        return self.answered


def test_a_late_replica_is_not_asked_before_it_has_answered() -> None:
    link = ManualLink()
    replica = RemoteWorker(link)
    assert not replica.ready()  # it loads its model
    link.loaded.set_result(None)
    assert replica.ready()
    assert replica.new
    replica.ask(b"", 10)
    assert replica.answer(0.0) is None
    assert not replica.ready()
    assert "has not answered" in replica.problem
    link.answered.set_result(gradient_messages.message({"say": "part"}))
    assert replica.ready()
    assert not replica.problem
    assert replica.late
    assert not replica.new


@pytest.mark.parametrize("fault", ["loading", "computing", "no message"])
def test_a_lost_replica_is_tried_again_and_is_new_then(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    link = ManualLink()
    replica = RemoteWorker(link)
    if fault == "loading":
        link.loaded.set_exception(ConnectionError("there is no such actor"))
    else:
        link.loaded.set_result(None)
        assert replica.ready()
        replica.ask(b"", 10)
        if fault == "computing":
            link.answered.set_exception(ConnectionError("its process has ended"))
        else:
            link.answered.set_result(b"zork")
        assert replica.answer(60.0) is None
    assert not replica.ready()
    assert replica.problem
    later = time.monotonic() + leader.RETRY_SECONDS
    monkeypatch.setattr(leader, "time", SimpleNamespace(monotonic=lambda: later))
    link.loaded = Future()
    assert not replica.ready()
    link.loaded.set_result(None)
    assert replica.ready()
    assert replica.new


def test_messages_are_checked() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        gradient_messages.read_message(b"zork")
    header, arrays = gradient_messages.read_message(
        gradient_messages.message({"a": [1]}, {"b": np.arange(3, dtype=np.float32)})
    )
    assert (header, arrays["b"].tolist()) == ({"a": [1]}, [0, 1, 2])
