"""A tokenizer and its chat templates in a child process with limits, since they come with downloads."""

from __future__ import annotations

import threading
from array import array
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.chat_template import TemplateError, UnusableError
from wgpu_lora.formats.tokenizer.local_tokenizer import AddedToken, TokenizerInfo
from wgpu_lora.formats.tokenizer.tokenizer_json import TokenizerError
from wgpu_lora.processes.child_process import ChildEnded, ChildProcess, Limits, python_command

# A vocabulary of 262,000 tokens takes 0.3 GB, and the longest text 0.9 GB more; ordinary texts take at most a second
# for each MiB, and the largest documents a thirtieth of that.
LIMITS = Limits(memory=2 << 30, seconds=5.0, seconds_per_mib=10.0, max_seconds=60.0, output=96 << 20)
PACKED = ("encode", "encode_with_offsets")  # methods whose lists of numbers are sent as base64, of i32 each
ERRORS: dict[str, Callable[[str], Exception]] = {
    kind.__name__: kind for kind in (TokenizerError, TemplateError, UnusableError)
}
_ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "2"}


class TokenizerProcess:
    """A `LocalTokenizer` in a child process, which can only compute. If the child has ended, `call` starts another.

    Args:
        document, added_tokens, normalized: see `LocalTokenizer.open`.

    Raises:
        TokenizerError: the tokenizer is refused.
    """

    info: TokenizerInfo

    def __init__(self, document: str, added_tokens: Sequence[Mapping[str, Any]] = (), normalized: bool = False) -> None:
        self._document = document, list(added_tokens), normalized
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
        try:
            self.call("token_to_id", "")
        except ChildEnded as error:
            raise TokenizerError(str(error)) from None

    def call(self, method: str, *arguments: Any, factor: int = 1) -> Any:
        """The value of a method of `LocalTokenizer`, or of `tokenize_all` in tokenizer_child.py.

        Args:
            factor: how often the arguments are worked through, which raises the limit of time.

        Raises:
            TokenizerError, UserError: see there.
            ChildEnded: it exceeded a limit, or crashed.
        """
        with self._lock:
            if not self._child or not self._child.running:
                command = python_command("wgpu_lora.formats.tokenizer.tokenizer_child", LIMITS)
                child = ChildProcess(command, LIMITS, environment=_ENVIRONMENT)
                info = value_of(child.ask(["open", *self._document]))
                added_tokens = tuple(AddedToken(**token) for token in info["added"])
                self.info = TokenizerInfo(info["vocab_size"], added_tokens, tuple(info["notes"]))
                self._child = child
            value = value_of(self._child.ask([method, *arguments], factor))
        return [unpack(text) for text in value] if method in PACKED else value


def unpack(text: str) -> list[int]:
    """Numbers that the child sent packed."""
    return array("i", b64decode(text)).tolist()


def value_of(answer: dict[str, Any]) -> Any:
    """The value of the child's answer; an error is raised."""
    if "error" in answer:
        kind, text = answer["error"]
        raise ERRORS.get(kind, UserError)(text)
    return answer["value"]
