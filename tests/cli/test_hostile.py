"""Files that are damaged, or made to harm: each is refused by a sentence, at little cost."""

from __future__ import annotations

import json
import math
import os
import random
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
from support.cli import MODELS, QWEN2, SMALL, Run, flags, write_rows
from support.fuzz import targets as fuzz
from support.models import FIXTURES, save_golden_adapter
from support.rows.hostile import refused
from support.sampling import sample
from support.training.shared_runs import edit_json

from wgpu_lora.data import Tokenizer
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import replace_directory
from wgpu_lora.formats.hub_upload import prepare
from wgpu_lora.formats.peft_adapter import WEIGHTS, read_adapter
from wgpu_lora.formats.safetensors_checkpoint import Checkpoint
from wgpu_lora.formats.safetensors_header import read_header
from wgpu_lora.models.architectures import load_config, parse_config
from wgpu_lora.models.config_fields import MOST
from wgpu_lora.models.export.adapter_merge import merge_adapter
from wgpu_lora.train.adapter_tasks import read_tasks, task_of
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values
from wgpu_lora.train.resolve_options import read_recipe

LAYER = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.weight"


def write_header(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[object, int | None, str]] = {
    "length beyond the file": ({}, 2**63, "not a complete safetensors file"),
    "length of the whole file": ({"a": entry(0, 4, [1])}, 2**20, "not a complete safetensors file"),
    "many megabytes": (b'{"a":"' + b"x" * (9 << 20) + b'"}', None, "longer than"),
    "many values": (b'{"a":[' + b"[]," * 300_000 + b"[]]}", None, "more than 200,000 values"),
    "many keys": (json.dumps({str(i): {} for i in range(250_000)}).encode(), None, "more than 200,000 values"),
    "nested": (b'{"a":' + b"[" * 90_000 + b"]" * 90_000 + b"}", None, "nested too deeply"),
    "twice a name": (b'{"a":' + json.dumps(entry(0, 4, [1])).encode() + b',"a":{}}', None, "'a' is repeated"),
    "not an object": (b"[1]", None, "JSON list"),
    "half a character": (b'{"\\ud800":{}}', None, "surrogates"),
    "overlapping": ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, None, "overlap"),
    "beyond the end": ({"a": entry(0, 4000, [1000])}, None, "truncated"),
    "a shape that does not fit": ({"a": entry(0, 12, [2])}, None, "is invalid for a"),
    "an absurd shape": ({"a": entry(0, 0, [2**62, 2**62, 0])}, None, "is invalid for a"),
    "too many dimensions": ({"a": entry(0, 4, [1] * 99)}, None, "is invalid for a"),
    "a negative offset": ({"a": entry(-4, 0, [1])}, None, "is invalid for a"),
    "a number of many digits": (b'{"a":{"dtype":"F32","shape":[' + b"9" * 9000 + b"]}}", None, "JSON"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADERS)
def test_safetensors_headers(tmp_path: Path, kind: str) -> None:
    header, length, words = HEADERS[kind]
    path = write_header(tmp_path / "model.safetensors", header, b"\0" * 12, length)
    refused(lambda: read_header(path), words)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    refused(lambda: load_config(tmp_path), "not a regular file")
    os.mkfifo(tmp_path / "model.safetensors")
    refused(lambda: Checkpoint(tmp_path), "not a regular file")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("/dev/zero")
    refused(lambda: Checkpoint(tmp_path), "not a regular file")


def test_a_link_out_of_a_model_is_not_copied(tmp_path: Path) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    model, secret = tmp_path / "model", tmp_path / "secret"
    model.mkdir()
    for path in Path(QWEN2).iterdir():
        (model / path.name).symlink_to(path) if path.suffix == ".safetensors" else (model / path.name).write_bytes(
            path.read_bytes()
        )
    secret.write_text("key")
    (model / "notes.txt").symlink_to(secret)
    refused(lambda: merge_adapter(model, adapter, tmp_path / "merged"), "link to a file outside")
    assert not (tmp_path / "merged").exists()
    (model / "notes.txt").unlink()
    merge_adapter(model, adapter, tmp_path / "merged")  # weights may be kept elsewhere


def test_files_of_the_hubs_cache_are_linked(tmp_path: Path) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in Path(QWEN2).iterdir():
        (blobs / path.name).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    merge_adapter(snapshot, adapter, tmp_path / "merged")
    assert (tmp_path / "merged" / "generation_config.json").is_file()


def test_replacing_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    precious, link, new = tmp_path / "precious", tmp_path / "best", tmp_path / "new"
    precious.mkdir()
    (precious / "a").write_text("a")
    link.symlink_to(precious)
    new.mkdir()
    replace_directory(new, link)
    assert (precious / "a").read_text() == "a"
    assert not link.is_symlink()


ODD_VALUES = [7, [1], {"a": 1}, True, 1.5, "a\0b", "\udcff"]
FINE = [("target_modules", "a\0b"), ("target_modules", "\udcff"), ("lora_alpha", 7), ("lora_alpha", 1.5)]
FINE += [("rank_pattern", {"a": 1})]  # type: ignore[list-item]
KEYS = ("base_model_name_or_path", "lora_alpha", "r", "target_modules", "rank_pattern")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        *((key, value, ".") for key in KEYS for value in ODD_VALUES if (key, value) not in FINE or value is True),
        *(("lora_alpha", value, "lora_alpha") for value in (10**400, 1e300, 1e-46, 0, -1.0, float("nan"))),
        ("rank_pattern", {"(" * 5000: 4}, "bad pattern"),
        ("rank_pattern", {"(?=(([a-z_.0-9]+)+)+!)": 4}, "exceeded its computation limit"),
        ("alpha_pattern", {f"m{i}": 1 for i in range(3000)}, "more than 2,000 patterns"),
        ("r", 10**30, "do not fit rank|must be at most 2147483648"),
        ("lora_alpha", float("inf"), "must be a whole number or a finite number"),
    ],
)
def test_adapter_configs(tmp_path: Path, key: str, value: object, words: str) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    edit_json(adapter / "adapter_config.json", **{key: value})
    save_file(load_file(adapter / WEIGHTS), adapter / WEIGHTS)  # without digests, as others save it
    refused(lambda: prepare(adapter) if words == "." else read_adapter(adapter), words)


def test_a_pattern_that_backtracks_is_only_a_pattern(tmp_path: Path) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    patterns = {"(([a-z_.0-9]+)+)+!": 4, "(a|a)*(a|a)*b": 4, "((a{1000}){1000}){1000}": 4}
    edit_json(adapter / "adapter_config.json", rank_pattern=patterns)
    save_file(load_file(adapter / WEIGHTS), adapter / WEIGHTS)
    assert read_adapter(adapter)[1]


@pytest.mark.parametrize("name", ["../../x", LAYER.format("9" * 20), LAYER.format("\u0663")])
def test_names_of_adapters_tensors(tmp_path: Path, name: str) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    write_header(adapter / "adapter_model.safetensors", {name: entry(0, 4, [1, 1])}, b"\0" * 4)
    refused(lambda: read_adapter(adapter), "not a LoRA factor|holds only lora_A")


def test_a_name_does_not_reach_the_terminal_as_it_is(tmp_path: Path, run: Run) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    write_header(adapter / "adapter_model.safetensors", {"\x1b[2Jx\u202e": entry(0, 4, [1, 1])}, b"\0" * 4)
    arguments = ["merge", "--model", QWEN2, "--adapter", str(adapter), "--output", str(tmp_path / "m")]
    shown = run(*arguments).refusal()
    assert "\\x1b[2Jx\\u202e" in shown
    assert "\x1b" not in shown


def test_a_tokenizer_or_template_of_any_size(tmp_path: Path) -> None:
    for name, most in (("tokenizer.json", 65 << 20), ("chat_template.jinja", 2 << 20)):
        if name != "tokenizer.json":
            (tmp_path / "tokenizer.json").write_bytes(fuzz.small_tokenizer())
        with (tmp_path / name).open("wb") as file:
            file.truncate(most)
        refused(lambda: Tokenizer.load(tmp_path), "regular file of at most")
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        refused(lambda: Tokenizer.load(tmp_path), "regular file of at most")
        (tmp_path / name).unlink()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
@pytest.mark.parametrize("text", [b'{"a": 1, "a": 2}', b"[" * 100_000, b"\xff", b"[]", b'{"a": "' + b"x" * (9 << 20)])
def test_a_tokenizers_settings(tmp_path: Path, name: str, text: bytes) -> None:
    demo = FIXTURES.parent.parent / "wgpu_lora" / "demo" / "model"
    (tmp_path / "tokenizer.json").write_bytes((demo / "tokenizer.json").read_bytes())
    (tmp_path / name).write_bytes(text)
    with pytest.raises(UserError, match=name):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_nothing_but_user_errors_comes_out(tmp_path: Path, target: str) -> None:
    """A few of the inputs that `make fuzz` makes, and without its guidance."""
    fuzzed, seeds, rng = fuzz.TARGETS[target], fuzz.seeds(target), random.Random(target)
    run, shaped = fuzzed.open(tmp_path), fuzzed.mutate
    for _ in range(60 if fuzzed.share <= fuzz.SLOW else 250):
        data = bytearray(rng.choice(seeds))
        kind = rng.random()
        if shaped and kind < 0.6:
            data = bytearray(shaped(bytes(data), rng))
        elif kind < 0.7:
            del data[rng.randrange(len(data)) :]
        else:
            for at in (rng.randrange(min(len(data), 4000)) for _ in range(rng.randint(1, 8))):
                data[at] = rng.randrange(256)
        try:
            run(bytes(data))
        except UserError:
            continue
    run(seeds[0])  # what is valid is taken


# -- numbers, names and sizes that nobody means ------------------------------------------------------------------------

HUGE = (10**400, -(10**400), 2**70, 2**63, -1, 1.5, True, None, "8", [8], {}, math.nan, math.inf)


def stated(architecture: str = "qwen2", **changes: Any) -> dict[str, Any]:
    return json.loads((MODELS / architecture / "config.json").read_text()) | changes


# -- config.json -------------------------------------------------------------------------------------------------------


UNSET = ("head_dim", "num_key_value_heads", "sliding_window", "original_max_position_embeddings")


@pytest.mark.parametrize("name", sorted(MOST))
def test_no_size_of_a_config_is_taken_on_trust(name: str) -> None:
    """Whatever is no whole number within what models have is refused by name, and at once."""
    settings: dict[str, Any] = {"use_sliding_window": True, "layer_types": None} if "window" in name else {}
    of = "qwen3_5_text" if name.startswith("linear_") else "phi3" if name.startswith("original_") else "qwen2"
    begin = time.monotonic()
    for value in (*HUGE, MOST[name] + 1, 2**31 - 1 if MOST[name] < 2**31 - 1 else 2**31):
        if value is None and name in UNSET:
            continue  # as if it were not there
        with pytest.raises(UserError, match=name) as caught:
            parse_config(stated(of, **{**settings, name: value}), "c.json")
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
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, text=True, timeout=60
    )
    assert "is missing from the shards" in process.stdout, process.stderr


# -- options -----------------------------------------------------------------------------------------------------------

NUMBERS = [f for f in TrainingArguments.__dataclass_fields__.values() if f.type in ("int", "float", "float | None")]


@pytest.mark.parametrize("name", [f.name for f in NUMBERS])
def test_no_number_of_an_option_is_taken_on_trust(name: str) -> None:
    """From a recipe or from Python: each is taken, or refused by its name; nothing else comes out."""
    values, messages = [], []
    for value in (10**400, -(10**400), 2**70, 2**33, 1e300, 1e39, 1e-300, 1e-46, -1e300, math.nan, math.inf, -math.inf):
        try:
            values.append(getattr(from_values({name: value}, "the recipe"), name))
        except UserError as error:
            messages.append(str(error).replace("-", "_"))
    assert all(name in text and len(text) < 300 for text in messages), messages
    assert all(np.isfinite(np.float32(value)) and abs(value) < 2**33 for value in values), values


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


# -- adapters ----------------------------------------------------------------------------------------------------------


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
    assert (
        "values larger than 1,048,576"
        in run(
            "finetune", *flags(**SMALL, model=QWEN2, data=data, output=tmp_path / "o", init_adapter=adapter)
        ).refusal()
    )
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
        assert "not finite" in run(*command).refusal()
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
    process = subprocess.run([*command, "--output", bytes(tmp_path / "o") + b"\xff"], capture_output=True, timeout=60)
    assert process.returncode == 2
    assert process.stderr.startswith(b"wgpu-lora: --output must be UTF-8 text")
    assert process.stderr.count(b"\n") == 1
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
        assert "UTF-8" in run(*command).refusal()
    assert not list(odd.iterdir())
