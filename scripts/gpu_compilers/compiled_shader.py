"""What a compiler printed about one compute pipeline, by a parser for each vendor."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


class Unreadable(Exception):
    """A driver did not print what its parser expects."""


@dataclass(frozen=True)
class Loop:
    """The innermost loop with the most multiply-adds.

    instructions: of one iteration, without those that only schedule others.
    multiplying: those of them that multiply and add.
    multiply_adds: of a lane; packed and dual instructions do two.
    """

    instructions: int
    multiplying: int
    multiply_adds: int

    @property
    def share(self) -> float:
        return self.multiplying / self.instructions


@dataclass(frozen=True)
class Compiled:
    """registers: 32-bit ones of a lane. spilled: values, or instructions that store them, as the driver counts.
    scratch: bytes of memory of a lane, for spills and for arrays that are indexed. shared: bytes of workgroup memory.
    occupancy: in the GPU's unit.
    """

    registers: int
    spilled: int
    scratch: int
    shared: int
    occupancy: int
    instructions: int
    loop: Loop | None

    @property
    def in_memory(self) -> bool:
        """Whether values that belong in registers are kept in memory."""
        return bool(self.spilled or self.scratch)


@dataclass(frozen=True)
class Instruction:
    """multiply_adds: that it does in a lane. scheduling: it only tells the GPU when others may start."""

    multiply_adds: int = 0
    scheduling: bool = False


def innermost(code: Sequence[Instruction], following: Sequence[Sequence[int]]) -> Loop | None:
    """The innermost loop with the most multiply-adds, wherever the compiler put its parts.

    following: of each instruction, the places in `code` of those that may run next.
    """
    preceding: list[list[int]] = [[] for _ in code]
    for place, after in enumerate(following):
        for target in after:
            preceding[target].append(place)
    bodies: dict[int, set[int]] = {}  # first instruction -> all of the loop, of natural loops
    for source, after in enumerate(following):
        for first in after:
            if first <= source:
                body, reached = {first}, [source]
                while reached:
                    place = reached.pop()
                    if place not in body:
                        body.add(place)
                        reached += preceding[place]
                if first == 0 or 0 not in body:  # else it can be entered elsewhere, so it is none
                    bodies.setdefault(first, set()).update(body)
    found = []
    for first, body in bodies.items():
        if any(other in body for other in bodies if other != first):
            continue
        counted = [code[place] for place in body if not code[place].scheduling]
        sums = sum(one.multiply_adds for one in counted)
        found.append(Loop(len(counted), sum(one.multiply_adds > 0 for one in counted), sums))
    return max(found, key=lambda loop: (loop.multiply_adds, loop.instructions), default=None)


def last_number(pattern: str, text: str, default: int | None = None) -> int:
    """The last number that a pattern with one group finds. Raises Unreadable if there is none and no default."""
    found = re.findall(pattern, text, re.MULTILINE)
    if not found and default is None:
        raise Unreadable(f"nothing matches {pattern!r}")
    return int(found[-1]) if found else int(default or 0)


# -- RADV's compiler, ACO: RADV_DEBUG=shaderstats,asm ------------------------------------------------------------------

AMD_LABEL = re.compile(r"(BB\d+):")
AMD_BRANCH = re.compile(r"\ts_c?branch\w* (BB\d+)")
AMD_LEAVES = frozenset({"s_branch", "s_endpgm"})  # what follows in the text is not run next
AMD_INSTRUCTION = re.compile(r"\t([a-z]\w*)(.*?)(?:\s;|$)")
AMD_MULTIPLIES = re.compile(r"\bv_(?:dual_)?(pk_)?(?:fma|fmac|fmamk|fmaak|mad|mac)_(?:mix_)?f(?:16|32)")
AMD_SCHEDULING = re.compile(r"s_(delay_alu|wait\w*|clause|nop)$")


def parse_amd(lines: Sequence[str]) -> Compiled:
    """The statistics and assembly of a compute pipeline. Raises Unreadable."""
    code: list[Instruction] = []
    places: dict[str, int] = {}
    branches: list[str] = []  # of each instruction: a label or ""
    leaving: list[bool] = []
    for line in lines:
        if line == "disasm:":
            code, places, branches, leaving = [], {}, [], []
        elif label := AMD_LABEL.match(line):
            places[label[1]] = len(code)
        elif one := AMD_INSTRUCTION.match(line):
            branch = AMD_BRANCH.match(line)
            branches.append(branch[1] if branch else "")
            leaving.append(one[1] in AMD_LEAVES)
            sums = sum(2 if packed else 1 for packed in AMD_MULTIPLIES.findall(one[0]))
            code.append(Instruction(sums, bool(AMD_SCHEDULING.match(one[1]))))
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


# -- Honeykrisp's compiler, AGX, which counts registers of 16 bits: AGX_MESA_DEBUG=shaderdb,stats,shaders --------------

APPLE_INSTRUCTION = re.compile(r" *([0-9a-f]+): [0-9a-f]+ +([a-z]\w*) *(-?\d*)")
APPLE_MULTIPLIES = frozenset({"ffma", "hfma"})
APPLE_SCHEDULING = frozenset({"wait"})


def parse_apple(lines: Sequence[str]) -> Compiled:
    """The statistics and assembly of a compute pipeline. Raises Unreadable."""
    programs: list[list[tuple[int, str, str]]] = [[]]  # address, name, offset of a jump
    for line in lines:
        if one := APPLE_INSTRUCTION.match(line):
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
    code = [Instruction(int(name in APPLE_MULTIPLIES), name in APPLE_SCHEDULING) for _, name, _ in program]
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


# -- NVK's compiler, NAK, which prints the program after each pass; the last is what is encoded: NAK_DEBUG=print -------

NVIDIA_BLOCK = re.compile(r"block\S* (\d+) ")
NVIDIA_NEXT = re.compile(r"\} -> \[(.*)\]")
NVIDIA_INSTRUCTION = re.compile(r"\s+(?:\S.* = )?(?:@\S+ )?\s*([a-z]\w*)")
NVIDIA_MULTIPLIES = {"ffma": 1, "hfma2": 2, "dfma": 1}
NVIDIA_SCHEDULING = frozenset({"nop"})


def parse_nvidia(lines: Sequence[str]) -> Compiled:
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
        if block := NVIDIA_BLOCK.match(line):
            places[int(block[1])] = len(code)
            code.append(Instruction(scheduling=True))  # a block may be empty
            following.append([len(code)])
        elif after := NVIDIA_NEXT.match(line):
            jumps.append((len(code) - 1, [int(number) for number in re.findall(r"\d+", after[1])]))
        elif one := NVIDIA_INSTRUCTION.match(line):
            code.append(Instruction(NVIDIA_MULTIPLIES.get(one[1], 0), one[1] in NVIDIA_SCHEDULING))
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
