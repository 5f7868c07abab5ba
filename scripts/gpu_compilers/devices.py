"""The GPUs whose compilers are asked: what makes a driver believe in one, and print what it compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scripts.gpu_compilers import amd, apple, nvidia
from scripts.gpu_compilers.compiled import Compiled

RADV = {"RADV_DEBUG": "shaderstats,asm,nocache"}


@dataclass(frozen=True)
class Gpu:
    """A GPU without hardware.

    shim, driver: of the shim's library, and of the file that the Vulkan loader reads.
    chosen_by: environment that selects the GPU and makes its compiler print statistics and assembly.
    subgroups: sizes that it may be used with, the one that `Device` would measure first.
    occupancy: its unit, and the most that the GPU holds with subgroups of 32.
    newest: whether it needs a newer Mesa than Debian 12's backports have.
    """

    name: str
    title: str
    shim: str
    driver: str
    chosen_by: dict[str, str]
    parse: Callable[[Sequence[str]], Compiled]
    subgroups: tuple[int, ...]
    occupancy: tuple[str, int]
    newest: bool = True


WAVES = "subgroups of 32 per SIMD"  # RADV counts one of 64 twice


def _amd(name: str, title: str, chip: str, waves: int, newest: bool = False) -> Gpu:
    # RADV runs workgroups of 64 as one subgroup, so that is what `Device` measures; other drivers may use 32.
    chosen = {"AMDGPU_GPU_ID": chip, **RADV}
    return Gpu(name, title, "amdgpu", "radeon", chosen, amd.parse, (64, 32), (WAVES, waves), newest)


_ALL = (
    _amd("rdna1", "RX 5700 XT (RDNA1)", "navi10", 20),
    _amd("rdna3", "RX 7900 XTX (RDNA3)", "navi31", 16),
    _amd("rdna4", "RX 9070 XT (RDNA4)", "gfx1201", 16, newest=True),
    Gpu(
        "ada",
        "RTX 40 (Ada, NVK)",
        "nouveau",
        "nouveau",
        {"NOUVEAU_CHIPSET": "0x192", "NAK_DEBUG": "print"},
        nvidia.parse,
        (32,),
        ("warps per SM", 48),
    ),
    Gpu(
        "m1",
        "Apple M1 (Honeykrisp)",
        "asahi",
        "asahi",
        {"AGX_MESA_DEBUG": "shaderdb,stats,shaders"},
        apple.parse,
        (32,),
        ("threads per core", 1024),
    ),
)
GPUS = {gpu.name: gpu for gpu in _ALL}
