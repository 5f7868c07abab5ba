"""The rule that CI checks: no kernel spills in its default tiling, nor in one that is offered to the tuner."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.gpu_compilers.report import amount, label, tiling
from scripts.gpu_compilers.run import Answers


def violations(answers: Sequence[Answers]) -> list[str]:
    """A sentence for each compute pipeline that breaks the rule, and each compiler that compiled nothing."""
    found = []
    for one in answers:
        where = f"{one.gpu.title}, subgroups of {one.subgroup_size}"
        if not one.rows:
            found.append(f"{where}: nothing was compiled")
        for row in one.rows:
            if row.spills:
                how = "its default tiling" if row.call["default"] else "a tiling that the tuner may choose"
                shapes = ", ".join(row.call["used_by"])
                found.append(f"{where}: {label(row)} ({shapes}) spills in {how}, {tiling(row)}: {amount(row)}")
    return found
