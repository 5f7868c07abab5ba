"""Running a chain: each stage that has not run, or whose inputs or outputs are not those of its last run."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from wgpu_lora.atomic import new_directory
from wgpu_lora.chain.digests import MISSING, Digests
from wgpu_lora.chain.file import Chain, Link, lasting
from wgpu_lora.chain.state import Done, State, inputs_of
from wgpu_lora.chain.watch import ChainWatch, Watch
from wgpu_lora.errors import UserError
from wgpu_lora.locks import sweep
from wgpu_lora.train.job import locked

DIGESTS = "digests.json"


@dataclass(frozen=True)
class Standing:
    """Whether a stage has to run: `why`, None if it is up to date."""

    link: Link
    why: str | None
    seconds: float | None


def standings(chain: Chain, start: str | None = None) -> list[Standing]:
    """What a run would do now. Nothing is written, and no model is downloaded."""
    state, digests = State.read(chain.output), Digests(chain.output / DIGESTS)
    forced = _forced(chain, start)
    found: list[Standing] = []
    for link in chain.links:
        due = [other.link.name for other in found if other.why and other.link.name in link.needs]
        done = state.stages.get(link.name)
        if link.name in forced:
            why: str | None = "asked for"
        elif due:
            why = f"'{due[0]}' runs before it"
        elif start is not None:
            why = _not_whole(link, done, digests)
        elif done is None:
            why = "it has not run yet"
        else:
            why = _why(link, done, digests, download=False)
        found.append(Standing(link, why, done.seconds if done else None))
    return found


def run(chain: Chain, watch: ChainWatch, start: str | None = None) -> None:
    """Run what has to run.

    Args:
        start: run this stage and all after it whatever their inputs, and none before it, whose outputs must be whole.

    Raises:
        UserError: a stage cannot run, or another process is running the chain.
        EndedEarlyError: a stage was interrupted, or failed.
    """
    forced = _forced(chain, start)
    with locked(chain.output):
        state, digests = State.read(chain.output), Digests(chain.output / DIGESTS)
        sweep(chain.output, re.compile("|".join(re.escape(link.name) for link in chain.links)))
        for number, link in enumerate(chain.links, 1):
            done = state.stages.get(link.name)
            if start is not None and link.name not in forced:
                wrong = _not_whole(link, done, digests)
                if wrong:
                    raise UserError(f"The stage '{link.name}' comes before '{start}', but {wrong}: run it first.")
                why = None
            else:
                why = "asked for" if link.name in forced else _why(link, done, digests)
            if why is None:
                watch.skipped(number, link.name, link.kind)
                continue
            known = [state.stages[one.name].seconds for one in chain.links[number - 1 :] if one.name in state.stages]
            rest = sum(known) if len(known) == len(chain.links) - number + 1 else None
            watch.stage(number, link.name, link.kind, why, rest)
            begun = time.monotonic()
            _run(link, state, digests, watch)
            watch.finished(link.name, link.output, time.monotonic() - begun)


def _forced(chain: Chain, start: str | None) -> set[str]:
    return set() if start is None else set(lasting(chain.links, start))


def _why(link: Link, done: Done | None, digests: Digests, download: bool = True) -> str | None:
    """Why a stage has to run; None if it is up to date."""
    if done is None:
        return "it has not run yet"
    if done.outputs is None:
        return "it was interrupted"
    return done.difference(inputs_of(link, digests.of_all(link.stage.files(download)))) or _not_whole(
        link, done, digests
    )


def _not_whole(link: Link, done: Done | None, digests: Digests) -> str | None:
    """What is wrong with the outputs, as text; None if nothing is."""
    if done is None or done.outputs is None:
        return "it has not finished"
    for name, digest in done.outputs.items():
        found = digests.of(link.output / name)
        if found != digest:
            return f"{name} {'is missing' if found == MISSING else 'has changed'}"
    return None


def _run(link: Link, state: State, digests: Digests, watch: Watch) -> None:
    stage, done = link.stage, state.stages.get(link.name)
    now = inputs_of(link, digests.of_all(stage.files(True)))
    if link.output.exists() and done is None:
        raise UserError(f"{link.output} exists, but not from this chain: choose another output, or remove it.")
    continues = stage.resumes and done is not None and done.outputs is None and not done.difference(now)
    if not continues and stage.resumes:
        _set_aside(link.output)
    now.seconds = done.seconds if continues and done else 0.0
    state.stages[link.name] = now
    state.write()
    begun = time.monotonic()
    try:
        if stage.resumes:
            stage.run(link.output, watch, continues)
        else:
            with new_directory(link.output) as place:
                stage.run(place, watch, False)
    finally:
        now.seconds += time.monotonic() - begun
        state.write()
    now.outputs = {path.relative_to(link.output).as_posix(): digests.of(path) for path in stage.outputs(link.output)}
    lost = [name for name, digest in now.outputs.items() if digest == MISSING]
    if lost:
        raise UserError(f"The stage '{link.name}' has not written {lost[0]}: run the chain again.")
    digests.save()
    state.write()


def _set_aside(output: Path) -> None:
    """Rename what an earlier run has left: it took long, and may be wanted."""
    number, kept = 1, output.with_name(f"{output.name}-1")
    while kept.exists():
        number += 1
        kept = output.with_name(f"{output.name}-{number}")
    if output.exists():
        output.rename(kept)
