"""wgpu-lora cluster run: adapters trained on the devices of a cluster."""

from __future__ import annotations

from typing import Any

import typer

from wgpu_lora.cli.cluster.options import Address, ClusterToml, Dashboard, Detach, Here, run_options, with_run_options
from wgpu_lora.cli.finetune import Adapters, AdaptersConfig
from wgpu_lora.cli.parameters import training_options, warn_unused
from wgpu_lora.train.options.training_arguments import TrainingArguments


def _run(ctx: typer.Context, given: dict[str, Any], recipe: str | None, values: dict[str, Any]) -> int:
    from wgpu_lora.cluster.extra import check_ray

    check_ray()
    from wgpu_lora.cli.cluster.running import run_tasks
    from wgpu_lora.cluster.client.connect import target
    from wgpu_lora.cluster.spec.tasks import gather_tasks, shared_arguments

    what = target(values["address"], values["file"], values["local"])
    options = run_options(ctx, values, what.file)
    tasks = gather_tasks(given, recipe, values["adapters"] or [], values["adapters_config"], what.file, options.shared)
    warn_unused(given, shared_arguments(given, recipe, what.file))
    return run_tasks(what, tasks, options, detach=values["detach"], dashboard=values["dashboard"])


@with_run_options
def _command(
    args: TrainingArguments,
    note: str | None,
    address: Address = None,
    file: ClusterToml = None,
    local: Here = False,
    adapters: Adapters = None,
    adapters_config: AdaptersConfig = None,
    detach: Detach = False,
    dashboard: Dashboard = False,
    **options: Any,
) -> int:
    """Train adapters on the devices of a cluster, each where it fits and is done soonest.

    All of them are shown in one table. Ctrl-C leaves them running: 'attach' comes back, 'cancel' ends them. Everything
    that can be refused is refused before anything runs.
    """
    raise AssertionError("cluster tasks are gathered from the given options")


_command.__name__ = "run"
run = training_options(_command, _run)
