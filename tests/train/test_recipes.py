"""Every bundled recipe states its needs, runs on the demo model when shortened, and trains the stated parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.cli import Run
from support.gguf_models import make_adapter
from support.rows.data import write_jsonl
from support.sampling import sample

from wgpu_lora.api.teacher_caches import teacher_cache
from wgpu_lora.cli.app import main
from wgpu_lora.files.assets import DEMO_MODEL, DEMO_TRAIN, asset_dir
from wgpu_lora.models.adapter_modules import resolve_target_modules
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.train.options.training_arguments import from_values
from wgpu_lora.train.resolve_options import find_recipe, read_recipe

FILES = sorted(Path(str(asset_dir("recipes"))).glob("*.toml"))
CHAINS = [path.stem for path in FILES if "[[stage]]" in path.read_text()]
RECIPES = [path.stem for path in FILES if path.stem not in CHAINS]
# Those that differ in little more than the time; one of them runs.
TIMED = [name for name in RECIPES if name.startswith("wallclock-")]
PAIRS, RECOVERS = ["persona-dpo"], ["recover-q2"]


@pytest.mark.parametrize("name", sample([name for name in RECIPES if name not in TIMED[1:]], 1 / 3))
def test_it_runs_cut_down(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(DEMO_TRAIN.read_text().splitlines(keepends=True)[:4]))
    if name in PAIRS:
        write_jsonl(rows, *({"prompt": f"Write {i}", "chosen": "good", "rejected": "bad"} for i in range(4)))
    cut = ["--model", "demo", "--data", str(rows), "--output", str(tmp_path / "run"), "--max-steps", "2"]
    cut += ["--per-device-train-batch-size", "1", "--gradient-accumulation-steps", "1", "--max-length", "64"]
    # One rank, no dropout and no checkpointing: the runs then share their compiled kernels.
    cut += ["--no-packing", "--lora-r", "4", "--lora-dropout", "0", "--no-gradient-checkpointing"]
    cut += ["--target-modules", "all-linear", "--base-dtype", "q2a4" if name in RECOVERS else "nf4"]
    if name in RECOVERS:
        teacher_cache("demo", str(rows), tmp_path / "cache", top_k=8, random=0, length=64, progress_bar=False)
        cut += ["--teacher-cache", str(tmp_path / "cache")]
    if name in PAIRS:
        cut += ["--reference-adapter", str(make_adapter(tmp_path / "adapter", DEMO_MODEL))]
    assert main(["finetune", "--recipe", name, *cut]) == 0, capsys.readouterr().err
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["stop_reason"] in ("max steps", "target seconds")
    recipe = read_recipe(find_recipe(name))
    for option in ("learning_rate", "lora_alpha", "weight_decay", "warmup_ratio", "enable_thinking", "target_seconds"):
        if option in recipe:
            assert facts["options"][option] == recipe[option]
    assert {"step", "seconds", "last_loss", "total_steps"} <= facts["state"].keys()
    assert len(facts["adapter_sha256"]) == 64


@pytest.mark.parametrize("name", RECIPES)
def test_its_header_says_what_a_reader_needs(name: str) -> None:
    from_values(read_recipe(find_recipe(name)), name)
    check_header(name)


def check_header(name: str) -> None:
    text = find_recipe(name).read_text()
    header = text.split("\n", 1)[0]
    assert header.startswith("# ")
    assert len(header) > 40
    if name != "demo":
        assert "# Reproduces:" in text
        assert "# Needs:" in text


@pytest.mark.parametrize("name", CHAINS)
def test_chains_say_so_too(name: str, run: Run) -> None:
    check_header(name)
    assert run("recipes", "show", name).output() == find_recipe(name).read_text()
    assert f"run it with 'wgpu-lora run {name}'" in run("finetune", "--recipe", name).refusal()


@pytest.mark.parametrize(
    ("recipe", "shape", "trained"),
    [
        ("instruct-qlora", "qwen3-8b", 7_667_712),
        ("instruct-qlora", "qwen2.5-7b", 5_046_272),
        ("hive-mind-0.5b", "qwen2.5-0.5b", 4_399_104),
        *[(f"wallclock-0.5b-{name}", "qwen2.5-0.5b", 270_336) for name in ("15m", "30m", "60m")],
        *[(f"wallclock-7b-{name}", "qwen2.5-7b", 1_261_568) for name in ("3m", "15m", "30m", "h100")],
        ("persona-sft", "qwen3-0.6b", 40_370_176),
        ("persona-sft", "qwen3.5-9b", 173_113_344),
    ],
)
def test_trained_parameters(recipe: str, shape: str, trained: int) -> None:
    args, config = from_values(read_recipe(find_recipe(recipe)), recipe), shape_config(shape)
    assert (
        sum(args.lora_r * sum(config.lora_modules[m]) for m in resolve_target_modules(args.target_modules, config))
        == trained
    )
    assert f"{trained:,}" in find_recipe(recipe).read_text()


def test_list_and_show(run: Run) -> None:
    listed = run("recipes", "list").output()
    assert all(name in listed for name in (*RECIPES, *CHAINS))
    assert run("recipes", "show", "persona-sft").output() == find_recipe("persona-sft").read_text()
    assert "persona-sft" in run("recipes", "show", "nothing").refusal()


def test_results_do_not_hide_what_they_are_named_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """A recipe's or a chain's results have its name, and it runs, is resumed and listed again beside them."""
    monkeypatch.chdir(tmp_path)
    for name in ("persona", "persona-sft"):
        (tmp_path / name).mkdir()
        assert find_recipe(name).is_file()
    (tmp_path / "persona-data").mkdir()
    (tmp_path / "persona-data" / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert "finetune" in run("run", "persona", "--list", "--model", "demo").output()


def test_synthetic_rows(tmp_path: Path, run: Run) -> None:
    def make(name: str, *more: str) -> int:
        return run("recipes", "data", "hive-mind-0.5b", str(tmp_path / name), *more).code

    assert make("a.jsonl") == make("b.jsonl") == make("c.jsonl", "--seed", "1", "--rows", "9") == 0
    text = (tmp_path / "a.jsonl").read_text()
    assert text == (tmp_path / "b.jsonl").read_text()
    assert len({json.loads(line)["prompt"] for line in text.splitlines()}) == len(text.splitlines()) == 1500
    assert len((tmp_path / "c.jsonl").read_text().splitlines()) == 9
    assert make("a.jsonl") == 2
    assert "hive-mind-0.5b" in run("recipes", "data", "persona-sft", str(tmp_path / "d.jsonl")).refusal()
