"""Honeykrisp's compiler, AGX: AGX_MESA_DEBUG=shaderdb,stats,shaders. It counts registers of 16 bits."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence

from scripts.gpu_compilers.compiled import Compiled, Instruction, innermost, last_number

INSTRUCTION = re.compile(r" *([0-9a-f]+): [0-9a-f]+ +([a-z]\w*) *(-?\d*)")
MULTIPLIES = frozenset({"ffma", "hfma"})
SCHEDULING = frozenset({"wait"})


def parse(lines: Sequence[str]) -> Compiled:
    """The statistics and assembly of a compute pipeline. Raises Unreadable."""
    programs: list[list[tuple[int, str, str]]] = [[]]  # address, name, offset of a jump
    for line in lines:
        if one := INSTRUCTION.match(line):
            address = int(one[1], 16)
            if not address:
                programs.append([])
            programs[-1].append((address, one[2], one[3]))
    program = max(programs, key=len)  # the others are preambles, which run once
    addresses = [address for address, _, _ in program]
    following = []
    for place, (address, name, offset) in enumerate(program):
        after = [place + 1] * (name != "stop" and place + 1 < len(program))
        if name.startswith("jmp") and offset:  # only if some or all lanes are done
            after.append(min(bisect_left(addresses, address + int(offset)), len(program) - 1))
        following.append(after)
    code = [Instruction(int(name in MULTIPLIES), name in SCHEDULING) for _, name, _ in program]
    text = "\n".join(line for line in lines if line[:1].isalpha())
    return Compiled(
        registers=-(-last_number(r"^CS shader: .* (\d+) gprs", text) // 2),
        spilled=last_number(r"^CS shader: .* (\d+):\d+ spills:fills", text),
        scratch=last_number(r"^CS shader: .* (\d+) scratch", text),
        shared=last_number(r"^shared_size: (\d+)", text, 0),
        occupancy=last_number(r"^CS shader: .* (\d+) threads", text),
        instructions=last_number(r"^CS shader: (\d+) instrs", text),
        loop=innermost(code, following),
    )
