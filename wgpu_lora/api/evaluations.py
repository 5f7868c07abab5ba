"""Evaluations in the run log."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from wgpu_lora.data import Prepared
from wgpu_lora.infer import Evaluation
from wgpu_lora.infer.named import BASE
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.track.entry import HELD_OUT, DataFile, Losses, run_name
from wgpu_lora.track.recording import device_facts, given_options, recorded


def recorded_evaluation(
    model: LoadedModel, prepared: Prepared, name: str, adapter: str | Path | None, objective: str = "sft"
) -> AbstractContextManager[dict[str, Any]]:
    """An evaluation in the run log."""
    quant = model.decoder.base_dtype
    config = {"model": model.name, "adapter": adapter and str(adapter), "max_length": prepared.max_length}
    return recorded(
        "evaluate",
        run_name(model.name, quant, adapter is not None, False, "evaluate", "f32"),
        objective="evaluate",
        adapter=None if name == BASE else name,
        device=device_facts(model.device.info),
        config=given_options({**config, "base_dtype": quant, "objective": objective}),
        data=DataFile(prepared.path, prepared.digest),
    )


def note_results(entry: dict[str, Any], found: Evaluation) -> None:
    """The results of an evaluation, in its entry of the run log."""
    entry["losses"] = Losses(HELD_OUT, final=found.loss)
    entry |= {"tokens": found.tokens, "seconds": round(found.seconds, 3)}
    entry["results"] = {"perplexity": found.perplexity, "rows": found.rows, **found.metrics}
