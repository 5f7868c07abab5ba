"""NVK's compiler, NAK: NAK_DEBUG=print, which prints the program after each pass; the last is what is encoded."""

from __future__ import annotations

import re
from collections.abc import Sequence

from scripts.gpu_compilers.compiled import Compiled, Instruction, Unreadable, innermost, last_number

BLOCK = re.compile(r"block\S* (\d+) ")
NEXT = re.compile(r"\} -> \[(.*)\]")
INSTRUCTION = re.compile(r"\s+(?:\S.* = )?(?:@\S+ )?\s*([a-z]\w*)")
MULTIPLIES = {"ffma": 1, "hfma2": 2, "dfma": 1}
SCHEDULING = frozenset({"nop"})


def parse(lines: Sequence[str]) -> Compiled:
    """The statistics and the last program of a compute pipeline. Raises Unreadable."""
    starts = [place for place, line in enumerate(lines) if line.startswith("NAK IR")]
    if not starts:
        raise Unreadable("no program was printed")
    code: list[Instruction] = []
    following: list[list[int]] = []
    places: dict[int, int] = {}
    jumps: list[tuple[int, list[int]]] = []  # the last instruction of a block, and the blocks after it
    for line in lines[starts[-1] + 1 :]:
        if line.startswith("Stage:"):
            break
        if block := BLOCK.match(line):
            places[int(block[1])] = len(code)
            code.append(Instruction(scheduling=True))  # a block may be empty
            following.append([len(code)])
        elif after := NEXT.match(line):
            jumps.append((len(code) - 1, [int(number) for number in re.findall(r"\d+", after[1])]))
        elif one := INSTRUCTION.match(line):
            code.append(Instruction(MULTIPLIES.get(one[1], 0), one[1] in SCHEDULING))
            following.append([len(code)])
    for last, blocks in jumps:
        following[last] = [places[number] for number in blocks if number in places]
    text = "\n".join(line for line in lines if line[:1].isalpha())
    return Compiled(
        registers=last_number(r"^Num GPRs: (\d+)", text),
        spilled=last_number(r"^Spills to mem: (\d+)", text),
        scratch=last_number(r"^SLM size: (\d+)", text),
        shared=last_number(r"^shared_size: (\d+)", text, 0),
        occupancy=last_number(r"^Max warps/SM: (\d+)", text),
        instructions=last_number(r"^Instruction count: (\d+)", text),
        loop=innermost(code, following),
    )
