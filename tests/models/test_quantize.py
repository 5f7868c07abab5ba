"""`wgpu-lora quantize`: what is written, how calibration weighs errors, and what is refused."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.cli import QWEN2, Run, commands, write_rows
from support.events import hearing
from support.models import FIXTURES, golden, golden_rows

from wgpu_lora.api.quantization import format_name, input_moments
from wgpu_lora.api.quantization import quantize as quantized
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import open_model

QWEN3 = str(FIXTURES / "models" / "qwen3")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return commands(capsys, "quantize")


def test_a_mix_and_then_another_scheme_of_it(run: Run, device: Device, tmp_path: Path) -> None:
    rows, first, second = write_rows(tmp_path / "rows.jsonl"), tmp_path / "first", tmp_path / "second"
    code, out, err = run(
        "--model", QWEN3, "--mlp", "lut2", "--attention", "int8", "--group", 16, "--output", first,
        "--calibration", rows, "--calibration-samples", 4, "--eval-data", rows, "--json",
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out)
    assert report["base_dtype"] == "q2a8-g16"
    assert {kind["kind"]: kind["schemes"] for kind in report["kinds"]} == {
        "attention": ["int8-g16"],
        "mlp": ["lut2-g16"],
    }
    errors = {kind["kind"]: kind["error"] for kind in report["kinds"]}
    assert 0 < errors["attention"] < 1e-4 < 0.05 < errors["mlp"] < 0.2
    assert report["before"] != report["after"]
    code, out, err = run("--from-base", first, "--scheme", "nf4", "--output", second, "--eval-data", rows)
    assert code == 0, err
    before, after = map(float, re.findall(r"([\d.]+) before, ([\d.]+) after", out)[0])
    assert before == pytest.approx(report["after"], abs=1e-4)
    assert after != before
    assert "relative error" in out
    model = open_model(str(second), device)
    assert model.config.packed == "nf4"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "rows.jsonl", "second"]


def test_moments_are_the_mean_squares_of_inputs(device: Device) -> None:
    """Those of the first layer are of normed embeddings. Batches and padding change nothing."""
    model = open_model(QWEN3, device, "bf16")
    ids = [np.asarray(row) for row in golden_rows(golden("qwen3"), "input_ids")]
    rows: Any = [SimpleNamespace(input_ids=row) for row in ids]
    moments = input_moments(model, rows, batch_tokens=max(map(len, ids)) + 3)
    assert moments.keys() == model.config.matrices().keys()
    table = model.checkpoint.read_f32(model.config.EMBEDDING).astype(np.float64)
    norm = model.checkpoint.read_f32("model.layers.0.input_layernorm.weight").astype(np.float64)
    x = table[np.concatenate(ids)]
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + model.config.rms_norm_eps) * norm
    want = (x**2).mean(axis=0)
    np.testing.assert_allclose(moments["model.layers.0.self_attn.q_proj.weight"], want, rtol=1e-5)
    together = input_moments(model, rows, batch_tokens=4096)
    for name, values in moments.items():
        np.testing.assert_allclose(together[name], values, rtol=1e-4, err_msg=name)
    model.unload()


def test_calibration_lowers_the_error_of_outputs(device: Device, tmp_path: Path, rng: np.random.Generator) -> None:
    model = open_model(QWEN3, device, "lut2-g16")
    name = "model.layers.0.mlp.up_proj.weight"
    _, size_in = model.config.matrices()[name]
    importance = np.exp(2 * rng.standard_normal(size_in))
    source = model.checkpoint.read_f32(name)

    def output_error() -> float:
        model.load_weights()
        values = dict(model.decoder.matrices())[name].values(device)
        model.unload()
        return float((importance * (values - source) ** 2).sum())

    plain = output_error()
    model.importance = {name: importance}
    assert output_error() < 0.95 * plain


REFUSED = [
    (["--model", QWEN3, "--scheme", "bf16"], "--scheme bf16 is not known: choose one of nf4, lut2"),
    (["--model", QWEN3], "No scheme is given"),
    (
        ["--scheme", "lut2", "--model", "a", "--from-base", "b"],
        "Give the model either as --model or, if it is quantised, as --from-base",
    ),
    (["--model", QWEN3, "--scheme", "lut5"], "--scheme lut5 is not known: choose one of nf4, lut2"),
    (["--model", QWEN3, "--scheme", "lut2", "--mlp", "lut2"], "are given together, instead of --scheme"),
    (["--model", QWEN3, "--mlp", "lut2"], "are given together"),
    (["--model", QWEN3, "--mlp", "lut2", "--attention", "nf4"], "--attention nf4 is not known"),
    (["--model", QWEN3, "--scheme", "lut2", "--group", "8"], "--group 8 is not known: choose one of 16, 32, 64, row"),
    (["--model", QWEN3, "--scheme", "lut2-g16", "--group", "16"], "names a group itself"),
    (["--model", QWEN3, "--scheme", "nf4", "--group", "16"], "--group has no effect on nf4"),
    (["--model", QWEN3, "--scheme", "nf4", "--calibration", "x"], "--calibration has no effect on nf4"),
    (["--model", QWEN3, "--mlp", "int8", "--attention", "int8", "--calibration", "x"], "has no effect on q8a8"),
    (["--model", QWEN3, "--scheme", "lut2", "--group", "64"], "which groups of 64 do not divide: use --group 16"),
    (["--model", QWEN3, "--scheme", "lut2", "--group", "16", "--calibration-samples", "0"], "must be at least 1"),
    (["--model", QWEN3, "--scheme", "lut2", "--group", "16", "--calibration-samples", "5"], "has no effect without"),
    (["--model", QWEN3, "--scheme", "lut2", "--group", "16", "--calibration", "nowhere.jsonl"], "nowhere.jsonl"),
    (["--model", QWEN3, "--scheme", "lut2", "--group", "16", "--eval-data", "nowhere.jsonl"], "nowhere.jsonl"),
    (["--from-base", QWEN2, "--scheme", "lut2"], "is in full precision: give it as --model instead of --from-base"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_does_not_fit_is_refused(run: Run, tmp_path: Path, options: list[str], message: str) -> None:
    code, _, err = run(*options, "--output", tmp_path / "output")
    assert (code, err.count("\n")) == (2, 1), err
    assert message in err
    assert not list(tmp_path.iterdir())


def test_existing_output_and_empty_data_are_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes").write_text("mine")
    (tmp_path / "empty.jsonl").write_text("")
    options = ["--model", QWEN3, "--scheme", "lut2", "--group", "16"]
    assert "exists already" in run(*options, "--output", tmp_path / "taken").err
    code, _, err = run(*options, "--output", tmp_path / "output", "--calibration", tmp_path / "empty.jsonl")
    assert (code, "empty.jsonl" in err) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.jsonl", "taken"]


FULL = r"{} cannot be written \(No space left on device\): free"


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
        (OSError(errno.ENOSPC, "No space left on device"), UserError, FULL),
    ],
)
def test_what_fails_leaves_nothing(
    device: Device, tmp_path: Path, error: BaseException, expected: type[BaseException], message: str
) -> None:
    events = hearing(written=Mock(side_effect=error))
    with pytest.raises(expected, match=message.format(tmp_path / "output")):
        quantized(QWEN3, "int8-row", tmp_path / "output", device=device, events=events)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("nf4", None, None, None), "nf4"),
        (("lut3", None, None, "row"), "lut3-row"),
        (("q2a4", None, None, "16"), "q2a4-g16"),
        ((None, "lut2", "int8", None), "q2a8"),
        (("lut2", None, None, "32"), "lut2"),
    ],
)
def test_names_of_formats(arguments: tuple[str | None, ...], name: str) -> None:
    assert format_name(*arguments) == name
