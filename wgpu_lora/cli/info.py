"""wgpu-lora info: the available devices, and which one is used by default."""

from __future__ import annotations

from wgpu_lora.cli.console import console, line, print_json
from wgpu_lora.cli.options import Device, Json


def info(device: Device = None, as_json: Json = False) -> int:
    """List the devices.

    It shows their drivers, features and limits; * marks the device that is used by default.
    """
    from wgpu_lora.gpu.choices import ChoiceFile
    from wgpu_lora.gpu.device import Device as OpenedDevice
    from wgpu_lora.gpu.devices import list_devices

    opened = OpenedDevice(device)
    devices, used, tilings = list_devices(), opened.info.index, str(ChoiceFile(opened).path)
    if as_json:
        print_json(
            {
                "devices": [d.as_dict() for d in devices],
                "adapters": [d.as_dict() for d in devices],  # their name in 0.1; to be removed in the next version
                "used": used,
                "subgroup_size": opened.capabilities.subgroup_size,
                "max_binding": opened.max_binding,
                "max_buffer": opened.max_buffer,
                "tilings": tilings,
            }
        )
        return 0
    from rich.table import Table

    from wgpu_lora.train.memory import readable

    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for name in ("", "#", "device and driver", "kind", "features", "limits"):
        table.add_column(name)
    for d in devices:
        limits = d.limits
        table.add_row(
            "*" if d.index == used else "",
            str(d.index),
            f"{d.name}\n{d.driver}",
            f"{d.kind}\n{d.backend}",
            "\n".join(d.features) or "none",
            f"buffer {readable(limits['max-buffer-size'])}\n"
            f"binding {readable(limits['max-storage-buffer-binding-size'])}\n"
            f"{limits['max-storage-buffers-per-shader-stage']} bindings per shader\n"
            f"workgroup {limits['max-compute-invocations-per-workgroup']} threads, "
            f"{readable(limits['max-compute-workgroup-storage-size'])}",
        )
    console().print(table)
    size = opened.capabilities.subgroup_size
    subgroups = f"subgroups of {size} (measured)" if size else "no subgroups used"
    line("used", f"{used}: {opened.info.name}, {subgroups}; choose another with --device")
    line("tilings", tilings, whole=True)
    return 0
