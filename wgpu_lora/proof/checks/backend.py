"""5. The device that trained is the one that was named, and its own clock shows the work."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import Finding, finite_or_nan

FACTS = ("name", "driver", "backend", "kind")
SAME_LOSS = 1e-5  # relative; the same program on the same device gives the same bits
SKEW = 0.02  # by which the device's clock may run faster than the host's


def work_happened_on_the_device(proof: Proof) -> Finding:
    """Passes where run.json names the enumerated device and the first step, repeated there, gives the logged loss."""
    training = proof.trained()
    assert training.record
    index = training.devices[0]
    said, listed = asdict(training.record.environment.device), proof.adapter(index)
    clock = proof.children.run("clock", "proof-clock", directory=str(training.directory), device=index)
    logged, loss = training.log[0]["loss"], finite_or_nan(clock["loss"])
    share = clock["device_seconds"] / clock["host_seconds"]
    times = [line["seconds"] for line in training.log]
    figures: dict[str, Any] = {
        "device": {name: said[name] for name in FACTS},
        "clock": clock,
        "share": share,
        "logged_loss": logged,
        "logged_step_seconds": statistics.median(b - a for a, b in pairwise([0.0, *times])),
    }
    faults = [f"run.json says {name} {said[name]}, but device {index} has {listed[name]}" for name in FACTS
              if said[name] != listed[name]]  # fmt: skip
    if not abs(loss - logged) <= SAME_LOSS * abs(logged):
        faults.append(f"the timed step's loss is {loss:.7f}, but the run logged {logged:.7f}")
    if not clock["dispatches"]:
        faults.append("no kernel was dispatched")
    if clock["clock"] == "timestamps" and not 0 < share <= 1 + SKEW:
        faults.append(f"the device's clock counts {share:.0%} of the step's time on the host's, which cannot be")
    by = {
        "timestamps": f"its own timestamps count {clock['device_seconds']:.4f} s of it ({min(share, 1):.0%} of it)",
        "host": "it has no timestamps, so its dispatches were counted alone",
    }[clock["clock"]]
    reason = (
        f"{said['name']}, {said['driver']}, {said['backend']}; the first step, repeated afterwards in "
        f"{clock['dispatches']} dispatches, has the loss that was logged, {logged:.6f}; {by}"
    )
    return Finding.of(faults, reason, figures)
