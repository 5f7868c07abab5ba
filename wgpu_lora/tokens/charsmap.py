"""Validation of SentencePiece's table of normalized characters, part of a `Precompiled` normalizer.

It consists of the size of a trie, the trie (a double array of 32-bit units), and the replacement texts, each terminated
by a zero byte. The library does not validate it.
"""

from __future__ import annotations

import base64
import binascii

MAX_CHARSMAP = 1 << 20  # bytes; nmt_nfkc, the most common one, takes 240,007
MAX_TEXT = 64  # bytes that replace a character; the longest in nmt_nfkc, for U+FDFA, takes 33


class CharsmapError(ValueError):
    """A table is damaged or malicious; the text says why."""


def check_charsmap(text: str) -> None:
    """Raise CharsmapError unless the library can use this table (base64) and no character becomes a long text."""
    if len(text) > 4 * MAX_CHARSMAP // 3:
        raise CharsmapError(f"it takes more than {MAX_CHARSMAP:,} bytes")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise CharsmapError("it is not base64") from None
    size = int.from_bytes(data[:4], "little")
    if len(data) < 8 or not 4 <= size <= len(data) - 4 or size % 4:
        raise CharsmapError("its stated size is wrong")
    texts = data[4 + size :]
    try:
        texts.decode()
    except UnicodeDecodeError:
        raise CharsmapError("its texts are not UTF-8") from None
    if max(map(len, texts.split(b"\0"))) > MAX_TEXT:
        raise CharsmapError(f"it replaces a character by more than {MAX_TEXT} bytes")
