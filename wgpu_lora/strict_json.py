"""Standard JSON, without the NaN and Infinity that Python's writer emits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, **options: Any) -> str:
    """`json.dumps(value, **options)`, with null for every non-finite number."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
