"""Numbers, names and sizes that nobody means: one sentence before anything is built, and never a traceback."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.cli import MODELS, QWEN2, SMALL, Run, commands, flags, write_rows
from support.models import save_golden_adapter
from support.sampling import sample

from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import WEIGHTS
from wgpu_lora.models.architectures import parse_config
from wgpu_lora.models.config_fields import MOST
from wgpu_lora.train.adapter_tasks import read_tasks, task_of
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values
from wgpu_lora.train.resolve_options import read_recipe

HUGE = (10**400, -(10**400), 2**70, 2**63, -1, 1.5, True, None, "8", [8], {}, math.nan, math.inf)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return commands(capsys)


def stated(architecture: str = "qwen2", **changes: Any) -> dict[str, Any]:
    return json.loads((MODELS / architecture / "config.json").read_text()) | changes


# -- config.json -----------------------------------------------------------------------------------------------------


UNSET = ("head_dim", "num_key_value_heads", "sliding_window", "original_max_position_embeddings")


@pytest.mark.parametrize("name", sorted(MOST))
def test_no_size_of_a_config_is_taken_on_trust(name: str) -> None:
    """Whatever is no whole number within what models have is refused by name, and at once."""
    needed: dict[str, Any] = {"use_sliding_window": True, "layer_types": None} if "window" in name else {}
    of = "qwen3_5_text" if name.startswith("linear_") else "phi3" if name.startswith("original_") else "qwen2"
    begin = time.monotonic()
    for value in (*HUGE, MOST[name] + 1, 2**31 - 1 if MOST[name] < 2**31 - 1 else 2**31):
        if value is None and name in UNSET:
            continue  # as if it were not there
        with pytest.raises(UserError, match=name) as caught:
            parse_config(stated(of, **{**needed, name: value}), "c.json")
        assert len(str(caught.value)) < 300
    assert time.monotonic() - begin < 5


ROPE = ("rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast",
        "beta_slow", "attention_factor")  # fmt: skip


@pytest.mark.parametrize("name", ROPE)
@pytest.mark.parametrize("value", [10**400, -(10**400), 1e300, 1e-300, 0, -1, True, "8", [8], {}, math.nan, math.inf])
def test_no_number_of_a_rope_is_taken_on_trust(name: str, value: Any) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, name: value}
    if name == "original_max_position_embeddings" and value == 0 and value is not True:
        return  # as if it were not there
    with pytest.raises(UserError, match=r"c\.json"):
        parse_config(stated(rope_parameters=rope), "c.json")


@pytest.mark.parametrize("value", [10**400, [10**400], [1, -1], 1.5, "a", [[1]], {"a": 1}, 2**31])
def test_no_token_id_is_taken_on_trust(value: Any) -> None:
    with pytest.raises(UserError, match="eos_token_id"):
        parse_config(stated(eos_token_id=value), "c.json")


def test_a_config_of_many_layers_costs_nothing(tmp_path: Path) -> None:
    """In a process with little memory: as many layers as may be, of which none is there."""
    shutil.copytree(MODELS / "qwen2", tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps(stated(num_hidden_layers=1000, layer_types=None)))
    code = (
        "import resource, sys, wgpu_lora.models.model_files as f\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n"
        "try: f.read_model(sys.argv[1])\nexcept f.UserError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, text=True, timeout=60)
    assert "is missing from the shards" in done.stdout, done.stderr


# -- options ---------------------------------------------------------------------------------------------------------

NUMBERS = [f for f in TrainingArguments.__dataclass_fields__.values() if f.type in ("int", "float", "float | None")]


@pytest.mark.parametrize("name", [f.name for f in NUMBERS])
def test_no_number_of_an_option_is_taken_on_trust(name: str) -> None:
    """From a recipe or from Python: each is taken, or refused by its name; nothing else comes out."""
    taken, said = [], []
    for value in (10**400, -(10**400), 2**70, 2**33, 1e300, 1e39, 1e-300, 1e-46, -1e300, math.nan, math.inf, -math.inf):
        try:
            taken.append(getattr(from_values({name: value}, "the recipe"), name))
        except UserError as error:
            said.append(str(error).replace("-", "_"))
    assert all(name in text and len(text) < 300 for text in said), said
    assert all(np.isfinite(np.float32(value)) and abs(value) < 2**33 for value in taken), taken


SIZES = ["9" * 400 + "GiB", "1e400", "0x10", "١٠GB", "1" + "0" * 15 + ".1TiB", "", "-1GB"]
TEXTS = ("output", "data", "model", "eval_data", "init_adapter", "device", "memory_budget")
NO_TEXTS = ("a\0b", "a\udcffb")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *((name, value, f"^{name} must be UTF-8 text") for name in TEXTS for value in NO_TEXTS),
        *(("memory_budget", size, r"^memory_budget") for size in SIZES),
    ],
)
def test_texts_that_are_none(name: str, value: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        TrainingArguments(**{name: value})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        *((key, value, f"'{key}' must be UTF-8 text") for key in ("data", "checkpoint", "name") for value in NO_TEXTS),
        *(("weight", value, "'weight' must be a number") for value in (10**400, 1e300, 0, -1, math.nan, "1", True)),
    ],
)
def test_values_of_adapters_that_are_none(key: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        task_of({"data": "a", "checkpoint": "b", key: value}, "x")


@pytest.mark.parametrize(
    "text",
    [b"a = " + b"[" * 5000 + b"]" * 5000, b"a." * 4000 + b"b = 1", b"\xff\xfe", b"a = 1\na = 2", b"x" * (2 << 20),
     b'output = "a\\u0000b"', b"lora_r = " + b"9" * 5000, b"lora_r = 1180591620717411303424", b"lora_r = inf",
     b"[table]\na = 1", b"\0", b"lora_r = 0x" + b"f" * 5000, b"seed = 0b" + b"1" * 9000,
     b".".join([b"a"] * 60_000) + b" = 1", b"[" + b".".join([b"a"] * 60_000) + b"]"],
    ids=range(15),
)  # fmt: skip
def test_recipes_and_adapters_files_that_are_none(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "odd.toml"
    path.write_bytes(text)
    with pytest.raises(UserError):
        from_values(read_recipe(path), "the recipe")
    for body in (text, b"[[adapter]]\n" + text):
        path.write_bytes(body)
        with pytest.raises(UserError):
            [task.arguments(TrainingArguments()) for task in read_tasks(path)]


@pytest.mark.parametrize("rank", [500_000, 3_000_000, 1_000_000_000, 2**31, 2**70, 10**400])
@pytest.mark.parametrize("where", ["plan", "finetune", "adapters.toml"])
def test_a_rank_is_looked_at_before_anything_is_built(run: Run, tmp_path: Path, rank: int, where: str) -> None:
    options = {**SMALL, "model": QWEN2, "memory_budget": "1GiB"}
    if where == "adapters.toml":
        write_rows(tmp_path / "rows.jsonl")
        text = f'[[adapter]]\ndata = "{tmp_path}/rows.jsonl"\ncheckpoint = "{tmp_path}/c"\nrank = {rank}\n'
        (tmp_path / "a.toml").write_text(text)
        arguments = ["plan", *flags(**options), "--adapters-config", tmp_path / "a.toml"]
    else:
        options |= {"data": write_rows(tmp_path / "rows.jsonl"), "lora_r": rank, "output": tmp_path / "out"}
        arguments = [where, *flags(**options)]
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    code, out, err = run(*arguments)
    assert code == 2 or "does not fit" in out
    assert (code, err.count("\n")) in ((2, 1), (0, 0))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10  # KiB
    assert time.monotonic() - begin < 30
    assert not (tmp_path / "out").exists()


# -- adapters --------------------------------------------------------------------------------------------------------


def poisoned(place: Path, value: float) -> Path:
    adapter = save_golden_adapter("qwen2", place)
    tensors = dict(load_file(adapter / WEIGHTS))
    name = sorted(tensors)[-1]
    tensors[name] = tensors[name].copy()
    tensors[name][0, 0] = value
    save_file(tensors, adapter / WEIGHTS, metadata={"format": "pt"})
    return adapter


def test_an_adapter_that_has_diverged_is_no_beginning(run: Run, tmp_path: Path) -> None:
    adapter, data = poisoned(tmp_path / "a", 3e6), write_rows(tmp_path / "rows.jsonl")
    code, _, err = run("finetune", *flags(**SMALL, model=QWEN2, data=data, output=tmp_path / "o", init_adapter=adapter))
    assert (code, err.count("\n")) == (2, 1)
    assert "values larger than 1,048,576" in err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("value", sample([math.nan, math.inf, -math.inf], 1 / 3))
def test_an_adapter_that_is_not_finite_is_nowhere_used(run: Run, tmp_path: Path, value: float) -> None:
    adapter, data = poisoned(tmp_path / "a", value), write_rows(tmp_path / "rows.jsonl")
    model = ["--model", QWEN2]
    for command in (
        ["finetune", *flags(**SMALL, data=data, output=tmp_path / "o", init_adapter=adapter), *model],
        ["generate", "--prompt", "a", "--adapter", adapter, *model],
        ["merge", "--output", tmp_path / "m", "--adapter", adapter, *model],
        ["push", adapter, "me/x", "--dry-run"],
    ):
        code, _, err = run(*command)
        assert (code, err.count("\n")) == (2, 1), (command, err)
        assert "not finite" in err
    assert not (tmp_path / "o").exists()
    assert not (tmp_path / "m").exists()
    for more in ([], ["--compare"]):
        evaluate = ["evaluate", "--data", data, "--max-length", 16, "--adapter", adapter, *model, *more]
        code, out, err = run(*evaluate, "--json")
        assert code == 1
        assert strict(out)["loss"] is None
        assert "not finite" in err
        assert run(*evaluate)[0] == 1


def test_a_loss_that_is_not_finite_is_said(run: Run, tmp_path: Path) -> None:
    """Of an adapter whose values are finite, and whose products are not."""
    adapter, data = save_golden_adapter("qwen2", tmp_path / "a"), write_rows(tmp_path / "rows.jsonl")
    save_file({n: t * 0 + np.float32(3e38) for n, t in load_file(adapter / WEIGHTS).items()}, adapter / WEIGHTS)
    evaluate = ["evaluate", "--data", data, "--max-length", 16, "--adapter", adapter, "--model", QWEN2]
    code, out, err = run(*evaluate, "--json")
    assert (code, strict(out)["loss"]) == (1, None)
    assert "not finite" in err
    code, out, err = run(*evaluate, "--compare", "--json")
    assert (code, [row["loss"] is None for row in strict(out)]) == (1, [False, True])


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# -- names on a terminal -----------------------------------------------------------------------------------------------


ODD_NAMES = ["run[/b]", "run[bold red]", "run\x1b]0;owned\x07", "a\x9bb", "run\u202e", "-x", "a\tb", r"$\frac{$"]


@pytest.mark.parametrize("name", sample(ODD_NAMES, 1 / 4))
def test_a_name_is_shown_and_does_nothing(run: Run, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path / f"{Path(name).name}.jsonl")
    options = {**SMALL, "model": QWEN2, "data": data, "max_steps": 1}
    code, out, err = run("finetune", *flags(**options), f"--output={name}")
    assert (code, err) == (0, "")
    assert (tmp_path / name / "run.json").is_file()
    for extra in (["push", f"./{name}", "me/x", "--dry-run"], ["report", f"./{name}", "--output", "page"]):
        code, more, err = run(*extra)
        assert (code, err) == (0, ""), err
        out += more
    assert all(c.isprintable() or c == "\n" for c in out)
    if "[" in name:
        assert name in out


@pytest.mark.skipif(os.name == "nt", reason="needs file names that are bytes, which Windows has not")
def test_a_name_that_is_not_utf8_is_refused_at_the_start(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    command = [sys.executable, "-m", "wgpu_lora", "finetune", *flags(**SMALL, model=QWEN2, data=data)]
    done = subprocess.run([*command, "--output", bytes(tmp_path / "o") + b"\xff"], capture_output=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(b"wgpu-lora: --output must be UTF-8 text")
    assert done.stderr.count(b"\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("name", ["a\udcff", "a\udc80b"])
def test_no_other_output_is_named_so(run: Run, tmp_path: Path, name: str) -> None:
    odd = tmp_path / name
    odd.mkdir()
    for command in (
        ["import", QWEN2, "--output", odd / "m"],
        ["merge", "--model", QWEN2, "--adapter", save_golden_adapter("qwen2", tmp_path / "a"), "--output", odd / "m"],
        ["push", odd, "me/x", "--dry-run"],
        ["demo", "--output", odd / "m", "--max-steps", 1],
    ):
        code, _, err = run(*command)
        assert (code, err.count("\n")) == (2, 1), (command[0], err)
        assert "UTF-8" in err
    assert not list(odd.iterdir())
