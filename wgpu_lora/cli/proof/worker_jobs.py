"""The jobs of the proof's child processes: kinds `proof-devices` and so on, which only its workers know."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.api import answer, load
from wgpu_lora.cluster.worker.job_file import KINDS
from wgpu_lora.cluster.worker.job_process import EventWriter
from wgpu_lora.data import UNTRAINED
from wgpu_lora.demo.before_and_after import BATCH, Functions
from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import Matrices, read_adapter
from wgpu_lora.gpu.backends import backend
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_list import DeviceInfo, choose, list_devices
from wgpu_lora.gpu.memory_leases.ledger import device_key
from wgpu_lora.gpu.reference_values import as_float64, nmse
from wgpu_lora.gpu.single_kernel import SingleKernel
from wgpu_lora.gpu.timer import Timer
from wgpu_lora.infer.generator import Generator
from wgpu_lora.models.export.quantized_model import write_packed
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.ops.loss.loss import sum_by_slot
from wgpu_lora.ops.matmul.matmul import matmul_nt
from wgpu_lora.train.objectives.objective import Group
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.prepare_run import prepare_run
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.train.session.batch import Batch
from wgpu_lora.train.session.session import Session
from wgpu_lora.weights.base_formats import DEFAULT_FORMAT

for _job in ("devices", "generate", "step", "answers"):
    KINDS[f"proof-{_job}"] = f"{__name__}:{_job}"

AT_ONCE = 2  # devices that are used by default
TOLERANCE = 1e-9  # mean squared error of an f32 product over its mean square; rounding alone gives about 1e-13


def devices(port: EventWriter, *, select: str | None, discrete: int = 0) -> dict[str, Any]:
    """The devices, the hardware behind each, the indices of those used, and the error of a product on each of these.

    select: indices or names, separated by commas; `refused` says what is wrong with it.
    discrete: how many discrete devices are wanted if `select` is None.
    """
    result = list_devices()
    try:
        indices = default_devices(result, max(AT_ONCE, discrete))
        if select and result:
            indices = [choose(part.strip())[0].index for part in select.split(",")]
    except UserError as error:
        return {"refused": str(error)}
    if len(set(indices)) != len(indices):
        return {"refused": f"--devices {select} names a device twice: name each once."}
    return {
        "devices": [info.as_dict() for info in result],
        "hardware": [device_key(info, result) for info in result],
        "used": indices,
        "asked": select is not None,
        "computed": {index: multiply(index) for index in indices},
        "webgpu": backend().versions(),
    }


def default_devices(devices: list[DeviceInfo], count: int = AT_ONCE) -> list[int]:
    """The first devices of different hardware, discrete ones first: Windows lists a device once for each API."""
    first = {device_key(info, devices): info.index for info in reversed(devices)}
    return sorted(first.values())[:count]


def multiply(index: int) -> dict[str, Any]:
    """A product of random matrices, compared with float64."""
    device, rng = Device(index), np.random.default_rng(0)
    a, b = rng.standard_normal((32, 64), np.float32), rng.standard_normal((48, 64), np.float32)
    arrays = {"a": a, "b": b, "y": np.zeros((32, 48), np.float32)}
    single = SingleKernel(device, matmul_nt, arrays, {"m": 32, "n": 48, "k": 64, **matmul_nt.defaults})
    single.run()
    error = nmse(single.outputs()[0], as_float64(a) @ as_float64(b).T)
    single.free()
    return {"error": error, "fine": error < TOLERANCE}


PROMPTS, SHORT = 4, 48  # rows that are continued, by how many tokens
POSITIONS = 16  # of each answer whose logits are saved


def generate(port: EventWriter, *, options: dict[str, Any], device: int, arrays: str) -> dict[str, Any]:
    """Imports the model into a temporary directory, and continues held-out rows with what was saved there.

    Logits go to the .npz file `arrays`, one [positions, vocab] for each prompt; the rest is returned.
    """
    args, opened = TrainingArguments(**options), Device(device)
    packed = Path(tempfile.mkdtemp()) / "packed"  # among the proof's caches, which it removes
    write_packed(open_model(args.model or "demo", opened), packed)
    args = replace(args, model=str(packed))
    model = open_model(str(packed), opened, args.base_dtype)
    heldout = prepare_run(args, model).heldout
    assert heldout, "a proof's recipe has held-out data"
    # The tokens before the first that is trained, or half of a row that is trained on from its start.
    untrained = [(row.input_ids.tolist(), int(np.argmax(row.labels != UNTRAINED))) for row in heldout.rows[:PROMPTS]]
    prompts = [ids[: count or max(1, len(ids) // 2)] for ids, count in untrained]
    logits: list[list[np.ndarray]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    stop_ids = model.tokenizer.stop_ids if model.tokenizer else ()
    capacity = min(max(map(len, prompts)) + SHORT, model.config.max_position_embeddings)
    with Generator(model, None, capacity, len(prompts)) as generator:

        def on_token(sequence: int, token: int) -> None:
            row = generator.last_logits()
            second, first = np.partition(row, -2)[-2:]
            gaps[sequence].append(float(first - second))
            if len(logits[sequence]) < POSITIONS:
                logits[sequence].append(row.copy())

        result = generator.generate(prompts, None, SHORT, stop_ids=stop_ids, on_token=on_token)
    np.savez(arrays, *map(np.array, logits))  # arr_0, arr_1 ...
    linears = [item.weight for layer in model.decoder.layers for item in layer.linears.values()]
    decode = model.tokenizer.decode if model.tokenizer else str
    return {
        "matrices": len(linears),
        "packed_matrices": sum(weight.format == DEFAULT_FORMAT for weight in linears),
        "answers": [{"ids": g.token_ids, "gaps": gaps[i], "text": decode(g.token_ids)} for i, g in enumerate(result)],
    }


def answers(
    port: EventWriter,
    *,
    prompts: list[Any],
    adapters: list[str | None],
    model: str,
    base_dtype: str,
    device: int,
    enable_thinking: bool | None = None,
) -> list[list[str]]:
    """The texts of all answers by each adapter; None is the model alone."""
    opened = load(model, device=device, base_dtype=base_dtype)
    options: dict[str, Any] = {
        "batch": BATCH,
        "max_new_tokens": Functions.new_tokens,
        "enable_thinking": enable_thinking,
    }
    results = (answer(opened, prompts, adapter=adapter, progress_bar=False, **options) for adapter in adapters)
    return [[completion.text for completion in result] for result in results]


REPEATS = 3  # of the timed step
# A direction's length over its matrix's. Each is compared with its half and its quarter; if the loss is too curved
# between them, the next is taken. Which one that is depends only on the measured losses, never on the gradient.
LENGTHS = tuple(0.1 / 2**i for i in range(8))
BENT = 0.05  # by how much two may differ; their extrapolation is then accurate to some thousandths
ROUNDING = 2e-6  # of the loss: error of a difference in f32; 4e-7 was measured
ZERO_SCALE = 0.01  # size of a value, for a matrix that is all zeros


def step(port: EventWriter, *, directory: str, device: int, differences: bool) -> dict[str, Any]:
    """The first step of the run in a directory, repeated without writing to it.

    clock: of `clock`. gradients: of `gradients`, if there shall be `differences`.
    """
    record = RunRecord.read(Path(directory))
    job = prepare_job(replace(record.options, device=str(device), resume=False), planning=True)
    session, run = job.session, job.run
    with closing(session):
        session.allocate(choices=record.state.tiles)
        first = next(run.stream.steps())  # depends on the options only (train.session.data_stream)
        batches = [(session.batch_for(groups), groups) for groups in run.stream.groups(first)]
        result = {}
        if differences:  # first, while the gradients are zero
            rng = np.random.default_rng(run.args.seed)
            result["gradients"] = gradients(session, *batches[0], read_adapter(directory)[1], rng)
        run.place_initial(session)
        result["clock"] = clock(session, batches, run.stream.units(first.samples))
        return result


def clock(session: Session, batches: Sequence[tuple[Batch, list[Group]]], units: int) -> dict[str, Any]:
    """Median device and host seconds of a step, and its loss, a mean over `units`, which is in the run's log too."""
    timer = Timer(session.device)
    device_seconds, host_seconds = [], []
    for repeat in range(-2, REPEATS):  # the first run compiles, the second finds where to split a long step
        session.begin()
        begin, seconds = time.perf_counter(), 0.0
        for batch, groups in batches:
            batch.upload(groups)
            if repeat < 0:
                batch.program.run()
            else:
                seconds += timer.run(batch.program)
        device_seconds.append(seconds)
        host_seconds.append(time.perf_counter() - begin)
    timer.free()
    return {
        "clock": timer.clock,
        "dispatches": sum(len(batch.program.dispatches) for batch, _ in batches),
        "device_seconds": statistics.median(device_seconds[-REPEATS:]),
        "host_seconds": statistics.median(host_seconds[-REPEATS:]),
        "loss": session.totals.read_loss(session.device, 0) / units,
    }


def gradients(
    session: Session, batch: Batch, groups: list[Group], adapter: Matrices, rng: np.random.Generator
) -> dict[str, Any]:
    """The gradients that the run's program computes of a batch's loss L, next to central differences of L.

    For a random direction v of a matrix W: L(W + v) - L(W - v), measured and extrapolated to its linear part, and as
    the gradient predicts it; see `difference`.
    """
    device, adapters, program = session.device, session.adapters, batch.program
    batch.upload(groups)
    adapters.write(device, 0, adapter)
    session.begin()
    program.run()
    recorded = adapters.read(device, 0, adapters.grads)
    # Differences need only the forward pass, which ends with the sum of the loss.
    forward = 1 + max(i for i, dispatch in enumerate(program.dispatches) if dispatch.kernel is sum_by_slot)

    def loss(matrices: Matrices) -> float:
        """The loss with these matrices; all others stay unchanged."""
        adapters.write(device, 0, matrices)
        session.begin()
        program.submit_in_pieces(0, forward)
        return session.totals.read_loss(device, 0) * groups[0].weight

    centre = loss(adapter)
    by_name: dict[str, list[str]] = {}
    for module in adapters.modules(0):
        by_name.setdefault(module.rpartition(".")[2], []).append(module)
    directions = []
    # One module of each name, from first layer to last.
    for share, of in zip(np.linspace(0, 1, len(by_name)), by_name.values(), strict=True):
        module = of[round(share * (len(of) - 1))]
        for factor in (0, 1):
            matrix, gradient = (matrices[module][factor].astype(np.float64) for matrices in (adapter, recorded))
            direction = rng.standard_normal(matrix.shape)
            size = np.linalg.norm(matrix) or ZERO_SCALE * np.sqrt(matrix.size)
            direction *= size / np.linalg.norm(direction)

            def moved(by: float, module: str = module, factor: int = factor, to: np.ndarray = direction) -> float:
                matrices = list(adapter[module])
                matrices[factor] = (matrices[factor] + by * to).astype(np.float32)
                return loss({module: (matrices[0], matrices[1])})

            result = difference(moved, 2 * float((gradient * direction).sum()), centre)
            adapters.write(device, 0, {module: adapter[module]})
            directions.append({"matrix": f"{module}.{'AB'[factor]}", **result})
    return {"loss": centre, "rounding": ROUNDING, "directions": directions}


def difference(loss: Callable[[float], float], slope: float, centre: float) -> dict[str, Any]:
    """A central difference, and what the slope predicts for it, at the first length where the loss is straight.

    loss: of a matrix moved by this share of a direction. centre: the loss of the matrix itself.
    `length` is None if the loss is too curved at every length. A loss that is not finite is a measurement as well.
    """

    def straight(whole: float, half: float) -> bool:  # as far as f32 can tell
        return abs(2 * half - whole) <= BENT * abs(whole) + 2 * ROUNDING * abs(centre)

    at: list[float] = []
    for length in LENGTHS:
        at.append(loss(length) - loss(-length))
        if not math.isfinite(at[-1]):
            return {"length": length, "measured": at[-1], "gradient": slope * length}
        if len(at) >= 3 and straight(at[-3], at[-2]) and straight(at[-2], at[-1]):
            # Richardson extrapolation: the cubic term is eight times as large in the whole as in the half.
            estimate = (8 * at[-2] - at[-3]) / 3
            return {"length": 4 * length, "measured": estimate, "gradient": slope * 4 * length}
    return {"length": None, "measured": None, "gradient": slope}
