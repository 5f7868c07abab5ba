"""Reading messages from a terminal or a pipe: lines, continued lines and blocks; and the input history."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from wgpu_lora.cli.console import is_terminal
from wgpu_lora.errors import UserError

QUOTES = '"""'
REMEMBERED = 1000  # lines in the history


class Reader:
    """Reads messages from stdin, with a prompt and line editing on a terminal."""

    def __init__(self) -> None:
        self.typed = is_terminal(sys.stdin)
        self.in_message = False  # whether part of a message has been typed
        self._history = History() if self.typed else None

    def read(self) -> str | None:
        """The next message; None at the end of the input.

        A line that ends with a backslash continues on the next one; three quotes begin and end a block.

        Raises:
            UserError: piped input is not UTF-8, or a block is not closed. KeyboardInterrupt, EOFError: as typed.
        """
        self.in_message = False
        line = self._line("> ")
        if line is None:
            return None
        if line.lstrip().startswith(QUOTES):
            return self._block(line.lstrip()[len(QUOTES) :])
        lines = [line]
        while lines[-1].endswith("\\") and not lines[-1].endswith("\\\\"):
            self.in_message = True
            lines[-1] = lines[-1][:-1]
            continuation = self._line(". ")
            if continuation is None:
                break
            lines.append(continuation)
        return "\n".join(lines)

    def _block(self, line: str) -> str:
        lines: list[str] = []
        self.in_message = True
        while True:
            if line.rstrip().endswith(QUOTES):
                lines.append(line.rstrip()[: -len(QUOTES)])
                return "\n".join(lines).strip("\n")
            lines.append(line)
            next_line = self._line(". ")
            if next_line is None:
                raise UserError(f"A block that begins with {QUOTES} is not closed: end it with {QUOTES}.")
            line = next_line

    def _line(self, prompt: str) -> str | None:
        try:
            if not self.typed:
                line = sys.stdin.readline()
                return line.rstrip("\r\n") if line else None
            return self._ask(prompt)
        except EOFError:
            return None
        except UnicodeDecodeError:
            raise UserError("The input is not valid UTF-8: convert it to UTF-8.") from None

    def _ask(self, prompt: str) -> str:
        if not is_terminal(sys.stdout):  # the output is redirected
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        return input(prompt)

    def has_input(self) -> bool:
        """Whether Ctrl-C interrupted a message, not just an empty line."""
        return self.in_message or bool(self._history and self._history.typing())

    def close(self) -> None:
        if self._history:
            self._history.save()


@contextmanager
def hide_typed_keys() -> Iterator[None]:
    """Do not echo typed keys, including ^C, into the output; the next prompt shows them."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    try:
        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (OSError, ValueError, termios.error):  # not a terminal
        yield
        return
    attributes = [*before]
    attributes[3] = attributes[3] & ~termios.ECHO | termios.NOFLSH  # Ctrl-C does not discard pending output
    termios.tcsetattr(number, termios.TCSANOW, attributes)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(number, termios.TCSANOW, before)


class History:
    """Earlier lines for the arrow keys, in a file that only its owner can read; does nothing without readline."""

    def __init__(self) -> None:
        self._readline = _readline()
        self._path = _history_path()
        if self._readline:
            with suppress(OSError):
                self._readline.read_history_file(self._path)

    def typing(self) -> str:
        return self._readline.get_line_buffer() if self._readline else ""

    def save(self) -> None:
        """Save the history, ignoring errors: it is only a convenience."""
        if not self._readline:
            return
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600))
            self._path.chmod(0o600)
            self._readline.set_history_length(REMEMBERED)
            self._readline.write_history_file(self._path)


def _readline() -> Any:
    try:
        import readline
    except ImportError:  # Windows
        return None
    return readline


def _history_path() -> Path:
    from platformdirs import user_state_path

    return user_state_path("wgpu-lora") / "chat_history"
