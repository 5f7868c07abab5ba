"""Adapters go to disk as PEFT has them and come back; what we cannot do is refused by name."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from support import path_of

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.formats.peft_adapter import read_adapter, tensor_name, write_adapter
from wgpu_lora.formats.peft_config import AdapterConfig, parse_config
from wgpu_lora.processes import untrusted_patterns
from wgpu_lora.processes.untrusted_patterns import first_matches

RAW = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def tensors(rank: int = 4, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    out = {}
    for layer, module in ((0, "q_proj"), (11, "down_proj")):
        out[tensor_name(path_of(layer, module), "A")] = (rng.standard_normal((rank, 6)) * scale).astype(np.float32)
        out[tensor_name(path_of(layer, module), "B")] = (rng.standard_normal((5, rank)) * scale).astype(np.float32)
    return out


def on_disk(directory, values: dict[str, np.ndarray], **changes):
    directory.mkdir(exist_ok=True)
    save_file(values, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({**RAW, **changes}))
    return directory


def test_round_trip(tmp_path):
    config = AdapterConfig(4, 16, 0.1, ("q_proj", "down_proj"), True, "demo", {"q_proj": 4}, {"mlp.down_proj": 2.0})
    write_adapter(tmp_path / "deep" / "a", tensors(), config)
    assert sorted(os.listdir(tmp_path / "deep")) == ["a"]
    back, pairs = read_adapter(tmp_path / "deep" / "a")
    assert back == config
    assert list(pairs) == [path_of(0, "q_proj"), path_of(11, "down_proj")]
    for module, (a, b) in pairs.items():
        np.testing.assert_array_equal(a, tensors()[tensor_name(module, "A")])
        np.testing.assert_array_equal(b, tensors()[tensor_name(module, "B")])


def test_writing_again_keeps_other_files(tmp_path):
    write_adapter(tmp_path, tensors(), AdapterConfig(4))
    (tmp_path / "log.jsonl").write_text("kept")
    write_adapter(tmp_path, tensors(scale=2.0), AdapterConfig(4, 99))
    assert read_adapter(tmp_path)[0].lora_alpha == 99
    assert sorted(os.listdir(tmp_path)) == ["adapter_config.json", "adapter_model.safetensors", "log.jsonl"]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_stored_dtypes(tmp_path, dtype):
    values = {name: value.astype(dtype) for name, value in tensors().items()}
    _, pairs = read_adapter(on_disk(tmp_path, values))
    expected = values[tensor_name(path_of(0, "q_proj"), "A")].astype(np.float32)
    np.testing.assert_array_equal(pairs[path_of(0, "q_proj")][0], expected)
    assert pairs[path_of(0, "q_proj")][0].dtype == np.float32


Q1, Q0 = (f"model.layers.{layer}.self_attn.q_proj" for layer in (1, 0))
PATTERNED = AdapterConfig(
    r=8,
    lora_alpha=16,
    rank_pattern={r"layers\.1\.self_attn\.q_proj": 2, "v_proj": 4},
    alpha_pattern={"^model.layers.0.self_attn.v_proj": 12},
)


@pytest.mark.parametrize(
    ("config", "module", "rank", "scaling"),
    [
        (PATTERNED, Q0, 8, 2),
        (PATTERNED, Q1, 2, 8),
        (PATTERNED, Q1.replace("1", "11"), 8, 2),
        (PATTERNED, Q1.replace("q_proj", "v_proj"), 4, 4),
        (PATTERNED, Q0.replace("q_proj", "v_proj"), 4, 3),
        (AdapterConfig(r=9, lora_alpha=6, use_rslora=True), Q0, 9, 6 / math.sqrt(9)),
    ],
)
def test_scaling_and_patterns(config, module, rank, scaling):
    assert (config.rank(module), config.scaling(module)) == (rank, scaling)


@pytest.mark.reference
def test_patterns_match_as_in_peft():
    from peft.utils.other import get_pattern_key

    patterns = {"q_proj": 2, r"layers\.[01]\.mlp\.up_proj": 3, "^model.layers.1.self_attn.v_proj": 5, "proj": 7}
    config = AdapterConfig(r=1, rank_pattern=patterns)
    for layer in (0, 1, 11):
        for path in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
            module = f"model.layers.{layer}.{path}"
            assert config.rank(module) == patterns.get(get_pattern_key(patterns, module), 1)


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|v)_proj", ["v_proj"]])
def test_kinds_of_target_modules(targets):
    expected = tuple(targets) if isinstance(targets, list) else targets
    assert parse_config({**RAW, "target_modules": targets}, "x").target_modules == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' in x is not supported"),
        ({"use_bdlora": True}, "use_bdlora = True in x"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"lora_of_tomorrow": {"depth": 2}}, r"lora_of_tomorrow = {'depth': 2} in x is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"target_modules": None}, "'target_modules' must be a list or text, not null"),
        ({"rank_pattern": [1]}, r"'rank_pattern' must be an object, not \[1\]"),
        ({"rank_pattern": {"q_proj": 1.5}}, "'rank_pattern.q_proj' must be a whole number, not 1.5"),
        ({"alpha_pattern": {"(": 1}}, r"alpha_pattern in x has a bad pattern: '\('"),
        ({"lora_dropout": 1.0}, "'lora_dropout' must be less than 1, not 1.0"),
        ({"r": 0}, "'r' must be at least 1, not 0"),
        ({"lora_alpha": "big"}, "'lora_alpha' must be a number, not"),
        ({"lora_alpha": 0}, "'lora_alpha' must be a positive number within float32's range, not 0"),
        ({"use_rslora": "false"}, "'use_rslora' must be true or false, not"),
        ({"use_dora": 1}, "'use_dora' must be true or false, not 1"),
        ({"r": True}, "'r' must be a whole number, not true"),
        ({"base_model_name_or_path": 3}, "'base_model_name_or_path' must be text, not 3"),
    ],
)
def test_refused_configs(changes, message):
    with pytest.raises(UserError, match=message):
        parse_config({**RAW, **changes}, "x")


def test_fields_that_change_nothing():
    """What is off or empty, whatever its name, and what only says how an adapter was made."""
    off = {"lora_of_tomorrow": False, "other": None, "third": {}, "fourth": [], "fifth": ""}
    written = {"task_type": "CAUSAL_LM", "peft_version": "0.21.2", "megatron_core": "megatron.core", "revision": "main"}
    assert parse_config({**RAW, **off, **written}, "x") == parse_config(RAW, "x")


@pytest.mark.reference
def test_what_peft_writes_by_default_is_read():
    from peft import LoraConfig

    written = LoraConfig(r=4, lora_alpha=8, target_modules=RAW["target_modules"]).to_dict()
    written |= {"peft_type": "LORA", "target_modules": RAW["target_modules"]}
    assert parse_config(written, "x") == parse_config(RAW, "x")


GOOD, FIRST = tensors(), tensor_name(path_of(0, "q_proj"), "A")
MODEL = "base_model.model."


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (GOOD, {"r": 3}, r"do not fit rank 3 of adapter_config.json"),
        ({k: v for k, v in GOOD.items() if k != FIRST}, {}, r"holds only lora_B of model.layers.0.self_attn.q_proj"),
        ({**GOOD, FIRST + ".x": GOOD[FIRST]}, {}, "not a LoRA factor of a module"),
        ({**GOOD, tensor_name("lm_head", "A"): GOOD[FIRST]}, {}, r"a tensor of the LM head .*which is not supported"),
        ({**GOOD, f"{MODEL}lm_head.base_layer.weight": GOOD[FIRST]}, {}, "a tensor of the LM head"),
        ({**GOOD, f"{MODEL}model.embed_tokens.lora_embedding_A": GOOD[FIRST]}, {}, "an adapter of the embedding"),
        ({**GOOD, f"{MODEL}model.embed_tokens.weight": GOOD[FIRST]}, {}, "a tensor of the embedding"),
        ({**GOOD, f"{MODEL}model.layers.0.mlp.up_proj.bias": GOOD[FIRST]}, {}, "a bias of the base that was trained"),
        ({**GOOD, FIRST.replace("A.weight", "B.bias"): GOOD[FIRST]}, {}, "a bias of a LoRA"),
        ({**GOOD, f"{MODEL}score.weight": GOOD[FIRST]}, {}, "a head for classification or rewards"),
        ({**GOOD, f"{MODEL}model.norm.weight": GOOD[FIRST]}, {}, "a norm that was trained"),
        ({**GOOD, FIRST.removeprefix("base_model.model."): GOOD[FIRST]}, {}, "not a LoRA factor of a module"),
        ({FIRST.replace("A.", "A.default."): GOOD[FIRST]}, {}, "not a LoRA factor of a module as PEFT saves it"),
        ({**GOOD, FIRST: GOOD[FIRST].astype(np.int32)}, {}, r"dtype I32: .* BF16, F16, F32"),
        ({}, {}, "holds no tensors"),
    ],
)
def test_refused_tensors(tmp_path, values, changes, message):
    with pytest.raises(UserError, match=message):
        read_adapter(on_disk(tmp_path, values, **changes))


def test_what_is_no_adapter(tmp_path):
    (on_disk(tmp_path / "bare", GOOD) / "adapter_model.safetensors").unlink()
    (on_disk(tmp_path / "mlx", GOOD) / "adapter_config.json").write_text('{"fine_tune_type": "lora"}')
    for name, message in (
        ("bare", r"adapter_model.safetensors does not exist"),
        ("mlx", "is an adapter of mlx-lm, which is not in PEFT's format: convert it"),
        ("no", "is not a directory"),
    ):
        with pytest.raises(UserError, match=message):
            read_adapter(tmp_path / name)


def test_write_refuses_what_peft_would_not_expect(tmp_path):
    for name, value in (
        ("q_proj.lora_A", np.zeros((1, 2), np.float32)),
        (tensor_name(path_of(0, "q_proj"), "A"), np.zeros((1, 2))),
    ):
        with pytest.raises(ValueError, match="is not a float32 LoRA matrix"):
            write_adapter(tmp_path / "a", {name: value}, AdapterConfig())
    assert not (tmp_path / "a").exists()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_bytes_atomic(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "disk full")))
        with pytest.raises(OSError, match="disk full"):
            write_bytes_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]
    write_bytes_atomic(path, b"new")
    assert path.read_bytes() == b"new"


# -- patterns ----------------------------------------------------------------------------------------------------------


NAMES = [f"model.layers.{i}.{module}" for i in range(12) for module in ("self_attn.q_proj", "mlp.up_proj", "x.in")]
PATTERNS = [
    "q_proj", r"layers\.[01]\.mlp\.up_proj", "^model.layers.1.x.in$", "proj", r".*\.(q|v)_proj", r"\w+\.\d{1,}\..*",
    r"(?!.*layers\.1\.).*up_proj", r"(?i)MODEL\..*", r".*(?<=mlp\.)up_proj", r".*\.(\d)\1\..*", r".{,27}",
    r"(?P<a>model).*", "model++.*", "", "(?x) model .* ",
]  # fmt: skip


@pytest.mark.parametrize("endings", [False, True])
def test_they_mean_what_re_means(endings: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, by whichever way it is matched, and all in one child."""
    usable = [p for p in PATTERNS if not (endings and p.startswith("(?") and p[2] in "ix")]  # flags come first
    meant = [rf"(.*\.)?({p})" if endings else p for p in usable]
    expected = [[0 if re.fullmatch(pattern, name) else None for name in NAMES] for pattern in meant]
    assert first_matches([[p] for p in usable], NAMES, endings) == expected
    assert any(any(v == 0 for v in row) for row in expected)
    (first,) = first_matches([usable[::-1]], NAMES, endings)
    backwards = [next((i for i, row in enumerate(expected[::-1]) if row[n] == 0), None) for n in range(len(NAMES))]
    assert first == backwards
    monkeypatch.setattr(untrusted_patterns, "_in_child", None)
    assert first_matches([PATTERNS[:6]], NAMES, endings)[0]  # without a process


@pytest.mark.parametrize(("pattern", "endings"), [("${2}", False), ("a^{2}", True), ("?", True)])
def test_what_re_refuses_is_refused(pattern: str, endings: bool) -> None:
    """RE2 would take it."""
    with pytest.raises(UserError, match="is not a regular expression"):
        first_matches([[pattern]], NAMES, endings)


def test_a_hostile_pattern_is_ended() -> None:
    begin = time.process_time()
    with pytest.raises(UserError, match="exceeded its computation limit"):
        first_matches([["x", r"(?=((a|a)*)*b).*"]], ["a" * 60 + "c"])
    deep = "(" * 2000 + "a" + ")" * 2000
    assert first_matches([[deep]], ["a"] * 50) == [[0] * 50]
    assert time.process_time() - begin < 1
    with pytest.raises(UserError, match=r"rank_pattern in x has a bad pattern: .*unterminated"):
        parse_config({"peft_type": "LORA", "target_modules": [], "rank_pattern": {"(?=": 1}}, "x")
