"""SentencePiece's table of normalized characters, which a `Precompiled` normalizer brings along.

It is the size of a trie, the trie (a double array of 32-bit units), and the texts that it leads to, each ended by a
zero byte. The library trusts all of it.
"""

from __future__ import annotations

import base64
import binascii

MAX_CHARSMAP = 1 << 20  # bytes; nmt_nfkc, which nearly all have, takes 240,007
MAX_TEXT = 64  # bytes that a character becomes; nmt_nfkc's longest, of U+FDFA, takes 33


class CharsmapError(ValueError):
    """A table is damaged, or none that a tokenizer has; the text says why."""


def check_charsmap(text: str) -> None:
    """Raises CharsmapError unless the library can use this table (base64), and no character becomes a long text."""
    if len(text) > 4 * MAX_CHARSMAP // 3:
        raise CharsmapError(f"it takes more than {MAX_CHARSMAP:,} bytes")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise CharsmapError("it is not base64") from None
    size = int.from_bytes(data[:4], "little")
    if len(data) < 8 or not 4 <= size <= len(data) - 4 or size % 4:
        raise CharsmapError("the size that it states is not its own")
    texts = data[4 + size :]
    try:
        texts.decode()
    except UnicodeDecodeError:
        raise CharsmapError("its texts are not UTF-8") from None
    if max(map(len, texts.split(b"\0"))) > MAX_TEXT:
        raise CharsmapError(f"it makes more than {MAX_TEXT} bytes of a character")
