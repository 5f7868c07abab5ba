"""The options of a run on a cluster: of the command line and of [run] in cluster.toml."""

from __future__ import annotations

from dataclasses import dataclass, fields

from wgpu_lora.cluster.spec.names import is_safe
from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.train.option_types import NOT_NEGATIVE, Range, check, option

CLUSTER = "Cluster"  # their heading in help
JOIN = ("auto", "always", "never")


@dataclass(frozen=True)
class RunOptions:
    """How a run uses a cluster. Fields are declared as options of training are."""

    name: str | None = option(None, CLUSTER, "Name of the run, for 'attach' and 'cancel'. Default: made of the time.")
    shared: str | None = option(
        None,
        CLUSTER,
        "Absolute path of a folder that all machines have: results are written there. Default: they are fetched to "
        "this machine.",
    )
    mirror_steps: int = option(
        50,
        CLUSTER,
        "Steps between checkpoints that are copied to another machine: at most these are lost with a machine. 0 copies "
        "results only.",
        within=NOT_NEGATIVE,
    )
    join: str = option(
        "auto",
        CLUSTER,
        "Whether adapters of one base are trained together in a pipeline: where that is faster (auto), wherever it is "
        "possible, or never.",
        choices=JOIN,
    )
    data_parallel: int = option(
        1, CLUSTER, "Devices that train each adapter together, on parts of every batch.", within=Range(1, at_most=64)
    )
    jobs_per_device: int = option(1, CLUSTER, "Jobs that a device runs at the same time.", within=Range(1, at_most=16))
    eval_device: str | None = option(
        None,
        CLUSTER,
        "Device that measures held-out losses and makes caches of teachers while others train: its key or part of its "
        "name, as 'cluster status' shows it.",
    )
    send_data: bool = option(
        False, CLUSTER, "Send data that only this machine has to the others, instead of refusing them."
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            check(item.name, getattr(self, item.name), item.metadata)
        if self.name is not None and not is_safe(self.name):
            raise UserError(
                f"{flag('name')} must be up to 64 letters, digits, '.', '_' and '-', the first of them a letter or a "
                f"digit, not {self.name!a:.80}."
            )
        if self.shared is not None:
            plain = self.shared.isprintable() and len(self.shared.encode()) <= 1024
            if not plain or not self.shared.startswith("/") or ".." in self.shared.split("/"):
                raise UserError(
                    f"{flag('shared')} must be the absolute path of a folder that all machines have, such as "
                    f"/mnt/lab/results, not {self.shared!a:.80}."
                )
        if self.eval_device is not None and not (self.eval_device.strip() and self.eval_device.isprintable()):
            raise UserError(f"{flag('eval_device')} must be a device's key or part of its name.")
        if self.data_parallel > 1 and self.join == "always":
            raise UserError(
                f"{setting('join', 'always')} and {setting('data_parallel', self.data_parallel)} cannot be combined: "
                "an adapter is trained with others on one device, or alone on several."
            )
