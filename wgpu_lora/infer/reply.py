"""An answer during generation: from tokens to text, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from wgpu_lora.data import StreamDecoder, Tokenizer
from wgpu_lora.infer.running import Generation


class Reply:
    """The answer to one prompt. Text that may be the beginning of a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer, prompt_tokens: int, stop: Sequence[str] = ()):
        self.generation = Generation(prompt_tokens)
        self._tokenizer, self._stop, self.stop_ids = tokenizer, stop, tokenizer.stop_ids
        self._decoder = StreamDecoder(tokenizer)
        self._shown, self._held, self._cut = "", "", False

    def push(self, token: int) -> str:
        """Add a token; returns the text that is certain now. A stop string ends the generation."""
        return "" if self._cut else self._emit(self._decoder.push(token), False)

    def finish(self) -> str:
        """The remaining text, after the last token."""
        return "" if self._cut else self._emit(self._decoder.flush(), True)

    def _emit(self, text: str, last: bool) -> str:
        self._held += text
        places = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if places:
            self._cut, self.generation.stop_reason = True, "stop"
        keep = 0 if last else max((_overlap(self._held, stop) for stop in self._stop), default=0)
        end = min(places) if places else len(self._held) - keep
        text, self._held = self._held[:end], self._held[end:]
        self._shown += text
        return text

    @property
    def text(self) -> str:
        """The whole text, without the stop string."""
        return self._shown if self._cut else self._tokenizer.decode(self.generation.token_ids)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
