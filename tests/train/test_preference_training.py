"""Preference training: resuming, packing, cutting, wrong rows and options, TRL's curves, and the losses in float64."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import short_of
from support.cli import Run
from support.models import FIXTURES, save_golden_adapter
from support.rows.sources import write_source
from support.training.shared_runs import assert_close_adapters, assert_resumes_exactly, edit_json
from support.training.training import golden_arguments, model_dir

from wgpu_lora.api.evaluation import evaluate
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.data.tokenized_data import Cut
from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.adapter_tasks import AdapterTask
from wgpu_lora.train.job import Job
from wgpu_lora.train.objectives import cpo, dpo, kto, objective_of, orpo, preference
from wgpu_lora.train.objectives.preference import log_sigmoid, sigmoid
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values
from wgpu_lora.train.options.unused_options import unused_options
from wgpu_lora.train.prepare_job import prepare_job, prepare_multi_adapter_job
from wgpu_lora.train.run.records import RUN
from wgpu_lora.train.run.training_log import LOG, read_log


def pairs(path: Path, count: int = 6, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)

    def ids(least: int, most: int) -> list[int]:
        return rng.integers(0, 301, rng.integers(least, most)).tolist()

    return write_source(
        path,
        [{"prompt_ids": ids(1, 5), "chosen_ids": ids(2, 7), "rejected_ids": ids(2, 7)} for _ in range(count)],
    )


def job(directory: Path, **changes: Any) -> Job[Any]:
    directory.mkdir(exist_ok=True)
    options = {"objective": "dpo", "data": str(pairs(directory / "pairs.jsonl")), "max_steps": 4, "base_dtype": "f32"}
    return prepare_job(golden_arguments(directory, "qwen2", **{**options, **changes}))


@pytest.mark.parametrize("precompute", [False, True])
def test_resuming_gives_the_same_bytes(device: Device, tmp_path: Path, precompute: bool) -> None:
    """With dropout, held-out rows and a frozen adapter as the reference."""
    options = {
        "eval_data": str(pairs(tmp_path / "heldout.jsonl", 3, seed=1)),
        "lora_dropout": 0.1,
        "precompute_ref_log_probs": precompute,
        "reference_adapter": str(save_golden_adapter("qwen2", tmp_path / "frozen", scale=2.0)),
    }
    assert_resumes_exactly(job, tmp_path, **options)
    lines = read_log(tmp_path / "a" / "run" / LOG)
    assert {"eval_loss", "eval_rewards/accuracies", "eval_rewards/margins"} <= set(lines[0])
    assert {"loss", "rewards/chosen", "logps/rejected", "tokens_per_second"} <= set(lines[1])
    assert (tmp_path / "a" / "run" / "best").is_dir()
    save_golden_adapter("qwen2", tmp_path / "frozen", scale=3.0)
    with pytest.raises(UserError, match=r"The reference adapter of the run in .* has changed since it started"):
        job(tmp_path / "b", **options, max_steps=6, resume=True).train()


def test_packing_and_accumulation_do_not_change_the_result(device: Device, tmp_path: Path) -> None:
    """Six pairs per step, in batches of one or packed, with dropout: the same loss and adapter."""
    ways: list[dict[str, Any]] = [
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6},
        {"per_device_train_batch_size": 6, "packing": True, "precompute_ref_log_probs": True},
    ]
    losses = []
    shared = {"max_steps": 2, "lora_dropout": 0.2, "loss_type": "sigmoid,sft"}
    for number, way in enumerate(ways):
        job(tmp_path / str(number), **shared, **way).train()
        losses.append([line["loss"] for line in read_log(tmp_path / str(number) / "run" / LOG)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert_close_adapters(tmp_path / "1" / "run", tmp_path / "0" / "run", 1e-5)


def test_a_pipeline_logs_the_metrics_of_each_adapter(device: Device, tmp_path: Path) -> None:
    """Of different objectives, also in steps in which another adapter measures its held-out loss."""
    data, heldout = str(pairs(tmp_path / "pairs.jsonl")), str(pairs(tmp_path / "heldout.jsonl", 2, seed=1))
    own: list[dict[str, Any]] = [{"objective": "dpo", "eval_data": heldout}, {"objective": "orpo"}]
    tasks = [{"data": data, "checkpoint": str(tmp_path / item["objective"]), "rank": 2, **item} for item in own]
    options: dict[str, Any] = {"max_length": 16, "max_steps": 2, "eval_steps": 1, "logging_steps": 1}
    model, output = str(model_dir("qwen2")), str(tmp_path / "pipeline")
    MultiAdapterPipeline(tasks, model, output=output, schedule="synchronized", base_dtype="f32", **options).train()
    lines = read_log(tmp_path / "orpo" / LOG)
    assert len(lines) == 2
    for line in lines:
        assert line["loss"] == pytest.approx(line["nll_loss"] - 0.1 * line["log_odds_ratio"], rel=1e-5)


def test_a_prompts_tokens_have_the_same_dropout(tmp_path: Path) -> None:
    stream = job(tmp_path / "a", lora_dropout=0.5).run.stream
    chosen, rejected = stream.group(3, 1.0, 0, epoch=1).segments
    shortest = min(len(chosen.input_ids), len(rejected.input_ids))
    np.testing.assert_array_equal(chosen.draws[:shortest], rejected.draws[:shortest])
    assert (stream.group(2, 1.0, 0, epoch=1).segments[0].draws[0] != chosen.draws[0]).any()


def test_the_plan_counts_the_reference(tmp_path: Path) -> None:
    """A frozen adapter takes its parameters, without gradients and optimizer state; the base is there once."""
    frozen = str(save_golden_adapter("qwen2", tmp_path / "frozen"))
    plain, alone, frozen_too = (
        job(tmp_path / name, **options).session.memory().groups
        for name, options in (
            ("a", {"objective": "cpo"}), ("b", {}), ("c", {"reference_adapter": frozen}),
        )
    )  # fmt: skip
    assert plain["reference"] == alone["reference"] == 0
    assert frozen_too["reference"] == plain["adapters"] > 0
    assert plain["base"] == alone["base"] == frozen_too["base"]
    assert alone["optimizer"] == frozen_too["optimizer"]
    assert plain["workspace"] < alone["workspace"]


def test_training_starts_from_the_reference(tmp_path: Path) -> None:
    frozen = save_golden_adapter("qwen2", tmp_path / "frozen", scale=2.0)
    run = job(tmp_path / "a", reference_adapter=str(frozen), init_adapter=None).run
    assert f"adapter: starts from the reference adapter {frozen}" in run.notes
    with pytest.raises(UserError, match=r"init_lora_weights.* and .*reference_adapter.* cannot be combined"):
        job(tmp_path / "c", reference_adapter=str(frozen), init_adapter=None, init_lora_weights="gaussian")
    key = next(iter(run.trainable.initial))
    np.testing.assert_array_equal(run.trainable.initial[key][1], read_adapter(frozen)[1][key][1])
    (frozen / RUN).write_text(json.dumps({"base_digest": "0" * 64}))
    edit_json(frozen / "adapter_config.json", base_model_name_or_path="someone/qwen2")  # the same in another format
    job(tmp_path / "b", reference_adapter=str(frozen))
    edit_json(frozen / "adapter_config.json", base_model_name_or_path="someone/other")
    with pytest.raises(UserError, match=r"frozen was trained on another base model, someone/other, not on .*qwen2"):
        job(tmp_path / "b", reference_adapter=str(frozen))
    other = save_golden_adapter("llama", tmp_path / "other")
    with pytest.raises(UserError, match=r"The adapter .*other does not fit the model: its .* is of shape"):
        job(tmp_path / "b", reference_adapter=str(other))


@pytest.mark.parametrize(
    ("cut", "length", "ids"),
    [
        (Cut(), 9, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Cut(), 5, [0, 1, 2, 3, 4]),
        (Cut(mode="keep_end"), 5, [3, 4, 5, 6, 7]),
        (Cut(prompt=2), 9, [1, 2, 3, 4, 5, 6, 7]),
        (Cut(answer=2), 9, [0, 1, 2, 3, 4]),
        (Cut(2, 4), 5, [1, 2, 3, 4, 5]),
        (Cut(2, 4, "keep_end"), 5, [2, 3, 4, 5, 6]),
        (Cut(9, 9), 9, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_cutting(cut: Cut, length: int, ids: list[int]) -> None:
    """A row of three tokens of prompt and five of an answer."""
    labels = [-100] * 3 + [3, 4, 5, 6, 7]
    assert cut(list(range(8)), labels, length) == (ids, [labels[i] for i in ids])


ROW = {"prompt_ids": [1, 2, 3, 4], "chosen_ids": [5, 6, 7], "rejected_ids": [5, 6, 8]}


@pytest.mark.parametrize(
    ("wrong", "options", "words"),
    [
        ({}, {"max_length": 6}, "the chosen and the rejected answer are equal where the length cuts them"),
        ({}, {"max_completion_length": 2}, "the chosen and the rejected answer are equal where the length cuts them"),
        ({}, {"max_length": 4}, "the prompt fills the whole length, so that nothing of the answer is left"),
        ({"rejected_ids": [5, 6, 7]}, {}, "'chosen_ids' and 'rejected_ids' are equal, so there is nothing to prefer."),
        ({"rejected_ids": None}, {}, "'rejected_ids' must be a list of integers"),
        ({"rejected_ids": []}, {}, "'rejected_ids' is an empty list; give at least one token."),
    ],
)
def test_rows_that_are_no_pairs(tmp_path: Path, wrong: dict[str, Any], options: dict[str, Any], words: str) -> None:
    """Each is an error that names its line, or is counted among the skipped rows."""
    sound = {"prompt_ids": [1], "chosen_ids": [5], "rejected_ids": [6]}
    data = str(write_source(tmp_path / "rows.jsonl", [sound, {**ROW, **wrong}, sound]))
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: ") as raised:
        job(tmp_path / "a", data=data, **options)
    assert words in str(raised.value)
    account = job(tmp_path / "b", data=data, skip_bad_rows=True, **options).run.stream.prepared.account
    assert account.examples == 3
    assert len(account.bad) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_type": "sigmod"}, "loss_type must be one or several of sigmoid, hinge, ipo"),
        ({"loss_type": "sft,sft"}, "loss_type has 'sft' twice"),
        ({"loss_type": "exo_pair"}, "loss_type='exo_pair' needs a label_smoothing of at least 1e-09 and at"),
        ({"loss_type": "exo_pair", "label_smoothing": 1 - 1e-9}, "at least 1e-09 and at most 0.999, not 1."),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "at least 0 and at most 0.499, not 0.5"),
        ({"loss_type": "sft,ipo", "loss_weights": "1"}, "loss_weights has 1 numbers, but loss_type 2 losses"),
        ({"loss_weights": "high"}, "loss_weights must be numbers of at least 0"),
        ({"loss_weights": "0"}, "loss_weights must be numbers of at least 0, not all 0"),
        ({"objective": "kto", "loss_type": "sigmoid"}, "loss_type must be one of kto, apo_zero_unpaired for objective"),
        ({"objective": "cpo", "loss_type": "sft"}, "loss_type must be one of sigmoid, hinge, ipo, simpo for objective"),
        ({"beta": 0.0}, "beta must be at least 1e-09 and at most 1e+09"),
        ({"beta": 1e-20, "loss_type": "ipo"}, "beta must be at least 1e-09 and at most 1e+09"),
        ({"ld_alpha": 1.5}, "ld_alpha must be at least 0 and at most 1"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as raised:
        TrainingArguments(**({"objective": "dpo"} | options))
    assert words in str(raised.value)


def test_lists_of_losses_and_options_of_other_objectives() -> None:
    args = from_values({"objective": "dpo", "loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 1]}, "recipe")
    assert objective_of(args).losses == {"sigmoid": 0.8, "sft": 1.0}  # type: ignore[attr-defined]
    names = ("ld_alpha", "simpo_gamma", "beta", "completion_only_loss")
    assert unused_options(names, args) == [
        "completion_only_loss does nothing: objective='dpo' is about answers only.",
        "simpo_gamma does nothing: objective='dpo' does not use it.",
    ]
    cpo = from_values({"objective": "cpo", "loss_type": "ipo"}, "recipe")
    assert unused_options(("simpo_gamma", "label_smoothing", "beta"), cpo) == [
        f"{name} does nothing: loss_type='ipo' does not use it." for name in ("simpo_gamma", "label_smoothing")
    ]
    assert [note.split()[0] for note in unused_options(names, TrainingArguments())] == [
        "beta",
        "ld_alpha",
        "simpo_gamma",
    ]


def test_evaluating_an_adapter_as_it_was_trained(device: Device, tmp_path: Path, run: Run) -> None:
    """The loss, accuracy and margin on pairs are those of the run; on other rows the usual loss."""
    heldout = str(pairs(tmp_path / "heldout.jsonl", 3, seed=1))
    job(tmp_path / "a", eval_data=heldout, beta=0.4, loss_type="ipo").train()
    line = read_log(tmp_path / "a" / "run" / LOG)[-1]
    options = ["--model", model_dir("qwen2"), "--base-dtype", "f32", "--json", "--adapter", tmp_path / "a" / "run"]
    result = json.loads(run("evaluate", "--data", heldout, *options).output())
    assert (result["objective"], result["perplexity"]) == ("dpo", None)
    assert result["loss"] == pytest.approx(line["eval_loss"], rel=1e-5)
    for name, value in result["metrics"].items():
        assert value == pytest.approx(line[f"eval_{name}"], rel=1e-4, abs=1e-5)
    base, other = json.loads(run("evaluate", "--data", heldout, "--compare", *options).output())
    assert base["metrics"]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert other["loss"] == result["loss"]
    plain = str(write_source(tmp_path / "plain.jsonl", [{"input_ids": [1, 2, 3]}]))
    assert json.loads(run("evaluate", "--data", plain, *options).output())["objective"] == "sft"
    labelled = str(write_source(tmp_path / "l.jsonl", [{"prompt_ids": [1], "completion_ids": [2], "label": True}]))
    assert "use --objective kto for such rows." in run("evaluate", "--data", labelled, *options).refusal()


def test_a_prompt_is_mismatched_with_another_answer(tmp_path: Path) -> None:
    """That of the sample before it in the step or, in a step of one, of the next in the data; cut to the length."""
    rows = [{"prompt_ids": [i] * 3, "completion_ids": [10 + i] * (1 + i), "label": True} for i in range(4)]
    data = str(write_source(tmp_path / "labelled.jsonl", rows))
    stream = job(tmp_path / "a", objective="kto", data=data, max_length=6, max_steps=1).run.stream
    groups = [group for batch in stream.heldout_groups([[0, 2], [3]], 0) for group in batch]
    kl_rows = [group.kl_row for group in (*groups, stream.heldout_groups([[3]], 0)[0][0])]
    expected = [([0] * 3, [13] * 3), ([2] * 3, [10]), ([3] * 3, [12] * 3), ([3] * 3, [10])]
    assert stream.longest_mismatched == 6
    for segment, (prompt, answer) in zip(kl_rows, expected, strict=True):
        assert segment.input_ids.tolist() == prompt + answer
        assert segment.labels.tolist() == [-100] * 3 + answer


@pytest.mark.parametrize("heldout", [False, True])
def test_the_kl_term_of_mismatched_rows_longer_than_all_others(device: Device, tmp_path: Path, heldout: bool) -> None:
    """A long prompt with a short answer and a short prompt with a long one give a mismatched row longer than either;
    its log-ratio is that of the same tokens as a row of their own."""
    rng = np.random.default_rng(0)
    rows = [
        {"prompt_ids": rng.integers(0, 301, a).tolist(), "completion_ids": rng.integers(0, 301, b).tolist(), "label": i}
        for i, (a, b) in enumerate([(20, 2), (2, 20)])
    ]
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter", 8.0)
    data = str(write_source(tmp_path / "labelled.jsonl", rows))
    short = str(write_source(tmp_path / "short.jsonl", [rows[0] | {"prompt_ids": [1]}] * 2))
    run = job(
        tmp_path / "a", objective="kto", data=short if heldout else data, eval_data=data if heldout else None,
        max_steps=1, max_length=64, init_adapter=str(adapter),
    )  # fmt: skip
    run.train()
    line = read_log(tmp_path / "a" / "run" / LOG)[0]
    swapped = [
        {
            "input_ids": row["prompt_ids"] + other["completion_ids"],
            "labels": [-100] * len(row["prompt_ids"]) + other["completion_ids"],
        }
        for row, other in zip(rows, rows[::-1], strict=True)
    ]

    model = open_model(str(model_dir("qwen2")), device, "f32")

    def logprob(adapter: Path | None) -> float:
        result = evaluate(model, swapped, adapter=adapter, max_length=64, run_log=False)
        return -result.loss * result.tokens / len(rows)

    expected = logprob(adapter) - logprob(None)
    assert expected > 1
    assert line["eval_kl" if heldout else "kl"] == pytest.approx(expected, abs=1e-3)


def test_labelled_rows_and_their_log(device: Device, tmp_path: Path) -> None:
    """KTO with held-out rows; a step without undesirable answers logs nothing about them."""
    rows = [{"prompt_ids": [i], "completion_ids": [5, i, 7], "label": i != 3} for i in range(4)]
    data = str(write_source(tmp_path / "labelled.jsonl", rows))
    job(tmp_path / "a", objective="kto", data=data, eval_data=data, max_steps=2).train()
    lines = read_log(tmp_path / "a" / "run" / LOG)
    assert {"eval_loss", "eval_rewards/margins", "eval_kl"} <= set(lines[0])
    assert "rewards/rejected" not in lines[1]
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "kl"} <= set(lines[2])
    assert json.loads((tmp_path / "a" / "run" / "run.json").read_text())["options"]["objective"] == "kto"


# -- 20 steps of every preference loss, compared with TRL's trainers (tests/fixtures/README.md) ------------------------

TARGETS, STEPS, GOLDEN_PAIRS = "q_proj,down_proj", 20, 8
CASES: dict[str, dict[str, Any]] = json.loads((FIXTURES / "golden" / "preferences.json").read_text())


@cache
def golden() -> dict[str, np.ndarray]:
    return load_file(FIXTURES / "golden" / "preferences.safetensors")


def rows(objective: str) -> list[dict[str, Any]]:
    """The pairs; for KTO, the chosen answer of every other one, and the rejected one of the others."""
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    pairs = [{name: golden()[f"{name}.{i}"].tolist() for name in names} for i in range(GOLDEN_PAIRS)]
    if objective != "kto":
        return pairs
    return [
        {"prompt_ids": pair["prompt_ids"], "completion_ids": pair[names[1 + i % 2]], "label": not i % 2}
        for i, pair in enumerate(pairs)
    ]


def golden_options(tmp_path: Path, name: str) -> dict[str, Any]:
    """A case's options, with the files that it reads."""
    case = dict(CASES[name])
    data = tmp_path / f"{case['objective']}.jsonl"
    if not data.exists():
        write_source(data, rows(case["objective"]))
    initial, frozen = tmp_path / "start", tmp_path / "frozen"
    if not initial.exists():
        targets = {"target_modules": tuple(TARGETS.split(","))}
        save_golden_adapter("qwen2", initial, modules=targets["target_modules"], **targets)
        save_golden_adapter("qwen2", frozen, modules=targets["target_modules"], scale=2.0, **targets)
    if "reference_adapter" in case:
        case["reference_adapter"] = str(frozen)
    return {"init_adapter": str(initial), "data": str(data), **case}


def shared(tmp_path: Path, **changes: Any) -> Any:
    golden_options = {
        "base_dtype": "f32",
        "beta": 0.3,
        "lr_scheduler_type": "constant",
        "adam_epsilon": 1e-5,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "max_length": 16,
    }
    return golden_arguments(tmp_path, "qwen2", **(golden_options | changes))


def check(name: str, directory: Path, steps: int) -> None:
    """Losses, metrics and, after all steps, the adapter are within 1e-3 of TRL's."""
    log = read_log(directory / LOG)
    values = {key.removeprefix(f"{name}."): value for key, value in golden().items() if key.startswith(f"{name}.")}
    curves = {key: value for key, value in values.items() if not key.startswith("final.")}
    assert len(curves) >= 6
    for key, curve in curves.items():
        series, scale = [line[key] for line in log], float(np.abs(curve).mean())
        assert series == pytest.approx(curve[:steps].tolist(), rel=1e-3, abs=1e-3 * scale), f"{name}: {key}"
    if steps < STEPS:
        return
    first, (_, matrices) = load_file(FIXTURES / "golden" / "qwen2.safetensors"), read_adapter(directory)
    for module, pair in matrices.items():
        for part, matrix in zip("AB", pair, strict=True):
            short = f"{short_of(module)}.{part}"
            final = values[f"final.{short}"]
            error = np.linalg.norm(matrix - final) / np.linalg.norm(final - first[f"adapter.{short}"])
            assert error < 1e-3, f"{name}: {short}: {error}"


def test_all_losses_match_trl(device: Device, tmp_path: Path) -> None:
    """Each is an adapter of one pipeline, whose batches they share."""
    tasks = []
    for name in CASES:
        own = golden_options(tmp_path, name)
        tasks.append(AdapterTask(own.pop("data"), str(tmp_path / f"run-{name}"), name, options=own))
    prepare_multi_adapter_job(shared(tmp_path, data=None, init_adapter=None), tasks, batch_tokens=1024).train()
    for name in CASES:
        check(name, tmp_path / f"run-{name}", STEPS)


@pytest.mark.parametrize("name", ["dpo-ld", "dpo-frozen", "kto"])
def test_a_precomputed_reference_is_the_same(device: Device, tmp_path: Path, name: str) -> None:
    """Alone, with activations computed again and inputs of blocks in the host's memory, in batches of one or two
    samples."""
    changes = {
        "gradient_checkpointing": True,
        "offload_activations": True,
        "precompute_ref_log_probs": True,
        "max_steps": 3,
    }
    batch = 1 if name == "kto" else 2
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 4 // batch}
    prepare_job(shared(tmp_path, **golden_options(tmp_path, name), **changes | sizes)).train()
    check(name, tmp_path / "run", 3)


# -- the losses of preference objectives in float64 --------------------------------------------------------------------

SIZE, STRIDE = 5, 64
CONSTANTS: dict[str, Any] = {"size": SIZE, "stride": STRIDE, "beta": 0.3}
LABELLED = {"desirable": 1.5, "undesirable": 0.5}
LOSS_CASES = [
    *((dpo.dpo_scores, {"label_smoothing": 0.1, name: 1.0}) for name in dpo.LOSSES),
    (dpo.dpo_scores, {"label_smoothing": 0.1, "sigmoid": 0.8, "apo_zero": 0.2, "sft": 1.0}),
    *(
        (cpo.cpo_scores, {"label_smoothing": 0.1, "gamma": 0.5, "alpha": 0.7, "mean": name in cpo.MEANS} | flags)
        for name in cpo.LOSSES
        for flags in [{kind: kind == name for kind in ("hinge", "ipo", "simpo")}]
    ),
    (orpo.orpo_scores, {}),
    (kto.kto_scores, LABELLED),
]


def inputs(kernel: Any, rng: np.random.Generator, scale: float = 1.0) -> dict[str, np.ndarray]:
    count = 1 if kernel is kto.kto_scores else 2
    stops = np.cumsum(rng.integers(2, 9, SIZE * count)).reshape(SIZE, count)
    values = {
        "sums": -np.abs(rng.normal(size=(SIZE, count, 2))) * scale,
        "members": np.stack([stops - 2, stops], 2),
        "reference": -np.abs(rng.normal(size=(SIZE, count))) * scale,
        "group_weights": np.full(SIZE, 1 / SIZE),
        "values": np.array([1.0, -1, 1, -1, 1]),
        "shared_values": np.full(SIZE, 0.2),
    }
    outputs = {name: np.zeros(1) for name in ("slopes", "losses", "metrics")}
    return {name: (values | outputs)[name] for name in kernel.bindings}


@pytest.mark.parametrize(("kernel", "constants"), LOSS_CASES)
def test_slopes_are_differences(kernel: Any, constants: dict[str, Any], rng: np.random.Generator) -> None:
    values = inputs(kernel, rng)

    def loss(sums: np.ndarray) -> float:
        return float((values["group_weights"] * kernel(**(values | {"sums": sums}), **CONSTANTS, **constants)[1]).sum())

    slopes = kernel(**values, **CONSTANTS, **constants)[0].reshape(values["sums"].shape)
    for place in np.ndindex(values["sums"].shape):
        step = np.zeros_like(values["sums"])
        step[place] = 1e-6
        difference = (loss(values["sums"] + step) - loss(values["sums"] - step)) / 2e-6
        assert slopes[place] == pytest.approx(difference, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("kernel", "constants"), LOSS_CASES)
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e4])
def test_nothing_overflows(kernel: Any, constants: dict[str, Any], scale: float, rng: np.random.Generator) -> None:
    for values in kernel(**inputs(kernel, rng, scale), **CONSTANTS, **constants):
        assert np.isfinite(values).all()


def test_sums_and_their_weights(rng: np.random.Generator) -> None:
    """A loss of the sums changes by a token's weight; what the longer answer has more counts by ld_alpha."""
    spans, starts = np.array([[(1, 4), (5, 7)], [(0, 0), (0, 0)]]), np.array([[0, 5], [0, 0]])
    logprobs, slopes = rng.normal(size=8), rng.normal(size=(2, 2, 2))
    constants: dict[str, Any] = {"size": 2, "count": 2, "ld_alpha": 0.25}

    def loss(logprobs: np.ndarray) -> float:
        return float((slopes * preference.member_sums(logprobs, spans, starts, None, **constants)).sum())

    weights = preference.member_weights(slopes, spans, starts, np.zeros(8), **constants)
    for r in range(8):
        step = np.zeros(8)
        step[r] = 1
        assert -weights[r] == pytest.approx(loss(logprobs + step) - loss(logprobs), abs=1e-12)
    sums = preference.member_sums(logprobs, spans, starts, None, **constants)
    assert sums[0, 0, 0] == pytest.approx(logprobs[1] + logprobs[2] + 0.25 * logprobs[3])
    assert sums[0, 0, 1] == pytest.approx(logprobs[:4].sum())


def test_the_logistic_function() -> None:
    x = np.array([-1e4, -40, -1, 0, 1, 40, 1e4])
    assert log_sigmoid(x) == pytest.approx([-1e4, -40, -1.3132616875, -np.log(2), -0.3132616875, -4.248354e-18, 0])
    assert sigmoid(x) + sigmoid(-x) == pytest.approx(np.ones(7))
