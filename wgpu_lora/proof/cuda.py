"""What counts as CUDA: libraries and Python packages; and what may be mapped by an NVIDIA driver."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import PurePath

# The toolkit's and its companions' libraries: libcublas.so.12, cublas64_12.dll, libtorch_cuda.so ...
TOOLKIT = re.compile(
    r"^(lib)?(cudart|cublas|cublaslt|nvrtc|nvrtc-builtins|cudnn\w*|cufft|cufftw|cufile|curand|cusolver|cusolvermg|"
    r"cusparse|cusparselt|cupti|nvjitlink|nvptxcompiler|nvvm|nccl|nvblas|npp\w*|nvjpeg|cutensor|nvinfer|torch_cuda\w*|"
    r"c10_cuda|bitsandbytes_cuda\w*)(64|32)?([-_.\d]|$)",
    re.IGNORECASE,
)
# The driver's side of CUDA, which NVIDIA's Vulkan driver maps for itself; nobody else may.
DRIVER = re.compile(r"^(libcuda\.so|libcudadebugger\.so|nvcuda\.dll|nvcuda64\.dll)", re.IGNORECASE)
# NVIDIA's Vulkan, OpenGL and DX12 drivers, and all that comes with them.
NVIDIA_ICD = re.compile(r"^(libGLX_nvidia|libEGL_nvidia|libnvidia-vulkan|nvoglv|nvwgf2um|nvldumd)", re.IGNORECASE)
NVIDIA_OWN = re.compile(r"^(libGLX_nvidia|libEGL_nvidia|libnvidia-|nvoglv|nvwgf2um|nvldumd|nvapi|nvml)", re.IGNORECASE)
# Importable names of packages that bring CUDA or are there to use it.
MODULES = {
    "torch", "triton", "cupy", "cupyx", "cupy_backends", "cuda", "nvidia", "pycuda", "numba", "tensorflow", "jax",
    "jaxlib", "bitsandbytes", "tensorrt", "cudf", "cuml", "cutlass", "nvmath", "pynvjitlink", "skcuda", "xformers",
    "flash_attn",
}  # fmt: skip
# The same as requirements.
PACKAGES = re.compile(
    r"^(nvidia-.*|cupy.*|pycuda|cuda-.*|torch|torchvision|torchaudio|triton|numba(-cuda)?|tensorflow.*|jax.*|tensorrt.*|"
    r"bitsandbytes|cudf.*|cuml.*|nvmath.*|scikit-cuda|xformers|flash-attn)$"
)
NAME = re.compile(r"^\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")
EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@dataclass(frozen=True)
class Libraries:
    """forbidden; explained: CUDA's driver side, beside an NVIDIA Vulkan driver; own: that driver's rest, `icds` too."""

    forbidden: list[str]
    explained: list[str]
    own: list[str]
    icds: list[str]


def classify(mapped: Iterable[str], preloaded: str = "") -> Libraries:
    """Sorts what one process has mapped. `preloaded`: its LD_PRELOAD, for which no driver answers."""
    names = {path: PurePath(path.replace("\\", "/").removesuffix(" (deleted)")).name for path in mapped}
    icds = sorted(path for path, name in names.items() if NVIDIA_ICD.match(name))
    forbidden: list[str] = []
    explained: list[str] = []
    own: list[str] = []
    for path, name in sorted(names.items()):
        if TOOLKIT.match(name):
            forbidden.append(path)
        elif DRIVER.match(name):
            (explained if icds and name not in preloaded else forbidden).append(path)
        elif NVIDIA_OWN.match(name):
            own.append(path)
    return Libraries(forbidden, explained, own, icds)


def imported(modules: Iterable[str]) -> list[str]:
    """The CUDA packages among the names of loaded modules."""
    return sorted({name.partition(".")[0] for name in modules} & MODULES)


def is_cuda(opened: str) -> bool:
    """Whether a library's name, as it is asked for (with or without its ending), is the toolkit's or the driver's."""
    name = PurePath(opened.replace("\\", "/")).name
    return any(kind.match(name + ending) for kind in (TOOLKIT, DRIVER) for ending in ("", ".so", ".dll"))


def required(package: str) -> set[str]:
    """The package and all that installing it would install, whatever the platform; extras only where asked for.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    seen: set[tuple[str, str]] = set()
    found: set[str] = set()
    todo = [(package, "")]
    while todo:
        name, extra = item = todo.pop()
        if item in seen:
            continue
        seen.add(item)
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            if name == package:
                raise
            continue  # required on other platforms only
        for line in lines:
            requirement, _, marker = line.partition(";")
            match, wanted = NAME.match(requirement), EXTRA.findall(marker)
            if match and (not wanted or extra in wanted):
                extras = ["", *filter(None, (e.strip() for e in (match[2] or "").split(",")))]
                todo += [(re.sub(r"[-_.]+", "-", match[1]).lower(), e) for e in extras]
    return found


def cuda_packages(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if PACKAGES.match(name))
