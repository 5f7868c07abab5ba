"""What a device is told of a unit that it is to train."""

from __future__ import annotations

from wgpu_lora.cluster.coordinator.state import State, UnitState
from wgpu_lora.cluster.coordinator.taught import as_trained, holders
from wgpu_lora.cluster.facts import Order, RunRequest
from wgpu_lora.train.options.training_arguments import TrainingArguments


def order(state: State, request: RunRequest, unit: UnitState, node: str) -> Order:
    """The order of a unit that was placed just now. node: the id of the coordinator's."""
    by_name = {task.name: task for task in request.tasks}
    tasks = [as_trained(state, request, by_name[name]) for name in unit.tasks]
    save = min(task.options.get("save_steps", TrainingArguments.save_steps) for task in tasks)
    mirror = request.mirror_steps
    return Order(
        run=unit.run,
        unit=unit.id,
        epoch=unit.epoch,
        tasks=tasks,
        save_steps=min(save, mirror) if save and mirror else save or mirror,
        mirror_steps=mirror,
        shelf=shelf(state, unit.devices[0], node),
        results=node,  # a machine that ends after its jobs takes no results along
        restore=unit.copy.digest if unit.copy else None,
        restore_from=(state.node_at(unit.at) or "") if unit.copy else "",
        parcels=holders(state, request, unit.tasks),
        helpers=unit.devices[1:],
        heldout_elsewhere=request.eval_device is not None,
        lease=unit.lease,
    )


def shelf(state: State, device: str, node: str) -> str:
    """The node whose host keeps copies of what a device trains: the coordinator's, or for its own devices another.

    That is the one with the most devices, which is probably there for the cluster; the coordinator's if it is alone.
    """
    if state.devices[device].node != node:
        return node
    others = [other for other in state.nodes if other.id != node]
    return max(others, key=lambda other: (len(other.devices), other.address)).id if others else node
