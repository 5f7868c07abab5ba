"""A chain of the product's own stages, from rows to the list of an upload, and the bundled chain's steps."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.events import hearing
from support.gguf_models import make_adapter, small
from support.rows.data import chat, write_jsonl
from support.sampling import seeds

from wgpu_lora.cli.app import main
from wgpu_lora.events import Events
from wgpu_lora.files.assets import DEMO_MODEL
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.formats.peft_adapter import WEIGHTS
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.chain.chain_file import Chain, read_chain
from wgpu_lora.train.chain.chain_run import run, stage_statuses
from wgpu_lora.train.chain.stage import ChainWatch, Watch
from wgpu_lora.train.chain.stages.export import Gguf
from wgpu_lora.train.chain.stages.push import Push
from wgpu_lora.train.prepare_run import prepare_run
from wgpu_lora.train.resolve_options import find_recipe

CHAIN = """
model = "{tmp}/model"
[[stage]]
kind = "finetune"
name = "sft"
data = "{tmp}/rows.jsonl"
recipe = "{tmp}/recipe.toml"
max_steps = 4
save_steps = 2
[[stage]]
kind = "finetune"
name = "more"
data = "{tmp}/rows.jsonl"
recipe = "{tmp}/recipe.toml"
init_adapter = "{{sft}}"
max_steps = 2
[[stage]]
kind = "merge"
adapter = "{{more}}"
[[stage]]
kind = "gguf"
adapter = "{{more}}"
quantize = ["q8_0", "f16"]
stem = "tiny"
[[stage]]
kind = "cards"
title = "Tiny"
adapters = ["{{sft}}", "{{more}}"]
files_of = ["{{gguf}}"]
[[stage]]
kind = "push"
repo = "me/tiny"
adapters = ["{{sft}}", "{{more}}"]
files_of = ["{{gguf}}"]
card = "{{cards}}"
"""
RECIPE = """
max_length = 16
per_device_train_batch_size = 1
gradient_accumulation_steps = 1
lora_r = 4
learning_rate = 1e-2
logging_steps = 1
"""


def write_chain(place: Path) -> Path:
    small(place / "model", "qwen2")
    write_jsonl(place / "rows.jsonl", *({"input_ids": [i + 1, *range(5, 12)]} for i in range(6)))
    (place / "recipe.toml").write_text(RECIPE)
    (place / "chain.toml").write_text(CHAIN.format(tmp=place))
    return place / "chain.toml"


class KilledError(BaseException):
    pass


class Killed(ChainWatch):
    """Ends the first run as if it were killed, after its third step."""

    @contextmanager
    def training(self, job: Any) -> Iterator[Events]:
        def step(result: Any) -> None:
            if result.step == 3:
                raise KilledError

        yield hearing(step=step)


def test_from_rows_to_an_upload(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = write_chain(tmp_path)
    chain = read_chain(str(path), str(tmp_path / "out"))
    with pytest.raises(KilledError):
        run(chain, Killed())
    assert [status.why for status in stage_statuses(chain)][:2] == ["it was interrupted", "'sft' runs before it"]
    assert main(["run", str(path), "--output", str(chain.output)]) == 0
    output = capsys.readouterr().out
    assert "resumed" in output
    assert "dry run   " in output
    assert not [status for status in stage_statuses(chain) if status.why]
    pushed = json.loads((chain.output / "push" / "push.json").read_text())
    assert (pushed["repo"], pushed["private"], pushed["uploaded"]) == ("me/tiny", True, None)
    files = pushed["files"]
    assert {"README.md", "sft/README.md", "sft/adapter_model.safetensors", "more/adapter_config.json"} <= files.keys()
    assert {"tiny-q8_0.gguf", "tiny-f16.gguf"} <= files.keys()
    assert not [name for name in files if "run.json" in name or "last" in name]
    card = (chain.output / "cards" / "README.md").read_text()
    assert all(files[name]["sha256"] in card for name in ("tiny-q8_0.gguf", "sft/adapter_model.safetensors"))
    assert (chain.output / "merge" / "model.safetensors").exists()
    # A card that is written by hand is uploaded, and trains nothing again.
    (chain.output / "sft" / "README.md").write_text("By hand.\n")
    assert {status.link.name: status.why for status in stage_statuses(chain) if status.why} == {
        "cards": "README.md changed",
        "push": "'cards' runs before it",
    }
    assert main(["run", str(path), "--output", str(chain.output), "--list"]) == 0
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("max_steps = 2", "max_stepz = 2", "stage 2 ('more') has an unknown option 'max_stepz': did you mean"),
        ("max_steps = 2", 'output = "x"', "stage 2 ('more') has the option 'output', which the chain chooses"),
        ("learning_rate = 1e-2", "learning_rate = -1", "learning_rate"),
        ('"f16"]', '"f17"]', "'f17' is no type of GGUF files"),
        ('"me/tiny"', '"a/b/c"', "stage 6 ('push'): 'a/b/c' is not a valid name"),
        ('kind = "merge"', 'kind = "merge"\ndtype = "f99"', "stage 3 ('merge'): 'dtype' is 'f99', but must be one of"),
        (
            'repo = "me/tiny"\nadapters = ["{sft}", "{more}"]',
            'repo = "me/tiny"\nadapters = ["{sft}/best", "{more}/best"]',
            "several of 'adapters' would be the folder 'best'",
        ),
        ('stem = "tiny"', 'stem = "../x"', "'stem' is '../x'"),
    ],
)
def test_mistakes(tmp_path: Path, capsys: Any, before: str, after: str, words: str) -> None:
    path = write_chain(tmp_path)
    for file in (path, tmp_path / "recipe.toml"):
        file.write_text(file.read_text().replace(before, after))
    assert main(["run", str(path), "--output", str(tmp_path / "out")]) == 2
    output = capsys.readouterr()
    assert (output.err.count("\n"), words in output.err, output.out) == (1, True, ""), output.err
    assert not (tmp_path / "out").exists()


def test_a_chain_is_no_recipe(tmp_path: Path, capsys: Any) -> None:
    path = write_chain(tmp_path)
    assert main(["finetune", "--recipe", str(path), "--data", str(tmp_path / "rows.jsonl")]) == 2
    assert "is a chain of stages, not a recipe: run it with 'wgpu-lora run" in capsys.readouterr().err


@pytest.mark.rare
def test_processes_killed_at_random(tmp_path: Path) -> None:
    """SIGKILL or SIGINT after a random time, until a run ends by itself: the same adapters as without."""
    path = write_chain(tmp_path)
    command = [sys.executable, "-m", "wgpu_lora", "run", str(path), "--output"]
    environment = os.environ | {"WGPU_LORA_NO_TUNE": "1"}
    start = time.monotonic()
    assert subprocess.run([*command, str(tmp_path / "whole")], env=environment, capture_output=True).returncode == 0
    whole, rng = time.monotonic() - start, random.Random(seeds(1, "chain")[0])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".chain.json.k_9wa2xt.tmp").write_text("{")  # of a process that was killed while it wrote
    ends = []
    for attempt in range(40):
        process = subprocess.Popen([*command, str(tmp_path / "out")], env=environment, stdout=subprocess.DEVNULL)
        try:
            ends.append(process.wait(whole * rng.uniform(0.05, 0.25) * (1 + attempt / 4)))
        except subprocess.TimeoutExpired:
            process.send_signal(rng.choice([signal.SIGKILL, signal.SIGINT]))
            ends.append(process.wait(60))
        assert ends[-1] in (0, -9, 130), ends
        if ends[-1] == 0:
            break
    assert ends[-1] == 0
    assert len(ends) > 1
    for name in ("sft", "more"):
        assert file_digest(tmp_path / "whole" / name / WEIGHTS) == file_digest(tmp_path / "out" / name / WEIGHTS)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )


def test_a_chain_does_not_read_what_it_writes(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "data").mkdir()
    rows = write_jsonl(tmp_path / "data" / "rows.jsonl", {"prompt": "a", "completion": "b"})
    path = tmp_path / "chain.toml"
    command = ["run", str(path), "--output", str(tmp_path / "data" / "out")]
    for inputs in ("", "out/*.json", ""):
        path.write_text(f'[[stage]]\nkind = "prepare"\ninputs = ["{tmp_path}/data/{inputs}"]\n')
        assert main(command) == 2
        assert "includes what the chain writes: choose another --output" in capsys.readouterr().err
    path.write_text(f'[[stage]]\nkind = "prepare"\ninputs = ["{rows}"]\n')
    assert main(command) == 0


def of_demo(place: Path) -> Chain:
    """The chain with the demo model, and made-up rows of the published counts."""
    text = find_recipe("persona").read_text()
    assert 'model = "Qwen/Qwen3.5-9B"' in text
    text = text.replace('"persona-data"', f'"{place / "rows"}"')
    (place / "persona.toml").write_text(text)
    (place / "rows").mkdir()
    chats = [{"messages": [*chat(f"question {i}", f"answer {i}")]} for i in range(1886)]
    pairs = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(180)]
    write_jsonl(place / "rows" / "chats.jsonl", *chats)
    write_jsonl(place / "rows" / "pairs.jsonl", *pairs)
    return read_chain(str(place / "persona.toml"), str(place / "out"), model="demo")


def test_the_published_steps(tmp_path: Path, device: Device) -> None:
    chain = of_demo(tmp_path)
    stages: dict[str, Any] = {link.name: link.stage for link in chain.links}
    assert [*stages] == ["prepare", "sft", "dpo", "merge", "gguf", "cards", "push"]
    chain.output.mkdir()
    stages["prepare"].run(chain.output / "prepare", Watch(), False)
    make_adapter(chain.output / "sft", DEMO_MODEL, r=64, lora_alpha=128)
    model = open_model("demo")

    def run_of(name: str, **changes: Any) -> Any:
        return prepare_run(stages[name].arguments(output=str(tmp_path / name), **changes), model)

    sft, dpo = run_of("sft"), run_of("dpo")
    assert (len(sft.stream.prepared.samples), sft.stream.total_steps()) == (1886, 177)
    assert (len(dpo.stream.prepared.samples), dpo.stream.total_steps()) == (180, 45)
    # transformers counts ceil(ceil(rows / batch) / accumulation) steps of each epoch, so does the recipe by itself.
    assert run_of("dpo", max_steps=-1).stream.total_steps() == 2 * 23
    for args, expected in (
        (sft.args, (64, 128, 0.05, 3, 1e-4, 0.05, 0.01, 16, 2, 1024, False)),
        (dpo.args, (64, 128, 0.05, 2, 5e-6, 0.1, 0.0, 4, 2, 1024, False)),
    ):
        assert expected == (
            args.lora_r, args.lora_alpha, args.lora_dropout, args.num_train_epochs, args.learning_rate,
            args.warmup_ratio, args.weight_decay, args.per_device_train_batch_size, args.gradient_accumulation_steps,
            args.max_length, args.packing,
        )  # fmt: skip
    assert (dpo.args.objective, dpo.args.beta, dpo.args.reference_adapter) == ("dpo", 0.1, str(chain.output / "sft"))
    assert (dpo.trainable.config.r, dpo.trainable.config.lora_alpha) == (64, 128)


def test_what_it_ends_with(tmp_path: Path) -> None:
    stages = {link.name: link.stage for link in of_demo(tmp_path).links}
    gguf, push = stages["gguf"], stages["push"]
    assert isinstance(gguf, Gguf)
    assert gguf.quantize == ["q4_k_m", "q5_k_m", "q6_k"]
    assert isinstance(push, Push)
    assert (push.private, push.dry_run, len(push.adapters), len(push.files_of)) == (True, True, 2, 1)


def test_an_interrupted_chain_says_how_to_continue(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """In a stage other than training."""
    monkeypatch.setattr("wgpu_lora.train.chain.chain_run.run", Mock(side_effect=KeyboardInterrupt))
    path = write_chain(tmp_path)
    assert main(["run", str(path)]) == 130
    assert f"run {path}" in capsys.readouterr().out
