"""The actor that decides for all runs of a cluster: what starts where, what is resumed, and what has ended."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from filelock import Timeout

from wgpu_lora.cluster.actors.data_parallel import ReplicaActor
from wgpu_lora.cluster.actors.evaluation_actor import EvaluationActor
from wgpu_lora.cluster.actors.host_actor import call_host, living_nodes, on_this_node
from wgpu_lora.cluster.actors.training_actor import TrainingActor
from wgpu_lora.cluster.cluster_paths import ADAPTERS
from wgpu_lora.cluster.controller import run_queue, run_state
from wgpu_lora.cluster.controller.run_state import CacheState, ClusterState, TaskState, UnitState
from wgpu_lora.cluster.controller.state_file import read_state_file, state_bytes, state_file
from wgpu_lora.cluster.device_resources import DEVICE
from wgpu_lora.cluster.messages import (
    CONTROLLER,
    NAMESPACE,
    Commit,
    NodeFacts,
    Parcel,
    Report,
    RunRequest,
    StoredFile,
    Task,
    from_plain,
)
from wgpu_lora.cluster.node_versions import difference, own_versions
from wgpu_lora.cluster.placement.placement import place
from wgpu_lora.errors import UserError, reason
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.files.json_files import to_json
from wgpu_lora.files.locks import lock_file

LOCK = "lock"
HEAD = "node:__internal_head__"  # the resource that Ray gives the head alone
TURN_SECONDS, SURVEY_SECONDS = 1.0, 10.0
POLL_SECONDS = 5.0  # that a turn waits for reports
HUNG_SECONDS = 60.0  # without a report, after which an actor is taken for lost
START_SECONDS = 120.0  # that a training actor may take to start
MEASURE_SECONDS = 300.0
PUBLISH_SECONDS, RETRY_SECONDS = 600.0, 15.0  # that writing a result may take, and before it is tried again
MISSES = 3  # surveys in a row that a node may miss while Ray takes it for alive
KEEP_SECONDS = 86400.0  # how long runs are shown that are over
IDLE_SECONDS = 60.0  # without a run, after which the actors of hosts and evaluations are ended
DRIVER_SECONDS = 1800.0  # more, after a driver has asked for nodes or results, whose hosts it then calls itself
CACHE_FAILURES, CACHE_RETRY_SECONDS = 3, 15.0
CALLS = 32  # that are answered at once


class RunController:
    """One per cluster, on its head. A thread takes a turn every second; calls and turns share the state by a lock.

    The state is a file that is replaced with every change, so that Ray can start the actor again.
    """

    def __init__(self, node: str):
        self._node, self._lock, self._wake = node, threading.RLock(), threading.Event()
        self._start, self._monotonic = time.time(), time.monotonic()
        self._actors: dict[str, Any] = {}  # training actors by unit
        self._reports: dict[str, tuple[Any, float]] = {}  # the report that a unit's actor was asked for, and when
        self._background: dict[str, Future[Any]] = {}  # work outside of turns, by name
        self._pool = ThreadPoolExecutor(CALLS, thread_name_prefix="background")
        self._surveys = ThreadPoolExecutor(CALLS, thread_name_prefix="survey")
        self._long = ThreadPoolExecutor(CALLS, thread_name_prefix="long")
        self._not_before: dict[str, float] = {}  # publishing is tried again
        self._queue, self._file_bytes, self._surveyed, self._last_use = run_queue.Queue(), b"", 0.0, self.now()
        self._misses: dict[str, int] = {}
        self._other_versions: dict[str, str | None] = {}
        self._evaluators: set[str] = set()  # devices whose actors have been made
        self._measured_steps: dict[tuple[str, str], int] = {}
        self._file = state_file()
        self._state = self._read()
        threading.Thread(target=self._run, daemon=True, name="turns").start()

    # -- the state -----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since 1970, by a clock that does not follow when the system's is set."""
        return self._start + time.monotonic() - self._monotonic

    def _read(self) -> ClusterState:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file_lock = lock_file(self._file.with_name(LOCK), 20.0).lock
        except (Timeout, OSError) as error:
            raise UserError(
                f"{self._file.parent} is used by another cluster, or cannot be written ({reason(error)}): set "
                "WGPU_LORA_CLUSTER_DIR on this host to another directory before Ray is started."
            ) from None
        try:
            state = read_state_file(self._file)
        except FileNotFoundError:
            return ClusterState()
        except (OSError, ValueError, KeyError, RecursionError) as error:
            backup = self._file.with_name(f"unreadable-{int(time.time())}.json")
            self._file.rename(backup)
            for actor in ray.util.list_named_actors(all_namespaces=True):  # of runs that nobody knows any more
                if actor["namespace"] == NAMESPACE and actor["name"].startswith(("train:", "evaluation:")):
                    with suppress(ValueError):
                        ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE))
            state = ClusterState()
            state.log(self.now(), f"{self._file} cannot be read ({error}): it is kept as {backup}.")
            return state
        if state.events:  # the clock must not go back
            self._start = max(self._start, state.events[-1].time)
        for device in state.devices.values():
            device.gone = True  # until a survey finds it
        state.nodes = []
        for cache in state.caches.values():
            cache.phase = "waiting" if cache.phase == "making" else cache.phase
        return state

    def _save(self) -> None:
        """Write the state if it has changed. Raises UserError if the disk refuses."""
        with self._lock:
            data = state_bytes(self._state)
            if data == self._file_bytes:
                return
            try:
                write_bytes_atomic(self._file, data)
            except OSError as error:
                raise UserError(f"The state of the cluster cannot be written ({reason(error)}): make room.") from None
            self._file_bytes = data

    # -- calls of drivers ----------------------------------------------------------------------------------------------

    def submit(self, request: dict[str, Any]) -> str:
        """Take a run, a RunRequest; returns its name. The same request again changes nothing. Raises UserError."""
        try:
            run = from_plain(RunRequest, request)
        except ValueError as error:
            raise UserError(f"The run is not valid ({error}): use the same version on all machines.") from None
        with self._lock:
            if self._state.requests.get(run.name) == run:
                return run.name
        if not self._state.nodes:
            self._survey()
        with self._lock:
            previous = self._state.requests.get(run.name)
            forgettable = run.name in run_state.forgettable_runs(self._state, self.now())
        if previous and forgettable:  # to its end: the new run has the same folders
            self._forget(run.name)
        with self._lock:
            run_state.check_run(self._state, run)
            run_queue.check_placeable(self._state, run)
            run_state.add_run(self._state, run, self.now())
            try:
                self._save()
            except UserError:
                run_state.forget_run(self._state, run.name)
                raise
        self._wake.set()
        return run.name

    def snapshot(self, run: str | None = None) -> dict[str, Any]:
        """A Snapshot of one run or of all."""
        with self._lock:
            if run is not None:
                run_state.check_exists(self._state, run)
            idle = self._idle()
        if idle and self.now() - self._surveyed > SURVEY_SECONDS:
            self._survey()
        with self._lock:
            return asdict(run_queue.snapshot(self._state, run, self.now()))

    def nodes(self) -> list[dict[str, Any]]:
        """The NodeFacts of all living nodes, as they are now."""
        self._last_use = self.now() + DRIVER_SECONDS
        self._survey()
        with self._lock:
            return [asdict(node) for node in self._state.nodes]

    def cancel(self, run: str, task: str | None = None) -> None:
        """End a task, or all of a run."""
        with self._lock:
            run_state.cancel_run(self._state, run, task, self.now())
            self._save()
        self._wake.set()

    def release(self, device: str) -> None:
        """Use a quarantined device again."""
        with self._lock:
            run_state.release_device(self._state, device, self.now())
            self._save()
        self._wake.set()

    def results(self, run: str) -> list[dict[str, Any]]:
        """Results that are not fetched yet: task, unit, nodes that have them, storage, and files with their digests.
        Those on hosts that are away are left out."""
        self._last_use = self.now() + DRIVER_SECONDS
        with self._lock:
            run_state.check_exists(self._state, run)
            results = []
            for task in self._state.tasks_of(run):
                if task.over and task.results and not task.fetched and (published := self._result(task)):
                    nodes, files = published
                    storage = self._state.requests[run].storage
                    plain = [asdict(file) for file in files]
                    results.append(
                        {"task": task.name, "unit": task.unit, "nodes": nodes, "storage": storage, "files": plain}
                    )
            return results

    def _result(self, task: TaskState) -> tuple[list[str], list[StoredFile]] | None:
        """The nodes that can read a task's result, and its files; None if these nodes are away."""
        commit = self._state.units[task.unit].commit
        if commit is None:
            return None
        nodes = [node for host in commit.hosts if (node := self._state.node_at(host))]
        if not nodes and commit.hosts:
            task.reason = f"its results are on {', '.join(commit.hosts)}, which is away"
            return None
        start = f"{ADAPTERS}/{task.name}/"
        files = [replace(f, path=f.path.removeprefix(start)) for f in commit.files if f.path.startswith(start)]
        return nodes or [self._node], files

    def _publish(self, task: TaskState) -> None:
        """Write a result to the shared folder, by a host that has it."""
        with self._lock:
            request, published = self._state.requests[task.run], self._result(task)
            output = next(candidate.output for candidate in request.tasks if candidate.name == task.name)
        if published is None:
            return
        (node, *_), files = published
        try:
            arguments = task.unit, task.name, files, output, request.shared, request.storage
            call_host(node, "publish", *arguments, seconds=PUBLISH_SECONDS)
        except (ConnectionError, UserError) as error:
            task.reason = f"its results are not in {output} yet: {error}"
            self._not_before[task.id] = self.now() + RETRY_SECONDS
            return
        with self._lock:
            task.reason = "" if task.state == "finished" else task.reason
        self.fetched(task.run, task.name)

    def fetched(self, run: str, task: str) -> None:
        """A driver has the results of a task."""
        with self._lock:
            state = self._state.tasks.get(f"{run}/{task}")
            if state and state.over and not state.fetched:
                state.fetched = True
                run_state.settle_run(self._state, run, self.now())
                self._save()

    def evaluations(self, run: str) -> list[dict[str, Any]]:
        """Held-out losses that another device has measured: task, step, eval_loss and time, in order."""
        try:
            return [json.loads(line) for line in self._evaluations(run).read_text().splitlines()]
        except FileNotFoundError:
            return []

    def _evaluations(self, run: str) -> Path:
        return self._file.with_name(f"evaluations-{run}.jsonl")

    # -- calls of training actors --------------------------------------------------------------------------------------

    def commit(self, commit: Commit) -> bool:
        """Take a stored checkpoint; False if the unit is another actor's."""
        with self._lock:
            if not run_state.accept_commit(self._state, commit):
                return False
            unit = self._state.units[commit.unit]
            self._save()
            request = self._state.requests[unit.run]
            if request.eval_device and not commit.final:
                self._run_in_background(f"evaluate {unit.id}", self._evaluate, unit.id, commit, pool=self._long)
            return True

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                self._turn()
            except Exception:  # the next turn may do better; Ray keeps what an actor prints
                traceback.print_exc(file=sys.stderr)
            self._wake.wait(TURN_SECONDS)
            self._wake.clear()

    def _turn(self) -> None:
        with self._lock:
            outdated = [
                run
                for run in run_state.forgettable_runs(self._state, self.now())
                if self.now() - self._state.runs[run].ended > KEEP_SECONDS
            ]
        for run in outdated:
            self._forget(run)
        if self._idle():
            self._save()
            self._end_idle_actors()
            return
        self._last_use = max(self._last_use, self.now())
        node_ids = set(living_nodes())
        if node_ids != {node.id for node in self._state.nodes} or self.now() - self._surveyed > SURVEY_SECONDS:
            self._run_in_background("survey", self._survey)
        self._find_actors()
        self._poll()
        self._make_caches()
        with self._lock:
            runs = [run.name for run in self._state.runs.values() if not run.ended]
            reserved = {self._state.requests[run].eval_device for run in runs}
        self._end_evaluators({device for device in self._evaluators if device not in reserved})
        with self._lock:
            matter = run_queue.speeds_matter(self._state)
            measures = run_state.devices_to_measure(self._state, self.now()) if matter else []
        for device, node, key in measures:
            self._run_in_background(f"measure {device}", self._measure, device, node, key)
        self._start_units()
        self._save()
        with self._lock:
            for task in self._state.tasks.values():
                is_due = self.now() >= self._not_before.get(task.id, 0.0)
                if task.results and not task.fetched and is_due and self._state.requests[task.run].shared:
                    self._run_in_background(f"publish {task.id}", self._publish, task)

    def _idle(self) -> bool:
        with self._lock:
            return all(run.ended for run in self._state.runs.values()) and not self._actors

    def _run_in_background(
        self, name: str, work: Callable[..., None], *arguments: Any, pool: ThreadPoolExecutor | None = None
    ) -> None:
        """Run something outside of turns, unless it is running. pool: for what takes long."""

        def guarded() -> None:
            try:
                work(*arguments)
            except Exception:
                traceback.print_exc(file=sys.stderr)
            finally:
                with self._lock:
                    self._background.pop(name, None)
                self._wake.set()

        with self._lock:
            if name not in self._background:
                self._background[name] = (pool or self._pool).submit(guarded)

    def _end_idle_actors(self) -> None:
        """After a while without anything to do, end the actors of hosts and evaluations, which hold memory."""
        if self.now() - self._last_use < IDLE_SECONDS:
            return
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == NAMESPACE and actor["name"] != CONTROLLER:
                with suppress(ValueError, ray.exceptions.RayError):
                    ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE))

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _survey(self) -> None:
        """Survey the devices of all nodes. One that is alive but does not answer keeps its last survey for a while."""
        node_ids = living_nodes()
        with self._lock:
            before = {node.id: node for node in self._state.nodes}
        facts = list(self._surveys.map(lambda node: self._ask_node(node, before.get(node)), node_ids))
        with self._lock:
            self._surveyed = self.now()
            run_state.take_survey(self._state, [node for node in facts if node is not None], self.now())

    def _ask_node(self, node: str, before: NodeFacts | None) -> NodeFacts | None:
        try:
            facts = from_plain(NodeFacts, call_host(node, "survey"))
        except Exception as error:  # of its driver or its files, too; others are surveyed all the same
            self._misses[node] = self._misses.get(node, 0) + 1
            if self._misses[node] == 1:
                with self._lock:
                    self._state.log(self.now(), f"Node {node:.8} does not tell its devices: {error}")
            return before if self._misses[node] < MISSES else None
        self._misses.pop(node, None)
        mismatch = difference(own_versions(), facts.versions)  # it would not train as the others do
        if mismatch and self._other_versions.get(node) != mismatch:
            with self._lock:
                text = f"No device of {facts.host} is used, since {mismatch}: install the head's."
                self._state.log(self.now(), text)
        self._other_versions[node] = mismatch
        return replace(facts, devices=[]) if mismatch else facts

    def _measure(self, device: str, node: str, key: str) -> None:
        speed = joined_speedup = None
        try:
            measurement = call_host(node, "measure", key, seconds=MEASURE_SECONDS)
            speed, joined_speedup = float(measurement["tokens_per_second"]), float(measurement["joined_speedup"])
        except (ConnectionError, UserError) as error:
            with self._lock:
                name = self._state.device_name(device)
                self._state.log(self.now(), f"The speed of {name} is not known: {error}")
        with self._lock:
            run_state.take_speed(self._state, device, speed, joined_speedup)

    # -- units ---------------------------------------------------------------------------------------------------------

    def _start_units(self) -> None:
        """Place what waits, and start its actors."""
        units: list[UnitState] = []
        with self._lock:
            state, now = self._state, self.now()
            for jobs in sorted({request.jobs_per_device for request in state.requests.values()}):
                devices = run_queue.candidate_devices(state, jobs, now)
                if all(device.out or device.active >= jobs for device in devices):
                    continue
                queue = self._queue.waiting_units(state, jobs, now)
                for placement in place(queue, devices, now) if queue else ():
                    unit = run_state.join_units(state, placement.tasks)
                    run_state.start_unit(state, unit, placement.devices, placement.peak_bytes, now)
                    units.append(unit)
            try:
                self._save()  # a generation must be known before its actor is
            except UserError as error:
                for unit in units:
                    run_state.wait_again(self._state, unit, now, str(error))
                raise
        for unit in units:
            self._start_actor(unit)

    def _start_actor(self, unit: UnitState) -> None:
        with self._lock:
            state = self._state
            order = run_queue.order_of(state, unit, self._node)
            jobs = state.requests[unit.run].jobs_per_device
            devices = [state.devices[name] for name in unit.devices]
        replicas = []
        for number, device in enumerate(devices[1:], 1):
            name = f"{_actor_name(unit)}:{number}"
            options = self._actor_options(name, device, jobs) | {"max_restarts": -1}
            ray.remote(ReplicaActor).options(**options).remote(device.facts.key, order.tasks[0].options, order.parcels)
            replicas.append(name)
        options = self._actor_options(_actor_name(unit), devices[0], jobs)
        handle = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
        actor = ray.remote(TrainingActor).options(**options).remote(replace(order, replicas=replicas), handle)
        with self._lock:
            self._actors[unit.id] = actor

    @staticmethod
    def _actor_options(name: str, device: run_state.DeviceState, jobs: int) -> dict[str, Any]:
        advertised = {key for node in ray.nodes() if node["NodeID"] == device.node for key in node["Resources"]}
        resources = {key: 1.0 / jobs for key in (device.facts.key, DEVICE) if key in advertised}
        return on_this_node(name, device.node, resources=resources)

    def _find_actors(self) -> None:
        """The actors of units that an earlier controller has started."""
        with self._lock:
            orphans = [unit for unit in self._state.placed() if unit.id not in self._actors]
        for unit in orphans:
            try:
                self._actors[unit.id] = ray.get_actor(_actor_name(unit), namespace=NAMESPACE)
            except ValueError:
                self._lose_unit(unit.id, "its actor is gone")

    def _poll(self) -> None:
        """Take the reports of all training actors, and pass on what is to end."""
        with self._lock:
            for unit in self._state.placed():
                if (actor := self._actors.get(unit.id)) and unit.id not in self._reports:
                    self._reports[unit.id] = actor.report.remote(), self.now()
            object_refs = {object_ref: unit for unit, (object_ref, _) in self._reports.items()}
        if not object_refs:
            return
        ready, _ = ray.wait(list(object_refs), num_returns=len(object_refs), timeout=POLL_SECONDS)
        for object_ref in ready:
            unit_id = object_refs[object_ref]
            self._reports.pop(unit_id, None)
            try:
                report = ray.get(object_ref)
            except ray.exceptions.ActorUnavailableError:
                continue
            except ray.exceptions.RayError as error:
                self._lose_unit(unit_id, _death(error))
                continue
            self._take_report(unit_id, report)
        with self._lock:
            now = self.now()
            late_units = [
                unit
                for unit in self._state.placed()
                if now - self._reports.get(unit.id, (None, now))[1] > (HUNG_SECONDS if unit.started else START_SECONDS)
            ]
        for unit in late_units:
            self._lose_unit(unit.id, "its actor does not answer" if unit.started else "its actor has not started")

    def _take_report(self, unit_id: str, report: Report) -> None:
        with self._lock:
            unit = self._state.units.get(unit_id)
            if unit is None or unit.phase != "placed":
                return
            if report.ended is not None:
                self._end_actor(unit_id)
            run_state.take_report(self._state, unit, report, self.now())
            tasks = self._state.members(unit) if unit.phase == "placed" else []
            cancel = bool(tasks) and all(task.ending == "cancelled" for task in tasks)
            ends = [task.name for task in tasks if task.ending and not task.outcome]
            if report.ended is not None:
                self._save()
        if actor := self._actors.get(unit_id):
            if cancel:
                actor.cancel.remote()
            elif ends:
                actor.end.remote(ends)

    def _lose_unit(self, unit_id: str, why: str) -> None:
        with self._lock:
            self._end_actor(unit_id)
            unit = self._state.units.get(unit_id)
            if unit and unit.phase == "placed":
                run_state.lose_unit(self._state, unit, why, self.now())
                self._save()

    def _end_actor(self, unit_id: str) -> None:
        """End the actors of a unit. One that cannot be reached can commit nothing any more."""
        self._reports.pop(unit_id, None)
        actor = self._actors.pop(unit_id, None)
        unit = self._state.units.get(unit_id)
        if actor is not None:
            ray.kill(actor)
        for number in range(1, len(unit.devices) if unit else 0):
            with suppress(ValueError, ray.exceptions.RayError):
                ray.kill(ray.get_actor(f"{_actor_name(unit)}:{number}", namespace=NAMESPACE))  # type: ignore[arg-type]

    # -- evaluations and teacher caches --------------------------------------------------------------------------------

    def _evaluator(self, device: str) -> Any:
        """The actor of an evaluation device. Raises ConnectionError if its device is gone."""
        with self._lock:
            state = self._state.devices.get(device)
        if state is None or state.gone:
            raise ConnectionError(f"{device} is gone")
        self._evaluators.add(device)
        options = self._actor_options(f"evaluation:{device}", state, 1)
        return ray.remote(EvaluationActor).options(**options).remote(state.facts.key)

    def _end_evaluators(self, devices: set[str]) -> None:
        """End the actors of these devices, which other runs can use then."""
        for device in devices & self._evaluators:
            self._evaluators.discard(device)
            with suppress(ValueError, ray.exceptions.RayError):
                ray.kill(ray.get_actor(f"evaluation:{device}", namespace=NAMESPACE))

    def _evaluate(self, unit_id: str, commit: Commit) -> None:
        """Measure the tasks of a commit; while that goes on, newer commits of the unit are not measured."""
        with self._lock:
            unit = self._state.units.get(unit_id)
            if unit is None:
                return
            request = self._state.requests[unit.run]
            tasks = {task.name: task for task in request.tasks}
            nodes = [node for host in commit.hosts if (node := self._state.node_at(host))]
            names = [name for name in unit.tasks if any(plan.heldout for plan in request.plans[name].values())]
        for name in names:
            if commit.steps.get(name, 0) <= self._measured_steps.get((unit.run, name), 0):
                continue
            try:
                task = run_queue.as_trained(self._state, request, tasks[name])
                actor = self._evaluator(request.eval_device or "")
                object_ref = actor.measure.remote(unit.run, task, commit, nodes, request.storage)
                step, loss = ray.get(object_ref)
            except (ray.exceptions.RayError, ConnectionError, ValueError) as error:
                with self._lock:
                    text = f"{unit.run}: the held-out loss of {name} was not measured: {_why(error)}"
                    self._state.log(self.now(), text)
                continue
            self._measured_steps[unit.run, name] = step
            self._take_loss(unit.run, name, step, loss)

    def _take_loss(self, run: str, name: str, step: int, loss: float) -> None:
        line = {"task": name, "step": step, "eval_loss": loss, "time": self.now()}
        with self._lock, suppress(OSError), self._evaluations(run).open("a") as file:
            file.write(to_json(line) + "\n")
        with self._lock:
            if task := self._state.tasks.get(f"{run}/{name}"):
                new = replace(task.progress, eval_loss=loss, best_eval_loss=loss)
                task.progress = run_state.merged_progress(task.progress, new)
                task.committed = run_state.merged_progress(
                    task.committed, replace(task.committed, eval_loss=loss, best_eval_loss=loss)
                )

    def _make_caches(self) -> None:
        """Begin teacher caches that units wait for, and follow those that are being made."""
        with self._lock:
            for cache in self._state.caches.values():
                waits = any(unit.phase == "waiting" for unit in run_queue.units_of_cache(self._state, cache))
                if cache.phase == "waiting" and waits and self.now() >= cache.not_before and self._state.nodes:
                    cache.phase, cache.reason = "making", ""
                if cache.phase == "making" and not run_queue.units_of_cache(self._state, cache):
                    self._end_evaluators({self._state.requests[cache.run].eval_device or ""})  # it was cancelled
                    cache.phase = "waiting"
                elif cache.phase == "making":
                    self._run_in_background(f"cache {cache.id}", self._make_cache, cache, pool=self._long)
                    self._run_in_background(f"cache progress {cache.id}", self._follow_cache, cache)

    def _make_cache(self, cache: CacheState) -> None:
        request = self._state.requests[cache.run]
        task = self._cached_task(cache)
        try:
            actor = self._evaluator(request.eval_device or "")
            parcels: dict[str, Parcel] = ray.get(actor.make_caches.remote(cache.run, cache.name, task.options))
            _, total = ray.get(actor.cache_progress.remote(cache.run, cache.name))
        except (ray.exceptions.RayError, ConnectionError) as error:
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
            with self._lock:
                self._cache_failed(cache, _why(error), final=isinstance(cause, UserError))
                self._save()
            return
        with self._lock:
            cache.phase, cache.parcels, cache.reason, cache.failures = "ready", parcels, "", 0
            cache.rows = cache.total = total or cache.total
            self._state.log(self.now(), f"{cache.run}: a teacher cache of {cache.total:,} rows is complete")
            self._save()

    def _follow_cache(self, cache: CacheState) -> None:
        with suppress(ray.exceptions.RayError, ConnectionError):
            actor = self._evaluator(self._state.requests[cache.run].eval_device or "")
            rows, total = ray.get(actor.cache_progress.remote(cache.run, cache.name), timeout=POLL_SECONDS)
            with self._lock:
                if rows > cache.rows:
                    cache.failures = 0
                cache.rows, cache.total = max(rows, cache.rows), total or cache.total
        time.sleep(TURN_SECONDS)

    def _cached_task(self, cache: CacheState) -> Task:
        request = self._state.requests[cache.run]
        names = {name for name, teacher in request.teachers.items() if teacher.cache == cache.name}
        return next(task for task in request.tasks if task.name in names)

    def _cache_failed(self, cache: CacheState, why: str, final: bool) -> None:
        """Try again later or, after some tries, let its tasks have live teachers where these fit."""
        state, now = self._state, self.now()
        cache.phase, cache.reason = "waiting", why
        cache.failures += 1
        units = run_queue.units_of_cache(state, cache)
        # Units that train with caches made earlier could not go on with a live teacher.
        if (not final and cache.failures < CACHE_FAILURES) or any(unit.phase != "waiting" for unit in units):
            cache.not_before = now + CACHE_RETRY_SECONDS * 2 ** (cache.failures - 1)
            state.log(now, f"{cache.run}: a teacher cache is tried again: {why}")
            return
        cache.phase = "failed"
        refusals = run_queue.Refusals(state, state.requests[cache.run])
        for unit in units:
            refusal = refusals.of(unit.tasks)
            if refusal is None:
                unit.commit = None
                name = run_state.unit_name(unit)
                state.log(now, f"{name} has its teacher beside it, since there is no teacher cache: {why}")
            else:
                about = f"There is no teacher cache ({why.rstrip('.')}), and with its teacher beside it: {refusal}"
                run_state.give_up(state, unit, about)
        run_state.settle_run(state, cache.run, now)

    # -- runs that are over --------------------------------------------------------------------------------------------

    def _forget(self, run: str) -> None:
        """Forget a run that is over, and have hosts remove what they keep of it."""
        with self._lock:
            state, storage = self._state, self._state.requests[run].storage
            digests_in_use = {
                p.digest for cache in state.caches.values() if cache.run != run for p in cache.parcels.values()
            }
            parcels = [
                parcel
                for cache in state.caches.values()
                if cache.run == run
                for parcel in cache.parcels.values()
                if parcel.digest not in digests_in_use
            ]
            run_state.forget_run(state, run)
            self._evaluations(run).unlink(missing_ok=True)

        def on(node: str) -> None:
            with suppress(ConnectionError, UserError, OSError):
                call_host(node, "forget", run, parcels, storage)

        list(self._surveys.map(on, living_nodes()))


def _actor_name(unit: UnitState) -> str:
    return f"train:{unit.id}:{unit.generation}"


def _death(error: Exception) -> str:
    """Why an actor has died, for people."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"its actor failed ({_why(error)})"
    return "its node was lost" if "its node has died" in str(error) else "its process ended"


def _why(error: Exception) -> str:
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    return str(cause) if isinstance(cause, UserError | ConnectionError) else f"{type(cause).__name__}: {cause}"


def run_controller() -> Any:
    """The handle of the cluster's controller, which is made if there is none.

    It is detached, so that jobs go on without a driver, and Ray starts it again whenever it dies. It is on the head
    alone, where its state is: without the head there is no cluster.

    Raises:
        UserError: Ray lists no living head.
    """
    head = next((node for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"]), None)
    if head is None:
        raise UserError("Ray lists no living head node of this cluster: start the cluster again.")
    retries = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": CALLS}
    options = on_this_node(CONTROLLER, head["NodeID"], **retries)
    return ray.remote(RunController).options(**options).remote(head["NodeID"])
