"""wgpu-lora run: a chain of stages, from data to an uploaded model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from wgpu_lora.cli.command import Command, Group
from wgpu_lora.cli.console import Bar, TensorBar, console, line, table
from wgpu_lora.cli.parameters import RECIPES, Device
from wgpu_lora.errors import UserError
from wgpu_lora.events import Events
from wgpu_lora.files.atomic import check_new, write_new_bytes
from wgpu_lora.files.installation import program
from wgpu_lora.names.text import count_noun, duration
from wgpu_lora.train.chain.stage import ChainWatch

if TYPE_CHECKING:
    from wgpu_lora.train.chain.chain_file import Chain
    from wgpu_lora.train.chain.chain_run import StageStatus
    from wgpu_lora.train.job import Job


def run_chain(
    chain: Annotated[
        str,
        typer.Argument(
            metavar="CHAIN", help="TOML file of stages, or the name of a bundled one.", autocompletion=RECIPES
        ),
    ],
    output: Annotated[str | None, typer.Option(help="Directory of all results; by default, the file's.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model of all stages that name none; by default, the file's.")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", help="Run this stage and those after it again, and none before it.", metavar="STAGE"),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--dry-run", "--list", help="Show the stages, and which of them would run.")
    ] = False,
    device: Device = None,
) -> int:
    """Run a chain of stages: prepare, finetune, merge, gguf, cards, push.

    A stage is skipped if its options, the files that it reads and wgpu-lora itself have not changed since it ran, and
    its results are as it left them. A chain can be interrupted at any time, and goes on when it is run again.
    """
    from wgpu_lora.train.chain.chain_file import read_chain
    from wgpu_lora.train.chain.chain_run import run, stage_statuses
    from wgpu_lora.train.chain.stage import EndedEarlyError

    result = read_chain(chain, output, device, model)
    if listing:
        _list(stage_statuses(result, start))
        return 0
    try:
        run(result, _ChainProgress(result), start)
    except (EndedEarlyError, KeyboardInterrupt) as error:
        command = [program(), "run", chain]
        for name, value in (("--output", output), ("--model", model)):
            command += [name, value] if value else []
        line("continue", shlex.join(command), whole=True)
        if isinstance(error, EndedEarlyError):
            return error.code
        raise
    line("finished", f"{len(result.links)} stages; the results are in {result.output}")
    return 0


def _list(stages: list[StageStatus]) -> None:
    rows = [
        [
            str(number),
            stage.link.name,
            stage.link.kind,
            "up to date" if stage.why is None else f"runs: {stage.why}",
            duration(stage.seconds) if stage.seconds else "",
        ]
        for number, stage in enumerate(stages, 1)
    ]
    text_columns = ["stage", "kind", "state"]
    console().print(table(["", *text_columns, "took"], rows, text_columns=text_columns))


class _ChainProgress(ChainWatch):
    """Lines about stages, and bars or lines about what they do."""

    def __init__(self, chain: Chain):
        self._total = len(chain.links)
        self._bar: Bar | None = None

    def stage(self, number: int, name: str, kind: str, why: str, seconds: float | None) -> None:
        estimate = "" if seconds is None else f"; about {duration(seconds)} left, as last time"
        line("stage", f"{number} of {self._total}: {name} ({kind}), since {why}{estimate}")

    def skipped(self, number: int, name: str, kind: str) -> None:
        line("stage", f"{number} of {self._total}: {name} ({kind}) is up to date")

    def finished(self, name: str, output: Path, seconds: float) -> None:
        self._close()
        line("done", f"{name} in {duration(seconds)}: {output}")

    def reading(self, text: str, done: float, total: float | None) -> None:
        self._bar = self._bar or Bar(text, total, " MB")
        self._bar.advance(text, done, total)

    def _close(self) -> None:
        if self._bar:
            self._bar.close()
            self._bar = None

    @contextmanager
    def tensors(self, text: str, total: int) -> Iterator[Events]:
        with Bar(text, total) as bar:
            yield TensorBar(bar)

    def training(self, job: Job[Any]) -> AbstractContextManager[Events]:
        from wgpu_lora.cli.finetune import TrainingProgress
        from wgpu_lora.cli.run_summary import describe

        describe(job)
        return TrainingProgress(job)

    def trained(self, record: Any) -> None:
        from wgpu_lora.cli.finetune import report

        report({None: record}, command="")

    def note_line(self, label: str, text: str) -> None:
        self._close()
        line(label, text)


recipes = typer.Typer(
    cls=Group, name="recipes", help="Training set-ups and chains included in the package.", rich_markup_mode=None
)


@recipes.command("list", cls=Command)
def list_recipes() -> int:
    """List the bundled recipes."""
    from rich.table import Table

    from wgpu_lora.files.assets import asset_dir

    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("description")
    for path in sorted(Path(str(asset_dir("recipes"))).glob("*.toml")):
        table.add_row(path.stem, path.read_text(encoding="utf-8").splitlines()[0].lstrip("# "))
    console().print(table)
    return 0


@recipes.command("show", cls=Command)
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of a bundled recipe, or a path.", autocompletion=RECIPES)
    ],
) -> int:
    """Print a recipe, its reference results and its requirements."""
    from wgpu_lora.files.json_files import read_toml
    from wgpu_lora.train.chain.chain_file import read_chain
    from wgpu_lora.train.resolve_options import find_recipe, recipe_arguments

    path = find_recipe(name)
    if path.exists() and "stage" in read_toml(path, "The recipe"):
        read_chain(name)
    else:
        recipe_arguments(path)
    print(path.read_text(encoding="utf-8"), end="", flush=True)
    return 0


@recipes.command("data", cls=Command)
def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Recipe with a generator: hive-mind-0.5b.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="JSONL file to write; it must not exist yet.")],
    rows: Annotated[int, typer.Option(help="Number of rows. [x>=1]")] = 1500,
    seed: Annotated[int, typer.Option(help="Seed of the generator.")] = 0,
) -> int:
    """Write synthetic training rows for a recipe."""

    if name not in GENERATORS:
        raise UserError(f"There is no generator for '{name}': choose one of {', '.join(GENERATORS)}.")
    if rows < 1:
        raise UserError(f"--rows must be greater than 0, not {rows}.")
    write_rows(GENERATORS[name], output, rows, seed)
    line("written", f"{count_noun(rows, 'row')} in {output}")
    return 0


Row = dict[str, str]
THINGS = ("crate", "shelf", "basket", "train", "garden", "library", "boat", "kitchen", "market", "workshop")
GOODS = ("apples", "books", "lamps", "bolts", "seeds", "plates", "ropes", "keys", "tiles", "candles")
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
NAMES = ("Ada", "Bela", "Chidi", "Dana", "Emeka", "Fumi", "Goran", "Hana", "Ivo", "Jun")


def hive_mind(rng: np.random.Generator) -> Row:
    """A short question of one of five kinds about numbers, names and lists, with its answer."""

    def pick(words: Sequence[str]) -> str:
        return words[int(rng.integers(len(words)))]

    a, b, c = (int(n) for n in rng.integers(2, 40, 3))
    name, thing, goods, other_goods = pick(NAMES), pick(THINGS), pick(GOODS), pick(GOODS)
    numbers = [int(n) for n in rng.integers(0, 99, 5)]
    numbers_text = ", ".join(map(str, numbers))
    word = "".join(pick(SYLLABLES) for _ in range(4))  # there are too few real ones
    kinds = (
        (
            f"A {thing} holds {a} {goods} in each of {b} rows. {name} takes {c} away. How many are left?",
            f"{a} times {b} is {a * b}. Without {c} that leaves {a * b - c} {goods}."
            if a * b >= c
            else f"{a} times {b} is {a * b}, which is fewer than {c}: none are left.",
        ),
        (f"Sort these numbers from low to high: {numbers_text}.", f"{', '.join(map(str, sorted(numbers)))}."),
        (f"Which is the largest of {numbers_text}?", f"The largest is {max(numbers)}."),
        (
            f"{name} has {a} {goods} and {b} {other_goods}. Write that as JSON.",
            json.dumps({"name": name, goods: a} | ({other_goods: b} if other_goods != goods else {goods: a + b})),
        ),
        (f"Spell the word '{word}' backwards.", f"'{word}' backwards is '{word[::-1]}'."),
    )
    prompt, completion = kinds[rng.integers(len(kinds))]
    return {"prompt": prompt, "completion": f" {completion}"}


GENERATORS: dict[str, Callable[[np.random.Generator], Row]] = {"hive-mind-0.5b": hive_mind}


def write_rows(make: Callable[[np.random.Generator], Row], path: Path, rows: int, seed: int) -> None:
    """Write `rows` distinct lines, the same for the same seed; `make` must be able to generate many more.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    check_new(path, "OUTPUT")
    rng = np.random.default_rng(seed)
    lines: dict[str, None] = {}  # in the order in which they were generated
    while len(lines) < rows:
        lines[json.dumps(make(rng)) + "\n"] = None
    write_new_bytes(path, "".join(lines).encode(), "OUTPUT")
