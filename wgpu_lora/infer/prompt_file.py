"""Files of prompts and answers, for `generate --prompts --output`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from wgpu_lora.data.column_types import ANYTHING, MESSAGES, TEXT, TEXT_OR_MESSAGES
from wgpu_lora.data.compressed_files import bare_name, opened
from wgpu_lora.data.example_formats import EXAMPLES, QUESTION, alpaca, with_system
from wgpu_lora.data.row_counts import RowCounts
from wgpu_lora.data.row_files import SUFFIXES, FileSource, reader_of
from wgpu_lora.data.row_formats import ColumnType, Fields, RowFormat, RowFormats
from wgpu_lora.data.source import BadRow
from wgpu_lora.data.unread_columns import is_input
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import numbered, write_new_bytes
from wgpu_lora.formats.tokenizer.examples import Completion
from wgpu_lora.infer.answers import Answer
from wgpu_lora.infer.prompts import Prompt, check_prompt
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import count_noun

MAX_TEXT_BYTES = 256 << 20


def _of_prompt(row: Fields) -> Any:
    """A training row is continued as text, as in training; a row with only a prompt is like any other prompt."""
    prompt, answer = row["prompt"], row.columns.get("completion")
    return Completion(prompt, answer) if isinstance(prompt, str) and isinstance(answer, str) else prompt


def _of_instruction(row: Fields) -> Any:
    return replace(alpaca(row), output="")


def _format(name: str, kind: ColumnType, prompt: Callable[[Fields], Any]) -> RowFormat[Any]:
    def convert(row: Fields) -> Any:
        result = prompt(row)
        row.keep(but=lambda column: column in QUESTION or is_input(column))  # beside the answer
        return result

    return RowFormat({name: kind}, convert, EXAMPLES.columns, QUESTION)


# Rows with a prompt, which may be rows to train on.
FORMATS: RowFormats[Any] = RowFormats(
    (
        *(
            _format(name, MESSAGES, partial(lambda name, row: with_system(row, name), name))
            for name in ("messages", "conversations")
        ),
        _format("prompt", replace(ANYTHING, cell=TEXT_OR_MESSAGES.cell), _of_prompt),
        _format("instruction", TEXT, _of_instruction),
    )
)
_ROWS = re.compile(rb"(\xef\xbb\xbf)?\s*(\{|\[\s*\{|PAR1)")  # the beginning of a file of rows
ANSWERED = ("response", "tokens", "stop_reason")  # keys that an answer adds to a row


@dataclass(frozen=True)
class Request:
    """A prompt, its row, and whether the row already had an answer, which is generated anew."""

    prompt: Prompt
    row: Mapping[str, Any]
    answered: bool = False


def read_requests(path: Path) -> list[Request]:
    """Read prompts in order: rows in any format that training reads, or lines of plain text.

    Rows fit one of FORMATS; they are recognised by the file's name or its first bytes. Blank lines are skipped.

    Raises:
        UserError: the file cannot be read or is empty, or rows have no prompt (with their line numbers).
    """
    if not path.is_file():
        wrong = f"{path} is not a regular file" if path.exists() else f"{path} does not exist"
        raise UserError(f"{wrong}: give {flag('prompts')} JSONL rows with 'prompt' or 'messages', or lines of text.")
    with opened(path) as file:
        begins = file.read(4096)
    if bare_name(path).suffix.lower() not in SUFFIXES and not _ROWS.match(begins):
        return [Request(line, {"prompt": line}) for line in _lines(path)]
    account = RowCounts(FileSource(path, reader_of(path)))
    result = []
    for position, row in account.source.rows(FORMATS):
        try:
            if isinstance(row, BadRow):
                raise UserError(row.reason)
            result.append(_request(row))
        except UserError as error:
            account.add_bad(position, BadRow(str(error)))
    account.refuse_bad("fix them")
    return result


def _lines(path: Path) -> list[str]:
    with opened(path) as file:
        data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise UserError(f"{path} is longer than {MAX_TEXT_BYTES:,} bytes: split it into several files.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid UTF-8 (byte {error.start + 1}): save it as UTF-8.") from None
    lines = [line for line in re.sub("[\r\n]+", "\n", text).split("\n") if line.strip()]  # blank ones take memory
    if not lines:
        raise UserError(f"{path} is empty: write one prompt per line.")
    return lines


def _request(row: dict[str, Any]) -> Request:
    for key in ("tools", "functions", "chat_template_kwargs"):
        if row.get(key):
            raise UserError(f"the row has {key!r}, which generation does not support: leave it out.")
    messages, answered = FORMATS.read(row), False
    while isinstance(messages, list) and len(messages) > 1 and _is_answer(messages[-1]):
        messages, answered = messages[:-1], True
    text = messages.prompt if isinstance(messages, Completion) else messages
    if isinstance(text, str) and not text.strip():
        raise UserError("the prompt is empty.")
    check_prompt(messages)
    return Request(messages, row, answered)


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def row_of(request: Request, answer: Answer, name: str | None = None) -> dict[str, Any]:
    """A row of the output: the input row and the answer; `name` is the adapter's, if there are several."""
    input_fields = {key: value for key, value in request.row.items() if key not in (*ANSWERED, "adapter")}
    adapter_field = {} if name is None else {"adapter": name}
    fields = {"response": answer.text, "tokens": len(answer.token_ids), "stop_reason": answer.stop_reason}
    return {**input_fields, **adapter_field, **fields}


def to_jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


@contextmanager
def kept_on_failure(
    path: Path | None, rows: Callable[[], Sequence[Mapping[str, Any]]], say: Callable[[str], None]
) -> Iterator[None]:
    """If generation is cut short, write the finished answers beside `path` and print where."""
    try:
        yield
    except BaseException:
        answers = rows() if path else []
        if path and answers:
            part = numbered(path.with_name(f"{path.name}.part"))
            write_new_bytes(part, to_jsonl(answers), flag("output"))
            say(f"{count_noun(len(answers), 'answer')} so far: {part}")
        raise
