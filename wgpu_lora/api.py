"""The Python door: load, fine-tune, generate, evaluate. The command line goes through it too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.data import StreamDecoder, Tokenizer, prepare, resolve_data
from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft import CONFIG, read_adapter
from wgpu_lora.infer import Evaluation, Generator, chat_prompt, load_adapters
from wgpu_lora.infer import evaluate as evaluate_rows
from wgpu_lora.infer.prompt import check_text
from wgpu_lora.models.config import read_json
from wgpu_lora.models.load import Progress
from wgpu_lora.models.loaded import LoadedModel, open_model
from wgpu_lora.models.lora import AdapterSet
from wgpu_lora.train.arguments import OVERFLOW, gather
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.trainer import Callback

OnText = Callable[[str], None]


def load(model: str | Path = "demo", *, device: str | int | None = None, base_dtype: str = "nf4") -> LoadedModel:
    """Opens a model and a device. The weights go onto the device at first use, and stay there.

    Args:
        model: a directory, a hub id, or `demo`.
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
    named = options.pop("model", None)
    if model is not None and named is not None:
        raise UserError("finetune() was given two models: name one of them.")
    model = named if model is None else model
    given = {name: _plain(name, value) for name, value in options.items()}
    recipe = given.pop("recipe", None)
    if isinstance(model, LoadedModel):
        for name, fixed in (("model", model.name), ("base_dtype", model.decoder.base_dtype)):
            if given.setdefault(name, fixed) != fixed:
                raise UserError(f"The model was loaded with {name} {fixed!r}: load another for {given[name]!r}.")
        return prepare_job(gather(given, recipe, "finetune()")[0], model).train(callback, progress)
    if model is not None:
        given["model"] = _plain("model", str(model))
    return prepare_job(gather(given, recipe, "finetune()")[0]).train(callback, progress)


def _plain(name: str, value: Any) -> Any:
    """An option as the command line has it."""
    if isinstance(value, Path) or (name == "device" and isinstance(value, int) and not isinstance(value, bool)):
        return str(value)
    if isinstance(value, str) and not value.strip():
        raise UserError(f"finetune(): '{name}' is empty: give it a value, or leave it out.")
    return value


@dataclass(frozen=True)
class Answer:
    """What a model said to a prompt, and how it came to an end: stop, length or capacity."""

    prompt: str
    text: str
    token_ids: list[int]
    stop_reason: str
    tokens_per_second: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def generate(model: LoadedModel | str | Path, prompt: str, **options: Any) -> str:
    """The model's answer to a prompt; options are those of `answer`."""
    return answer(model, [prompt], **options)[0].text


def answer(
    model: LoadedModel | str | Path,
    prompts: Sequence[str],
    *,
    adapter: str | Path | None = None,
    system: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    batch: int = 1,
    on_text: OnText | None = None,
    on_done: Callable[[int], None] = lambda number: None,
    progress: Progress = lambda name: None,
) -> list[Answer]:
    """Answers prompts, each for itself.

    Args:
        adapter: a PEFT adapter directory; None asks the base alone.
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
    opened = model if isinstance(model, LoadedModel) else load(model)
    tokenizer = _tokenizer(opened)
    ids = [chat_prompt(tokenizer, prompt, system) for prompt in prompts]
    decoder = StreamDecoder(tokenizer)
    count = 0

    def on_token(number: int, token: int) -> None:
        nonlocal count
        count += 1
        on_done(count)
        if on_text:
            on_text(decoder.push(token))

    # No more cache than these prompts can use.
    longest = max(map(len, ids)) + max(1, max_new_tokens)
    capacity = min(longest, opened.config.max_position_embeddings)
    with _adapter(opened, adapter) as adapters:
        opened.load_weights(progress)
        with Generator(opened, adapters, capacity, min(batch, len(ids))) as generator:
            found = generator.generate(
                ids,
                [0 if adapters else None] * len(ids),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                seed=seed,
                stop_ids=tokenizer.stop_ids,
                on_token=on_token,
            )
    if on_text:
        on_text(decoder.flush())
    return [
        Answer(prompt, tokenizer.decode(g.token_ids), g.token_ids, g.stop_reason, round(g.decode_speed, 2))
        for prompt, g in zip(prompts, found, strict=True)
    ]


def evaluate(
    model: LoadedModel | str | Path,
    data: str | Path,
    *,
    adapter: str | Path | None = None,
    max_length: int = 1024,
    on_overflow: str = "truncate",
    completion_only_loss: bool = True,
    enable_thinking: bool | None = None,
    progress: Progress = lambda name: None,
) -> Evaluation:
    """Loss and perplexity of a JSONL file (of a folder's valid.jsonl, where it has one), with an adapter or without.

    Args:
        max_length: tokens of a row at most; longer ones are cut or, where `on_overflow` is drop, left out.
        enable_thinking: passed to the chat template where it is not None.

    Raises:
        UserError: a value is out of range, the data cannot be read or have nothing to predict, or the adapter does not
            fit.
    """
    if on_overflow not in OVERFLOW:
        raise UserError(f"--on-overflow must be one of {', '.join(OVERFLOW)}, not {on_overflow}.")
    if max_length < 2:
        raise UserError(f"--max-length must be at least 2, not {max_length}.")
    opened = model if isinstance(model, LoadedModel) else load(model)
    limit = opened.config.max_position_embeddings
    if max_length > limit:
        raise UserError(f"--max-length {max_length} is more than this model's {limit} positions: lower it to {limit}.")
    train, valid = resolve_data(Path(data))
    prepared = prepare(
        valid or train,
        opened.tokenizer,
        max_length=max_length,
        completion_only_loss=completion_only_loss,
        on_overflow="drop" if on_overflow == "drop" else "truncate",
        chat_template_kwargs={} if enable_thinking is None else {"enable_thinking": enable_thinking},
        vocab_size=opened.config.vocab_size,
    )
    with _adapter(opened, adapter) as adapters:
        opened.load_weights(progress)
        return evaluate_rows(opened, prepared, adapters, 0 if adapters else None)


def base_of(adapter: str | Path) -> str | None:
    """The model that an adapter's own configuration names, if it does."""
    read_adapter(adapter)  # says clearly what is missing or damaged
    base = read_json(Path(adapter) / CONFIG).get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


def _tokenizer(model: LoadedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise UserError(
            f"The model {model.name} has no tokenizer.json, so it cannot read text: add one to its directory."
        )
    return model.tokenizer


@contextmanager
def _adapter(model: LoadedModel, directory: str | Path | None) -> Iterator[AdapterSet | None]:
    """The adapter on the device for as long as it is used."""
    if directory is None:
        yield None
        return
    adapters = load_adapters(model.device, model.config, [Path(directory)])
    try:
        yield adapters
    finally:
        for storage in adapters.storages():
            if storage.buffer is not None:
                model.device.free(storage.buffer)
                storage.buffer = None
