"""wgpu-lora run: a chain of stages, from data to an uploaded model."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.chain.watch import ChainWatch
from wgpu_lora.cli.completion import RECIPE
from wgpu_lora.cli.console import Bar, TensorBar, console, duration, line, table
from wgpu_lora.cli.options import Device
from wgpu_lora.events import Events
from wgpu_lora.installed import program

if TYPE_CHECKING:
    from wgpu_lora.chain.file import Chain
    from wgpu_lora.chain.run import Standing
    from wgpu_lora.train.finetune import FinetuneJob


def run_chain(
    chain: Annotated[
        str,
        typer.Argument(
            metavar="CHAIN", help="TOML file of stages, or the name of a bundled one.", autocompletion=RECIPE
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
    from wgpu_lora.chain.file import read_chain
    from wgpu_lora.chain.run import run, standings
    from wgpu_lora.chain.stage import EndedEarlyError

    found = read_chain(chain, output, device, model)
    if listing:
        _list(standings(found, start))
        return 0
    try:
        run(found, _Shown(found), start)
    except (EndedEarlyError, KeyboardInterrupt) as error:
        again = [program(), "run", chain]
        for name, value in (("--output", output), ("--model", model)):
            again += [name, value] if value else []
        line("continue", shlex.join(again), whole=True)
        if isinstance(error, EndedEarlyError):
            return error.code
        raise
    line("finished", f"{len(found.links)} stages; the results are in {found.output}")
    return 0


def _list(stages: list[Standing]) -> None:
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
    left = ["stage", "kind", "state"]
    console().print(table(["", *left, "took"], rows, left=left))


class _Shown(ChainWatch):
    """Lines about stages, and bars or lines about what they do."""

    def __init__(self, chain: Chain):
        self._total = len(chain.links)
        self._bar: Bar | None = None

    def stage(self, number: int, name: str, kind: str, why: str, seconds: float | None) -> None:
        left = "" if seconds is None else f"; about {duration(seconds)} left, as last time"
        line("stage", f"{number} of {self._total}: {name} ({kind}), since {why}{left}")

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

    def training(self, job: FinetuneJob) -> AbstractContextManager[Events]:
        from wgpu_lora.cli.describing import describe
        from wgpu_lora.cli.finetune import Watcher

        describe(job)
        return Watcher(job)

    def trained(self, record: Any) -> None:
        from wgpu_lora.cli.finetune import report

        report(record, command="")

    def said(self, label: str, text: str) -> None:
        self._close()
        line(label, text)
