"""target_modules resolves against what a model has, as PEFT's does, and errors name what there is."""

import pytest
from support import MODELS, path_of

from wgpu_lora.errors import UserError
from wgpu_lora.models.adapter_modules import resolve_target_modules, shortest
from wgpu_lora.models.architectures import load_config

CONFIG = load_config(MODELS / "qwen3")  # two layers
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("given", "expected", "names"),
    [
        ("all-linear", [path_of(i, name) for i in (0, 1) for name in NAMES], NAMES),
        (" v_proj , q_proj,", [path_of(i, n) for i in (0, 1) for n in ("q_proj", "v_proj")], ("q_proj", "v_proj")),
        ("self_attn.q_proj", [path_of(0, "q_proj"), path_of(1, "q_proj")], ("q_proj",)),
        ("layers.1.mlp.up_proj,k_proj", [path_of(0, "k_proj"), *(path_of(1, n) for n in ("k_proj", "up_proj"))],
         ("k_proj", "1.mlp.up_proj")),
        (r".*\.[01]\.self_attn\.(q|o)_proj", [path_of(i, n) for i in (0, 1) for n in ("q_proj", "o_proj")],
         ("q_proj", "o_proj")),
        ("mlp", [path_of(i, name) for i in (0, 1) for name in NAMES[4:]], NAMES[4:]),
        ("attention,up_proj", [path_of(i, name) for i in (0, 1) for name in (*NAMES[:4], "up_proj")],
         (*NAMES[:4], "up_proj")),
        (r".*layers\.(?!0\.).*down_proj", [path_of(1, "down_proj")], ("1.mlp.down_proj",)),
    ],
)  # fmt: skip
def test_what_is_meant(given: str, expected: list[str], names: tuple[str, ...]) -> None:
    found = resolve_target_modules(given, CONFIG)
    assert found == expected
    assert shortest(found, CONFIG) == names
    assert resolve_target_modules(",".join(names), CONFIG) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("q_proj,zork", r"has no 'zork': choose among q_proj, .*, down_proj, mlp, attention, or 'all-linear'\.$"),
        ("proj", "has no 'proj'"),  # not the end of a name
        ("lm_head", "has no 'lm_head'"),
        (r"q_proj|v_proj.*", r"matches none of the model's modules: .* such as model\.layers\.0\.self_attn\.q_proj"),
        (
            "(q_proj",
            r"cannot be used: '\(q_proj' is not a regular expression \(missing \), unterminated subpattern\)\.$",
        ),
    ],
)
def test_what_the_model_does_not_have_is_refused(given: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_target_modules(given, CONFIG)


def test_matrices_that_are_kept_are_named_too() -> None:
    """PEFT would leave out modules that adapter_config.json does not name, without an error."""
    config = load_config(MODELS / "qwen3_5_text")
    names = shortest(list(config.lora_modules), config)
    assert {"in_proj_a", "in_proj_b"} <= set(names)
    assert resolve_target_modules(",".join(names), config) == list(config.lora_modules)
    assert shortest([path_of(0, "in_proj_a")], config) == ("in_proj_a",)
