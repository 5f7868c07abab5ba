"""The one exception for mistakes that a person can mend."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """Something outside the program is wrong: a path, a file, an option, a device.

    The message is one sentence that says what is wrong, where, and what to do. Where there are several things of a
    kind, `details` has a line for each, which the message then has under the sentence.
    The command line prints it on stderr and exits with code 2; from Python it is an ordinary exception.
    """

    def __init__(self, sentence: object = "", details: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join([str(sentence), *details]))
        self.lines = [str(sentence), *details]


class NotFiniteError(UserError):
    """Weights or a loss hold NaN or infinity."""


class NoRoomError(UserError):
    """A device has no room for what is asked for; less of it may fit."""
