"""The logistic function and its logarithm in float64, for the kernels' references."""

from __future__ import annotations

from typing import Any

import numpy as np


def log_sigmoid(x: Any) -> Any:
    """log(1 / (1 + exp(-x)))."""
    return -np.logaddexp(0, -x)


def sigmoid(x: Any) -> Any:
    return np.exp(log_sigmoid(x))
