"""Options of an objective's own: declared beside it, given together, checked by name."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import COMMAND_LINE, naming
from wgpu_lora.train.adapter_tasks import task_of
from wgpu_lora.train.objectives import OBJECTIVES, objective_of
from wgpu_lora.train.objectives.objective import Objective
from wgpu_lora.train.option_types import Range, own_option
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values
from wgpu_lora.train.resolve_options import resolve_options


@dataclass(frozen=True)
class Mine(Objective):
    factor: float = own_option(0.1, "Scale of the margins.", within=Range(above=0))
    loss: str = own_option("hinge", "Loss by margin.", choices=("hinge", "sigmoid"))
    seed: int = 0  # a training option
    least: int = 1
    centred: bool = False


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, "mine", Mine)


def args(text: object) -> TrainingArguments:
    return from_values({"objective": "mine", "objective_args": text, "seed": 3}, "Here")


def test_they_reach_the_objective() -> None:
    assert objective_of(args(None)) == Mine(seed=3)
    arguments = args(" centred=true, factor = 2,loss=sigmoid,")
    assert objective_of(arguments) == Mine(2.0, "sigmoid", 3, centred=True)
    assert arguments.objective_args == "factor=2.0,loss=sigmoid,centred=true"
    assert args({"centred": True, "factor": 2, "loss": "sigmoid"}) == arguments


def test_equal_values_are_equal_options() -> None:
    """So that a run can be resumed however they are spelled."""
    assert args("factor=.50").objective_args == "factor=0.5"
    assert args("factor=0.1,least=1") == args("") == args(None)


def test_from_a_recipe_and_an_adapters_table(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('objective = "mine"\nobjective_args = "factor=0.5"\ndata = "x.jsonl"\n')
    base = resolve_options({}, str(recipe), "Here")[0]
    assert objective_of(base) == Mine(0.5, seed=42)
    assert (
        resolve_options({"objective": "sft"}, str(recipe), "Here")[0].objective_args is None
    )  # they are not of that one
    table = {"data": "x.jsonl", "checkpoint": "a"}
    assert task_of(table, "Here").arguments(base).objective_args == "factor=0.5"
    assert task_of({**table, "objective": "sft"}, "Here").arguments(base).objective_args is None
    own = task_of({**table, "objective_args": {"factor": 3}}, "Here").arguments(base)
    assert objective_of(own) == Mine(3.0, seed=42)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("factor=0", "--objective-args: 'factor' must be greater than 0, not 0.0."),
        ("factor=nan", "--objective-args: 'factor' must be a number, not 'nan'."),
        ("least=0.5", "--objective-args: 'least' must be a whole number, not '0.5'."),
        ("centred=1", "--objective-args: 'centred' must be true or false, not '1'."),
        ("loss=exp", "--objective-args: 'loss' must be one of hinge, sigmoid, not exp."),
        ("factor", "--objective-args must be NAME=VALUE, separated by commas, not 'factor'."),
        ("factor=1,factor=2", "--objective-args has 'factor' twice: leave one out."),
        ("seed=1", "--objective-args: --objective mine has no option 'seed' of its own: use --seed."),
        (
            "gamma=1",
            "--objective-args: --objective mine has no option 'gamma' of its own: choose among factor (Scale of the "
            "margins; 0.1), loss (Loss by margin; hinge), least (a whole number; 1), centred (true or false; False).",
        ),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with naming(COMMAND_LINE), pytest.raises(UserError) as caught:
        args(text)
    assert str(caught.value) == message
