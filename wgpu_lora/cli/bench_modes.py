"""Which options of 'wgpu-lora bench' act in which of its modes: one that would do nothing is refused."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from wgpu_lora.cli.options import refuse_idle
from wgpu_lora.errors import UserError

MODEL = {"model", "shape", "layers", "tokens", "rank", "base_dtype", "compute_dtype", "device", "json"}
BRICKS = MODEL | {"tune", "time_limit"}
# Parameter that chooses the mode -> the others that act in it.
TAKES: dict[str, set[str]] = {
    "brick": BRICKS,
    "everything": BRICKS,
    "listing": set(),
    "compare": set(),
    "training": MODEL | {"tune", "recipe", "repeat", "max_steps", "project", "data", "batch", "accumulation"},
    "find_max_batch": MODEL | {"time_limit", "max_batch", "memory_limit"},
}


def check_mode(ctx: typer.Context) -> None:
    """Raises UserError unless the command line names one mode, and no option that does nothing in it."""
    flags = {str(p.name): p.opts[0] for p in ctx.command.params}
    chosen = [mode for mode in TAKES if ctx.params[mode]]
    if len(chosen) != 1:
        raise UserError(
            "Say what to do with exactly one of --brick NAME, --all, --list, --compare OLD NEW, --training and "
            "--find-max-batch."
        )
    (mode,) = chosen
    refuse_idle(ctx, flags.keys() - TAKES[mode] - {mode}, f"with {flags[mode]}")


def check_bricks(ctx: typer.Context, names: Sequence[str]) -> None:
    """The same of bricks, which do not depend on all that a model and a step may be. UserError for one not known."""
    from wgpu_lora.bench.contract import OPTIONS, load_contract

    taken = {option for name in names for option in load_contract(name).options}
    bricks = "the brick" if len(names) == 1 else "the bricks"
    refuse_idle(ctx, set(OPTIONS) - taken, f"with {bricks} {', '.join(names)}")
