"""The job `gradients`: a process that helps another one's run."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest
from support.cli import QWEN2, SMALL, write_rows

from wgpu_lora.chain.chain_run import code_digest
from wgpu_lora.gpu.device import Device
from wgpu_lora.train.data_parallel.leader import DataParallelLeader
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values
from wgpu_lora.train.run.training_log import LOG, read_log
from wgpu_lora.worker.worker import Worker


@pytest.fixture
def listener() -> Iterator[Listener]:
    with tempfile.TemporaryDirectory(prefix="wgl-") as short, Listener(os.path.join(short, "0")) as listening:
        yield listening


def options(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    rows = str(write_rows(tmp_path / "rows.jsonl"))
    return {**SMALL, "model": QWEN2, "data": rows, "per_device_train_batch_size": 4, **changes}


def arguments(given: dict[str, Any], output: Path) -> TrainingArguments:
    return from_values({**given, "output": str(output)}, "the test")


def test_a_process_helps_and_ends_with_its_leader(device: Device, tmp_path: Path, listener: Listener) -> None:
    given = options(tmp_path)
    with Worker("gradients", {**given, "link": listener.address}, place=tmp_path, timeout=300) as worker:
        with closing(DataParallelLeader([listener.accept()], code_digest())) as sharing:
            end = time.monotonic() + 240
            while not sharing.ready() and time.monotonic() < end:  # else the first steps are the leader's alone
                time.sleep(0.05)
            shared = prepare_job(arguments(given, tmp_path / "shared"), sharing=sharing).train()
        assert worker.result() == {"answers": shared.steps}
    alone = prepare_job(arguments(given, tmp_path / "alone")).train()
    assert shared.loss == pytest.approx(alone.loss, rel=1e-5)
    lines = read_log(tmp_path / "shared" / LOG)
    assert [line["share/1"] for line in lines] == [pytest.approx(0.5, abs=0.2)] * shared.steps
