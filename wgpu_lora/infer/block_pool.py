"""The blocks of a cache: who uses them, and which hold the beginnings of earlier prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import sha256

import numpy as np

from wgpu_lora.ops.attention.attention import BLOCK

Key = tuple[Hashable, ...]


class BlockPool:
    """Blocks of BLOCK tokens, by number. A block whose key is known is kept after its last user, until it is needed.

    A key names all that the block's keys and values depend on: the adapter, and the tokens up to the block's end.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._users = [0] * count
        self._keys: dict[int, Key] = {}
        self._blocks: dict[Key, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # with a key and without a user, the oldest first

    @property
    def available(self) -> int:
        """How many blocks `take` can give."""
        return len(self._free) + len(self._evictable)

    def cached(self, keys: Sequence[Key]) -> list[int]:
        """The blocks of the longest beginning of `keys` that the cache has, now used once more."""
        blocks: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            self._users[block] += 1
            self._evictable.pop(block, None)
            blocks.append(block)
        return blocks

    def take(self, count: int) -> list[int]:
        """Blocks for one user; those of earlier prompts are taken last, the one that was used least recently first."""
        assert count <= self.available
        result = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                del self._blocks[self._keys.pop(block)]
            self._users[block] = 1
            result.append(block)
        return result

    def keep(self, block: int, key: Key) -> None:
        """Name a block that has been filled, unless another has the same."""
        if key not in self._blocks:
            self._keys[block], self._blocks[key] = key, block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up blocks. Later ones of a prompt are forgotten before earlier ones, which more prompts begin with."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._keys:
                self._evictable[block] = None
            else:
                self._free.append(block)


def block_keys(adapter: Hashable, tokens: Sequence[int]) -> list[Key]:
    """The keys of the whole blocks of a prompt."""
    keys: list[Key] = []
    digest, ids = sha256(), np.asarray(tokens, np.uint32)
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        digest.update(ids[end - BLOCK : end].tobytes())  # nobody can make two prompts with the same digest
        keys.append((adapter, digest.digest()))
    return keys
