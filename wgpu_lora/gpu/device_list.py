"""Lists the devices of this machine and selects one. (WebGPU calls a device that is not opened yet an adapter.)"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.backends import AUTO, DAWN, SUBGROUP, Backend, MatrixConfiguration, backend, installed

KINDS = {"DiscreteGPU": "discrete", "IntegratedGPU": "integrated", "CPU": "software"}
PREFERENCE = {"discrete": 0, "integrated": 1, "software": 2, "unknown": 3}
MAPPABLE = "mappable-primary-buffers"  # storage buffers in the host's memory
FEATURES_THAT_MATTER = (
    SUBGROUP,
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


@dataclass(frozen=True)
class DeviceInfo:
    """The properties of a device that `wgpu-lora info` shows. backend: the interface that its driver has, as Vulkan."""

    index: int
    name: str
    driver: str
    vendor_id: int
    backend: str
    kind: str  # discrete | integrated | software | unknown
    features: tuple[str, ...]
    limits: dict[str, int]
    device_id: int = 0  # of the vendor; 0 if unknown
    matrices: tuple[MatrixConfiguration, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(index: int, adapter: Any, webgpu: Backend) -> DeviceInfo:
    info, features = adapter.info, webgpu.features(adapter)
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
        matrices=webgpu.matrices(adapter),
    )


def list_devices(webgpu: Backend | None = None) -> list[DeviceInfo]:
    """All devices in a stable order: discrete GPUs first, software drivers last."""
    webgpu = webgpu or backend()
    return [describe(i, adapter, webgpu) for i, adapter in enumerate(_sorted_adapters(webgpu))]


def _sorted_adapters(webgpu: Backend) -> list[Any]:
    def rank(adapter: Any) -> tuple[int, str, str]:
        info = adapter.info
        return (
            PREFERENCE[KINDS.get(info["adapter_type"], "unknown")],
            info["vendor"] == "SwiftShader driver",
            info["device"],
        )

    return sorted(webgpu.adapters(), key=rank)


def choose_backend(selector: str | int | None, name: str | None) -> tuple[Backend, DeviceInfo, Any]:
    """Selects a device as `choose`, and the backend to open it with: for `auto`, Dawn where it is installed and lists
    matrix units of a GPU.

    Raises:
        UserError: there is no such backend or device.
    """
    webgpu = backend(name)
    info, adapter = choose(selector, webgpu)
    if (name or AUTO) != AUTO or info.kind == "software" or not installed(DAWN):
        return webgpu, info, adapter
    dawn = backend(DAWN)

    def alike(listed: list[DeviceInfo]) -> list[DeviceInfo]:
        return [device for device in listed if (device.name, device.vendor_id) == (info.name, info.vendor_id)]

    position = [device.index for device in alike(list_devices(webgpu))].index(info.index)
    devices = [d for d in alike(list_devices(dawn)) if d.matrices and d.backend == info.backend][position:]
    return (dawn, *choose(devices[0].index, dawn)) if devices else (webgpu, info, adapter)


def choose(selector: str | int | None, webgpu: Backend | None = None) -> tuple[DeviceInfo, Any]:
    """Selects a device; returns its info and its WebGPU adapter.

    Args:
        selector: index in `list_devices`, or part of the name of a device or driver, in any case. By default, the
            environment variable `WGPU_LORA_DEVICE`, then the first device.

    Raises:
        UserError: there is no device, or none matches.
    """
    webgpu = webgpu or backend()
    adapters = _sorted_adapters(webgpu)
    infos = [describe(i, a, webgpu) for i, a in enumerate(adapters)]
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
