"""Hold prepared samples out for validation."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np

from wgpu_lora.data.account import Account
from wgpu_lora.data.prepare import Prepared
from wgpu_lora.data.split import held_out
from wgpu_lora.names.spelling import setting
from wgpu_lora.words import counted


def hold_out(prepared: Prepared, amount: float, seed: int) -> tuple[Prepared, Prepared]:
    """Split samples: (to train on, held out). Equal rows, and the samples made of one row, stay together.

    Args:
        amount: share or number of the samples to hold out.

    Raises:
        UserError: there are too few samples.
    """
    mask = held_out(prepared.keys, amount, seed)
    count, total = int(mask.sum()), len(mask)
    note = f"{count:,} of {counted(total, 'row')} are held out ({setting('validation_split', amount)})"
    train = _only(prepared, ~mask, notes=(*prepared.notes, note))
    source = prepared.account.source
    which = np.sort(prepared.keys[mask]).tobytes()
    if source.private:  # records have the digest, by which somebody could try what the rows are
        which = f"{prepared.digest} {amount} {seed}".encode()
    digest = hashlib.sha256(which).hexdigest()
    return train, _only(prepared, mask, digest=digest, account=Account(source, examples=count), notes=())


def _only(prepared: Prepared, mask: np.ndarray, **changes: Any) -> Prepared:
    """Some of the samples."""
    chosen = np.flatnonzero(mask).tolist()
    rows = [row for sample in chosen for row in prepared.samples[sample]]
    return replace(
        prepared,
        rows=rows,
        values=tuple(prepared.values[sample] for sample in chosen) if prepared.values else (),
        keys=prepared.keys[mask],
        trained_tokens=sum(row.trained_tokens for row in rows),
        total_tokens=sum(len(row.input_ids) for row in rows),
        **changes,
    )
