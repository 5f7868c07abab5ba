"""A run before it is submitted: whatever can be refused is refused here, all of it at once."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from wgpu_lora.cluster.cluster_connection import Cluster
from wgpu_lora.cluster.cluster_file import ClusterFile, HostSpec, RunOptions, SweepOptions
from wgpu_lora.cluster.cluster_paths import HERE, unreadable
from wgpu_lora.cluster.data_upload import send_data
from wgpu_lora.cluster.messages import (
    CachedTeacher,
    DeviceFacts,
    NodeFacts,
    Parcel,
    RunRequest,
    Task,
    Versions,
    from_plain,
)
from wgpu_lora.cluster.node_versions import difference
from wgpu_lora.cluster.placement.placement import refusal
from wgpu_lora.cluster.placement.placement_field import CandidateDevice
from wgpu_lora.cluster.run_status import chosen_device
from wgpu_lora.cluster.sweep import plan_sweep
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun, join_words
from wgpu_lora.train.memory import RunRequirements

MOST_REASONS, MOST_HOSTS = 20, 3  # that an error lists
SURVEY_SECONDS = 120.0
PLAN_SECONDS = 900.0  # opening a large model over a network takes minutes
Plans = dict[str, dict[str, RunRequirements]]  # by task and plan class


def refuse(reasons: Iterable[str]) -> None:
    """Raise UserError if there are any reasons, which are sentences; equal ones count once."""
    sentences = list(dict.fromkeys(reasons))
    if len(sentences) == 1:
        raise UserError(sentences[0])
    if sentences:
        remaining = len(sentences) - MOST_REASONS
        notes = [f"and {remaining:,} more"] if remaining > 0 else []
        raise UserError(
            f"The run is refused for {len(sentences):,} reasons: mend them all.", [*sentences[:MOST_REASONS], *notes]
        )


def surveyed(cluster: Cluster, versions: Versions, local: bool = False) -> list[NodeFacts]:
    """The nodes of the cluster, with their devices as they are now.

    Args:
        versions: of this machine. local: the cluster is Ray of this machine.

    Raises:
        UserError: a node has another version of something than this machine, or there is no device.
    """
    nodes = [from_plain(NodeFacts, answer) for answer in cluster.controller("nodes", seconds=SURVEY_SECONDS)]
    reasons = [*_other_versions(nodes, versions, local)]
    if not nodes:
        reasons.append("The cluster has no node that answers: see 'wgpu-lora cluster status'.")
    elif not any(node.devices for node in nodes):
        reasons.append(
            f"The cluster has no WebGPU device ({listed_hosts(nodes)}): see 'wgpu-lora info' on its machines."
        )
    refuse(reasons)
    return nodes


def _other_versions(nodes: Iterable[NodeFacts], versions: Versions, local: bool) -> Iterator[str]:
    for node in nodes:
        # The controller leaves out nodes that differ from the head, by which they have no devices.
        if not (mismatch := difference(versions, node.versions)) or not (node.devices or local):
            continue
        if local:
            yield (
                f"Ray of this machine was started before something changed here ({mismatch}): end it with "
                "'wgpu-lora cluster down --local', and run again."
            )
        else:
            yield (
                f"{node.host} ({node.address}) differs from this machine: {mismatch}; install the same there and here."
            )


def missing_hosts(nodes: Sequence[NodeFacts], spec: ClusterFile) -> list[str]:
    """The hosts of a cluster file that are no nodes of the cluster now, by their addresses or names."""
    present = {node.address for node in nodes} | {node.host.partition(".")[0] for node in nodes}
    return [
        f"{host.host} ({host.address})" if host.address else host.host
        for host in spec.host
        if not present & {_address(host), host.host.partition(".")[0]}
    ]


def _address(host: HostSpec) -> str | None:
    with suppress(OSError):
        return host.address or socket.gethostbyname(host.host)
    return None


def listed_hosts(nodes: Sequence[NodeFacts]) -> str:
    """The names of hosts, of which there may be many."""
    return join_words([node.host for node in nodes], limit=MOST_HOSTS)


def request_of(
    cluster: Cluster,
    nodes: Sequence[NodeFacts],
    tasks: Sequence[Task],
    run: RunOptions,
    sweep: SweepOptions | None = None,
) -> RunRequest:
    """What to submit: the tasks, checked on the machines of the cluster, with their exact plans.

    Raises:
        UserError: a path is missing on a machine, a task cannot be trained or fits nowhere, or the device for
            evaluations is not known.
    """
    devices = [(f"{node.host}:{device.index}", device) for node in nodes for device in node.devices]
    reasons: list[str] = []
    eval_device = None
    if run.eval_device is not None:
        try:
            eval_device = chosen_device(devices, run.eval_device, "--eval-device").id
        except UserError as error:
            reasons.append(str(error))
        reasons += _not_evaluated(tasks, len(devices))
    tasks, parcels = _with_data(cluster, [node for node in nodes if node.devices], tasks, run, reasons)
    refuse(reasons)  # plans of data that are not there would only repeat it
    plans, teachers = _plans(cluster, nodes, tasks, run.data_parallel > 1, eval_device is not None)
    reasons += _not_trained(plans)
    plans = {
        name: {key: plan for key, plan in by_class.items() if not plan.refused} for name, by_class in plans.items()
    }
    candidates = [
        CandidateDevice(
            device.id, device.plan_class, node.host, budget=device.budget, name=f"{device.name} on {node.host}"
        )
        for node in nodes
        for device in node.devices
        if device.id != eval_device
    ]
    for name, by_class in plans.items():
        memory = {key: plan.needed for key, plan in by_class.items()}
        if memory and (why := refusal(name, memory, candidates, run.data_parallel)):
            reasons.append(why)
    refuse(reasons)
    compared = None
    if sweep:
        compared, tasks = plan_sweep(sweep, tasks, plans)
    now = time.time()  # with milliseconds, since other users may start a run in the same second
    name = time.strftime("run-%Y%m%d-%H%M%S", time.localtime(now)) + f"-{int(now * 1000) % 1000:03}"
    return RunRequest(
        name=run.name or name,
        tasks=list(tasks),
        plans=plans,
        shared=run.shared,
        mirror_steps=run.mirror_steps,
        join=run.join,
        data_parallel=run.data_parallel,
        jobs_per_device=run.jobs_per_device,
        eval_device=eval_device,
        sweep=compared,
        by=f"{_user()}@{socket.gethostname()}",
        teachers=teachers,
        parcels=parcels,
        storage=run.storage,
    )


def _user() -> str:
    with suppress(OSError, KeyError):  # no name is known for the user's number
        return getpass.getuser()
    return "?"


def _not_evaluated(tasks: Iterable[Task], devices: int) -> Iterator[str]:
    """Why a device cannot be reserved for evaluations."""
    if devices == 1:
        yield "--eval-device needs a second device, but the cluster has one: leave it out."
    for task in tasks:
        if (train := task.options.get("train", "lora")) != "lora":
            yield (
                f"{task.name}: --eval-device measures adapters, but --train {train} trains something else: leave it "
                "out."
            )


# -- data --------------------------------------------------------------------------------------------------------------


def _users_of_paths(tasks: Sequence[Task]) -> dict[str, list[str]]:
    """The paths that machines must have, with the tasks that name them."""
    users: dict[str, list[str]] = {}
    for task in tasks:
        for path in map(task.options.get, HERE):
            if isinstance(path, str) and os.path.isabs(path):
                users.setdefault(path, []).append(task.name)
    return users


def check_here(tasks: Sequence[Task]) -> None:
    """Refuse paths that cannot be read on this machine, which is all that the cluster will have.

    Raises:
        UserError: there are some.
    """
    refuse(
        f"{path} of {join_words(users, limit=1)} cannot be used, since it {why}: check the path."
        for path, users in _users_of_paths(tasks).items()
        if (why := unreadable(path, []))
    )


def _with_data(
    cluster: Cluster, nodes: Sequence[NodeFacts], tasks: Sequence[Task], run: RunOptions, reasons: list[str]
) -> tuple[Sequence[Task], list[Parcel]]:
    """The tasks, whose data all nodes have, or get, and the parcels that were sent. Appends to the reasons."""
    users = _users_of_paths(tasks)
    paths = sorted({*users, *([run.shared] if run.shared else [])})
    nodes_by_path: dict[str, list[NodeFacts]] = {}
    why: dict[str, str] = {}
    parcels: dict[str, Parcel] = {}
    for node in nodes:
        for path, sentence in cluster.host(node.id, "check_paths", paths).items():
            nodes_by_path.setdefault(path, []).append(node)
            why.setdefault(path, sentence)
    if nodes_by_path and run.send_data:
        tasks, parcels = send_data([(cluster.store(node.id), node.host) for node in nodes], tasks, nodes_by_path.keys())
        for node in nodes:
            for parcel in parcels.values():
                cluster.host(node.id, "place", parcel, seconds=PLAN_SECONDS)
    for path in [path for path in nodes_by_path if path not in parcels]:
        hosts = listed_hosts(nodes_by_path[path])
        if path == run.shared:
            reasons.append(f"The shared folder {path} is missing on {hosts}: mount it there, or leave --shared out.")
            continue
        first, *other_tasks = users[path]
        of = f"of {first}" + (f" and {count_noun(len(other_tasks), 'other')}" if other_tasks else "")
        if os.path.exists(path):
            reasons.append(
                f"{path} {of} is on this machine, but {hosts} cannot read it: put it into a folder that all machines "
                "have, or give --send-data."
            )
        else:
            reasons.append(f"{path} {of} cannot be used on {hosts}: {why[path].rstrip('.')}.")
    if run.storage and nodes:
        reasons += _unusable_storage(cluster, nodes, run.storage)
    if run.shared and run.shared not in nodes_by_path and nodes:
        outputs = [Task(task.name, {}, task.output) for task in tasks]
        try:
            cluster.host(nodes[0].id, "check_outputs", outputs)
        except UserError as error:
            reasons.append(str(error))
    return tasks, list(parcels.values())


def _unusable_storage(cluster: Cluster, nodes: Sequence[NodeFacts], storage: str) -> Iterator[str]:
    """Refusals of a storage that a host cannot use, or that is not the same on all hosts."""
    name, (first, *other_nodes) = secrets.token_hex(8), nodes
    try:
        cluster.host(first.id, "check_storage", storage, name, True)
        for node in other_nodes:
            if not cluster.host(node.id, "check_storage", storage, name, False):
                yield f"{node.host} does not find in {storage} what {first.host} has written: mount the same there."
    except UserError as error:
        yield f"{first.host}: {error}"


# -- plans -------------------------------------------------------------------------------------------------------------


def _plans(
    cluster: Cluster, nodes: Sequence[NodeFacts], tasks: Sequence[Task], shared: bool, cached: bool
) -> tuple[Plans, dict[str, CachedTeacher]]:
    """What each task needs on devices of each class: one machine that has such a device plans all of them.

    cached: teachers are cached; what tasks need is without them then, and with them in what is told of these tasks.
    """
    planners: dict[str, tuple[NodeFacts, DeviceFacts]] = {}
    for node in nodes:
        for device in node.devices:
            planners.setdefault(device.plan_class, (node, device))
    plans: Plans = {task.name: {} for task in tasks}
    teachers: dict[str, CachedTeacher] = {}
    jobs = [{"name": task.name, "options": task.options} for task in tasks]
    for plan_class, (node, device) in planners.items():
        answer = cluster.host(node.id, "plan", jobs, device.index, shared, cached, seconds=PLAN_SECONDS)
        for name, plan in answer["tasks"].items():
            plans[name][plan_class] = from_plain(RunRequirements, plan)
        for name, cached_plan in answer["taught"].items():
            live, plans[name][plan_class] = plans[name][plan_class], from_plain(RunRequirements, cached_plan["needs"])
            teachers.setdefault(name, CachedTeacher(cached_plan["digest"], {})).live[plan_class] = live
    return plans, teachers


def _not_trained(plans: Plans) -> Iterator[str]:
    """Why tasks cannot be trained on any device."""
    for name, by_class in plans.items():
        refusals = [plan.refused for plan in by_class.values()]
        if refusals and None not in refusals:
            yield f"{name}: {refusals[0]}"
