"""Memory: what was planned, tensors larger than a binding, activations that take less, and what wiping leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.models import golden, load
from support.training.shared_runs import assert_close_adapters
from support.training.training import golden_arguments, golden_job, gradients_of, model_dir, random_rows

import wgpu_lora
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.bench.training_step import TrainingStep, chosen_model
from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import WEIGHTS
from wgpu_lora.gpu.buffer_wipe import Wiper
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import BindingTooLarge
from wgpu_lora.gpu.device_list import list_devices
from wgpu_lora.gpu.program import Arena, Program, allocate, release
from wgpu_lora.gpu.tensor import persistent
from wgpu_lora.infer.generator import Generator
from wgpu_lora.models.architectures import parse_config
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.names.spelling import COMMAND_LINE, IN_FILE, PYTHON, Naming, naming
from wgpu_lora.ops.activation_storage import BLOCK, Saving, block_of, store
from wgpu_lora.ops.elementwise import add_forward, copy
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.training_log import LOG, read_log
from wgpu_lora.train.session.session import Session

# A process of its own, so that its resident memory is that of this run: prints bytes as JSON.
CHILD = """
import json, sys
import psutil
from wgpu_lora.events import Events
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
model, data, output = sys.argv[1:]
def resident():
    return psutil.Process().memory_info().rss
# A run on a tiny model first: drivers, compilers and libraries are then in memory already.
warm = TrainingArguments(model=sys.argv[1] + "-tiny", data=data, output=output + "-warm", max_steps=2, max_length=16,
                         per_device_train_batch_size=1, gradient_accumulation_steps=1, base_dtype="f32")
job = prepare_job(warm)
job.train()
device = job.session.device
args = TrainingArguments(model=model, data=data, output=output, max_steps=2, max_length=16, base_dtype="f32",
                         per_device_train_batch_size=1, gradient_accumulation_steps=1)
before, held = resident(), device.allocated
job = prepare_job(args, open_model(model, device, "f32"))
planned = job.session.memory().peak
highest = [0]
loading = []
class Watching(Events):
    def step(self, result):
        highest.append(resident())
    def loading(self, *tensor):
        loading.append(resident())
job.train(Watching())
print(json.dumps({"planned": planned, "allocated": device.peak_allocated - held, "resident": max(highest) - before,
                  "loading": max(loading) - before}))
"""


def make_model(directory: Path, hidden: int, layers: int) -> Path:
    """A random Qwen3 with f32 weights."""
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 128, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shapes = parse_config(config).parameter_shapes()
    tensors = {n: (rng.standard_normal(shape) * 0.02).astype(np.float32) for n, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.slow
@pytest.mark.skipif(
    list_devices()[0].kind != "software", reason="needs a software driver, whose memory is the process's own"
)
def test_resident_memory_is_what_was_planned(tmp_path: Path) -> None:
    """About 240 MB of weights: plan = allocation to the byte; resident memory within 15% plus 48 MB for the driver."""
    make_model(tmp_path / "model", 1024, 4)
    make_model(tmp_path / "model-tiny", 64, 1)
    data = random_rows(tmp_path / "rows.jsonl", 4, 512)
    command = [sys.executable, "-c", CHILD, str(tmp_path / "model"), str(data), str(tmp_path / "run")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert process.returncode == 0, process.stderr
    memory = json.loads(process.stdout.splitlines()[-1])
    assert memory["planned"] == memory["allocated"]
    assert abs(memory["resident"] - memory["planned"]) < 0.15 * memory["planned"] + (48 << 20), memory
    # While loading, the host holds a piece of one tensor, not the model.
    assert memory["loading"] - memory["planned"] < 512 << 20, memory


# -- tensors larger than one binding of the device ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "options"),
    [
        (PYTHON, "per_device_train_batch_size or max_length"),
        (COMMAND_LINE, "--per-device-train-batch-size or --max-length"),
        (IN_FILE, "'per_device_train_batch_size' or 'max_length'"),
    ],
)
def test_in_training(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: Naming, options: str
) -> None:
    monkeypatch.setattr(device, "max_binding", 1 << 14)
    with naming(spelling), pytest.raises(BindingTooLarge) as caught:
        prepare_job(golden_arguments(tmp_path, "qwen2"), load("qwen2", device, "f32")).check_memory()
    error = caught.value
    assert (error.name, error.limit, error.nbytes > error.limit) == ("linears", 1 << 14, True)
    fact = f"The tensor 'linears' needs {error.nbytes:,} bytes, but one binding of this device holds at most 16,384"
    assert str(error) == f"{fact}: lower {options}."


def test_a_batch_is_limited_by_its_largest_tensor(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """q of Qwen3-0.6B is 128 MiB at 16 rows of 1,024 tokens; with k and v it is twice that."""
    monkeypatch.setattr(device, "max_binding", 128 << 20)
    model = chosen_model(None, "qwen3-0.6b", 1, device)

    def peak(rows: int) -> int:
        args = TrainingArguments(per_device_train_batch_size=rows, max_length=1024)
        return TrainingStep(model, args).session.memory().peak

    assert 0 < peak(8) < peak(16)
    with pytest.raises(BindingTooLarge):
        peak(17)


@pytest.mark.parametrize(("limit", "what"), [(1 << 12, "values of 128 tokens"), (1 << 14, "linears")])
def test_in_generation(device: Device, monkeypatch: pytest.MonkeyPatch, limit: int, what: str) -> None:
    model, before = load("qwen2", device, "f32"), device.allocated
    monkeypatch.setattr(device, "max_binding", limit)
    with pytest.raises(
        BindingTooLarge, match=r": use shorter prompts and answers, fewer at a time, or a smaller"
    ) as caught:
        Generator(model, capacity=64, batch=2 if limit == 1 << 12 else 1)
    assert (caught.value.name, caught.value.limit) == (what, limit)
    assert device.allocated == before


# -- activations in 16 bits, or in the host's memory, until the backward pass ------------------------------------------

WAYS = [("f32", True), ("bf16", False), ("f16", False), ("f16", True)]
BOUNDS = {"bf16": 2e-2, "f16": 2e-3}  # of a gradient's error: values keep 8 and 11 bits


@pytest.mark.parametrize("saving", [Saving(*way) for way in WAYS])
def test_what_is_restored(device: Device, rng: np.random.Generator, saving: Saving) -> None:
    """Values of any size, in blocks of rows of one storage, one of which has no values in common with the others."""
    program, rows, cols = Program(device), 6, 2 * BLOCK + 8
    x = persistent((rows, cols), "f32", "base", "x")
    out = persistent((rows, cols), "f32", "base", "out")
    duplicate = program.temp((rows, cols), name="kept")
    program.dispatch(copy, x, duplicate, size=x.size)
    for _ in range(3):  # what passes between the forward and the backward pass
        program.dispatch(copy, x, out, size=x.size)
    forward = len(program.dispatches)
    program.dispatch(add_forward, duplicate, out, out, size=x.size)
    store(program, {duplicate.storage: [duplicate]}, forward, saving)
    plan, spans = program.plan(), program.lifetimes()
    assert bool(program.plan(on_host=True).sizes) == saving.offload
    assert spans[duplicate.storage][1] < forward, "it is not kept itself"
    values = rng.standard_normal((rows, cols), np.float32) * np.float32([[1e-30], [1e-8], [0], [1], [7e4], [1e30]])
    allocate(device, {x.storage, out.storage} | program.persistent_storages())
    arena = Arena(device, plan.sizes, program.plan(on_host=True).sizes)
    try:
        program.build(arena)
        device.write(x.storage.buffer, values)
        program.run()
        got = device.read(out.storage.buffer).view(np.float32).reshape(rows, cols) - values
    finally:
        arena.free()
        release(device, {x.storage, out.storage})
    assert device.host_allocated == 0
    if saving.dtype == "f32":
        assert np.array_equal(got, values)
    else:
        flat = values.reshape(-1)
        block = block_of(cols)  # of one row: what another one holds does not matter
        tops = np.abs(flat).reshape(-1, block).max(axis=1).repeat(block)
        allowed = np.abs(flat) * 2.0 ** -(8 if saving.dtype == "bf16" else 11) + np.abs(flat) * 2.0**-23
        floor = tops * 2.0**-38 if saving.dtype == "f16" else 0  # subnormals of f16
        assert (np.abs(got.reshape(-1) - flat) <= allowed + floor).all()


@pytest.mark.parametrize(
    ("dtype", "offload", "recompute"),
    [("f32", True, False), ("f32", True, True), ("bf16", False, False), ("f16", True, True)],
)
def test_gradients_and_memory(device: Device, tmp_path: Path, dtype: str, offload: bool, recompute: bool) -> None:
    """Gradients differ from PEFT's by what rounding explains, and not at all if activations are only offloaded. The
    device allocates what was planned, and less than with activations in f32."""

    def job(**changes: Any) -> Any:
        return golden_job(device, tmp_path, "qwen2", "nf4", gradient_checkpointing=recompute, **changes)

    plain, other = job(), job(activation_dtype=dtype, offload_activations=offload)
    values, before, plan = golden("qwen2"), device.allocated, other.session.memory()
    assert plan.groups["activations"] < plain.session.memory().groups["activations"]
    assert (plan.host > 0) == offload

    def counted(session: Session) -> None:
        assert device.allocated - before == plan.training
        assert device.host_allocated == plan.host

    loss, gradients = gradients_of(other, device, "qwen2", counted)
    assert (device.allocated, device.host_allocated) == (before + plan.groups["base"], 0)
    assert loss == pytest.approx(values["loss.nf4"][0], rel=1e-5)
    if dtype == "f32":
        _, expected = gradients_of(plain, device, "qwen2")
        assert all(np.array_equal(gradients[name], array) for name, array in expected.items())
        return
    for name, gradient in gradients.items():
        reference = values[f"grad.nf4.{name}"]
        error = np.linalg.norm(gradient - reference) / np.linalg.norm(reference)
        assert 1e-5 < error < BOUNDS[dtype], f"{name}: {error}"


def test_batches_of_unlike_sizes(device: Device, tmp_path: Path) -> None:
    """What an earlier, longer batch has left behind the tokens of a shorter one does not change gradients."""
    data = tmp_path / "unlike.jsonl"
    rows = [[(7 * i + 3 * j) % 40 + 1 for j in range(length)] for i, length in enumerate((8, 60, 9, 33, 62, 12))]
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    norms = {}
    for kind in ("f32", "f16"):
        output = tmp_path / kind
        args = golden_arguments(tmp_path, "qwen3", output=str(output), activation_dtype=kind, compute_dtype=kind)
        args = replace(args, data=str(data), max_length=64, learning_rate=1e-9, per_device_train_batch_size=1)
        prepare_job(replace(args, max_steps=12)).train()
        norms[kind] = [line["grad_norm"] for line in read_log(output / LOG)]
    assert len(norms["f32"]) == 12
    assert norms["f16"] == pytest.approx(norms["f32"], rel=5e-3)


def test_resumed_runs_and_pipelines(device: Device, tmp_path: Path) -> None:
    """A run of four steps is one of two, resumed, to the byte; where its activations are may change. Beside another
    adapter it is the same up to rounding."""
    model = open_model(str(model_dir("qwen3")), device, "nf4")
    options: dict[str, Any] = {
        "activation_dtype": "f16",
        "max_length": 16,
        "packing": False,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "lr_scheduler_type": "constant",
        "lora_dropout": 0.1,
        "use_dora": True,
    }
    data = [str(random_rows(tmp_path / f"{i}.jsonl", 8, 200, i)) for i in range(2)]

    def trained(name: str, **changes: Any) -> bytes:
        wgpu_lora.finetune(model, output=str(tmp_path / name), **changes)
        return (tmp_path / name / WEIGHTS).read_bytes()

    whole = trained("whole", data=data[0], max_steps=4, **options)
    trained("parts", data=data[0], max_steps=2, **options)
    with pytest.raises(UserError, match="activation_dtype was 'f16', not 'bf16'"):
        trained("parts", resume=True, max_steps=4, activation_dtype="bf16")
    assert trained("parts", resume=True, max_steps=4, offload_activations=True) == whole
    adapters = [{"data": rows, "checkpoint": str(tmp_path / f"adapter {i}")} for i, rows in enumerate(data)]
    MultiAdapterPipeline(adapters, model, output=str(tmp_path / "pipeline"), max_steps=4, **options).train()
    assert_close_adapters(tmp_path / "whole", tmp_path / "adapter 0", 1e-4)


def test_devices_without_buffers_in_host_memory(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "features", frozenset())
    args = golden_arguments(tmp_path, "qwen2", offload_activations=True)
    with pytest.raises(UserError, match=r"does not offer the feature mappable-primary-buffers: leave out offload_act"):
        prepare_job(args, open_model(args.model, device, "nf4"))
    assert not (tmp_path / "run").exists()


# -- what a run leaves in a device's memory when its buffers are wiped -------------------------------------------------


def test_all_that_a_run_kept_on_the_device_is_overwritten(device: Device, tmp_path: Path) -> None:
    allocated_before = list(device.live)  # of other tests
    held_out = random_rows(tmp_path / "heldout.jsonl", 4, 40)
    job = golden_job(device, tmp_path, "qwen2", "nf4", max_steps=2, eval_data=str(held_out), eval_steps=1, save_steps=1)
    dirty: set[str] = set()
    with Wiper(device) as wiper:
        overwrite = device.before_free

        def watched(buffer: Any) -> None:
            if device.read(buffer).any():
                dirty.add(buffer.label)
            overwrite(buffer)
            assert not device.read(buffer).any()

        device.before_free = watched
        job.train()
        weights = [s.buffer for s in job.session.model.decoder.storages() if s.buffer is not None]
        report = wiper.wipe(keep=[*allocated_before, *weights])
    assert report.verified, report
    assert {"activations", "params 0", "second_moment 0"} <= dirty
    assert any(label.startswith("targets") for label in dirty)
    assert device.live <= {*allocated_before, *weights}
