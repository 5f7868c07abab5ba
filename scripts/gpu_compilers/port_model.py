"""What share of a GPU's peak the busiest port lets an inner loop reach.

Each instruction takes a port for some cycles, and different ports work at the same time for different subgroups. So a
loop takes at least the cycles of its busiest port, and the bound is the cycles that its multiply-adds need at the peak
rate, divided by those. A real GPU stays below: the model has no latencies, bank conflicts, cache misses or clocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from scripts.gpu_compilers.compiled_shader import Kind, Loop

Costs = Mapping[Kind, Mapping[str, float]]
MATRICES = frozenset({Kind.MATRIX, Kind.MATRIX_F16})
FEW = 32  # multiply-adds of a lane in an iteration: norms have 2, optimizers 29, products 64


@dataclass(frozen=True)
class Rates:
    """The ports that take a subgroup's instructions: of a SIMD (AMD), of a quarter of an SM (NVIDIA) or core (Apple).

    What several of them share, such as workgroup memory, has the cycles that it takes if all of them use it.

    peak: f32 multiply-adds of a lane in a cycle.
    costs: of an instruction of each kind, of a 32-bit word of a lane in memory, or of 512 multiply-adds of matrices,
        by port: cycles of a subgroup of 32.
    issue: cycles of any instruction on a port of its own, 0 if ports take instructions of several subgroups at once.
    one_pass: kinds that take no longer for a subgroup of 64. The others take twice as long.
    """

    peak: float
    costs: Costs
    issue: float = 0
    one_pass: frozenset[Kind] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Bound:
    """share: of the peak, which is that of matrix units if the loop uses them. port: the busiest.
    speed: multiply-adds per cycle of one of 32 lanes. cycles: of one iteration, by port.
    """

    share: float
    port: str
    speed: float
    cycles: Mapping[str, float]


def bound(loop: Loop, rates: Rates, threads: int = 64, minimum: int = FEW) -> Bound | None:
    """None for a loop with fewer multiply-adds than `minimum`: memory decides there.

    threads: of a workgroup. With fewer than the subgroup's lanes, the others are idle.
    """
    if loop.multiply_adds < minimum:
        return None
    cycles = Counter[str]({"issue": loop.instructions * rates.issue})
    for kind, count in loop.counts.items():
        passes = 1 if kind in rates.one_pass else loop.lanes // 32
        for port, cost in rates.costs.get(kind, {}).items():
            cycles[port] += count * cost * passes
    matrices = {kind: count for kind, count in loop.counts.items() if kind in MATRICES}
    multiply_adds = sum(matrices.values()) * 512 / 32 or loop.multiply_adds * loop.lanes / 32
    peak_cycles = (
        sum(count * max(rates.costs[kind].values()) for kind, count in matrices.items()) or multiply_adds / rates.peak
    )
    port, busy = max(cycles, key=lambda name: cycles[name]), min(1, threads / loop.lanes)
    return Bound(busy * peak_cycles / cycles[port], port, busy * multiply_adds / cycles[port], dict(+cycles))


# -- AMD ---------------------------------------------------------------------------------------------------------------
# Vector, transcendental and scalar units: get_perf_info() of the compiler, Mesa's src/amd/compiler/aco_statistics.cpp.
# v_mul_lo_u32 and its like take 4 cycles of the vector unit, a product of 16x16x16 on RDNA3 takes 32.
# Matrices of 16 bits: 512 FLOPS per clock and CU (two SIMDs) on RDNA3, 1,024 on RDNA4: "Using the Matrix Cores of AMD
# RDNA 4 architecture GPUs", gpuopen.com/learn/using_matrix_core_amd_rdna4, and gpuopen.com/learn/wmma_on_rdna3. Whether
# RDNA4's vector unit works beside its matrices is unknown. Here it does not.
# f32: two multiply-adds per cycle on RDNA3 and 4, in an instruction of two parts (VOPD), or for both halves of a
# subgroup of 64: "RDNA3 Instruction Set Architecture" guide, amd.com, Dual Issue VALU.
# Workgroup memory and the L0 cache: 128 bytes per clock and CU each: "RDNA Architecture" whitepaper, amd.com. Permutes
# through workgroup memory move a word as a load does. Reads of one lane are assumed to run once in a subgroup of 64.


def _amd(peak: float, matrix: float, one_pass: frozenset[Kind] = frozenset()) -> Rates:
    costs = {
        Kind.MULTIPLY_ADD: {"VALU": 1},
        Kind.MATRIX: {"VALU": matrix},
        Kind.MATRIX_F16: {"VALU": matrix},
        Kind.FLOAT: {"VALU": 1},
        Kind.INTEGER: {"VALU": 1},
        Kind.SLOW_INTEGER: {"VALU": 4},
        Kind.TRANSCENDENTAL: {"VALU": 1, "transcendental": 4},
        Kind.LANE: {"VALU": 1},
        Kind.PERMUTE: {"VALU": 1},
        Kind.SHUFFLE: {"LDS": 2},
        Kind.WORKGROUP: {"LDS": 2},
        Kind.GLOBAL: {"L0": 2},
        Kind.SCALAR: {"scalar": 1},
    }
    return Rates(peak, costs, one_pass=one_pass | MATRICES | {Kind.LANE, Kind.SCALAR})


BOTH_HALVES = frozenset({Kind.MULTIPLY_ADD, Kind.FLOAT})
RDNA1 = _amd(1, 0)
RDNA3 = _amd(2, 4, BOTH_HALVES)
RDNA4 = _amd(2, 2, BOTH_HALVES)

# -- NVIDIA ------------------------------------------------------------------------------------------------------------
# Results per clock and SM, capability 8.9: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions":
# 128 f32, 64 integer, 16 transcendental, 32 shuffled. A quarter of an SM issues an instruction of 32 lanes per cycle.
# Shuffles and memory share a queue (MIO), which moves 128 bytes per clock and SM: Jia et al., "Dissecting the NVIDIA
# Turing T4 GPU via Microbenchmarking", arXiv:1903.07486.
# Matrices: 512 FLOPS per clock and SM with f32 sums and 1,024 with f16 ones, from 165.2 and 330.3 TFLOPS of an RTX 4090
# (128 SMs at 2.52 GHz): "NVIDIA Ada GPU Architecture" whitepaper, appendix A.

ADA = Rates(
    1,
    {
        Kind.MULTIPLY_ADD: {"FMA": 1},
        Kind.MATRIX: {"tensor": 8},
        Kind.MATRIX_F16: {"tensor": 4},
        Kind.FLOAT: {"FMA": 1},
        Kind.INTEGER: {"integer": 2},
        Kind.TRANSCENDENTAL: {"transcendental": 8},
        Kind.SHUFFLE: {"MIO": 4},
        Kind.WORKGROUP: {"MIO": 4},
        Kind.GLOBAL: {"MIO": 4},
    },
    issue=1,
)

# -- Apple -------------------------------------------------------------------------------------------------------------
# Cycles per instruction and scheduler: github.com/philipturner/metal-benchmarks, "ALU Layout" and "Instruction
# Throughputs"; the fifth pipeline has shifts, bit fields, integer products, conversions and transcendental functions.
# Workgroup memory: 671 GB/s of eight cores at 1.278 GHz, or 64 bytes per clock and core: "iGPU Cache Setups Compared,
# Including M1", chipsandcheese.com. Other loads have the same units.

M1 = Rates(
    1,
    {
        Kind.SLOW_INTEGER: {"complex": 4},
        Kind.TRANSCENDENTAL: {"complex": 4},
        Kind.SHUFFLE: {"shuffle": 2},
        Kind.WORKGROUP: {"memory": 8},
        Kind.GLOBAL: {"memory": 8},
    },
    issue=1,
)
