"""Lists the devices of this machine and selects one. (WebGPU calls a device that is not opened yet an adapter.)"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import wgpu
from wgpu.backends.wgpu_native import ffi, lib_path, lib_version_info

from wgpu_lora.errors import UserError

TYPEDEF = "typedef "


def declare_only_used_types(ffi: Any) -> None:
    """Parse names of types faster: cffi first declares all types of wgpu, which takes 34 ms for each of some 40 names.

    Does nothing if cffi has no such parser.
    """
    parser: Any = getattr(ffi, "_parser", None)
    if not (hasattr(parser, "parse_type_and_quals") and hasattr(parser, "_declarations")):
        return
    parse, declarations = parser.parse_type_and_quals, parser._declarations

    def parse_used_types(text: str) -> Any:
        typedefs = {TYPEDEF + name for name in re.findall(r"\w+", text)}
        used = {key: type for key, type in declarations.items() if key in typedefs or not key.startswith(TYPEDEF)}
        parser._declarations = used
        try:
            return parse(text)
        finally:
            declarations.update(used)  # parsing declares what is new
            parser._declarations = declarations

    parser.parse_type_and_quals = parse_used_types


declare_only_used_types(ffi)

# wgpu warns of this feature on discrete GPUs; here only offloaded activations use it, which belong into host memory.
logging.getLogger("wgpu").addFilter(lambda record: "MAPPABLE_PRIMARY_BUFFERS" not in record.getMessage())

KINDS = {"DiscreteGPU": "discrete", "IntegratedGPU": "integrated", "CPU": "software"}
PREFERENCE = {"discrete": 0, "integrated": 1, "software": 2, "unknown": 3}
MAPPABLE = "mappable-primary-buffers"  # storage buffers in the host's memory
FEATURES_THAT_MATTER = (
    "subgroup",
    "shader-f16",
    "shader-int64",
    "timestamp-query",
    "timestamp-query-inside-passes",
    MAPPABLE,
)
LIMITS_THAT_MATTER = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-storage-buffers-per-shader-stage",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-storage-size",
    "min-storage-buffer-offset-alignment",
)


def native_version() -> str:
    """The version of the wgpu-native library that wgpu loaded."""
    return ".".join(map(str, lib_version_info))


def native_library() -> Path:
    """The file of the wgpu-native library that wgpu loaded."""
    return Path(lib_path)


@dataclass(frozen=True)
class DeviceInfo:
    """The properties of a device that `wgpu-lora info` shows."""

    index: int
    name: str
    driver: str
    vendor_id: int
    backend: str
    kind: str  # discrete | integrated | software | unknown
    features: tuple[str, ...]
    limits: dict[str, int]
    device_id: int = 0  # of the vendor; 0 if unknown

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _enumerate() -> list[Any]:
    adapters = wgpu.gpu.enumerate_adapters_sync()
    native = [a for a in adapters if a.info["backend_type"] != "OpenGL"]
    # OpenGL lists the same devices again, with fewer features.
    return native or adapters


def describe(index: int, adapter: Any) -> DeviceInfo:
    info = adapter.info
    features = set(adapter.features)
    return DeviceInfo(
        index=index,
        name=info["device"],
        driver=info["description"] or info["vendor"],
        vendor_id=info["vendor_id"],
        backend=info["backend_type"],
        kind=KINDS.get(info["adapter_type"], "unknown"),
        features=tuple(f for f in FEATURES_THAT_MATTER if f in features),
        limits={name: int(adapter.limits[name]) for name in LIMITS_THAT_MATTER},
        device_id=info["device_id"],
    )


def list_devices() -> list[DeviceInfo]:
    """All devices in a stable order: discrete GPUs first, software drivers last."""
    return [describe(i, adapter) for i, adapter in enumerate(_sorted_adapters())]


def _sorted_adapters() -> list[Any]:
    def rank(adapter: Any) -> tuple[int, str, str]:
        info = adapter.info
        return (
            PREFERENCE[KINDS.get(info["adapter_type"], "unknown")],
            info["vendor"] == "SwiftShader driver",
            info["device"],
        )

    return sorted(_enumerate(), key=rank)


def choose(selector: str | int | None) -> tuple[DeviceInfo, Any]:
    """Selects a device; returns its info and its WebGPU adapter.

    Args:
        selector: index in `list_devices`, or part of the name of a device or driver, in any case. By default, the
            environment variable `WGPU_LORA_DEVICE`, then the first device.

    Raises:
        UserError: there is no device, or none matches.
    """
    adapters = _sorted_adapters()
    infos = [describe(i, a) for i, a in enumerate(adapters)]
    if not infos:
        raise UserError(
            "No device was found: install your GPU's Vulkan driver (or Mesa's software one with "
            "'scripts/install_vulkan.sh') and check 'wgpu-lora info'."
        )
    if selector is None:
        selector = os.environ.get("WGPU_LORA_DEVICE") or 0
    text = str(selector)
    if text.lstrip("-").isdigit():
        if not 0 <= int(text) < len(infos):
            raise UserError(f"There is no device {text}: choose 0 to {len(infos) - 1}, as 'wgpu-lora info' lists them.")
        return infos[int(text)], adapters[int(text)]
    for info, adapter in zip(infos, adapters, strict=True):
        if text.lower() in f"{info.name} {info.driver}".lower():
            return info, adapter
    names = ", ".join(f"{i.index} ({i.name})" for i in infos)
    raise UserError(f"No device is named '{text}': choose one of {names}.")
