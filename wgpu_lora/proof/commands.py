"""Whether a command line runs one of CUDA's compilers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath

COMPILERS = re.compile(r"^(nvcc|cicc|ptxas|nvlink|fatbinary|cudafe\+\+|nvrtc)(\.exe)?$", re.IGNORECASE)
SHELLS = re.compile(r"^(sh|bash|dash|ash|zsh|ksh|cmd)(\.exe)?$", re.IGNORECASE)
SCRIPT = re.compile(r"^(-[a-z]*c|/c)$", re.IGNORECASE)
# After these words of a script a command follows, not an argument.
BEFORE = {"env", "exec", "nice", "nohup", "time", "command", "if", "then", "else", "do", "while", "until", "!", "{"}
BREAKS = ";&|()`"
ASSIGNMENT = re.compile(r"^\w+=")


def compiler_in(command: Sequence[str]) -> str | None:
    """The word that names a compiler: the program, or a command of what sh -c runs. Arguments don't count."""
    words = [command[0], *_scripted(command)] if command else []
    return next((word for word in words if COMPILERS.match(_name(word))), None)


def _scripted(command: Sequence[str]) -> Iterator[str]:
    if not SHELLS.match(_name(command[0])):
        return
    at = next((i for i, word in enumerate(command[1:], 1) if SCRIPT.match(word)), len(command))
    for line in " ".join(command[at + 1 : at + 2]).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=BREAKS)
        lexer.whitespace_split = True
        expected = True
        for word in _words(lexer, line):
            if word and set(word) <= set(BREAKS):
                expected = True
            elif expected:
                yield word
                expected = word in BEFORE or bool(ASSIGNMENT.match(word))


def _words(lexer: shlex.shlex, line: str) -> list[str]:
    try:
        return list(lexer)
    except ValueError:  # a quotation that ends on another line
        return line.split()


def _name(word: str) -> str:
    return PurePath(word.replace("\\", "/")).name
