"""Which run or device a person means, and the state of a cluster as JSON."""

from __future__ import annotations

from typing import Any

from wgpu_lora.cluster.client.asking import Asking
from wgpu_lora.cluster.client.follow import snapshot_of
from wgpu_lora.cluster.facts import DeviceView, RunView, Snapshot, to_plain
from wgpu_lora.errors import UserError
from wgpu_lora.text import join_words

MOST = 5  # names that a sentence lists


def chosen_run(cluster: Asking, name: str | None) -> RunView:
    """The run of this name; without one, the only one that goes on or has results that were not fetched.

    Raises:
        UserError: there is none, or there are several.
    """
    seen = snapshot_of(cluster)
    known = {run.name: run for run in seen.runs}
    if name is not None:
        if name in known:
            return known[name]
        said = join_words([*known][-MOST:], max(0, len(known) - MOST)) if known else "none"
        raise UserError(f"The cluster knows no run '{name}': its runs are {said}.")
    due = {task.run for task in seen.tasks if not task.fetched}
    found = [run for run in seen.runs if not run.over or run.name in due]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError("No run goes on in this cluster: 'wgpu-lora cluster status' shows those that have ended.")
    names = join_words([run.name for run in found[-MOST:]], max(0, len(found) - MOST))
    raise UserError(f"Several runs go on in this cluster: name one of {names}.")


def chosen_device(snapshot: Snapshot, given: str) -> DeviceView:
    """The device with this key or id, or at HOST:INDEX. Raises UserError if there is none, or several."""
    found = [one for one in snapshot.devices if given in (one.facts.id, one.facts.key, place_of(snapshot, one))]
    if len(found) == 1:
        return found[0]
    names = [place_of(snapshot, one) for one in snapshot.devices]
    known = join_words(names[:MOST], max(0, len(names) - MOST)) if names else "none"
    what = "several devices" if found else "no device"
    raise UserError(f"{given} names {what} of the cluster: give HOST:INDEX; there are {known}.")


def place_of(snapshot: Snapshot, view: DeviceView) -> str:
    """A device's short name, HOST:INDEX."""
    hosts = {node.address: node.host for node in snapshot.nodes}
    return f"{hosts.get(view.facts.address, view.facts.address)}:{view.facts.index}"


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot for programs; each device also has its `id` and `place`."""
    found = to_plain(snapshot)
    for value, view in zip(found["devices"], snapshot.devices, strict=True):
        value |= {"id": view.facts.id, "place": place_of(snapshot, view)}
    return found
