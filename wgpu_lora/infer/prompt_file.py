"""Prompts from a file and answers into one: what `generate --prompts --output` reads and writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.data import read_jsonl
from wgpu_lora.errors import UserError
from wgpu_lora.formats.atomic import write_new_bytes
from wgpu_lora.infer.answer import Answer
from wgpu_lora.infer.prompt import Prompt, check_prompt

MAX_TEXT_BYTES = 256 << 20
ANSWERED = ("response", "tokens", "stop_reason")  # what an answer adds to a row


@dataclass(frozen=True)
class Request:
    """A prompt, the row that it is from, and whether an answer that stood there is asked for anew."""

    prompt: Prompt
    row: Mapping[str, Any]
    answered: bool = False


def read_requests(path: Path) -> list[Request]:
    """The prompts of a file, in its order: JSONL rows with `prompt` or `messages`, or lines of plain text.

    It is JSONL by its name, or where its first line begins with a brace. Blank lines are passed over.

    Raises:
        UserError: the file cannot be read or is empty, or a row has no prompt, with its line.
    """
    if not path.is_file():
        wrong = f"{path} is not a regular file" if path.exists() else f"There is no file {path}"
        raise UserError(f"{wrong}: give --prompts JSONL rows with 'prompt' or 'messages', or lines of text.")
    if path.suffix.lower() not in (".jsonl", ".ndjson") and not _begins_with_brace(path):
        return [Request(line, {"prompt": line}) for line in _lines(path)]
    found = []
    for number, row in read_jsonl(path):
        try:
            found.append(_request(row))
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    return found


def _begins_with_brace(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"


def _lines(path: Path) -> list[str]:
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise UserError(f"{path} is longer than {MAX_TEXT_BYTES:,} bytes: split it into several files.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid UTF-8 (byte {error.start + 1}): save it as UTF-8.") from None
    lines = [line for line in text.split("\n") if line.strip()]  # universal newlines: no line ends with \r
    if not lines:
        raise UserError(f"{path} is empty: write a prompt to a line.")
    return lines


def _request(row: dict[str, Any]) -> Request:
    messages = row.get("messages", row.get("prompt"))
    if messages is None:
        keys = ", ".join(repr(key) for key in list(row)[:12]) or "none"
        raise UserError(f"the row has no 'prompt' and no 'messages': its keys are {keys}.")
    for key in ("tools", "chat_template_kwargs"):
        if row.get(key):
            raise UserError(f"the row has {key!r}, which answers cannot be given with: leave it out.")
    answered = False
    if "messages" in row and not isinstance(messages, list):
        raise UserError("'messages' must be a list of messages.")
    while isinstance(messages, list) and len(messages) > 1 and _is_answer(messages[-1]):
        messages, answered = messages[:-1], True
    if isinstance(messages, str) and not messages.strip():
        raise UserError("the prompt is empty.")
    check_prompt(messages)
    return Request(messages, row, answered)


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def row_of(request: Request, answer: Answer, name: str | None = None) -> dict[str, Any]:
    """A row of the output: what stood in the row, and the answer; `name` is the adapter's, where there are several."""
    kept = {key: value for key, value in request.row.items() if key not in (*ANSWERED, "adapter")}
    who = {} if name is None else {"adapter": name}
    said = {"response": answer.text, "tokens": len(answer.token_ids), "stop_reason": answer.stop_reason}
    return {**kept, **who, **said}


def to_jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def check_new(path: Path) -> None:
    """UserError, before the work, where `path` could not be written after it."""
    if path.is_symlink() or path.exists():
        raise UserError(f"{path} exists already: give --output another name, or remove it.")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written, since there is no directory {path.parent}: make it first.")


@contextmanager
def kept_on_failure(
    path: Path | None, rows: Callable[[], Sequence[Mapping[str, Any]]], say: Callable[[str], None]
) -> Iterator[None]:
    """Writes what has been answered beside `path` where the work is cut short, and says so."""
    try:
        yield
    except BaseException:
        done = rows() if path else []
        if path and done:
            part = _free(path.with_name(f"{path.name}.part"))
            write_new_bytes(part, to_jsonl(done), "--output")
            say(f"the {len(done):,} answers so far are in {part}")
        raise


def _free(wanted: Path) -> Path:
    number, path = 1, wanted
    while path.exists() or path.is_symlink():
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")
    return path
