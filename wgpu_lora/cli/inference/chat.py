"""wgpu-lora chat: talk to a model, with an adapter or several side by side."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.console import Bar, TensorBar, console, folded, is_terminal
from wgpu_lora.cli.inference.line_reader import Reader, hide_typed_keys
from wgpu_lora.cli.inference.sampling_options import (
    OWN,
    EnableThinking,
    MaxNewTokens,
    MinP,
    PromptFormat,
    RepetitionPenalty,
    Seed,
    SideBySide,
    Stop,
    System,
    Temperature,
    TopK,
    TopP,
    Url,
    for_stdout,
)
from wgpu_lora.cli.inference.slash_commands import SlashCommands
from wgpu_lora.cli.parameters import Adapter, BaseDtype, Device, Model, is_given, refuse_unused
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.processes.signals import ENDING, on_end_signal
from wgpu_lora.weights.base_formats import AUTO

if TYPE_CHECKING:
    from wgpu_lora.infer.chat import Chat

MaxLength = Annotated[
    int | None,
    typer.Option(
        help="Maximum tokens of the conversation; by default 4096, or what the model and memory allow. [x>=2]"
    ),
]


def chat(
    ctx: typer.Context,
    model: Model = None,
    adapter: Adapter = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also answer with the base model alone.")] = False,
    system: System = None,
    prompt_format: PromptFormat = None,
    enable_thinking: EnableThinking = None,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    seed: Seed = 0,
    max_length: MaxLength = None,
    device: Device = None,
    base_dtype: BaseDtype = AUTO,
    url: Url = None,
) -> int:
    """Chat with a model, with or without an adapter.

    Several adapters answer side by side, each in its own conversation. /help lists the commands. If stdin is not a
    terminal, every line is a message; if it is, lines are kept in a private file for the arrow keys.
    """
    settings = {
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
    if url:
        from wgpu_lora.infer.generation_options import generation_options
        from wgpu_lora.infer.serve.client import ServerClient
        from wgpu_lora.infer.serve.served_chat import ServedChat

        refuse_unused(ctx, (*OWN, "max_length"), "with --url")
        limit = max_new_tokens if is_given(ctx, "max_new_tokens") else None
        options = generation_options(settings, "The command line")
        return ChatSession(ServedChat(ServerClient(url, model), options, limit)).run()
    return run_chat(model, adapter or [], compare, settings, max_length, device, base_dtype)


def run_chat(
    model: str | None,
    adapter: list[str],
    compare: bool,
    options: dict[str, Any],
    max_length: int | None,
    device: str | None,
    base_dtype: str,
) -> int:
    if sys.stdin is None:
        raise UserError("There is no input to read messages from: run it in a terminal, or pipe messages in.")
    from wgpu_lora.infer.chat import Chat
    from wgpu_lora.infer.generation_options import generation_options
    from wgpu_lora.infer.named_adapters import BASE, model_of, named_adapters, slots_of
    from wgpu_lora.models.loaded_model import open_model

    settings = generation_options(options, "The command line")
    adapters = named_adapters(adapter)
    names = list(slots_of(adapters, compare)) if adapters or compare else [BASE]
    opened = open_model(model_of(adapters, model), device, base_dtype)
    with Bar("loading", opened.tensors_to_load()) as bar:
        talk = Chat(opened, adapters, names, settings, max_length, TensorBar(bar))
        if settings.system is not None and not talk.templated:
            raise UserError("The model has no chat template, so it cannot use a system prompt: leave it out.")
        talk.open()
    with talk:
        return ChatSession(talk).run()


class ChatSession:
    """A chat at a terminal or on a pipe."""

    def __init__(self, chat: Chat):
        self.chat, self.reader = chat, Reader()
        self.commands = SlashCommands(chat, self.say)
        self.answering = self.stopped = False

    def say(self, text: str) -> None:
        """Print a line that is not part of an answer: on the terminal, or to stderr in a pipe."""
        text = escape_unprintable(text, "\n")
        print(
            folded(text) if self._on_terminal else text,
            file=sys.stdout if self._on_terminal else sys.stderr,
            flush=True,
        )

    @property
    def _on_terminal(self) -> bool:
        return self.reader.typed and is_terminal(sys.stdout)

    def run(self) -> int:
        introduction, *notes = self.chat.introduction()
        if self.reader.typed:
            self.say(f"{introduction} /help lists the commands; Ctrl-D exits.")
        for note in notes:
            self.say(note)
        try:
            with self._signals():
                while self._turn():
                    pass
        finally:
            self.reader.close()
        return 0

    def _turn(self) -> bool:
        """Read and handle a message; returns False at the end."""
        if self.chat.shrunk:
            self.chat.shrunk = False
            self.say(f"[the device has room for a conversation of {self.chat.capacity:,} tokens only]")
        try:
            text = self.reader.read()
        except KeyboardInterrupt:
            if self.ending or not self.reader.typed:
                raise
            print(flush=True)
            return self.reader.has_input()
        except UserError as error:
            return self._refuse(error)
        if text is None:
            if self._on_terminal:
                print(flush=True)
            return False
        try:
            if not text.strip():
                return True
            if text.startswith("/") and not text.startswith("//"):
                if not self.commands.run(text.strip()):
                    return False
                if not self.commands.retry:
                    return True
            self._answer(text[1:] if text.startswith("//") else text)
        except UserError as error:
            return self._refuse(error)
        return True

    def _refuse(self, error: UserError) -> bool:
        """Print the error if a person is typing, who can continue; a script ends with it."""
        if not self.reader.typed:
            raise error
        self.say(f"wgpu-lora: {' '.join(str(error).split())}")
        return True

    # -- an answer -------------------------------------------------------------------------------------------------

    def _answer(self, text: str) -> None:
        chat, retry = self.chat, self.commands.retry
        self.commands.retry = False
        self.answering, self.stopped = True, False
        try:
            pieces = chat.retry(lambda: self.stopped) if retry else chat.ask(text, lambda: self.stopped)
            with hide_typed_keys():
                if len(chat.lanes) == 1:
                    self._show_one(pieces)
                else:
                    self._show_several(pieces)
        finally:
            self.answering = False
        for note in self._notes():
            self.say(note)

    def _show_one(self, pieces: Iterator[tuple[str, str]]) -> None:
        status = console().status("") if self._on_terminal else nullcontext()
        with status:
            first = [piece for piece in [next(pieces, None)] if piece]
        for _, piece in chain(first, pieces):
            print(for_stdout(piece), end="", flush=True)
        if first or not self._on_terminal:  # in a pipe, an empty answer is an empty line
            print(flush=True)

    def _show_several(self, pieces: Iterator[tuple[str, str]]) -> None:
        if self._on_terminal:
            with SideBySide(console(), list(self.chat.lanes)) as view:
                for name, piece in pieces:
                    view.add(name, piece)
            return
        texts = dict.fromkeys(self.chat.lanes, "")
        for name, piece in pieces:
            texts[name] += piece
        print("\n\n".join(f"== {name} ==\n{for_stdout(text)}" for name, text in texts.items()), flush=True)

    def _notes(self) -> list[str]:
        """Notes about the last turn that its answer does not show."""
        chat, notes = self.chat, []
        for name, count in chat.left_out.items():
            owner = f" of {name}" if len(chat.lanes) > 1 else ""
            turns = "turn" if count == 1 else f"{count} turns"
            verbs = ("fits", "was") if count == 1 else ("fit", "were")
            notes.append(
                f"the oldest {turns}{owner} no longer {verbs[0]} in {chat.capacity:,} tokens and {verbs[1]} left out"
            )
        reasons = {name: reply.generation.stop_reason for name, reply in chat.replies.items()}
        if "interrupt" in reasons.values():
            notes.append("stopped" if chat.remembered else "stopped before the answer began; the message is not kept")
        if "length" in reasons.values():
            limit = chat.settings.max_new_tokens
            notes.append(f"cut off after {limit:,} tokens; /set max_new_tokens {2 * limit} allows more")
        if "capacity" in reasons.values():
            notes.append(f"cut off: the conversation is limited to {chat.capacity:,} tokens, which --max-length raises")
        if any(not r.text and r.generation.stop_reason == "stop" for r in chat.replies.values()):
            notes.append("the answer is empty; the model may be trained on prompts of another form (--prompt-format)")
        return [f"[{note}]" for note in notes]

    # -- signals ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C stops an answer; a second one, and other signals, go to their previous handlers."""
        before = {number: signal.getsignal(number) for number in ENDING}
        self.ending = False

        def act(number: int) -> None:
            if number == signal.SIGINT and self.answering and not self.stopped:
                self.stopped = True
                return
            self.ending = self.answering or number != signal.SIGINT
            handler = before[number]
            if callable(handler):
                handler(number, None)
            raise KeyboardInterrupt

        with on_end_signal(act):
            yield
