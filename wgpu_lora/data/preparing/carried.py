"""Columns that are carried along: values of tables that JSON lacks become text, or are dropped."""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from wgpu_lora.data.preparing.kinds import Row


def plain_row(row: Row, needed: Collection[str]) -> tuple[Row, list[str]]:
    """The row as JSON has it, and the columns that were dropped, such as images.

    needed: columns that the formats read; their values are checked when they are read.
    """
    made, dropped = {}, []
    for name, value in row.items():
        try:
            made[name] = json.loads(json.dumps(value, default=_text))
        except (TypeError, ValueError):
            if name not in needed:
                dropped.append(name)
    return made, dropped


def _text(value: Any) -> str:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not of JSON")
