"""`generate` and `chat` by a server (--url)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import typer

from wgpu_lora.cli.console import Bar
from wgpu_lora.errors import UserError

if TYPE_CHECKING:
    from wgpu_lora.infer.answers import Answer
    from wgpu_lora.infer.generation_options import GenerationOptions
    from wgpu_lora.infer.prompts import Prompt
    from wgpu_lora.infer.serve.client import ServerClient

Url = Annotated[
    str | None,
    typer.Option(help="Ask this server of OpenAI's API, such as http://127.0.0.1:8000; --model is one of its models."),
]
OWN = ("adapter", "compare", "device", "base_dtype")  # options that a server decides


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
