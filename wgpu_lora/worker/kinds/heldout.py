"""The job `heldout`: held-out losses of adapters of any runs, as their own training measures them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from wgpu_lora.api.call_arguments import path_as_text
from wgpu_lora.data import split_python_rows
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.finetune import prepare_run, with_demo_data, with_stored_dtype
from wgpu_lora.train.objective_eval import evaluate_objective
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.resolve_options import resolve_options
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.session.data_stream import heldout_options
from wgpu_lora.worker.job_process import EventWriter, JobResult

# An adapter says these itself, also where its file is of another form than training's (PiSSA has twice the rank).
OF_ADAPTERS = ("lora_r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "init_lora_weights", "init_adapter")


def run(port: EventWriter, *, where: str, device: str | int | None = None) -> JobResult:
    """Answers the request `measure`, any number of them, as JSON lines on standard input."""
    port.answer(SimpleNamespace(measure=_Measuring(port, Device(device), where).measure))
    return JobResult({}, 0, "")


@dataclass
class _Measuring:
    """Keeps one opened model, and the rows of runs that were requested."""

    port: EventWriter
    device: Device
    where: str
    _model: tuple[tuple[str, str], LoadedModel] | None = None
    _runs: dict[str, tuple[dict[str, Any], AdapterRun]] = field(default_factory=dict)

    def measure(self, name: str, options: dict[str, Any], adapter: str) -> dict[str, Any]:
        """The loss and the metrics of an adapter on the held-out rows of a run; or why it cannot be measured.

        Args:
            name: of the run. options: of its training. adapter: a PEFT directory.
        """
        try:
            read, model = self._read(name, options)
            assert read.heldout
            defaults = TrainingArguments()
            own = {option: getattr(defaults, option) for option in OF_ADAPTERS}
            args = replace(heldout_options(read.args), **own | {"init_adapter": adapter})
            return dict(evaluate_objective(model, read.heldout, args, self.port))
        except UserError as error:
            return {"refused": str(error)}

    def _read(self, name: str, options: dict[str, Any]) -> tuple[AdapterRun, LoadedModel]:
        known = self._runs.get(name)
        texts, rows = split_python_rows({key: path_as_text(value, key, self.where) for key, value in options.items()})
        args, _ = resolve_options(texts, None, self.where)
        args = with_demo_data(args)
        model = self._opened(args)
        if known and known[0] == options:
            return known[1], model
        result = prepare_run(with_stored_dtype(replace(args, resume=False), model), model, rows=rows)
        if not result.heldout:
            raise UserError(f"{name} has no held-out rows: give --eval-data or --validation-split.")
        self._runs[name] = options, result
        return result, model

    def _opened(self, args: TrainingArguments) -> LoadedModel:
        key = args.model or "demo", args.base_dtype
        if self._model is None or self._model[0] != key:
            self._model, self._runs = None, {}  # a device may not have the room for two
            self._model = key, open_model(key[0], base_dtype=key[1], device=self.device)
        return self._model[1]
