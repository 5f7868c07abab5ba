"""The Python door: load, fine-tune, generate, compare, evaluate. The command line goes through it too."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wgpu_lora.data import Prepared, prepare, resolve_data
from wgpu_lora.errors import UserError
from wgpu_lora.infer import Evaluation
from wgpu_lora.infer import evaluate as evaluate_rows
from wgpu_lora.infer.answer import Answer, OnDone, OnText, answer_slots
from wgpu_lora.infer.named import on_device, slots_of
from wgpu_lora.infer.prompt import check_text
from wgpu_lora.models.load import Progress
from wgpu_lora.models.loaded import LoadedModel, open_model
from wgpu_lora.train.arguments import gather, named
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.idle import idle
from wgpu_lora.train.length import check_rows, fit_rows
from wgpu_lora.train.pipeline import MultiAdapterPipeline as MultiAdapterPipeline
from wgpu_lora.train.trainer import Callback

__all__ = ["Answer", "answer", "compare", "evaluate", "evaluate_several", "finetune", "generate", "load"]


def load(model: str | Path = "demo", *, device: str | int | None = None, base_dtype: str = "nf4") -> LoadedModel:
    """Opens a model and a device. The weights go onto the device at first use, and stay there.

    Args:
        model: a directory, a GGUF file, a hub id, or `demo`.
        device: index or part of a name, as `wgpu-lora info` lists them.
    """
    return open_model(str(model), device, base_dtype)


def finetune(
    model: LoadedModel | str | Path | None = None,
    /,
    *,
    callback: Callback = lambda result: None,
    progress: Progress = lambda name: None,
    **options: Any,
) -> dict[str, Any]:
    """Trains an adapter and writes it to `output`; returns what run.json holds.

    Args:
        model: a loaded one, or what `load` takes; may be given by name too.
        callback: called after every step with a StepResult.
        progress: called with the name of each tensor that is loaded.
        options: those of `wgpu-lora finetune`, with underscores; `recipe` names a TOML file of them.

    Raises:
        UserError: an option is unknown or out of range, or something about the model, the data or the device is wrong.
    """
    options = named(options, "finetune()", "recipe")
    also = options.pop("model", None)
    if model is not None and also is not None:
        raise UserError("finetune() was given two models: name one of them.")
    model = also if model is None else model
    given = {name: _plain(name, value) for name, value in options.items()}
    recipe = given.pop("recipe", None)
    if isinstance(model, LoadedModel):
        for name, fixed in (("model", model.name), ("base_dtype", model.decoder.base_dtype)):
            if given.setdefault(name, fixed) != fixed:
                raise UserError(f"The model was loaded with {name} {fixed!r}: load another for {given[name]!r}.")
    elif model is not None:
        given["model"] = _plain("model", str(model))
    args, _ = gather(given, recipe, "finetune()")
    for text in idle(given, args):
        warnings.warn(text, stacklevel=2)
    return prepare_job(args, model if isinstance(model, LoadedModel) else None).train(callback, progress)


def _plain(name: str, value: Any) -> Any:
    """An option as the command line has it."""
    if isinstance(value, Path) or (name == "device" and isinstance(value, int) and not isinstance(value, bool)):
        return str(value)
    if isinstance(value, str) and not value.strip():
        raise UserError(f"finetune(): '{name}' is empty: give it a value, or leave it out.")
    return value


def generate(model: LoadedModel | str | Path, prompt: str, **options: Any) -> str:
    """The model's answer to a prompt; options are those of `answer`."""
    return answer(model, [prompt], **options)[0].text


def answer(
    model: LoadedModel | str | Path,
    prompts: Sequence[str],
    *,
    adapter: str | Path | None = None,
    system: str | None = None,
    enable_thinking: bool | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    batch: int = 1,
    on_text: OnText | None = None,
    on_done: OnDone = lambda number: None,
    progress: Progress = lambda name: None,
) -> list[Answer]:
    """Answers prompts, each for itself.

    Args:
        adapter: a PEFT adapter directory; None asks the base alone.
        enable_thinking: passed to the chat template where it is not None; give what the adapter was trained with.
        batch: prompts that are answered at a time.
        on_text: called with every piece of text as it comes; for a single prompt only.
        on_done: called with how many tokens have come so far.

    Raises:
        UserError: there is no tokenizer, a prompt is too long, the adapter does not fit, or a value is out of range.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise UserError(f"The prompts must be a list of texts, not {prompts!r:.100}.")
    for prompt in prompts:
        check_text("prompt", prompt)
    if not prompts:
        return []
    return answer_slots(
        _opened(model),
        prompts,
        [] if adapter is None else [adapter],
        [None if adapter is None else 0] * len(prompts),
        system=system,
        enable_thinking=enable_thinking,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        batch=batch,
        on_text=on_text,
        on_done=on_done,
        progress=progress,
    )


def compare(
    model: LoadedModel | str | Path,
    prompt: str,
    adapters: Mapping[str, str | Path],
    *,
    include_base: bool = True,
    system: str | None = None,
    enable_thinking: bool | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    on_done: OnDone = lambda number: None,
    progress: Progress = lambda name: None,
) -> dict[str, Answer]:
    """Answers one prompt under each of several adapters, all in a single batch over one base.

    No answer depends on the others: each is the one that `answer` gives with that adapter alone (where two tokens are
    as likely as each other, rounding may decide). With a temperature, all draw the same numbers.

    Args:
        adapters: PEFT adapter directories by name; their ranks and modules may differ.
        include_base: whether the base alone answers too, as "base".
        on_done: called with how many tokens have come so far, of all answers together.

    Returns:
        An answer by name: "base" first, then the adapters in their order.

    Raises:
        UserError: there is no adapter, one is named "base" beside the base, or anything that `answer` refuses.
    """
    slots = slots_of(adapters, include_base)
    check_text("prompt", prompt)
    found = answer_slots(
        _opened(model),
        [prompt] * len(slots),
        list(adapters.values()),
        list(slots.values()),
        system=system,
        enable_thinking=enable_thinking,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        batch=len(slots),
        on_text=None,
        on_done=on_done,
        progress=progress,
    )
    return dict(zip(slots, found, strict=True))


def evaluate(
    model: LoadedModel | str | Path,
    data: str | Path,
    *,
    adapter: str | Path | None = None,
    max_length: int | None = None,
    on_overflow: str | None = None,
    completion_only_loss: bool | None = None,
    enable_thinking: bool | None = None,
    progress: Progress = lambda name: None,
) -> Evaluation:
    """Loss and perplexity of a JSONL file (of a folder's valid.jsonl, where it has one), with an adapter or without.

    Args:
        max_length: tokens of a row at most; longer ones are cut or, where `on_overflow` is drop, left out. Where it is
            None, it is what the adapter was trained with, as its run.json says, else 1024 or, if the model has fewer,
            its positions; the result has it.
        on_overflow, completion_only_loss, enable_thinking: as in training; where they are None, as the adapter was
            trained, else truncate, True, and nothing for the chat template.

    Raises:
        UserError: a value is out of range, the data cannot be read or have nothing to predict, or the adapter does not
            fit.
    """
    adapters = [] if adapter is None else [adapter]
    opened, prepared = _heldout(model, data, adapters, max_length, on_overflow, completion_only_loss, enable_thinking)
    with on_device(opened, adapters) as loaded:
        return evaluate_rows(opened, prepared, loaded, 0 if loaded else None, progress=progress)


def evaluate_several(
    model: LoadedModel | str | Path,
    data: str | Path,
    adapters: Mapping[str, str | Path],
    *,
    include_base: bool = True,
    max_length: int | None = None,
    on_overflow: str | None = None,
    completion_only_loss: bool | None = None,
    enable_thinking: bool | None = None,
    progress: Progress = lambda name: None,
) -> dict[str, Evaluation]:
    """Loss and perplexity of the same data under each of several adapters, which are all loaded at once.

    Args:
        adapters: PEFT adapter directories by name; their ranks and modules may differ.
        include_base: whether the base alone is evaluated too, as "base".

    The other arguments are those of `evaluate`.

    Returns:
        An evaluation by name: "base" first, then the adapters in their order.

    Raises:
        UserError: there is no adapter, one is named "base" beside the base, or anything that `evaluate` refuses.
    """
    slots = slots_of(adapters, include_base)
    directories = list(adapters.values())
    opened, prepared = _heldout(
        model, data, directories, max_length, on_overflow, completion_only_loss, enable_thinking
    )
    with on_device(opened, directories) as loaded:
        return {name: evaluate_rows(opened, prepared, loaded, slot, progress=progress) for name, slot in slots.items()}


def _opened(model: LoadedModel | str | Path) -> LoadedModel:
    return model if isinstance(model, LoadedModel) else load(model)


def _heldout(
    model: LoadedModel | str | Path,
    data: str | Path,
    adapters: Sequence[str | Path],
    max_length: int | None,
    on_overflow: str | None,
    completion_only_loss: bool | None,
    enable_thinking: bool | None,
) -> tuple[LoadedModel, Prepared]:
    """The opened model, and the rows that are evaluated; mistakes in the options are said before it is opened."""
    given = {
        "max_length": max_length,
        "on_overflow": on_overflow,
        "completion_only_loss": completion_only_loss,
        "enable_thinking": enable_thinking,
    }
    check_rows(given)
    opened = _opened(model)
    rows = fit_rows(given, adapters, opened.config.max_position_embeddings)
    train, valid = resolve_data(Path(data))
    prepared = prepare(
        valid or train,
        opened.tokenizer,
        max_length=rows.max_length,
        completion_only_loss=rows.completion_only_loss,
        on_overflow="drop" if rows.on_overflow == "drop" else "truncate",
        chat_template_kwargs={} if rows.enable_thinking is None else {"enable_thinking": rows.enable_thinking},
        vocab_size=opened.config.vocab_size,
    )
    return opened, prepared
