"""The Python API for answers: generate, answer, compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, cast, overload

from wgpu_lora.api.call_arguments import listeners
from wgpu_lora.api.notebook_progress import Bars
from wgpu_lora.errors import UserError
from wgpu_lora.events import EventForwarder, Events
from wgpu_lora.infer.answers import Answer, answer_slots, answer_table, stream_slot, tokenizer_of
from wgpu_lora.infer.generation_options import generation_options
from wgpu_lora.infer.named_adapters import check_directory, slots_of
from wgpu_lora.infer.prompts import Messages, Prompt, check_prompt
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.names.typed_options import AnswerOptions

Model = LoadedModel | str | Path


@overload
def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str
    model: Model,
    prompt: Prompt,
    *,
    adapter: str | Path | None = None,
    stream: Literal[False] = False,
    batch: int | None = None,
    progress_bar: bool | None = None,
    **options: Unpack[AnswerOptions],
) -> str: ...
@overload
def generate(
    model: Model,
    prompt: Sequence[str] | Sequence[Messages],
    *,
    adapter: str | Path | None = None,
    stream: Literal[False] = False,
    batch: int | None = None,
    progress_bar: bool | None = None,
    **options: Unpack[AnswerOptions],
) -> list[str]: ...
@overload
def generate(
    model: Model,
    prompt: Prompt,
    *,
    adapter: str | Path | None = None,
    stream: Literal[True],
    batch: int | None = None,
    progress_bar: bool | None = None,
    **options: Unpack[AnswerOptions],
) -> Iterator[str]: ...
def generate(
    model: Model,
    prompt: Any,
    *,
    adapter: str | Path | None = None,
    stream: bool = False,
    batch: int | None = None,
    progress_bar: bool | None = None,
    **options: Unpack[AnswerOptions],
) -> Any:
    """Generate the answer to a prompt, or a list of answers to a list of prompts.

    Args:
        model: a loaded model, or an argument of `load`.
        prompt: a text, or a conversation as a list of messages such as {"role": "user", "content": "Hello"}; or a list
            of either.
        adapter: a PEFT adapter directory; None uses the base model alone.
        stream: return an iterator over the pieces of a single answer, as they are generated.
        batch: prompts that run at a time; by default as many as fit on the device, up to 16.
        progress_bar: whether to show progress; by default, on a terminal and in a notebook.

    Returns:
        A str for one prompt, a list of them for several, an iterator of str if `stream` is true.

    Raises:
        UserError: there is no tokenizer, a prompt is too long, the adapter does not fit, or a value is out of range.
    """
    settings = generation_options(options, "generate()")
    if adapter is not None:
        check_directory(adapter)
    prompt = _listed(prompt)
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str) and not _is_conversation(prompt)
    if not stream:
        result = answer(
            model,
            prompt if is_list else [prompt],
            adapter=adapter,
            batch=batch,
            progress_bar=progress_bar,
            **options,
        )
        return [completion.text for completion in result] if is_list else result[0].text
    if is_list:
        raise UserError("stream=True works with a single prompt only: pass one, or leave stream out.")
    check_prompt(prompt)
    opened = _opened(model)
    tokenizer_of(opened, adapter)

    def pieces() -> Iterator[str]:
        with Bars(progress_bar) as bars:
            for piece in stream_slot(opened, prompt, adapter, settings, bars):
                bars.close()
                yield piece

    return pieces()


def _listed(prompts: Any) -> Any:
    """A container of prompts, such as an array or a column of a table, as a list."""
    is_one = isinstance(prompts, str | bytes | Mapping | Sequence) or not isinstance(prompts, Iterable)
    return prompts if is_one else list(prompts)


def _is_conversation(prompt: Sequence[Any]) -> bool:
    return bool(prompt) and all(isinstance(message, Mapping) for message in prompt)


def answer(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    adapter: str | Path | None = None,
    batch: int | None = None,
    events: Events | None = None,
    progress_bar: bool | None = None,
    **options: Unpack[AnswerOptions],
) -> list[Answer]:
    """Answer prompts, each independently.

    Args:
        prompts: texts, or conversations (lists of messages).
        adapter: a PEFT adapter directory; None uses the base model alone.
        batch: prompts that run at a time; by default as many as fit on the device, up to 16.
        events: receives `loading`, `answering`, `answered` and, for a single prompt, `text`.
        progress_bar: whether to show progress; by default, on a terminal and in a notebook, unless `events` is given.

    Raises:
        UserError: there is no tokenizer, a prompt is too long, the adapter does not fit, or a value is out of range.
    """
    receivers = listeners("answer()", events, cast("dict[str, Any]", options))
    settings = generation_options(options, "answer()")
    if adapter is not None:
        check_directory(adapter)
    prompts = _listed(prompts)
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise UserError(f"The prompts must be a list of texts, not {prompts!r:.100}.")
    for prompt in prompts:
        check_prompt(prompt)
    if not prompts:
        return []
    with Bars(False if receivers and progress_bar is None else progress_bar) as bars:
        return answer_slots(
            _opened(model),
            prompts,
            [] if adapter is None else [adapter],
            [None if adapter is None else 0] * len(prompts),
            settings,
            batch=batch,
            streamed=bool(receivers) and len(prompts) == 1,
            events=EventForwarder(bars, *receivers),
        )


def compare(
    model: Model,
    prompt: Prompt,
    adapters: Mapping[str, str | Path],
    *,
    include_base: bool = True,
    events: Events | None = None,
    progress_bar: bool | None = None,
    **options: Unpack[AnswerOptions],
) -> dict[str, Answer]:
    """Answer one prompt with several adapters, in a single batch over one base model.

    The answers are independent: each is the one that `answer` gives with that adapter alone (if two tokens are equally
    likely, rounding may decide). With a temperature, all adapters use the same random numbers.

    Args:
        adapters: PEFT adapter directories by name; their ranks and modules may differ.
        include_base: also answer with the base model alone, as "base".
        events: receives `loading`, `answering` and `answered`.
        progress_bar: whether to show progress; by default, on a terminal and in a notebook, unless `events` is given.

    Returns:
        Answers by name: "base" first, then the adapters in order.

    Raises:
        UserError: there is no adapter, one is named "base" beside the base, or as `answer`.
    """
    receivers = listeners("compare()", events, cast("dict[str, Any]", options))
    settings = generation_options(options, "compare()")
    slots = slots_of(adapters, include_base)
    check_prompt(prompt)
    with Bars(False if receivers and progress_bar is None else progress_bar) as bars:
        (result,) = answer_table(
            _opened(model),
            [prompt],
            adapters,
            slots,
            settings,
            batch=len(slots),
            events=EventForwarder(bars, *receivers),
        )
    return result


def _opened(model: Model) -> LoadedModel:
    return model if isinstance(model, LoadedModel) else open_model(str(model))
