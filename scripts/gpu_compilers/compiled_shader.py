"""What a compiler printed about one compute pipeline, by a parser for each vendor."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod


class Unreadable(Exception):
    """A driver did not print what its parser expects."""


class Kind(StrEnum):
    """What an instruction keeps busy; `port_model.py` has the cycles.

    LANE: a scalar from or to one lane. PERMUTE: between lanes, by the arithmetic units. SHUFFLE: between lanes, by
    others. WAIT: only tells the GPU when others may start.
    """

    MULTIPLY_ADD = "multiply-add"
    MATRIX = "matrix"
    MATRIX_F16 = "matrix, f16 sums"
    FLOAT = "float"
    INTEGER = "integer"
    SLOW_INTEGER = "slow integer"
    TRANSCENDENTAL = "transcendental"
    LANE = "lane"
    PERMUTE = "permute"
    SHUFFLE = "shuffle"
    WORKGROUP = "workgroup memory"
    GLOBAL = "global memory"
    SCALAR = "scalar"
    WAIT = "wait"


@dataclass(frozen=True)
class Loop:
    """The innermost loop with the most multiply-adds.

    instructions: of one iteration, without those that only schedule others.
    multiplying: those of them that multiply and add.
    multiply_adds: of a lane; packed and dual instructions do two, matrix instructions their part of a subgroup of 32.
    counts: instructions by kind; for memory the 32-bit words of a lane, for matrices 512 multiply-adds of a subgroup.
    lanes: of a subgroup, as it was compiled.
    """

    instructions: int
    multiplying: int
    multiply_adds: int
    counts: Mapping[Kind, int] = field(default_factory=dict)
    lanes: int = 32

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
    """multiply_adds: that it does in a lane. amount: what `Loop.counts` counts."""

    kind: Kind = Kind.INTEGER
    multiply_adds: int = 0
    amount: int = 1


Kinds = Sequence[tuple[str, Kind]]


def first_kind(name: str, kinds: Kinds) -> Kind:
    """The kind of the first pattern that matches a name's beginning, else INTEGER."""
    return next((kind for pattern, kind in kinds if re.match(pattern, name)), Kind.INTEGER)


def matrix(sizes: Iterable[str], sums: str) -> Instruction:
    """A product of matrices of these three sizes, by a subgroup."""
    count = prod(map(int, sizes))
    return Instruction(Kind.MATRIX_F16 if sums == "f16" else Kind.MATRIX, count // 32, count // 512)


def innermost(code: Sequence[Instruction], following: Sequence[Sequence[int]], lanes: int = 32) -> Loop | None:
    """The innermost loop with the most multiply-adds, wherever the compiler put its parts.

    Both sides of a branch count.
    following: of each instruction, the indices in `code` of those that may run next.
    """
    if not code:
        return None

    def walk(start: int, edges: Sequence[Sequence[int]], inside: set[int]) -> set[int]:
        reached, stack = set[int](), [start]
        while stack:
            new = (inside & {*edges[stack.pop()]}) - reached
            reached |= new
            stack += new
        return reached

    reachable = {0} | walk(0, following, set(range(len(code))))
    preceding: list[list[int]] = [[] for _ in code]
    for index in reachable:
        for target in following[index]:
            preceding[target].append(index)
    pivots = sorted(target for target in reachable if any(index >= target for index in preceding[target]))

    def innermost_of(indices: set[int]) -> list[set[int]]:
        """Strongly connected parts, which have no others within once they cannot be entered."""
        bodies, remaining = list[set[int]](), set(indices)
        for pivot in pivots:
            if pivot in remaining and (body := walk(pivot, following, remaining) & walk(pivot, preceding, remaining)):
                remaining -= body
                entries = {index for index in body if not body.issuperset(preceding[index])} or {pivot}
                bodies += innermost_of(body - entries) or [body]
        return bodies

    loops = []
    for body in innermost_of(reachable):
        counts = Counter[Kind]()
        for index in body:
            counts[code[index].kind] += code[index].amount
        working = [code[index] for index in body if code[index].kind != Kind.WAIT]
        sums = sum(instruction.multiply_adds for instruction in working)
        loops.append(
            Loop(
                len(working), sum(instruction.multiply_adds > 0 for instruction in working), sums, dict(+counts), lanes
            )
        )
    return max(loops, key=lambda loop: (loop.multiply_adds, loop.instructions), default=None)


def last_number(pattern: str, text: str, default: int | None = None) -> int:
    """The last number that a pattern with one group finds. Raises Unreadable if there is none and no default."""
    numbers = re.findall(pattern, text, re.MULTILINE)
    if not numbers and default is None:
        raise Unreadable(f"nothing matches {pattern!r}")
    return int(numbers[-1]) if numbers else int(default or 0)


# -- RADV's compiler, ACO: RADV_DEBUG=shaderstats,asm ------------------------------------------------------------------

AMD_LABEL = re.compile(r"(BB\d+):")
AMD_BRANCH = re.compile(r"\ts_c?branch\w* (BB\d+)")
AMD_LEAVES = frozenset({"s_branch", "s_endpgm"})  # what follows in the text is not run next
AMD_INSTRUCTION = re.compile(r"\t([a-z]\w*)(.*?)(?:\s;|$)")
AMD_MULTIPLIES = re.compile(r"\bv_(?:dual_)?(pk_)?(?:fma|fmac|fmamk|fmaak|mad|mac)_(?:mix_)?f(?:16|32)")
# In a subgroup of 64, FLOAT runs for both halves at the same time: is_dual_issue_capable() in ACO's aco_statistics.cpp.
AMD_KINDS: Kinds = (
    (r"s_(delay_alu|wait\w*|clause|nop|barrier\w*)$", Kind.WAIT),
    (r"s_", Kind.SCALAR),
    (r"ds_(b?permute|swizzle)", Kind.SHUFFLE),
    (r"ds_", Kind.WORKGROUP),
    (r"(buffer|global|flat|scratch|image)_", Kind.GLOBAL),
    (r"v_(readlane|readfirstlane|writelane)", Kind.LANE),
    (r"v_permlane|.*_dpp", Kind.PERMUTE),
    (r"v_mul_(lo|hi)_[iu]32|v_mad_[iu]64", Kind.SLOW_INTEGER),
    (r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_f", Kind.TRANSCENDENTAL),
    (r"v_dual_|v_((add|sub|subrev|mul|max|min)_f(16|32)|(mov|cndmask)_b32)(_e32|_e64)?$", Kind.FLOAT),
)
AMD_MATRIX = re.compile(r"v_s?wmmac?_(f32|f16|bf16)_(\d+)x(\d+)x(\d+)_")
AMD_64 = re.compile(r"\t(\w+saveexec_b64 |s_mov_b64 exec, |v_cmpx?_\w+ (vcc|s\[\d+:\d+\]), )")
AMD_WIDTH = re.compile(r"(2addr_(?:stride64_)?|2(?:st64)?_)?(?:b|dwordx)(\d+)$")


def amd_instruction(name: str, text: str) -> Instruction:
    if match := AMD_MATRIX.match(name):
        return matrix(match.groups()[1:], "f16" if match[1] == "f16" else "f32")
    if sums := sum(2 if packed else 1 for packed in AMD_MULTIPLIES.findall(text)):
        return Instruction(Kind.MULTIPLY_ADD, sums)
    kind, amount = first_kind(name, AMD_KINDS), 1
    if kind in (Kind.WORKGROUP, Kind.GLOBAL) and (width := AMD_WIDTH.search(name)):
        bits = int(width[2]) * (32 if "dword" in width[0] else 1)
        amount = max(1, bits // 32) * (2 if width[1] else 1)
    return Instruction(kind, 0, amount)


def parse_amd(lines: Sequence[str]) -> Compiled:
    """The statistics and assembly of a compute pipeline. Raises Unreadable."""
    code: list[Instruction] = []
    indices: dict[str, int] = {}
    branches: list[str] = []  # of each instruction: a label or ""
    leaving: list[bool] = []
    for line in lines:
        if line == "disasm:":
            code, indices, branches, leaving = [], {}, [], []
        elif label := AMD_LABEL.match(line):
            indices[label[1]] = len(code)
        elif match := AMD_INSTRUCTION.match(line):
            branch = AMD_BRANCH.match(line)
            branches.append(branch[1] if branch else "")
            leaving.append(match[1] in AMD_LEAVES)
            code.append(amd_instruction(match[1], match[0]))
    lanes = 64 if any(map(AMD_64.match, lines)) else 32
    following = []
    for index, (target, leaves) in enumerate(zip(branches, leaving, strict=True)):
        after = [] if leaves else [index + 1]
        if target in indices:
            after.append(indices[target])
        following.append([number for number in after if number < len(code)])
    text = "\n".join(lines)
    return Compiled(
        registers=last_number(r"^VGPRs: (\d+)", text),
        spilled=last_number(r"^Spilled VGPRs: (\d+)", text),
        scratch=last_number(r"^Scratch size: (\d+)", text),
        shared=last_number(r"^LDS size: (\d+)", text),
        occupancy=last_number(r"^Subgroups per SIMD: (\d+)", text),
        instructions=last_number(r"^Instructions: (\d+)", text),
        loop=innermost(code, following, lanes),
    )


# -- Honeykrisp's compiler, AGX, which counts registers of 16 bits: AGX_MESA_DEBUG=shaderdb,stats,shaders --------------

APPLE_INSTRUCTION = re.compile(r" *([0-9a-f]+): [0-9a-f]+ +([a-z]\w*) *((-?\d*).*)")
APPLE_WIDTH = re.compile(r"\b[a-z]+(8|16|32), ([xyzw]+)")
# It has no name for products of matrices: Honeykrisp makes none.
APPLE_KINDS: Kinds = (
    (r"[fh]fma$", Kind.MULTIPLY_ADD),
    (r"wait|barrier", Kind.WAIT),
    (r"[fh](add|mul)$", Kind.FLOAT),
    (r"exp2|log2|rcp|rsqrt|sin", Kind.TRANSCENDENTAL),
    (r"shl|shr|asr|bf|extr|imadd|imul|imsub|popcnt|ffs|bitrev|\w+_to_", Kind.SLOW_INTEGER),
    (r"(quad_)?shuffle|ballot|simd|quad", Kind.SHUFFLE),
    (r"l(load|store)", Kind.WORKGROUP),
    (r"load|store|stack_", Kind.GLOBAL),
    (r"jmp|if|else|while|pop_exec|stop", Kind.SCALAR),
)


def apple_instruction(name: str, text: str) -> Instruction:
    kind, amount = first_kind(name, APPLE_KINDS), 1
    if kind in (Kind.WORKGROUP, Kind.GLOBAL) and (width := APPLE_WIDTH.search(text)):
        amount = -(-int(width[1]) * len(width[2]) // 32)
    return Instruction(kind, int(kind == Kind.MULTIPLY_ADD), amount)


def parse_apple(lines: Sequence[str]) -> Compiled:
    """The statistics and assembly of a compute pipeline. Raises Unreadable."""
    programs: list[list[tuple[int, str, str, str]]] = [[]]  # address, name, operands, offset of a jump
    for line in lines:
        if match := APPLE_INSTRUCTION.match(line):
            address = int(match[1], 16)
            if not address:
                programs.append([])
            programs[-1].append((address, match[2], match[3], match[4]))
    program = max(programs, key=len)  # the others are preambles, which run once
    addresses = [address for address, *_ in program]
    following = []
    for index, (address, name, _, offset) in enumerate(program):
        after = [index + 1] * (name != "stop" and index + 1 < len(program))
        if name.startswith("jmp") and offset:  # only if some or all lanes are done
            after.append(min(bisect_left(addresses, address + int(offset)), len(program) - 1))
        following.append(after)
    code = [apple_instruction(name, operands) for _, name, operands, _ in program]
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
NVIDIA_INSTRUCTION = re.compile(r"\s+(?:\S.* = )?(?:@\S+ )?\s*([a-z]\w*)(\S*)")
NVIDIA_MULTIPLIES = {"ffma": 1, "hfma2": 2, "dfma": 1}
NVIDIA_UNIFORM = re.compile(r"\s+u[rp]\d")  # results that the uniform unit computes
NVIDIA_KINDS: Kinds = (
    (r"ffma|hfma2|dfma", Kind.MULTIPLY_ADD),
    (r"nop", Kind.WAIT),
    (r"fadd|fmul|hadd2|hmul2", Kind.FLOAT),
    (r"mufu|popc|flo|brev", Kind.TRANSCENDENTAL),
    (r"shfl|redux", Kind.SHUFFLE),
    (r"(ld|st|atom|red)\.shared|ldsm", Kind.WORKGROUP),
    (r"(ld|st|atom|red)\.", Kind.GLOBAL),
    (r"ldc|s2r|r2ur|cs2r|b(ra|ssy|sync|clear|reak|ar)\b|membar|exit", Kind.SCALAR),
)
NVIDIA_MATRIX = re.compile(r"hmma\.m(\d+)n(\d+)k(\d+)\.(f16|f32)")
NVIDIA_WIDTH = re.compile(r"\.(?:[bui](\d+)|x(\d))\b")  # x: matrices of 8 x 8 halves, a word of a lane each


def nvidia_instruction(name: str, uniform: bool) -> Instruction:
    if match := NVIDIA_MATRIX.match(name):
        return matrix(match.groups()[:3], match[4])
    kind, amount = Kind.SCALAR if uniform else first_kind(name, NVIDIA_KINDS), 1
    if kind in (Kind.WORKGROUP, Kind.GLOBAL) and (widths := NVIDIA_WIDTH.findall(name)):
        bits, matrices = widths[-1]
        amount = int(matrices) if matrices else max(1, int(bits) // 32)
    return Instruction(kind, NVIDIA_MULTIPLIES.get(name.split(".")[0], 0), amount)


def parse_nvidia(lines: Sequence[str]) -> Compiled:
    """The statistics and the last program of a compute pipeline. Raises Unreadable."""
    starts = [index for index, line in enumerate(lines) if line.startswith("NAK IR")]
    if not starts:
        raise Unreadable("no program was printed")
    code: list[Instruction] = []
    following: list[list[int]] = []
    indices: dict[int, int] = {}
    jumps: list[tuple[int, list[int]]] = []  # the last instruction of a block, and the blocks after it
    for line in lines[starts[-1] + 1 :]:
        if line.startswith("Stage:"):
            break
        if block := NVIDIA_BLOCK.match(line):
            indices[int(block[1])] = len(code)
            code.append(Instruction(Kind.WAIT, amount=0))  # a block may be empty
            following.append([len(code)])
        elif after := NVIDIA_NEXT.match(line):
            jumps.append((len(code) - 1, [int(number) for number in re.findall(r"\d+", after[1])]))
        elif match := NVIDIA_INSTRUCTION.match(line):
            code.append(nvidia_instruction(match[1] + match[2], bool(NVIDIA_UNIFORM.match(line))))
            following.append([len(code)])
    for last, blocks in jumps:
        following[last] = [indices[number] for number in blocks if number in indices]
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
