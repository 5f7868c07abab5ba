"""Near duplicates: rows whose sets of shingles are alike, by MinHash (Broder 1997) with the library `rensa`.

Signatures and their bands are kept on disk. Rows that share a band are compared by their whole signatures, so that the
threshold does not depend on the bands.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np

from wgpu_lora.data.preparing.seen import place_of, stored
from wgpu_lora.errors import UserError
from wgpu_lora.installation import pip_line
from wgpu_lora.names.spelling import flag

PERMUTATIONS, BANDS = 128, 32  # 4 values a band: finds 99.8% of pairs with a similarity of 0.65, all above 0.75
LEAST = 0.65  # threshold
COMPARED = 512  # rows that a row is compared with, at most: texts made from one template share bands with all others
_SEED = 1  # of the permutations


class Near:
    """Signatures of rows. threshold: least estimated Jaccard similarity of near duplicates."""

    def __init__(self, connection: sqlite3.Connection, threshold: float) -> None:
        try:
            import rensa
        except ImportError:
            raise UserError(f"{flag('near_duplicates')} needs rensa: {pip_line('dedupe')}.") from None
        self._made: Any = rensa.RMinHash
        self._do, self._threshold = connection.execute, threshold
        self._many = connection.executemany
        self._do("CREATE TABLE signatures (row INTEGER PRIMARY KEY, signature BLOB, place INTEGER)")
        self._do("CREATE TABLE bands (band BLOB, row INTEGER, PRIMARY KEY (band, row)) WITHOUT ROWID")

    def add(self, kind: str, shingles: Sequence[str], source: int, number: int) -> tuple[float, int, int] | None:
        """Add a row, unless it is a near duplicate.

        Returns:
            None if it is new, else (similarity, source and number) of the first row that is nearest.
        """
        sketch = self._made(num_perm=PERMUTATIONS, seed=_SEED)
        sketch.update(shingles)
        signature = np.array(sketch.digest(), np.uint32)
        bands = [
            hashlib.blake2b(part.tobytes(), digest_size=8, person=f"{kind[:8]}{i}".encode()).digest()
            for i, part in enumerate(signature.reshape(BANDS, -1))
        ]
        marks = ",".join("?" * BANDS)
        found = self._do(
            f"SELECT row, signature, place FROM signatures WHERE row IN "
            f"(SELECT DISTINCT row FROM bands WHERE band IN ({marks}) LIMIT {COMPARED}) ORDER BY row",
            bands,
        )
        best: tuple[float, int] | None = None
        for _, other, where in found:
            alike = float(np.mean(np.frombuffer(other, np.uint32) == signature))
            if alike >= self._threshold and (best is None or alike > best[0]):
                best = alike, where
        if best:
            return best[0], *place_of(best[1])
        row = self._do(
            "INSERT INTO signatures (signature, place) VALUES (?, ?)", (signature.tobytes(), stored(source, number))
        ).lastrowid
        self._many("INSERT INTO bands VALUES (?, ?)", [(band, row) for band in sorted(set(bands))])
        return None
