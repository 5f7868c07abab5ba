"""Pieces of answers as choices of chats and completions."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from wgpu_lora.infer.answers import overlap
from wgpu_lora.infer.request import TokenLogprobs
from wgpu_lora.infer.tool_calls import ToolCallParser
from wgpu_lora.serve.engine_thread import EngineThread, Piece, RunningAnswer
from wgpu_lora.serve.grammars import Vocabulary
from wgpu_lora.serve.schema import GenerationRequest, Json

LEAST = -9999.0  # a log-probability of minus infinity, which JSON does not have


class AnswerFormat(Protocol):
    """From the pieces of a request's answers to choices."""

    def start(self, index: int) -> list[Json]:
        """Choices of a stream before the first piece of an answer."""

    def deltas(self, piece: Piece) -> list[Json]:
        """What a piece adds to a choice. A `finish_reason` ends it, whether or not the piece is the answer's last."""

    def whole(self, index: int, deltas: Sequence[Json]) -> Json:
        """The choice of an answer, of all its `deltas`."""


async def choice_deltas(
    engine: EngineThread, answers: Sequence[RunningAnswer], format: AnswerFormat
) -> AsyncIterator[Json]:
    """What all answers of a request add to their choices, until the last has ended. Raises RequestError."""
    running = {answer.index: answer for answer in answers}
    while running:
        piece = await answers[0].pieces.get()
        if piece.error:
            raise piece.error
        for choice in format.deltas(piece) if piece.index in running else ():
            if choice["finish_reason"]:
                engine.stop([running.pop(piece.index)])
            yield choice


class TokenTexts:
    """The names of tokens in a request's log-probabilities, of which each has its own.

    They are texts, `bytes:` with the bytes of a part of a character, or ids, if the request wants these.
    """

    def __init__(self, vocabulary: Vocabulary, body: GenerationRequest) -> None:
        self.bytes_of, self._ids = vocabulary.bytes_of, bool(body.return_tokens_as_token_ids)

    def name(self, token: int) -> str:
        data = self.bytes_of(token)
        if self._ids:
            return f"token_id:{token}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def entry(self, token: int, logprob: float) -> Json:
        return {"token": self.name(token), "logprob": max(logprob, LEAST), "bytes": list(self.bytes_of(token))}

    def by_name(self, value: TokenLogprobs, count: int) -> dict[str, float]:
        """Log-probabilities of the `count` most likely tokens, and of the token itself."""
        result = {self.name(value.token): max(value.logprob, LEAST)}
        pairs = [pair for pair in value.top[:count] if pair[0] != value.token]
        for token, logprob in pairs:
            name = self.name(token)
            result[f"token_id:{token}" if name in result else name] = max(logprob, LEAST)
        return dict(sorted(result.items(), key=lambda item: -item[1]))

    def of_prompt(self, values: Sequence[TokenLogprobs], count: int) -> list[Json | None]:
        """vLLM's `prompt_logprobs`. A `rank` is null for a token that is not among the `count` most likely ones."""
        result: list[Json | None] = [None]  # the first token of a prompt has no probability
        for value in values:
            ranks = {token: (rank, logprob) for rank, (token, logprob) in enumerate(value.top[:count], 1)}
            ranks.setdefault(value.token, (None, value.logprob))  # type: ignore[arg-type]
            result.append({
                str(token): {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": self.name(token)}
                for token, (rank, logprob) in ranks.items()
            })  # fmt: skip
        return result


class ReasoningParser:
    """Splits an answer, piece by piece, into its reasoning and the rest, without the marks and blank lines between.

    Args:
        marks: of the beginning and the end of reasoning. inside: whether the prompt ends with the first one.
    """

    def __init__(self, marks: tuple[str, str], inside: bool) -> None:
        self._begin, self._end = marks
        self._before, self.inside = not inside, inside
        self._text = ""  # that is not certain yet
        self._blank = inside  # whether blank lines are left out that come next

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """(reasoning, other text) that are certain now."""
        self._text += text
        if self._before:
            start = self._text.lstrip()
            if not last and len(start) < len(self._begin) and self._begin.startswith(start):
                return "", ""
            self._before, self.inside = False, start.startswith(self._begin)
            if self.inside:
                self._text, self._blank = start.removeprefix(self._begin), True
        reasoning = self._take(self._end, last) if self.inside else ""
        return reasoning, "" if self.inside else self._take("", last)

    def _take(self, mark: str, last: bool) -> str:
        """The text before the mark, or all that cannot begin it, without blank lines around it."""
        text = self._text.lstrip("\n") if self._blank else self._text
        place = text.find(mark) if mark else -1
        end = len(text) if last or not mark else len(text) - overlap(text, mark)
        result = text[: place if place >= 0 else end]
        kept = result.rstrip("\n") if mark else result
        self._text = text[len(kept) :]
        self._blank = self._blank and not kept
        if place >= 0:
            self._text, self.inside, self._blank = text[place + len(mark) :], False, True
        return kept


class ChatFormat:
    """Pieces of answers as choices of a chat.

    Args:
        parsers: of calls of tools, and reasonings: of reasoning, one an answer.
        top: how many of the most likely tokens are returned; None for no log-probabilities.
    """

    def __init__(
        self,
        texts: TokenTexts,
        parsers: Sequence[ToolCallParser | None],
        reasonings: Sequence[ReasoningParser | None],
        top: int | None = None,
        token_ids: bool = False,
    ) -> None:
        self._texts, self._parsers, self._reasonings = texts, parsers, reasonings
        self._top, self._token_ids = top, token_ids
        self.reasoning_tokens = 0

    def start(self, index: int) -> list[Json]:
        delta: Json = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def deltas(self, piece: Piece) -> list[Json]:
        parser, end, delta = self._parsers[piece.index], piece.finish_reason, Json()
        content = piece.text
        if reasoning := self._reasonings[piece.index]:
            thought, content = reasoning.push(piece.text, end is not None)
            self.reasoning_tokens += bool(thought or reasoning.inside)
            if thought:
                delta["reasoning"] = delta["reasoning_content"] = thought
        if parser:
            content, calls = parser.push(content, end is not None)
            if calls:
                first = len(parser.calls) - len(calls)
                delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls, first)]
            if parser.calls and (parser.ended or end == "stop"):
                end = "tool_calls"
        if content:
            delta["content"] = content
        values = [self._logprob(piece.logprobs)] if piece.logprobs and self._top is not None else []
        if not (delta or end or values or (self._token_ids and piece.tokens)):
            return []
        choice: Json = {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": end}
        if values:
            choice["logprobs"] = {"content": values}
        if self._token_ids:
            choice["token_ids"] = piece.tokens
        return [choice]

    def whole(self, index: int, deltas: Sequence[Json]) -> Json:
        calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
        texts = {
            name: "".join(delta["delta"].get(name) or "" for delta in deltas)
            for name in ("content", "reasoning", "reasoning_content")
        }
        message: Json = {"role": "assistant", "content": texts.pop("content") or (None if calls else "")}
        message |= {name: text for name, text in texts.items() if text}
        if calls:
            message["tool_calls"] = calls
        choice: Json = {"index": index, "message": message, "logprobs": None}
        if self._top is not None:
            choice["logprobs"] = {
                "content": [value for delta in deltas if delta["logprobs"] for value in delta["logprobs"]["content"]]
            }
        choice["finish_reason"] = deltas[-1]["finish_reason"]
        if self._token_ids:
            choice["token_ids"] = [token for delta in deltas for token in delta["token_ids"]]
        return choice

    def _logprob(self, value: TokenLogprobs) -> Json:
        top = value.top[: self._top]
        if top and value.token not in dict(top):
            top = [*top, (value.token, value.logprob)]
        return {
            **self._texts.entry(value.token, value.logprob),
            "top_logprobs": [self._texts.entry(*pair) for pair in top],
        }


class TextFormat:
    """Pieces of answers as choices of a completion.

    Args:
        echo: the prompt's text, which each answer begins with.
        top: how many of the most likely tokens are returned; None for no log-probabilities.
    """

    def __init__(
        self,
        texts: TokenTexts,
        answers: Sequence[RunningAnswer],
        echo: Sequence[str],
        top: int | None = None,
        token_ids: bool = False,
    ) -> None:
        self._texts, self._answers, self._echo = texts, answers, echo
        self._top, self._token_ids = top, token_ids
        self._started = [False] * len(answers)

    def start(self, index: int) -> list[Json]:
        return []

    def deltas(self, piece: Piece) -> list[Json]:
        index, echo = piece.index, self._echo[piece.index]
        rows: list[tuple[TokenLogprobs | int, int]] = []  # with their offsets
        text = piece.text
        if not self._started[index]:
            text, self._started[index] = echo + text, True
            if self._top is not None and echo:
                answer = self._answers[index]
                prompt = answer.request.prompt
                values = [prompt[0], *(answer.prompt_logprobs or ())]  # the first token has no probability
                rows += zip(values, self._offsets(prompt, echo), strict=True)
        if self._top is not None and piece.logprobs:
            rows.append((piece.logprobs, len(echo) + piece.offset))
        if not (text or rows or piece.finish_reason or (self._token_ids and piece.tokens)):
            return []
        choice: Json = {"index": index, "text": text, "logprobs": None, "finish_reason": piece.finish_reason}
        if rows:
            choice["logprobs"] = self._logprobs(rows)
        if self._token_ids:
            choice["token_ids"] = piece.tokens
        return [choice]

    def whole(self, index: int, deltas: Sequence[Json]) -> Json:
        choice: Json = {"index": index, "text": "".join(delta["text"] for delta in deltas), "logprobs": None}
        if self._top is not None:
            parts = [delta["logprobs"] for delta in deltas if delta["logprobs"]]
            choice["logprobs"] = {
                name: [value for part in parts for value in part[name]] for name in self._logprobs([])
            }
        choice["finish_reason"] = deltas[-1]["finish_reason"]
        if self._token_ids:
            choice["token_ids"] = [token for delta in deltas for token in delta["token_ids"]]
        return choice

    def _logprobs(self, rows: Sequence[tuple[TokenLogprobs | int, int]]) -> Json:
        result: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for value, offset in rows:
            logprob = top = None
            if isinstance(value, TokenLogprobs):
                logprob, top = max(value.logprob, LEAST), self._texts.by_name(value, self._top or 0)
            name = self._texts.name(value.token if isinstance(value, TokenLogprobs) else value)
            for column, item in zip(result.values(), (name, logprob, top, offset), strict=True):
                column.append(item)
        return result

    def _offsets(self, prompt: Sequence[int], echo: str) -> list[int]:
        """Where each token of a prompt begins in its text, in characters; a part of one begins with it."""
        decoder, starts, length = getincrementaldecoder("utf-8")("replace"), [], 0
        for token in prompt:
            starts.append(length)
            length += len(decoder.decode(self._texts.bytes_of(token)))
        missing = length + len(decoder.decode(b"", True)) - len(echo)  # such as a space before the first word
        return [max(0, start - missing) for start in starts]


def usage(answers: Sequence[RunningAnswer], count: int, reasoning_tokens: int | None = None) -> Json:
    """Of all answers of a request, `count` to each prompt, which counts once."""
    requests = [answer.request for answer in answers[::count]]
    prompt = sum(len(request.prompt) for request in requests)
    completion = sum(answer.tokens for answer in answers)
    result: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in requests)},
    }
    if reasoning_tokens is not None:
        result["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return result
