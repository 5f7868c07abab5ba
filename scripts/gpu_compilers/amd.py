"""RADV's compiler, ACO: RADV_DEBUG=shaderstats,asm."""

from __future__ import annotations

import re
from collections.abc import Sequence

from scripts.gpu_compilers.compiled import Compiled, Instruction, innermost, last_number

LABEL = re.compile(r"(BB\d+):")
BRANCH = re.compile(r"\ts_c?branch\w* (BB\d+)")
LEAVES = frozenset({"s_branch", "s_endpgm"})  # what follows in the text is not run next
INSTRUCTION = re.compile(r"\t([a-z]\w*)(.*?)(?:\s;|$)")
MULTIPLIES = re.compile(r"\bv_(?:dual_)?(pk_)?(?:fma|fmac|fmamk|fmaak|mad|mac)_(?:mix_)?f(?:16|32)")
SCHEDULING = re.compile(r"s_(delay_alu|wait\w*|clause|nop)$")


def parse(lines: Sequence[str]) -> Compiled:
    """The statistics and assembly of a compute pipeline. Raises Unreadable."""
    code: list[Instruction] = []
    places: dict[str, int] = {}
    branches: list[str] = []  # of each instruction: a label or ""
    leaving: list[bool] = []
    for line in lines:
        if line == "disasm:":
            code, places, branches, leaving = [], {}, [], []
        elif label := LABEL.match(line):
            places[label[1]] = len(code)
        elif one := INSTRUCTION.match(line):
            branch = BRANCH.match(line)
            branches.append(branch[1] if branch else "")
            leaving.append(one[1] in LEAVES)
            sums = sum(2 if packed else 1 for packed in MULTIPLIES.findall(one[0]))
            code.append(Instruction(sums, bool(SCHEDULING.match(one[1]))))
    following = []
    for place, (target, leaves) in enumerate(zip(branches, leaving, strict=True)):
        after = [] if leaves else [place + 1]
        if target in places:
            after.append(places[target])
        following.append([number for number in after if number < len(code)])
    text = "\n".join(lines)
    return Compiled(
        registers=last_number(r"^VGPRs: (\d+)", text),
        spilled=last_number(r"^Spilled VGPRs: (\d+)", text),
        scratch=last_number(r"^Scratch size: (\d+)", text),
        shared=last_number(r"^LDS size: (\d+)", text),
        occupancy=last_number(r"^Subgroups per SIMD: (\d+)", text),
        instructions=last_number(r"^Instructions: (\d+)", text),
        loop=innermost(code, following),
    )
