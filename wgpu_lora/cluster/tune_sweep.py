"""Sweeps with a scheduler of Ray Tune, a trial a task: ASHA ends poor ones early, PBT lets them copy better ones."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec

from wgpu_lora.cluster.cluster_paths import cluster_root, options_here
from wgpu_lora.cluster.device_resources import DEVICE, hold_any_device
from wgpu_lora.cluster.messages import NodeFacts, RunRequest, RunView, Snapshot, Task, TaskProgress, TaskView
from wgpu_lora.cluster.worker.kinds.training_jobs import prepare_finetune
from wgpu_lora.errors import UserError, reason
from wgpu_lora.events import Evaluating, Events, StepResult
from wgpu_lora.files.atomic import replace_directory
from wgpu_lora.files.installation import pip_line
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.training_log import LOG, Log

STEP, LOSS, EVAL_LOSS = "step", "loss", "eval_loss"  # of a report
FAILURES = 3  # of a trial
CONFIG, NAME, PARAMS = "task", "name", "params"  # the parameter of a trial, and what it has
RUN = "run"  # the folder of a run in a trial's checkpoint


def check_tune() -> None:
    """Raises UserError if the libraries that Ray Tune needs are not installed."""
    missing = [name for name in ("ray", "pandas", "pyarrow", "fsspec", "requests") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"A scheduler needs Ray Tune, whose library {missing[0]} is not installed: run {pip_line('sweep')}, or "
            "leave the scheduler out."
        )


def tune_storage(request: RunRequest, nodes: Sequence[NodeFacts]) -> str:
    """Where Tune keeps its trials: the run's storage, or a folder of this host if it is the only one.

    Raises:
        UserError: there are several hosts, but no storage that all reach.
    """
    if request.storage:
        return f"{request.storage.rstrip('/')}/tune"
    if len([node for node in nodes if node.devices]) > 1:
        raise UserError(
            "A sweep with a scheduler on several hosts needs a storage that all of them reach: give --storage."
        )
    return str(cluster_root() / "tune")


def run_tune(request: RunRequest, storage: str) -> Snapshot:
    """Train the tasks of a sweep as trials of Ray Tune, and bring their results to their outputs.

    A sweep of the same name that was interrupted goes on.

    Raises:
        UserError: a result cannot be written.
    """
    from ray import tune

    assert request.sweep is not None
    metric = request.sweep.metric
    options = {task.name: task.options for task in request.tasks}
    trained = tune.with_parameters(train_trial, options=options, metric=metric)
    trainable = tune.with_resources(trained, {"cpu": 0, DEVICE: 1})
    content = json.dumps([options, metric, request.sweep.scheduler], sort_keys=True)
    name = f"{request.name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"  # other tasks are another experiment
    path = f"{storage}/{name}"
    if tune.Tuner.can_restore(path):
        tuner = tune.Tuner.restore(path, trainable, resume_errored=True)
    else:
        trials = [{NAME: task.name, PARAMS: task.params} for task in request.tasks]
        tuner = tune.Tuner(
            trainable,
            param_space={CONFIG: tune.grid_search(trials)},
            tune_config=tune.TuneConfig(
                metric=metric,
                mode="min",
                scheduler=_scheduler(request),
                trial_name_creator=lambda trial: str(trial.config[CONFIG][NAME]),
            ),
            run_config=tune.RunConfig(
                name=name,
                storage_path=storage,
                failure_config=tune.FailureConfig(max_failures=FAILURES),
                verbose=1,
            ),
        )
    results = tuner.fit()
    if results.num_terminated + results.num_errors < len(request.tasks):
        raise KeyboardInterrupt  # Tune has saved its state
    # With PBT, the configuration of a trial may be another's by now, but for one that has reported nothing.
    by_name = {(result.metrics or {}).get(NAME) or result.config[CONFIG][NAME]: result for result in results}
    views = [_view(request, task, by_name.get(task.name)) for task in request.tasks]
    files, root = fsspec.core.url_to_fs(path)
    files.rm(root, recursive=True)
    return Snapshot(0.0, [RunView(request.name, request.by, 0.0, True, None, request.sweep)], views, [], [])


def _scheduler(request: RunRequest) -> Any:
    from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

    sweep = request.sweep
    assert sweep is not None
    if sweep.scheduler == "pbt":
        values: dict[str, list[Any]] = {}
        for task in request.tasks:
            for name, value in task.params.items():
                values.setdefault(name, []).append(value)
        # In order, since a value changes to one beside it; None is the option's default.
        mutations = {name: sorted(set(of), key=lambda v: -math.inf if v is None else v) for name, of in values.items()}
        return PopulationBasedTraining(
            time_attr=STEP,
            perturbation_interval=sweep.perturbation_interval,
            hyperparam_mutations={CONFIG: {PARAMS: mutations}},
        )
    return ASHAScheduler(
        time_attr=STEP,
        max_t=1 + max(_steps(request, task) for task in request.tasks),
        stop_last_trials=False,  # a trial ends by itself, with its results
        grace_period=sweep.grace_period,
        reduction_factor=sweep.reduction_factor,
    )


def _steps(request: RunRequest, task: Task) -> int:
    return max((plan.steps for plan in request.plans[task.name].values()), default=1)


def train_trial(config: dict[str, Any], options: dict[str, dict[str, Any]], metric: str) -> None:
    """The function of a trial: trains a task on a free device of its node, from its checkpoint if it has one.

    Args:
        options: of training, by task.
    """
    from ray import tune

    with tempfile.TemporaryDirectory(prefix="wgpu-lora-trial-") as directory, hold_any_device() as index:
        name, params = tune.get_context().get_trial_name(), config[CONFIG][PARAMS]
        run, checkpoint = Path(directory, RUN), tune.get_checkpoint()
        if checkpoint:
            checkpoint.to_directory(directory)
            if newest := run_checkpoint.latest_checkpoint(run):  # with PBT, that of a trial with other values
                run_checkpoint.change_options(newest, params)
        values = {**options_here(options[name]), **params}
        arguments = {option: value for option, value in values.items() if value is not None}
        arguments |= {"device": index, "output": str(run)} | ({"resume": True} if checkpoint else {})
        job, _ = prepare_finetune(arguments, name)
        job.train(_TrialEvents(Path(directory), name, metric))
        # The results, by a last report of the same values.
        state = json.loads((run / "run.json").read_text())["state"]
        losses = {LOSS: state["last_loss"], EVAL_LOSS: state["last_eval_loss"]}
        tune.report({NAME: name, STEP: state["step"], **losses}, checkpoint=tune.Checkpoint.from_directory(directory))


class _TrialEvents(Events):
    """Reports the metric of a trial, with the newest checkpoint of its run: that of the same step if it is saved."""

    def __init__(self, directory: Path, name: str, metric: str):
        self._directory, self._name, self._metric = directory, name, metric
        self._loss = math.nan
        self._saved = False
        self._pending_report: tuple[int, float | None] | None = None  # a step and its held-out loss

    def saved(self, directory: Path, step: int, adapter: str | None) -> None:
        self._saved = True
        self._report()

    def step(self, result: StepResult) -> bool | None:
        self._report()
        self._loss = result.loss
        if self._metric == LOSS or result.eval_loss is not None:
            self._pending_report = result.step, result.eval_loss
        return None

    def evaluating(self, evaluating: Evaluating) -> None:
        if evaluating.loss is not None and evaluating.step == 0:
            self._pending_report = 0, evaluating.loss

    def _report(self) -> None:
        from ray import tune

        if self._pending_report is None:
            return
        (step, eval_loss), self._pending_report = self._pending_report, None
        with tempfile.TemporaryDirectory(prefix="wgpu-lora-report-") as copy:
            checkpoint = None
            if self._saved:  # the run goes on writing, so a copy of what it has now
                shutil.copytree(self._directory / RUN, Path(copy, RUN), ignore=shutil.ignore_patterns(".*"))
                Log(Path(copy, RUN, LOG), resume_step=step)  # without the steps after the one reported
                checkpoint = tune.Checkpoint.from_directory(copy)
            values = {NAME: self._name, STEP: step, LOSS: self._loss} | (
                {} if eval_loss is None else {EVAL_LOSS: eval_loss}
            )
            tune.report(values, checkpoint=checkpoint)


def _view(request: RunRequest, task: Task, result: Any) -> TaskView:
    """A task as it ended; its result is copied to its output."""
    metrics = (result.metrics or {}) if result else {}
    total, step, state, why = _steps(request, task), int(metrics.get(STEP, 0)), "stopped", ""
    if result is None or result.error:
        state, why = "failed", str(result.error).strip().splitlines()[-1] if result else "it was not started"
    elif result.checkpoint is None:
        why = "it has no checkpoint"
    else:
        _copy_result(result.checkpoint, Path(task.output))
        state = "finished" if (Path(task.output) / "run.json").is_file() else "stopped"
    best = None
    if result is not None and result.metrics_dataframe is not None and EVAL_LOSS in result.metrics_dataframe:
        best = float(result.metrics_dataframe[EVAL_LOSS].min())
    progress = TaskProgress(step, total, metrics.get(LOSS), metrics.get(EVAL_LOSS), best)
    params = result.config[CONFIG][PARAMS] if result else task.params
    return TaskView(request.name, task.name, state, None, progress, task.output, 1, why, True, params)


def _copy_result(checkpoint: Any, output: Path) -> None:
    """Copy the run of a trial. One that was ended early gets the adapter of its newest checkpoint."""
    hidden = output.with_name(f".{output.name}.tmp")
    with checkpoint.as_directory() as directory:
        try:
            shutil.rmtree(hidden, ignore_errors=True)
            shutil.copytree(Path(directory, RUN), hidden)
            newest = run_checkpoint.latest_checkpoint(hidden)
            for file in run_checkpoint.ADAPTER_FILES if newest and not (hidden / "run.json").exists() else ():
                with suppress(FileNotFoundError):
                    shutil.copyfile(newest / file, hidden / file)  # type: ignore[operator]
            replace_directory(hidden, output)
        except OSError as error:
            text = f"The result cannot be written to {output} ({reason(error)}): run the sweep again."
            raise UserError(text) from None
