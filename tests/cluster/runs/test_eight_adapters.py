"""Eight adapters over three hosts with unlike drivers end as each does alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.cli import flags
from support.cluster_runs import cluster, rows_of, status
from support.hosts import Hosts, namespaces_allowed, until

from wgpu_lora.proof.checks.training import SAME_LOSS
from wgpu_lora.train.output import LOG, read_log

pytestmark = pytest.mark.skipif(not namespaces_allowed(), reason="namespaces cannot be made here")

COUNT = 8
ADAPTER = "adapter_model.safetensors"
OPTIONS = {
    "model": "demo",
    "max_length": 16,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "lora_r": 4,
    "logging_steps": 1,
    "max_steps": 4,
}
ALONE = """
import json, sys
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.arguments import TrainingArguments
for options in json.loads(sys.argv[1]):
    prepare_job(TrainingArguments(**options)).train()
"""


def device_of(directory: Path) -> str:
    """The name of the device on which a run was ended."""
    name: str = json.loads((directory / "run.json").read_text())["environment"]["device"]["name"]
    return name


def test_eight_adapters_end_as_each_alone(tmp_path: Path) -> None:
    data = [rows_of(tmp_path, number) for number in range(COUNT)]
    together, alone = ([tmp_path / kind / f"a{number}" for number in range(COUNT)] for kind in ("together", "alone"))
    named = [word for rows, output in zip(data, together, strict=True) for word in ("--adapters", f"{rows}:{output}")]
    each = [{**OPTIONS, "data": str(rows), "output": str(output)} for rows, output in zip(data, alone, strict=True)]
    with Hosts(3, shared=tmp_path) as hosts:
        hosts.start_nodes()
        until(lambda: len(status(hosts)["devices"]) == 3, 300)
        cluster(hosts, "run", "--join", "never", *named, *flags(**OPTIONS))
        seen = status(hosts)
        hosts[0].python("-c", ALONE, json.dumps(each), timeout=400)
    assert [task["state"] for task in seen["tasks"]] == ["finished"] * COUNT
    same_driver = [device_of(ours) == device_of(theirs) for ours, theirs in zip(together, alone, strict=True)]
    assert any(same_driver)
    for ours, theirs, same in zip(together, alone, same_driver, strict=True):
        made, expected = read_log(ours / LOG), read_log(theirs / LOG)
        assert [entry["step"] for entry in made] == [entry["step"] for entry in expected] == [1, 2, 3, 4]
        assert [entry["loss"] for entry in made] == pytest.approx([entry["loss"] for entry in expected], rel=SAME_LOSS)
        if same:
            assert (ours / ADAPTER).read_bytes() == (theirs / ADAPTER).read_bytes()
