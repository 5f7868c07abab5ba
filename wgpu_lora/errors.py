"""Exceptions for errors that the user can fix, and warnings."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """An error in the user's input: a path, a file, an option, a device.

    The message is one sentence that says what is wrong, where, and what to do. `details` are further lines below it,
    one for each of several problems of the same kind.
    The command line prints the message on stderr and exits with code 2; from Python it is an ordinary exception.
    """

    def __init__(self, sentence: object = "", details: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join([str(sentence), *details]))
        self.lines = [str(sentence), *details]

    @property
    def problem(self) -> str:
        """The message without what to do, which follows the last colon."""
        sentence = self.lines[0]
        return sentence.rpartition(": ")[0] or sentence


class DeviceWarning(UserWarning):
    """A fault of a device that is worked around, or slow. The command line prints it as a line on stderr."""


class TrainingWarning(UserWarning):
    """What `RunRecord.warnings` has, from Python as it becomes known; the command line prints it."""


class RolloutWarning(UserWarning):
    """Rewards or completions that a run cannot learn from."""


class TrackingWarning(UserWarning):
    """A run log or a tracker cannot be used, and the run continues without it. Printed as a line, too."""


class NotFiniteError(UserError):
    """Weights or a loss contain NaN or infinity."""


class NoRoomError(UserError):
    """A device has too little free memory for a request; a smaller one may fit."""


class StorageError(UserError):
    """A disk refuses to be written to; the same job may run elsewhere."""


def reason(error: Exception) -> str:
    """The message of an error; of a system error without its number and path, which the sentence states already."""
    return str(getattr(error, "strerror", None) or error)
