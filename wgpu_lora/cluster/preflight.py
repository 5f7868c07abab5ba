"""A run before it is submitted: whatever can be refused is refused here, all of it at once."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

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
from wgpu_lora.cluster.placement import refusal
from wgpu_lora.cluster.placement_field import Place
from wgpu_lora.errors import UserError
from wgpu_lora.text import count_noun, join_words
from wgpu_lora.train.memory import RunRequirements

MOST_SAID = 20  # refusals that are listed


@dataclass
class Refusals:
    """What is wrong, by sentence; equal ones count once."""

    said: dict[str, None] = field(default_factory=dict)

    def add(self, *sentences: str) -> None:
        self.said.update(dict.fromkeys(sentences))

    def settle(self) -> None:
        """Raise UserError if there are any."""
        if not self.said:
            return
        found = list(self.said)
        if len(found) == 1:
            raise UserError(found[0])
        rest = len(found) - MOST_SAID
        more = [f"and {rest:,} more"] if rest > 0 else []
        raise UserError(f"The run is refused for {len(found):,} reasons: mend them all.", [*found[:MOST_SAID], *more])


MOST_HOSTS = 3  # that a sentence names
SURVEY_SECONDS = 120.0


def surveyed(cluster: Cluster, own: Versions, here: bool = False) -> list[NodeFacts]:
    """The nodes of the cluster, with their devices as they are now.

    Args:
        here: it is Ray of this machine.

    Raises:
        UserError: a node has another version of something than this machine, or there is no device.
    """
    nodes = [from_plain(NodeFacts, one) for one in cluster.controller("nodes", seconds=SURVEY_SECONDS)]
    refusals = Refusals()
    refusals.add(*_other_versions(nodes, own, here))
    if not any(node.devices for node in nodes):
        refusals.add(
            f"The cluster has no WebGPU device ({listed_hosts(nodes)}): see 'wgpu-lora info' on its machines."
            if nodes
            else "The cluster has no node that answers: see 'wgpu-lora cluster status'."
        )
    refusals.settle()
    return nodes


def _other_versions(nodes: Iterable[NodeFacts], own: Versions, here: bool) -> Iterable[str]:
    from wgpu_lora.cluster.node_versions import difference

    for node in nodes:
        # The controller leaves out nodes that differ from the head, by which they have no devices.
        if not (what := difference(own, node.versions)) or not (node.devices or here):
            continue
        if here:
            yield (
                f"Ray of this machine was started before something changed here ({what}): end it with "
                "'wgpu-lora cluster down --local', and run again."
            )
        else:
            yield f"{node.host} ({node.address}) differs from this machine: {what}; install the same there and here."


def missing_hosts(nodes: Sequence[NodeFacts], spec: ClusterFile) -> list[str]:
    """The hosts of a cluster file that are no nodes of the cluster now, by their addresses or names."""
    known = {node.address for node in nodes} | {node.host.partition(".")[0] for node in nodes}
    return [
        f"{host.host} ({host.address})" if host.address else host.host
        for host in spec.host
        if not known & {_address(host), host.host.partition(".")[0]}
    ]


def _address(host: HostSpec) -> str | None:
    with suppress(OSError):
        return host.address or socket.gethostbyname(host.host)
    return None


def listed_hosts(nodes: Sequence[NodeFacts]) -> str:
    """The names of hosts, of which there may be many."""
    names = [node.host for node in nodes]
    return join_words(names[:MOST_HOSTS], len(names) - MOST_HOSTS if len(names) > MOST_HOSTS else 0)


PLAN_SECONDS = 900.0  # opening a large model over a network takes minutes


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
    refusals = Refusals()
    eval_device = _eval_device(nodes, run.eval_device, refusals)
    tasks, parcels = _with_data(cluster, nodes, tasks, run, refusals)
    if eval_device is not None:
        refusals.add(*_not_measured(tasks))
    refusals.settle()  # plans of data that are not there would only repeat it
    plans, teachers = _plans(cluster, nodes, tasks, run.data_parallel > 1, eval_device is not None, refusals)
    others = [] if eval_device is None else [eval_device]
    refusals.add(*_fits_nowhere(tasks, plans, nodes, run.data_parallel, others))
    refusals.settle()
    compared = None
    if sweep:
        from wgpu_lora.cluster.sweep import planned

        compared, tasks = planned(sweep, tasks, plans)
    return RunRequest(
        name=run.name or name_now(),
        tasks=list(tasks),
        plans=plans,
        shared=run.shared,
        mirror_steps=run.mirror_steps,
        join=run.join,
        data_parallel=run.data_parallel,
        jobs_per_device=run.jobs_per_device,
        eval_device=eval_device,
        sweep=compared,
        by=asked_by(),
        teachers=teachers,
        parcels=parcels,
        storage=run.storage,
    )


def name_now() -> str:
    """The name of a run that is given none: its time, and a few digits of it, since others begin runs, too."""
    now = time.time()
    return time.strftime("run-%Y%m%d-%H%M%S", time.localtime(now)) + f"-{int(now * 1000) % 1000:03}"


def asked_by() -> str:
    """The user and the host that ask."""
    user = "?"
    with suppress(OSError, KeyError):  # no name is known for the user's number
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


# -- devices -----------------------------------------------------------------------------------------------------------


def _eval_device(nodes: Sequence[NodeFacts], given: str | None, refusals: Refusals) -> str | None:
    """The id of the device that a person names: by its key, its id, or a part of its name."""
    if given is None:
        return None
    devices = [(node, device) for node in nodes for device in node.devices]
    exact = [device for _, device in devices if given in (device.id, device.key)]
    part = [device for _, device in devices if given.casefold() in device.name.casefold()]
    found = exact or part
    if len(found) != 1:
        names = [f"{device.key} ({device.name}) on {node.host}" for node, device in devices]
        known = join_words(names[:MOST_HOSTS], max(0, len(names) - MOST_HOSTS))
        which = "no device of the cluster" if not found else f"{count_noun(len(found), 'device')} of the cluster"
        refusals.add(f"--eval-device {given} names {which}: give a key or more of the name; there are {known}.")
        return None
    if len(devices) == 1:
        refusals.add("--eval-device needs a second device, but the cluster has one: leave it out.")
    return found[0].id


def _not_measured(tasks: Iterable[Task]) -> Iterable[str]:
    for task in tasks:
        if task.options.get("train", "lora") != "lora":
            yield (
                f"{task.name}: --eval-device measures adapters, but --train {task.options['train']} trains something "
                "else: leave it out."
            )


def _fits_nowhere(
    tasks: Sequence[Task],
    plans: dict[str, dict[str, RunRequirements]],
    nodes: Sequence[NodeFacts],
    devices: int,
    excluded: Sequence[str],
) -> Iterable[str]:
    places = [
        Place(device.id, device.plan_class, node.host, budget=device.budget, name=f"{device.name} on {node.host}")
        for node in nodes
        for device in node.devices
        if device.id not in excluded
    ]
    for task in tasks:
        needed = {name: plan.needed for name, plan in plans.get(task.name, {}).items() if plan.refused is None}
        if needed and (why := refusal(task.name, needed, places, devices)):
            yield why


# -- data --------------------------------------------------------------------------------------------------------------


def paths_of(task: Task) -> list[str]:
    """The paths of a task that its machine must have."""
    return [path for name in HERE if isinstance(path := task.options.get(name), str) and os.path.isabs(path)]


def check_here(tasks: Sequence[Task]) -> None:
    """Refuse paths that cannot be read on this machine, which is all that the cluster will have.

    Raises:
        UserError: there are some.
    """
    refusals = Refusals()
    for task in tasks:
        for path in paths_of(task):
            if why := unreadable(path, []):
                refusals.add(f"{path} of {task.name} cannot be used, since it {why}: check the path.")
    refusals.settle()


def _with_data(
    cluster: Cluster, nodes: Sequence[NodeFacts], tasks: Sequence[Task], run: RunOptions, refusals: Refusals
) -> tuple[list[Task], list[Parcel]]:
    """The tasks, whose data all machines with devices have, or get, and the parcels that were sent."""
    users: dict[str, list[str]] = {}
    for task in tasks:
        for path in paths_of(task):
            users.setdefault(path, []).append(task.name)
    if run.shared:
        users.setdefault(run.shared, [])
    lacking: dict[str, list[NodeFacts]] = {}
    why: dict[str, str] = {}
    parcels: dict[str, Parcel] = {}
    able = [node for node in nodes if node.devices]
    for node in able:
        for path, sentence in cluster.host(node.id, "check_paths", sorted(users)).items():
            lacking.setdefault(path, []).append(node)
            why.setdefault(path, sentence)
    if lacking and run.send_data:
        stores = [(cluster.store(node.id), node.host) for node in able]
        tasks, parcels = send_data(stores, tasks, lacking.keys())
        for node in able:
            for parcel in parcels.values():
                cluster.host(node.id, "place", parcel, seconds=PLAN_SECONDS)
        lacking = {path: hosts for path, hosts in lacking.items() if path not in parcels}
    for path, hosts in lacking.items():
        refusals.add(_lacks(path, hosts, why[path], users[path], path == run.shared))
    if run.storage and able:
        refusals.add(*_unusable_storage(cluster, able, run.storage))
    if run.shared and run.shared not in lacking and able:
        outputs = [Task(task.name, {}, task.output) for task in tasks]
        try:
            cluster.host(able[0].id, "check_outputs", outputs)
        except UserError as error:
            refusals.add(str(error))
    return list(tasks), list(parcels.values())


def _unusable_storage(cluster: Cluster, nodes: Sequence[NodeFacts], storage: str) -> Iterable[str]:
    """Refusals of a storage that a host cannot use, or that is not the same on all hosts."""
    name, (first, *others) = secrets.token_hex(8), nodes
    try:
        cluster.host(first.id, "check_storage", storage, name, True)
        for node in others:
            if not cluster.host(node.id, "check_storage", storage, name, False):
                yield f"{node.host} does not find in {storage} what {first.host} has written: mount the same there."
    except UserError as error:
        yield f"{first.host}: {error}"


def _lacks(path: str, hosts: Sequence[NodeFacts], why: str, users: Sequence[str], shared: bool) -> str:
    if shared:
        return f"The shared folder {path} is missing on {listed_hosts(hosts)}: mount it there, or leave --shared out."
    of = f"of {users[0]}" + (f" and {count_noun(len(users) - 1, 'other')}" if len(users) > 1 else "")
    if os.path.exists(path):
        return (
            f"{path} {of} is on this machine, but {listed_hosts(hosts)} cannot read it: put it into a folder that all "
            "machines have, or give --send-data."
        )
    return f"{path} {of} cannot be used on {listed_hosts(hosts)}: {why.rstrip('.')}."


# -- plans -------------------------------------------------------------------------------------------------------------


def _plans(
    cluster: Cluster, nodes: Sequence[NodeFacts], tasks: Sequence[Task], shared: bool, cached: bool, refusals: Refusals
) -> tuple[dict[str, dict[str, RunRequirements]], dict[str, CachedTeacher]]:
    """What each task needs on devices of each class: one machine that has such a device plans all of them.

    cached: teachers are cached; what tasks need is without them then, and with them in what is told of these tasks.
    """
    asked: dict[str, tuple[NodeFacts, DeviceFacts]] = {}
    for node in nodes:
        for device in node.devices:
            asked.setdefault(device.plan_class, (node, device))
    plans: dict[str, dict[str, RunRequirements]] = {task.name: {} for task in tasks}
    teachers: dict[str, CachedTeacher] = {}
    jobs = [{"name": task.name, "options": task.options} for task in tasks]
    for plan_class, (node, device) in asked.items():
        given = jobs, device.index, shared, cached
        found = cluster.host(node.id, "plan", *given, seconds=PLAN_SECONDS)
        for name, plan in found["tasks"].items():
            plans[name][plan_class] = from_plain(RunRequirements, plan)
        for name, told in found["taught"].items():
            live, plans[name][plan_class] = plans[name][plan_class], from_plain(RunRequirements, told["needs"])
            teachers.setdefault(name, CachedTeacher(told["digest"], {})).live[plan_class] = live
    for name, by_class in plans.items():
        if by_class and all(plan.refused is not None for plan in by_class.values()):
            refusals.add(next(f"{name}: {plan.refused}" for plan in by_class.values()))
    able = {name: {key: plan for key, plan in found.items() if not plan.refused} for name, found in plans.items()}
    return able, teachers
