"""What counts as CUDA: libraries, Python packages, commands; and what an NVIDIA driver maps by itself."""

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
# The driver's side of CUDA. NVIDIA's Vulkan driver may map it for itself, nobody else may.
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
COMPILERS = re.compile(r"^(nvcc|cicc|ptxas|nvlink|fatbinary|cudafe\+\+|nvrtc)(\.exe)?$", re.IGNORECASE)
NAME = re.compile(r"^\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")
EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@dataclass(frozen=True)
class Libraries:
    """forbidden; explained: CUDA's driver side, mapped by an NVIDIA Vulkan driver; own: the rest of that driver's."""

    forbidden: list[str]
    explained: list[str]
    own: list[str]


def classify(mapped: Iterable[str], preloaded: str = "") -> Libraries:
    """Sorts what one process has mapped. `preloaded`: its LD_PRELOAD, for which no driver answers."""
    names = {path: PurePath(path.replace("\\", "/").removesuffix(" (deleted)")).name for path in mapped}
    has_icd = any(NVIDIA_ICD.match(name) for name in names.values())
    forbidden: list[str] = []
    explained: list[str] = []
    own: list[str] = []
    for path, name in sorted(names.items()):
        if TOOLKIT.match(name):
            forbidden.append(path)
        elif DRIVER.match(name):
            (explained if has_icd and name not in preloaded else forbidden).append(path)
        elif NVIDIA_OWN.match(name):
            own.append(path)
    return Libraries(forbidden, explained, own)


def imported(modules: Iterable[str]) -> list[str]:
    """The CUDA packages among the names of loaded modules."""
    return sorted({name.partition(".")[0] for name in modules} & MODULES)


def is_compiler(command: Iterable[str]) -> bool:
    """Whether a command line runs one of the toolkit's compilers, directly or through another program."""
    return any(COMPILERS.match(PurePath(word.replace("\\", "/")).name) for part in command for word in part.split())


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
