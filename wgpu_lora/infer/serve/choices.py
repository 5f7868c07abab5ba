"""Pieces of answers as choices of chats and completions."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Sequence

from wgpu_lora.infer.answers import overlap
from wgpu_lora.infer.request import TokenLogprobs
from wgpu_lora.infer.serve.engine_thread import EngineThread, Piece, RunningAnswer
from wgpu_lora.infer.serve.grammars import Vocabulary
from wgpu_lora.infer.serve.schema import GenerationRequest, Json
from wgpu_lora.infer.tool_calls import ToolCallParser

LEAST = -9999.0  # a log-probability of minus infinity, which JSON does not have


async def choice_deltas(
    engine: EngineThread, answers: Sequence[RunningAnswer], format: ChatFormat | TextFormat
) -> AsyncIterator[Json]:
    """What all answers of a request add to their choices, until the last has ended. A `finish_reason` ends a choice,
    whether or not its piece is the last of its answer. Raises RequestError.
    """
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
        self._marks, self._begins_inside, self.inside = marks, inside, inside
        self._text, self._sent = "", (0, 0)  # characters of both parts

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """(reasoning, other text) that are certain now."""
        self._text += text
        (begin, end), (first, second) = self._marks, self._sent
        whole, start = self._text, self._text.lstrip()
        if not self._begins_inside:
            if not start.startswith(begin):
                rest = "" if not last and begin.startswith(start) else whole
                self._sent = 0, len(rest)
                return "", rest[second:]
            whole = start.removeprefix(begin)
        thought, mark, rest = whole.partition(end)
        self.inside = not mark
        if not mark and not last:
            thought = thought[: len(thought) - overlap(thought, end)]
        thought, rest = thought.strip("\n"), rest.lstrip("\n")
        self._sent = len(thought), len(rest)
        return thought[first:], rest[second:]


class _Format:
    """Pieces of answers as choices.

    Args:
        top: how many of the most likely tokens are returned; None for no log-probabilities.
        token_ids: whether the tokens are.
    """

    def __init__(self, texts: TokenTexts, top: int | None, token_ids: bool) -> None:
        self._texts, self._top, self._token_ids = texts, top, token_ids

    def _delta(self, piece: Piece, fields: Json, is_empty: bool, logprobs: Json | None, end: str | None) -> list[Json]:
        """What a piece adds to a choice: nothing, or one with these fields."""
        ids = {"token_ids": piece.tokens} if self._token_ids else {}
        if is_empty and not (logprobs or end or any(ids.values())):
            return []
        return [{"index": piece.index, **fields, "logprobs": logprobs, "finish_reason": end, **ids}]

    def _whole(self, index: int, fields: Json, deltas: Sequence[Json], columns: Sequence[str]) -> Json:
        """A choice with these fields, of all its deltas. columns: of log-probabilities."""
        parts = [delta["logprobs"] for delta in deltas if delta["logprobs"]]
        logprobs = {name: [value for part in parts for value in part[name]] for name in columns}
        ids = {"token_ids": [token for delta in deltas for token in delta["token_ids"]]} if self._token_ids else {}
        end = deltas[-1]["finish_reason"]
        return {
            "index": index, **fields, "logprobs": None if self._top is None else logprobs, "finish_reason": end, **ids,
        }  # fmt: skip


class ChatFormat(_Format):
    """Choices of a chat.

    Args:
        parsers: of calls of tools, and reasonings: of reasoning, one an answer.
    """

    def __init__(
        self,
        texts: TokenTexts,
        parsers: Sequence[ToolCallParser | None],
        reasonings: Sequence[ReasoningParser | None],
        top: int | None = None,
        token_ids: bool = False,
    ) -> None:
        super().__init__(texts, top, token_ids)
        self._parsers, self._reasonings = parsers, reasonings
        self.reasoning_tokens = 0

    def start(self, index: int) -> list[Json]:
        """Choices of a stream before the first piece of an answer."""
        delta: Json = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def deltas(self, piece: Piece) -> list[Json]:
        """What a piece adds to a choice."""
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
        scored = piece.logprobs if self._top is not None else None
        logprobs = {"content": [self._logprob(scored)]} if scored else None
        return self._delta(piece, {"delta": delta}, not delta, logprobs, end)

    def whole(self, index: int, deltas: Sequence[Json]) -> Json:
        """The choice of an answer, of all its `deltas`."""
        calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
        texts = {
            name: "".join(delta["delta"].get(name) or "" for delta in deltas)
            for name in ("content", "reasoning", "reasoning_content")
        }
        message: Json = {"role": "assistant", "content": texts.pop("content") or (None if calls else "")}
        message |= {name: text for name, text in texts.items() if text} | ({"tool_calls": calls} if calls else {})
        return self._whole(index, {"message": message}, deltas, ["content"])

    def _logprob(self, value: TokenLogprobs) -> Json:
        top = value.top[: self._top]
        if top and value.token not in dict(top):
            top = [*top, (value.token, value.logprob)]
        entries = [self._texts.entry(*pair) for pair in top]
        return {**self._texts.entry(value.token, value.logprob), "top_logprobs": entries}


class TextFormat(_Format):
    """Choices of a completion. echo: the prompt's text, which each answer begins with."""

    def __init__(
        self,
        texts: TokenTexts,
        answers: Sequence[RunningAnswer],
        echo: Sequence[str],
        top: int | None = None,
        token_ids: bool = False,
    ) -> None:
        super().__init__(texts, top, token_ids)
        self._answers, self._echo, self._started = answers, echo, [False] * len(answers)

    def start(self, index: int) -> list[Json]:
        return []

    def deltas(self, piece: Piece) -> list[Json]:
        answer, echo, text = self._answers[piece.index], self._echo[piece.index], piece.text
        rows: list[tuple[TokenLogprobs | int, int]] = []  # with their offsets
        if not self._started[piece.index]:
            text, self._started[piece.index] = echo + text, True
            if echo and self._top is not None:  # the first token of a prompt has no probability
                prompt = answer.request.prompt
                rows += zip([prompt[0], *(answer.prompt_logprobs or ())], self._offsets(prompt, echo), strict=True)
        if piece.logprobs:
            rows.append((piece.logprobs, len(echo) + piece.offset))
        logprobs = self._logprobs(rows) if rows and self._top is not None else None
        return self._delta(piece, {"text": text}, not text, logprobs, piece.finish_reason)

    def whole(self, index: int, deltas: Sequence[Json]) -> Json:
        text = "".join(delta["text"] for delta in deltas)
        return self._whole(index, {"text": text}, deltas, [*self._logprobs([])])

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
