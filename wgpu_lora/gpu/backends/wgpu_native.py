"""wgpu-native, through wgpu-py."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import wgpu
from wgpu.backends.wgpu_native import ffi, lib, lib_path, lib_version_info

from wgpu_lora.gpu.backends import WGPU, MatrixConfiguration

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
        selection = {key: type for key, type in declarations.items() if key in typedefs or not key.startswith(TYPEDEF)}
        parser._declarations = selection
        try:
            return parse(text)
        finally:
            declarations.update(selection)  # parsing declares what is new
            parser._declarations = declarations

    parser.parse_type_and_quals = parse_used_types


declare_only_used_types(ffi)

# wgpu warns of this feature on discrete GPUs; here only offloaded activations use it, which belong into host memory.
logging.getLogger("wgpu").addFilter(lambda record: "MAPPABLE_PRIMARY_BUFFERS" not in record.getMessage())


class WgpuNative:
    """See `Backend`. It refuses experimental features, so it has no subgroup matrices."""

    name, api = WGPU, wgpu

    def versions(self) -> dict[str, str]:
        return {"wgpu-native": ".".join(map(str, lib_version_info))}

    def library(self) -> Path:
        return Path(lib_path)

    def adapters(self) -> list[Any]:
        adapters = wgpu.gpu.enumerate_adapters_sync()
        # OpenGL lists the same devices again, with fewer features.
        return [adapter for adapter in adapters if adapter.info["backend_type"] != "OpenGL"] or adapters

    def features(self, adapter: Any) -> frozenset[str]:
        return frozenset(adapter.features)

    def matrices(self, adapter: Any) -> tuple[MatrixConfiguration, ...]:
        return ()

    def open(self, adapter: Any, features: list[str], limits: dict[str, int], checked: bool) -> Any:
        required: list[Any] = list(features)
        return adapter.request_device_sync(required_features=required, required_limits=limits)

    def module(self, device: Any, code: str, label: str, checked: bool) -> Any:
        module = device.create_shader_module(code=code, label=label)  # raises readable errors
        if checked or not hasattr(lib, "wgpuDeviceCreateShaderModuleTrusted"):
            return module
        text, name = code.encode(), label.encode()
        c_text, c_name = ffi.new("char[]", text), ffi.new("char[]", name)
        source = ffi.new("WGPUShaderSourceWGSL *")
        source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
        source.code.data, source.code.length = c_text, len(text)
        descriptor = ffi.new("WGPUShaderModuleDescriptor *")
        descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", source)
        descriptor.label.data, descriptor.label.length = c_name, len(name)
        # Without bounds checks kernels run 5 to 20% faster. Every kernel is tested with and without them.
        handle = lib.wgpuDeviceCreateShaderModuleTrusted(device._internal, descriptor, 0)
        return type(module)(label, handle, device)

    def wait(self, device: Any) -> None:
        # wgpu-py's own on_submitted_work_done_sync raises TypeError. Without commands, a lost device would abort.
        device.queue.submit([device.create_command_encoder().finish()])
        device._poll_wait()

    def timestamp_period(self, device: Any) -> float:
        return 1e-9 * float(lib.wgpuQueueGetTimestampPeriod(device.queue._internal))
