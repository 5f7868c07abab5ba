"""What counts as CUDA in a proof, and what is recorded of its processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from wgpu_lora.cli.proof.cuda_check import classify, compiler_in, cuda_packages, required
from wgpu_lora.cli.proof.watched_workers import EVENTS, Watcher, record_own_process

ICD, DRIVER = "/usr/lib/libGLX_nvidia.so.0", "/usr/lib/libcuda.so.1"


@pytest.mark.parametrize(
    "name",
    ["libcudart.so.12", "libcublas.so", "libcublasLt.so.12", "libnvrtc.so.12", "libnvrtc-builtins.so.12.4",
     "libcudnn.so.9", "libcudnn_ops_infer.so.8", "libcufft.so.11", "libcusparse.so.12", "libtorch_cuda.so",
     "libc10_cuda.so", "libcudart-9335f6a2.so.12.4.127", "cublas64_12.dll", "cudart64_110.dll", "libnccl.so.2",
     "libcusolverMg.so.11", "libbitsandbytes_cuda124.so", "libnvJitLink.so.12", "libcudart.so.12 (deleted)"],
)  # fmt: skip
def test_toolkit_libraries_are_forbidden_even_beside_a_driver(name: str) -> None:
    assert classify([f"/x/{name}", ICD])[0] == [f"/x/{name}"]


OTHERS = ["libc.so.6", "libvulkan_lvp.so", "libwgpu_native-release.so", "libvk_swiftshader.so", "libcurl.so.4"]
OTHERS += ["libcups.so.2", "libnvme.so.1", "libnvidia-vulkan-producer.so"]


@pytest.mark.parametrize(
    ("paths", "preloaded", "forbidden", "explained"),
    [
        ([DRIVER], "", [DRIVER], []),
        ([DRIVER, ICD, "/usr/lib/libnvidia-glcore.so.550"], "", [], [DRIVER]),
        ([DRIVER, ICD], "/tmp/libcuda.so.1", [DRIVER], []),
        ([f"/x/{name}" for name in OTHERS], "", [], []),
    ],
)
def test_the_driver_s_own_library_is_explained_only_beside_its_vulkan(
    paths: list[str], preloaded: str, forbidden: list[str], explained: list[str]
) -> None:
    assert classify(paths, preloaded=preloaded) == (forbidden, explained)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        *((["/bin/sh", "-ec", script], True) for script in (
            "nvcc x.cu", "cd x && CUDA=1 /opt/ptxas x", "true; (nvcc)", "echo $(nvcc -V)", "env A=1 nvcc",
        )),
        (["/usr/local/cuda/bin/nvcc", "-c", "x.cu"], True),
        (["wgpu-lora", "prove", "--out", "nvcc"], False),
        (["sh", "-c", "wgpu-lora prove --out nvcc 'nvcc; nvcc'"], False),
        (["sh", "nvcc"], False),
    ],
)  # fmt: skip
def test_compilers_are_known(command: list[str], expected: bool) -> None:
    assert bool(compiler_in(command)) == expected


def test_modules_are_known() -> None:
    assert cuda_packages(["numpy", "torch.cuda", "nvidia.cublas", "wgpu", "tqdm.contrib"]) == ["nvidia", "torch"]


def test_requirements_are_followed_and_extras_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def package(name: str, *needs: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-1.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1", *(f"Requires-Dist: {need}" for need in needs)]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")

    package("top", "plain>=1", 'torch; extra == "gpu"', 'Other_One[fast] ; python_version > "3"')
    package("plain", 'cupy-cuda12x; extra == "never"')
    package("other-one", 'nvidia-cublas-cu12 (>=12); extra == "fast"', 'triton; extra == "slow"')
    monkeypatch.syspath_prepend(str(tmp_path))
    names = required("top")
    assert names == {"top", "plain", "other-one", "nvidia-cublas-cu12"}
    assert cuda_packages(names) == ["nvidia-cublas-cu12"]
    assert cuda_packages(required("wgpu-lora")) == []


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs Linux: copies a program of its own and reads /proc"
)
def test_a_compiler_is_recorded_from_outside_and_inside(tmp_path: Path) -> None:
    fake = tmp_path / "nvcc"
    shutil.copyfile(shutil.which("sleep") or "/bin/sleep", fake)
    fake.chmod(0o755)
    watcher, events = Watcher(), list[Any]()
    sys.addaudithook(lambda event, arguments: events.append((event, arguments)) if event in EVENTS else None)
    with record_own_process(str(tmp_path / "account.json"), events), subprocess.Popen([str(fake), "5"]) as process:
        deadline = time.monotonic() + 4
        while (
            not any(compiler_in(record.command) for record in watcher.records.values()) and time.monotonic() < deadline
        ):
            watcher.look()
        process.kill()
    assert any(compiler_in(record.command) for record in watcher.records.values())
    mine = next(record for record in watcher.records.values() if record.pid == os.getpid())
    assert any("libc" in path for path in mine.libraries)
    account = json.loads((tmp_path / "account.json").read_text())
    assert [str(fake), "5"] in account["commands"]
    assert "json" in account["modules"]
    assert account["libraries"]
