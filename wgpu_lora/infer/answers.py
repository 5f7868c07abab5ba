"""Answers to prompts: texts or conversations, each with an adapter of its own or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wgpu_lora.data import StreamDecoder, Tokenizer
from wgpu_lora.errors import NoRoomError, UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.formats.tokenizer.tokenizer_files import OWN_TOKENIZER, adapter_tokenizer
from wgpu_lora.infer.generation_options import GenerationOptions
from wgpu_lora.infer.generator import Generation, Generator
from wgpu_lora.infer.named_adapters import adapters_on_device
from wgpu_lora.infer.prompts import Prompt, chat_prompt, trained_prompt_format
from wgpu_lora.infer.request import Sampler
from wgpu_lora.models.adapter_set import AdapterSet
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.names.text import count_noun

MOST = 16  # prompts at a time by default
SHOWN = 60  # characters of a text in an answer's repr


@dataclass(frozen=True, repr=False)
class Answer:
    """A model's answer to a prompt. stop_reason: see Generation.

    token_ids: of the whole answer, including a stop string. tokens_per_second: of all prompts answered together.
    """

    prompt: Prompt
    text: str
    token_ids: list[int]
    stop_reason: str
    tokens_per_second: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else self.text[: SHOWN - 3] + "..."
        return f"Answer({text!r}, {count_noun(len(self.token_ids), 'token')}, stop_reason={self.stop_reason!r})"


def tokenizer_of(model: LoadedModel, adapter: str | Path | None = None) -> Tokenizer:
    """The model's tokenizer, or that of an adapter which has its own beside it.

    Raises:
        UserError: there is none, or the adapter's has tokens that the model lacks.
    """
    if model.tokenizer is None:
        raise UserError(
            f"The model {model.name} has no tokenizer.json, so it cannot read text: add one to its directory."
        )
    return model.tokenizer if adapter is None else adapter_tokenizer(model.tokenizer, model.config.vocab_size, adapter)


def notes_for(model: LoadedModel, adapters: Iterable[str | Path]) -> list[str]:
    """Sentences for the user about weights that are rounded again, and about adapters with other tokenizers."""
    base = model.tokenizer  # rows may be tokens, which need none
    own = [directory for directory in adapters if base and tokenizer_of(model, directory) is not base]
    return [*model.rounding, *map(OWN_TOKENIZER.format, own)]


def answer_slots(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    directories: Sequence[str | Path],
    slots: Sequence[int | None],
    settings: GenerationOptions,
    *,
    batch: int | None = None,
    names: Sequence[str] = (),
    streamed: bool = False,
    seeds: Sequence[int] | None = None,
    events: Events = SILENT,
) -> list[Answer]:
    """Answer prompts[i] with the adapter of directories[slots[i]], or with the base model alone if that is None.

    Args:
        batch: prompts that run at a time; by default as many as fit on the device, up to 16.
        names: of the adapters, if `prompts` repeats each prompt once for each of them, in this order.
        streamed: whether `events.text` receives the answer piece by piece; for a single prompt.
        seeds: of each prompt's draws, instead of the settings' seed for all.
        events: receives `loading`, `text`, `answering` and, after each batch, `answered`.

    Raises:
        UserError: there is no tokenizer, a prompt is too long, an adapter does not fit, or a value is out of range.
    """
    if batch is not None and (type(batch) is not int or batch < 1):
        raise UserError(f"A batch of {batch!r:.40} prompts is not possible: use a batch of at least one.")
    tokenizers = {slot: tokenizer_of(model, slot if slot is None else directories[slot]) for slot in {*slots}}
    ids = prompt_ids([tokenizers[slot] for slot in slots], prompts, settings, directories)
    samplers = [settings.sampler] * len(ids) if seeds is None else [replace(settings.sampler, seed=s) for s in seeds]
    result: list[Answer] = []
    finished_tokens = 0
    with (
        adapters_on_device(model, directories) as adapters,
        open_generator(model, adapters, capacity_for(model, ids, settings), len(ids), batch, events) as generator,
    ):
        for start in range(0, len(ids), generator.batch):
            part = slice(start, start + generator.batch)
            streams = [
                StreamedAnswer(tokenizers[slot], len(input_ids), settings.stop)
                for slot, input_ids in zip(slots[part], ids[part], strict=True)
            ]
            for _, piece in replies(
                generator, streams, ids[part], slots[part], settings, streamed, samplers=samplers[part]
            ):
                if streamed and piece:
                    events.text(piece)
                tokens = finished_tokens + sum(len(reply.generation.token_ids) for reply in streams)
                events.answering(len(result), len(prompts), tokens)
            finished_tokens += sum(len(reply.generation.token_ids) for reply in streams)
            for prompt, reply in zip(prompts[part], streams, strict=True):
                result.append(answer_of(prompt, reply))
                number, adapter_index = divmod(len(result) - 1, max(1, len(names)))
                events.answered(number, names[adapter_index] if names else None, result[-1])
    return result


def stream_slot(
    model: LoadedModel, prompt: Prompt, directory: str | Path | None, settings: GenerationOptions, events: Events
) -> Iterator[str]:
    """The answer to one prompt in pieces, as they are generated; frees its memory when the iterator ends."""
    tokenizer = tokenizer_of(model, directory)
    ids = prompt_ids([tokenizer], [prompt], settings, [] if directory is None else [directory])
    with (
        adapters_on_device(model, [] if directory is None else [directory]) as adapters,
        open_generator(model, adapters, capacity_for(model, ids, settings), 1, 1, events) as generator,
    ):
        result = [StreamedAnswer(tokenizer, len(ids[0]), settings.stop)]
        for _, piece in replies(generator, result, ids, [0 if adapters else None], settings):
            if piece:
                yield piece


def open_generator(
    model: LoadedModel,
    adapters: AdapterSet | None,
    capacity: int,
    prompts: int,
    batch: int | None = None,
    events: Events = SILENT,
) -> Generator:
    """A generator for `count` prompts; the default batch is the largest one that fits, up to MOST.

    Raises:
        UserError: as for Generator.
    """
    size = min(prompts, batch or MOST)
    while True:
        try:
            return Generator(model, adapters, capacity, size, events=events)
        except NoRoomError:
            if batch or size == 1:
                raise
        size = (size + 1) // 2


def prompt_ids(
    tokenizers: Sequence[Tokenizer],
    prompts: Sequence[Prompt],
    settings: GenerationOptions,
    adapters: Sequence[str | Path],
) -> list[list[int]]:
    """Token ids of each prompt; texts are worded as the settings say or as the adapters were trained."""
    form = settings.prompt_format or trained_prompt_format(adapters)
    return [
        chat_prompt(tokenizer, prompt, settings.system, form, **settings.template_kwargs)
        for tokenizer, prompt in zip(tokenizers, prompts, strict=True)
    ]


def capacity_for(model: LoadedModel, ids: Sequence[Sequence[int]], settings: GenerationOptions) -> int:
    """Tokens of the longest prompt with its answer, so that the cache is no larger than needed."""
    return min(max(map(len, ids)) + settings.max_new_tokens, model.config.max_position_embeddings)


def replies(
    generator: Generator,
    answers: Sequence[StreamedAnswer],
    ids: Sequence[Sequence[int]],
    slots: Sequence[int | None],
    settings: GenerationOptions,
    streamed: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
    samplers: Sequence[Sampler] | None = None,
) -> Iterator[tuple[int, str]]:
    """Generate replies to a batch of prompts, yielding (prompt's number, piece of text) after every token.

    Args:
        streamed: if false, and there is no stop string, the pieces are empty.
        should_stop: see Generator.tokens.
        samplers: of each prompt, instead of the settings' for all.
    """
    assert len(ids) <= generator.batch
    read = streamed or bool(settings.stop)
    results = [reply.generation for reply in answers]
    tokens = generator.tokens(
        ids,
        slots,
        results,
        samplers or settings.sampler,
        settings.max_new_tokens,
        [reply.stop_ids for reply in answers],
        should_stop=should_stop,
    )
    for number, token in tokens:
        yield number, answers[number].push(token) if read else ""
    for number, reply in enumerate(answers):
        if read and (tail := reply.finish()):
            yield number, tail


def answer_of(prompt: Prompt, reply: StreamedAnswer) -> Answer:
    generation = reply.generation
    assert generation.stop_reason
    speed = round(generation.decode_speed, 2)
    return Answer(prompt, reply.text, generation.token_ids, generation.stop_reason, speed)


def answer_table(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    adapters: Mapping[str, str | Path],
    slots: Mapping[str, int | None],
    settings: GenerationOptions,
    *,
    batch: int | None = None,
    events: Events = SILENT,
) -> list[dict[str, Answer]]:
    """Answer each prompt with every adapter; returns a dict by name for each prompt.

    Args:
        slots: index of the adapter by name; None is the base model alone.
        events: see `answer_slots`.
    """
    names = list(slots)
    result = answer_slots(
        model,
        [prompt for prompt in prompts for _ in names],
        list(adapters.values()),
        [slot for _ in prompts for slot in slots.values()],
        settings,
        batch=batch,
        names=names,
        events=events,
    )
    rows = iter(result)
    return [{name: next(rows) for name in names} for _ in prompts]


class StreamedAnswer:
    """The answer to one prompt. Text that may be the beginning of a stop string is held back.

    Args:
        include_stop: whether the text includes the stop string that ends it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_tokens: int, stop: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self.generation = Generation(prompt_tokens)
        self._tokenizer, self._stop, self.stop_ids = tokenizer, stop, tokenizer.stop_ids
        self._include_stop = include_stop
        self._decoder = StreamDecoder(tokenizer)
        self._output, self._pending, self._cut = "", "", False

    def push(self, token: int) -> str:
        """Add a token; returns the text that is certain now. A stop string ends the generation."""
        return "" if self._cut else self._emit(self._decoder.push(token), False)

    def finish(self) -> str:
        """The remaining text, after the last token."""
        return "" if self._cut else self._emit(self._decoder.flush(), True)

    def _emit(self, text: str, last: bool) -> str:
        self._pending += text
        starts = [(start, len(stop)) for stop in self._stop if (start := self._pending.find(stop)) >= 0]
        if starts:
            self._cut, self.generation.stop_reason = True, "stop"
        keep = 0 if last else max((overlap(self._pending, stop) for stop in self._stop), default=0)
        end = len(self._pending) - keep
        if starts:
            start, size = min(starts)
            end = start + size if self._include_stop else start
        text, self._pending = self._pending[:end], self._pending[end:]
        self._output += text
        return text

    @property
    def text(self) -> str:
        """The whole text, without the stop string."""
        return self._output if self._cut else self._tokenizer.decode(self.generation.token_ids)


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
