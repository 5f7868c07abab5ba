"""Where the compilers run: on this machine, or in a root of the newest Debian."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.gpu_compilers.devices import Gpu
from wgpu_lora.errors import UserError

CHECKOUT = Path(__file__).parents[2]
SHIMS = CHECKOUT / ".drivers"  # where install_vulkan.sh puts shims
DRIVERS = Path("/usr/share/vulkan/icd.d")
ROOT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "wgpu-lora-sid")
ROOT_SCRIPT = Path(__file__).with_name("root.sh")


@dataclass(frozen=True)
class Place:
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


def place_of(gpu: Gpu, root: Path, in_root: bool = False) -> Place:
    """Where a GPU's compiler runs; what is missing is installed. Raises UserError if it cannot be."""
    if gpu.newest or in_root:
        if not (root / "venv").is_dir():
            print(f"Making a root of the newest Debian in {root}, which takes some minutes.", file=sys.stderr)
        _run([str(ROOT_SCRIPT), "make", str(root)])
        run = [str(ROOT_SCRIPT), "run", str(root)]
        return Place((*run, *_environment(gpu, ""), "PYTHONPATH=/checkout", "/venv/bin/python"))
    if not (DRIVERS / f"{gpu.driver}_icd.json").is_file():
        raise UserError(
            f"Mesa's Vulkan driver '{gpu.driver}' is not installed in {DRIVERS}: install 'mesa-vulkan-drivers' "
            "(Debian, Ubuntu), or use --in-root."
        )
    _run([str(CHECKOUT / "scripts" / "install_vulkan.sh"), "--drm-shim", str(SHIMS)])
    return Place((*_environment(gpu, f"{SHIMS}/"), f"PYTHONPATH={CHECKOUT}", sys.executable))


def _run(command: list[str]) -> None:
    quiet = subprocess.DEVNULL
    done = subprocess.run(command, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        *above, said = done.stderr.strip().splitlines() or ["it said nothing"]
        if above:
            print("\n".join(above), file=sys.stderr)
        raise UserError(said)
