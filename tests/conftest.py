"""One device per test process: opening one and compiling for it is what costs time, so whoever opens one gets it."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.cli import Run, commands
from support.processes.broken import Break, breaking
from support.training.shared_runs import built_once, train_multi_adapter, train_run
from support.training.training import model_dir

from wgpu_lora.bench import training_runs
from wgpu_lora.gpu.device import Device, DeviceOptions
from wgpu_lora.models import loaded_model
from wgpu_lora.train import prepare_job

os.environ["WGPU_LORA_NO_TUNE"] = "1"  # a shape for every test: tuning would take most of the time
os.environ.setdefault("WGPU_LORA_NO_CHECK", "1")  # likewise: test_kernels.py checks all kernels
# One cache for all processes, also those that have another home: compiling takes a second for each kernel.
os.environ.setdefault("MESA_SHADER_CACHE_DIR", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))
# Ledgers of memory, a directory for each process, in one that the process which began the session removes: workers are
# killed where it is interrupted. What a session that was killed left behind goes when the next one begins.
SHARES, PREFIX = "WGPU_LORA_TESTS_SHARES", "wgpu-lora-share-"


def _directory_of_shares() -> str:
    temporary = Path(tempfile.gettempdir())
    for path in temporary.glob(f"{PREFIX}*-*") if Path("/proc/self").exists() else ():
        if not Path("/proc", path.name.removeprefix(PREFIX).split("-")[0]).exists():
            shutil.rmtree(path, ignore_errors=True)
    directory = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=temporary)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    os.environ[SHARES] = directory
    return directory


shares = os.environ.get(SHARES) if "PYTEST_XDIST_WORKER" in os.environ else None
# Neither the user's own ledger nor the user's own run log.
os.environ["WGPU_LORA_SHARE_DIR"] = tempfile.mkdtemp(dir=shares or _directory_of_shares())
os.environ["WGPU_LORA_DATA_DIR"] = tempfile.mkdtemp(dir=shares or os.environ[SHARES])
# A shell's background jobs ignore SIGINT, and under nohup SIGHUP is ignored: what runs here is to hear both.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@cache
def opened(environment: tuple[tuple[str, str], ...]) -> Device:
    return Device()


class DefaultDevice(Device):
    """Who opens the default device gets that of the process, as long as the environment does not choose another."""

    def __new__(cls, selector: Device | str | int | None = None) -> Device:  # type: ignore[misc]
        if selector is not None:
            return selector if isinstance(selector, Device) else Device(selector)
        other = ("WGPU_LORA_SHARE_DIR", "WGPU_LORA_DATA_DIR", "WGPU_LORA_NO_CHECK")  # of which a device depends on none
        settings = ((k, v) for k, v in os.environ.items() if k.startswith("WGPU_LORA_") and k not in other)
        return opened(tuple(sorted(settings)))


for opener in (loaded_model, prepare_job, training_runs):
    opener.Device = DefaultDevice  # type: ignore[misc]


@pytest.fixture(scope="session")
def device() -> Device:
    """The device that WGPU_LORA_DEVICE names, else the first."""
    return DefaultDevice()


@pytest.fixture(scope="session")
def qwen2(device: Device) -> loaded_model.LoadedModel:
    """The tiny qwen2 in NF4, which a run loads and releases."""
    return loaded_model.open_model(str(model_dir("qwen2")), device, "nf4")


@pytest.fixture(scope="session")
def finished_run(qwen2: loaded_model.LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the rows, held-out rows and output (`run`) of a short run. Copy what a test changes."""
    return built_once(tmp_path_factory, "finished_run", lambda place: train_run(qwen2, place))


@pytest.fixture(scope="session")
def finished_multi_adapter_run(qwen2: loaded_model.LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the rows of adapters a, b and c, and their outputs (`run`). Copy what a test changes."""
    return built_once(tmp_path_factory, "finished_multi_adapter_run", lambda place: train_multi_adapter(qwen2, place))


@pytest.fixture
def fresh_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens the default device gets one of the test's own, on which nothing is allocated or claimed."""
    monkeypatch.setenv("WGPU_LORA_TESTS_DEVICE", request.node.nodeid)


@pytest.fixture(scope="session")
def checked_device() -> Device:
    """The same with the driver's own bounds checks in every shader, and WebGPU's default limits."""
    return Device(options=replace(DeviceOptions.from_environment(), checked=True, default_limits=True))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs commands of the command line in this process."""
    return commands(capsys)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Breaks kernels of the device: `broken(name, which tilings, compiles=True)`."""
    return breaking(monkeypatch)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers of the test's own; the seed is shown when it fails."""
    seed = zlib.crc32(request.node.name.encode())
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def no_progress_lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine, phases of more than two seconds would write lines that tests do not expect."""
    if request.module.__name__ not in ("test_console", "test_bounds"):
        monkeypatch.setattr("wgpu_lora.cli.console.SOON", 1e9)
