"""wgpu-lora generate: answer a prompt as it is generated, or many prompts into a file."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.console import Bar, TensorBar, console, is_terminal, print_json
from wgpu_lora.cli.inference.sampling_options import (
    OWN,
    EnableThinking,
    MaxNewTokens,
    MinP,
    PromptFormat,
    RepetitionPenalty,
    Seed,
    Stop,
    System,
    Temperature,
    TopK,
    TopP,
    Url,
    for_stdout,
)
from wgpu_lora.cli.parameters import Adapter, BaseDtype, Device, Json, Model, is_given, refuse_unused
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun, escape_unprintable
from wgpu_lora.weights.base_formats import AUTO

if TYPE_CHECKING:
    from wgpu_lora.infer.answers import Answer
    from wgpu_lora.infer.generation_options import GenerationOptions
    from wgpu_lora.infer.prompt_file import Request
    from wgpu_lora.infer.prompts import Prompt
    from wgpu_lora.infer.serve.client import ServerClient
    from wgpu_lora.models.loaded_model import LoadedModel


def served_answers(
    client: ServerClient, prompts: Sequence[Prompt], settings: GenerationOptions, at_once: int
) -> list[Answer]:
    """A server's answers to prompts, in order. Raises UserError."""
    from wgpu_lora.formats.tokenizer.examples import Alpaca, Completion
    from wgpu_lora.infer.answers import Answer
    from wgpu_lora.infer.serve.client import request_of

    def answer(prompt: Prompt) -> Answer:
        if isinstance(prompt, Alpaca):
            raise UserError("A row has an instruction, whose wording a server does not know: give messages.")
        text = prompt.prompt if isinstance(prompt, Completion) else prompt
        path, body = request_of(text, settings, settings.max_new_tokens)
        with client.understood():
            (choice,) = client.complete(path, {**body, "return_token_ids": True})["choices"]
            content = choice["text"] if "text" in choice else choice["message"]["content"]
            result = Answer(prompt, content or "", choice.get("token_ids") or [], choice["finish_reason"], 0.0)
        bar.advance()
        return result

    with Bar("answering", len(prompts)) as bar, ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(answer, prompts))


EMPTY = (
    "the answer is empty: the model ends it with its first token; it may be trained on prompts of another form "
    "(--prompt-format)"
)
TITLE = 60  # characters of a prompt above its answer
DRAWING = ("top_p", "top_k", "min_p")  # not --seed, which is often given without need


def generate(
    ctx: typer.Context,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompt, read from stdin if that is piped; if given several times, all are answered together."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts: rows as in training, with 'prompt' or 'messages', or lines of text."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File for the answers, as JSONL; by default, they are printed.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Prompts answered at a time; by default as many as fit, up to 16. [x>=1]")
    ] = None,
    system: System = None,
    prompt_format: PromptFormat = None,
    enable_thinking: EnableThinking = None,
    model: Model = None,
    adapter: Adapter = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also answer with the base model alone.")] = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    seed: Seed = 0,
    device: Device = None,
    base_dtype: BaseDtype = AUTO,
    as_json: Json = False,
    url: Url = None,
) -> int:
    """Answer prompts; without one, start a chat on a terminal.

    Several adapters answer in a single batch.
    """
    settings: dict[str, Any] = {
        "system": system,
        "prompt_format": prompt_format,
        "enable_thinking": enable_thinking,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop or [],
        "seed": seed,
    }
    from wgpu_lora.infer.generation_options import generation_options
    from wgpu_lora.infer.serve.client import ServerClient

    no_prompts = not prompt and prompts is None
    if no_prompts and not (as_json or output or batch_size) and is_terminal(sys.stdin) and is_terminal(sys.stdout):
        from wgpu_lora.cli.inference.chat import ChatSession, run_chat
        from wgpu_lora.infer.serve.served_chat import ServedChat

        if url:
            refuse_unused(ctx, OWN, "with --url")
            limit = max_new_tokens if is_given(ctx, "max_new_tokens") else None
            options = generation_options(settings, "The command line")
            return ChatSession(ServedChat(ServerClient(url, model), options, limit)).run()
        return run_chat(model, adapter or [], compare, settings, None, device, base_dtype)
    if temperature == 0:
        refuse_unused(ctx, DRAWING, "at --temperature 0, which takes the most likely token")
    if output or prompts:
        refuse_unused(ctx, ("as_json",), "with --output or --prompts, whose answers are JSONL")
    if prompt and prompts:
        raise UserError("--prompt and --prompts cannot be combined: give one of them.")
    from wgpu_lora.files.atomic import check_new, write_new_bytes
    from wgpu_lora.files.json_files import to_json
    from wgpu_lora.infer.answers import answer_table, notes_for, tokenizer_of
    from wgpu_lora.infer.named_adapters import BASE, model_of, named_adapters, slots_of
    from wgpu_lora.infer.prompt_file import Request, kept_on_failure, read_requests, row_of, to_jsonl
    from wgpu_lora.infer.prompts import check_text, prompt_notes
    from wgpu_lora.models.loaded_model import open_model

    # Check the options before anything is opened.
    generation = generation_options(settings, "The command line")
    if batch_size is not None and batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, not {batch_size}.")
    if prompts:
        requests = read_requests(prompts)
        anew = sum(request.answered for request in requests)
        if anew:
            subject = "a row ends" if anew == 1 else f"{anew:,} rows end"
            _note(f"{subject} with an assistant's message, which is left out and answered anew")
    else:
        texts = prompt or [_piped()]
        if not all(texts):
            raise UserError("The prompt is empty: give a text.")
        for text in texts:
            check_text("prompt", text)
        requests = [Request(text, {"prompt": text}) for text in texts]
    if output:
        check_new(output, "--output")
    if url:
        refuse_unused(ctx, OWN, "with --url")
        client = ServerClient(url, model)
        answers = served_answers(client, [request.prompt for request in requests], generation, batch_size or 16)
        if output or prompts:
            lines = to_jsonl([row_of(request, answer) for request, answer in zip(requests, answers, strict=True)])
            write_new_bytes(output, lines, "--output") if output else print(lines.decode(), end="", flush=True)
        elif as_json:
            print_json([answer.as_dict() for answer in answers])
        else:
            print("\n\n".join(for_stdout(answer.text) for answer in answers), flush=True)
        return 0
    adapters = named_adapters(adapter or [])
    comparison = compare or len(adapters) > 1
    slots = slots_of(adapters, compare) if comparison else {next(iter(adapters), BASE): 0 if adapters else None}
    opened = open_model(model_of(adapters, model), device, base_dtype)
    inputs = [request.prompt for request in requests]
    of_prompts = prompt_notes(tokenizer_of(opened), inputs, generation.prompt_format, adapters.values())
    for note in (*notes_for(opened, adapters.values()), *of_prompts):
        _note(note)
    with Bar("loading", opened.tensors_to_load()) as bar:
        if len(requests) == 1 and not (comparison or output or prompts):
            _answer_one(opened, requests[0], adapters, generation, as_json, bar)
            return 0
        rows: list[dict[str, Any]] = []
        with kept_on_failure(output, lambda: rows, _note):
            result = answer_table(
                opened,
                inputs,
                adapters,
                slots,
                generation,
                batch=batch_size or (len(slots) if len(inputs) == 1 else None),
                events=_Collected(requests, comparison, rows, bar),
            )
            if output:
                write_new_bytes(output, to_jsonl(rows), "--output")
    if output:
        _note(f"{count_noun(len(rows), 'answer')} written to {output}")
    elif prompts:
        print("\n".join(map(to_json, rows)), flush=True)
    elif as_json:
        row_lists = (
            as_rows(answers, adapters) if comparison else [answer.as_dict() for answer in answers.values()]
            for answers in result
        )
        print_json([row for rows in row_lists for row in rows])
    else:
        show_answers(_titled(requests, result, comparison))
    return 0


class _Streamed(TensorBar):
    """Prints a single answer as it is generated."""

    def text(self, piece: str) -> None:
        self._bar.close()
        print(for_stdout(piece), end="", flush=True)


class _Collected(TensorBar):
    """Keeps every answer as a row, as soon as it is complete."""

    def __init__(self, requests: list[Request], comparison: bool, rows: list[dict[str, Any]], bar: Bar):
        super().__init__(bar)
        self._requests, self._comparison, self._rows = requests, comparison, rows

    def answering(self, done: int, total: int, tokens: int) -> None:
        self._bar.advance(f"answering, {count_noun(tokens, 'token')} so far", to=done, total=total)

    def answered(self, number: int, name: str | None, answer: Answer) -> None:
        from wgpu_lora.infer.prompt_file import row_of

        self._rows.append(row_of(self._requests[number], answer, name if self._comparison else None))


def _answer_one(
    model: LoadedModel,
    request: Request,
    adapters: dict[str, Path],
    settings: GenerationOptions,
    as_json: bool,
    bar: Bar,
) -> None:
    """Stream a single answer, or print it as JSON."""
    from wgpu_lora.infer.answers import answer_slots

    (result,) = answer_slots(
        model,
        [request.prompt],
        list(adapters.values()),
        [0 if adapters else None],
        settings,
        streamed=not as_json,
        events=_Streamed(bar),
    )
    if as_json:
        print_json(result.as_dict())
    else:
        print(flush=True)
    if not result.text:
        _note(EMPTY)


def _titled(requests: list[Request], results: list[dict[str, Answer]], comparison: bool) -> dict[str, Answer]:
    """Answers by titles that distinguish them: names, prompts, or both."""
    if len(requests) == 1:
        return results[0]
    by_title: dict[str, Answer] = {}
    for number, (request, answers) in enumerate(zip(requests, results, strict=True), 1):
        line = " ".join(str(request.prompt).split())
        short = line if len(line) <= TITLE else f"{line[: TITLE - 3]}..."
        for name, answer in answers.items():
            by_title[f"{number}. {short}{f' ({name})' if comparison else ''}"] = answer
    return by_title


def _note(text: str) -> None:
    print(f"wgpu-lora: {escape_unprintable(text)}", file=sys.stderr, flush=True)


def _piped() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("--prompt is missing: give a prompt, or pipe one in.")
    try:
        return sys.stdin.read().strip()
    except UnicodeDecodeError:
        raise UserError("The prompt is not valid UTF-8: convert it to UTF-8.") from None


def as_rows(results: Mapping[str, Any], adapters: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Rows for JSON: each adapter's result with its name and directory; the base has none."""
    directories = {name: str(directory) for name, directory in adapters.items()}
    return [{"name": name, "adapter": directories.get(name), **asdict(value)} for name, value in results.items()]


def show_answers(answers: Mapping[str, Answer]) -> None:
    """Print the answers, in panels on a terminal, else in blocks under their names."""
    if not is_terminal(sys.stdout):
        print("\n\n".join(f"== {name} ==\n{answer.text}" for name, answer in answers.items()), flush=True)
        return
    from rich.panel import Panel
    from rich.text import Text

    screen = console()
    for name, answer in answers.items():
        end = Text(f"{count_noun(len(answer.token_ids), 'token')}, {answer.stop_reason}", "dim")
        title = Text(escape_unprintable(name), "bold")
        screen.print(
            Panel(
                Text(escape_unprintable(answer.text, "\n\t")),
                title=title,
                title_align="left",
                subtitle=end,
                subtitle_align="right",
            )
        )
