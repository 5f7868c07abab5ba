"""`generate` and `chat` by a server (--url)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.console import Bar
from wgpu_lora.cli.inference.line_reader import Reader
from wgpu_lora.cli.inference.sampling_options import for_stdout
from wgpu_lora.errors import UserError

if TYPE_CHECKING:
    from wgpu_lora.infer.answers import Answer
    from wgpu_lora.infer.generation_options import GenerationOptions
    from wgpu_lora.infer.prompts import Prompt
    from wgpu_lora.serve.client import ServerClient

Url = Annotated[
    str | None,
    typer.Option(help="Ask this server of OpenAI's API, such as http://127.0.0.1:8000; --model is one of its models."),
]
OWN = ("adapter", "compare", "device", "base_dtype")  # options that a server decides


def served_answers(
    client: ServerClient, prompts: Sequence[Prompt], settings: GenerationOptions, at_once: int
) -> list[Answer]:
    """A server's answers to prompts, in order. Raises UserError."""
    from wgpu_lora.infer.answers import Answer
    from wgpu_lora.serve.client import request_of
    from wgpu_lora.tokenizer.examples import Alpaca, Completion

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


def served_chat(client: ServerClient, settings: GenerationOptions, max_tokens: int | None) -> int:
    """A conversation with a server; /reset begins anew, /exit ends it. max_tokens: see `request_of`."""
    from wgpu_lora.serve.client import request_of

    reader = Reader()
    messages: list[dict[str, Any]] = []
    try:
        while (text := reader.read()) not in (None, "/exit"):
            if text == "/reset":
                messages.clear()
            elif text and text.strip():
                messages.append({"role": "user", "content": text})
                answer = ""
                try:
                    with client.understood():
                        for chunk in client.events(*request_of(messages, settings, max_tokens)):
                            for choice in chunk["choices"]:
                                piece = choice["delta"].get("content") or ""
                                answer += piece
                                print(for_stdout(piece), end="", flush=True)
                except KeyboardInterrupt:  # by a person who has read enough
                    if not reader.typed:
                        raise
                except UserError as error:
                    if not reader.typed:
                        raise
                    print(f"wgpu-lora: {error}", file=sys.stderr, flush=True)
                    messages.pop()
                    continue
                print(flush=True)
                messages.append({"role": "assistant", "content": answer})
    finally:
        reader.close()
    return 0
