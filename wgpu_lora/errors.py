"""The one exception for mistakes that a person can mend."""


class UserError(Exception):
    """Something outside the program is wrong: a path, a file, an option, a device.

    The message is one sentence that says what is wrong, where, and what to do.
    The command line prints it on stderr and exits with code 2; from Python it is an ordinary exception.
    """


class NotFiniteError(UserError):
    """Weights or a loss hold NaN or infinity."""


class NoRoomError(UserError):
    """A device has no room for what is asked for; less of it may fit."""
