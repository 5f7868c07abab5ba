"""The GPUs whose compilers are asked: what makes a driver believe in one, and where its compiler runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.gpu_compilers.compiled_shader import Compiled, parse_amd, parse_apple, parse_nvidia
from scripts.gpu_compilers.port_model import ADA, M1, RDNA1, RDNA3, RDNA4, Rates
from wgpu_lora.errors import UserError

RADV = {"RADV_DEBUG": "shaderstats,asm,nocache"}


@dataclass(frozen=True)
class Gpu:
    """A GPU without hardware.

    shim, driver: of the shim's library, and of the file that the Vulkan loader reads.
    chosen_by: environment that selects the GPU and makes its compiler print statistics and assembly.
    subgroups: sizes that it may be used with, the one that `Device` would measure first.
    occupancy: its unit, and the most that the GPU holds with subgroups of 32.
    units, hertz: what `rates` are of, and their boost clock. bandwidth: bytes of memory per second.
    newest: whether it needs a newer Mesa than Debian 12's backports have.
    """

    name: str
    title: str
    shim: str
    driver: str
    chosen_by: dict[str, str]
    parse: Callable[[Sequence[str]], Compiled]
    rates: Rates
    subgroups: tuple[int, ...]
    occupancy: tuple[str, int]
    units: int
    hertz: float
    bandwidth: float
    newest: bool = True


WAVES = "subgroups of 32 per SIMD"  # RADV counts one of 64 twice


# Units, boost clocks and bandwidths of memory: AMD's, of the cards' pages on amd.com; an RTX 4090's, of the "NVIDIA Ada
# GPU Architecture" whitepaper, appendix A. The M1 has 128 bits of LPDDR4X-4266.
def _amd(
    name: str,
    title: str,
    chip: str,
    rates: Rates,
    waves: int,
    units: int,
    hertz: float,
    bandwidth: float,
    newest: bool = False,
) -> Gpu:
    # RADV runs workgroups of 64 as one subgroup, so that is what `Device` measures; other drivers may use 32.
    environment = {"AMDGPU_GPU_ID": chip, **RADV}
    driver, of = ("amdgpu", "radeon", environment, parse_amd), (units, hertz, bandwidth)
    return Gpu(name, title, *driver, rates, (64, 32), (WAVES, waves), *of, newest)


_ALL = (
    _amd("rdna1", "RX 5700 XT (RDNA1)", "navi10", RDNA1, 20, 80, 1.905e9, 448e9),
    _amd("rdna3", "RX 7900 XTX (RDNA3)", "navi31", RDNA3, 16, 192, 2.5e9, 960e9),
    _amd("rdna4", "RX 9070 XT (RDNA4)", "gfx1201", RDNA4, 16, 128, 2.97e9, 640e9, newest=True),
    Gpu(
        "ada",
        "RTX 40 (Ada, NVK)",
        "nouveau",
        "nouveau",
        {"NOUVEAU_CHIPSET": "0x192", "NAK_DEBUG": "print"},
        parse_nvidia,
        ADA,
        (32,),
        ("warps per SM", 48),
        512,
        2.52e9,
        1008e9,
    ),
    Gpu(
        "m1",
        "Apple M1 (Honeykrisp)",
        "asahi",
        "asahi",
        {"AGX_MESA_DEBUG": "shaderdb,stats,shaders"},
        parse_apple,
        M1,
        (32,),
        ("threads per core", 1024),
        32,
        1.278e9,
        16 * 4.266e9,
    ),
)
GPUS = {gpu.name: gpu for gpu in _ALL}


# -- where the compilers run: on this machine, or in a root of the newest Debian ---------------------------------------

CHECKOUT = Path(__file__).parents[2]
SHIMS = CHECKOUT / ".drivers"  # where install_vulkan.sh puts shims
DRIVERS = Path("/usr/share/vulkan/icd.d")
ROOT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "wgpu-lora-sid")
ROOT_SCRIPT = Path(__file__).with_name("root.sh")


@dataclass(frozen=True)
class Environment:
    """command: starts a Python that has this checkout's modules and sees the GPU; its arguments follow."""

    command: tuple[str, ...]


def _environment(gpu: Gpu, shims: str) -> list[str]:
    values = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "XDG_RUNTIME_DIR": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MESA_SHADER_CACHE_DISABLE": "1",
        "LD_PRELOAD": f"{shims}lib{gpu.shim}_noop_drm_shim.so",
        "VK_DRIVER_FILES": str(DRIVERS / f"{gpu.driver}_icd.json"),
        **gpu.chosen_by,
    }
    return ["env", "-i", *(f"{name}={value}" for name, value in values.items())]


def environment_of(gpu: Gpu, root: Path, in_root: bool = False) -> Environment:
    """Where a GPU's compiler runs; what is missing is installed. Raises UserError if it cannot be."""
    if gpu.newest or in_root:
        if not (root / "venv").is_dir():
            print(f"Making a root of the newest Debian in {root}, which takes some minutes.", file=sys.stderr)
        _run([str(ROOT_SCRIPT), "make", str(root)])
        run = [str(ROOT_SCRIPT), "run", str(root)]
        return Environment((*run, *_environment(gpu, ""), "PYTHONPATH=/checkout", "/venv/bin/python"))
    if not (DRIVERS / f"{gpu.driver}_icd.json").is_file():
        raise UserError(
            f"Mesa's Vulkan driver '{gpu.driver}' is not installed in {DRIVERS}: install 'mesa-vulkan-drivers' "
            "(Debian, Ubuntu), or use --in-root."
        )
    _run([str(CHECKOUT / "scripts" / "install_vulkan.sh"), "--drm-shim", str(SHIMS)])
    return Environment((*_environment(gpu, f"{SHIMS}/"), f"PYTHONPATH={CHECKOUT}", sys.executable))


def _run(command: list[str]) -> None:
    quiet = subprocess.DEVNULL
    process = subprocess.run(command, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, text=True)
    if process.returncode:
        *above, message = process.stderr.strip().splitlines() or ["no message"]
        if above:
            print("\n".join(above), file=sys.stderr)
        raise UserError(message)
