"""What a proof rests on: the libraries that are opened, the rows that are held out, and the requests."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cffi
import pytest

from wgpu_lora.cli.app import main
from wgpu_lora.cli.proof.checks import resuming_is_exact
from wgpu_lora.cli.proof.cuda_check import look_into, no_cuda, package_libraries
from wgpu_lora.cli.proof.proof_context import Check, Result, carry_out, count_leaked_rows, request_of
from wgpu_lora.cli.proof.proof_run import render
from wgpu_lora.cli.proof.watched_workers import EVENTS, Children, command_of, record_own_process
from wgpu_lora.files.assets import DEMO_HELDOUT
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.training_log import LOG

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: reads /proc and fakes libraries")


def fake(folder: Path, *names: str) -> list[Path]:
    """Libraries that do nothing, under NVIDIA's names."""
    small = next(path for line in Path("/proc/self/maps").read_text().splitlines()
                 if (path := line.split()[-1]).startswith("/") and "libz" in path and ".so" in path)  # fmt: skip
    return [Path(shutil.copyfile(small, folder / name)) for name in names]


@LINUX
def test_what_python_opens_is_not_the_driver_s_doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are opened before any module of ours is imported, and mapped together as a driver's are."""
    libraries = fake(tmp_path, "libGLX_nvidia.so.0", "libcuda.so.1")
    lines = ["import ctypes", *(f"ctypes.CDLL({str(path)!r})" for path in libraries)]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(
        "wgpu_lora.cli.proof.cuda_check.required", lambda package: set()
    )  # unknown, which hides no other fault
    finding = watched(tmp_path, monkeypatch)
    assert finding.status == "failed"
    assert f"opened by Python: {libraries[1]} (child)" in finding.reason
    why = finding.figures["cuda_of_the_driver"]["why"]
    assert "not shown" in why


@LINUX
def test_what_the_loader_brings_is_explained_by_what_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not opened through Python: linked by another library, as a driver's own are."""
    icd, cuda = fake(tmp_path, "libGLX_nvidia.so.0", "libcuda.so.1")
    monkeypatch.setattr("wgpu_lora.cli.proof.watched_workers.libraries", lambda pid: {str(icd), str(cuda)})
    finding = watched(tmp_path, monkeypatch)
    assert finding.status == "passed", finding.reason
    figures = finding.figures["cuda_of_the_driver"]
    assert any("child" in process for process in figures["libraries"][str(cuda)])
    assert "ctypes or cffi" in figures["why"]
    assert "libGLX_nvidia.so.0" in figures["why"]
    page = render(facts_of(finding))
    assert str(cuda) in page
    assert "child (" in page
    assert "ctypes or cffi" in page


def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check 6 after one child."""
    monkeypatch.setattr("wgpu_lora.cli.proof.cuda_check.cuda_packages", lambda names: [])  # tests may have torch
    children = Children(tmp_path / "out")
    try:
        children.run("child", "proof-devices", select="0")
        children.watcher.look()
        for record in children.watcher.records.values():
            record.looks = record.looks or 1
        proof: Any = SimpleNamespace(children=children, devices={"used": [0]})
        return carry_out(6, "no CUDA", no_cuda, proof)
    finally:
        children.end()


def facts_of(check: Check) -> dict[str, Any]:
    checks = [asdict(check if n == check.number else Check(n, "x", "passed", 0.0, "")) for n in range(1, 10)]
    return {"checks": checks, "proven": True, "outcome": "", "verdict": "", "date": "", "platform": "", "seconds": 1.0,
            "devices": [], "used": [], "used_on": "", "require_discrete": 0, "recipe": {"path": ""},
            "commit": None, "webgpu": {}, "versions": {}}  # fmt: skip


def test_a_page_shows_what_there_is() -> None:
    assert "None: there was no training" in render(facts_of(Check(6, "no CUDA", "not run", 0.0, "<b>")))
    page = render(facts_of(Check(4, "losses fall", "failed", 0.0, "<b>", {"losses": [2.0, None, 1.0]})))
    assert "&lt;b&gt;" in page
    assert "<svg" in page


def test_a_child_records_what_ctypes_and_cffi_open(tmp_path: Path) -> None:
    events: list[Any] = []
    sys.addaudithook(lambda event, arguments: events.append((event, arguments)) if event in EVENTS else None)
    with record_own_process(str(tmp_path / "account.json"), events):
        with pytest.raises(OSError, match="libcuda"):
            ctypes.CDLL("libcuda.so.1-no")
        with pytest.raises(OSError, match="libcudart"):
            cffi.FFI().dlopen("libcudart.so.1-no")
    assert {"libcuda.so.1-no", "libcudart.so.1-no"} <= set(
        json.loads((tmp_path / "account.json").read_text())["opened"]
    )


def test_commands_are_words_with_the_program_first() -> None:
    assert command_of("os.system", ("nvcc x",)) == ["sh", "-c", "nvcc x"]
    assert command_of("subprocess.Popen", ("/x/nvcc", ["harmless", "a"], None, None)) == ["/x/nvcc", "a"]
    assert command_of("os.spawn", (0, "/x/nvcc", ["nvcc", "a"], None)) == ["/x/nvcc", "a"]


def test_our_native_libraries_are_searched_and_nvidia_s_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    paths = {name: folder / name for name in ("a.so", "b.so", "libnvidia-x.so", "empty.so")}
    for path, content in zip(paths.values(), (b"\0", b"xlibcudart.so", b"libcuda", b""), strict=True):
        path.write_bytes(content)
    mine = package_libraries(
        [*map(str, paths.values()), "/usr/lib/libc.so", "/usr/lib/libwgpu_native.so", str(folder / "gone.so")]
    )
    assert [Path(path).name for path in mine] == ["a.so", "b.so", "empty.so", "gone.so", "libwgpu_native.so"]
    assert look_into(mine[:3]) == {str(paths["b.so"]): ["libcuda", "libcudart"]}
    with pytest.raises(OSError, match="gone"):
        look_into(mine[:4])


def test_held_out_rows_are_compared_by_their_texts(tmp_path: Path) -> None:
    def row(text: str, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]
        return {"messages": messages, **more}

    files = [tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"]
    for file, rows in zip(files, ([row("a"), row("c")], [row(" a ", check="x"), row("d")]), strict=True):
        file.write_text("".join(json.dumps(item) + "\n" for item in rows))
    assert count_leaked_rows(*files) == (1, 2)
    assert count_leaked_rows(DEMO_HELDOUT.with_name("train.jsonl"), DEMO_HELDOUT)[0] == 0


def test_requests_are_all_before_the_last_answer() -> None:
    turns = [("system", "S"), ("user", "u1"), ("assistant", "a1"), ("user", "u2"), ("assistant", "a2")]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert [message["content"] for message in request_of({"messages": messages})] == ["S", "u1", "a1", "u2"]
    assert request_of({"text": "x"}) == request_of({"messages": messages[2:3]}) == []


@pytest.mark.parametrize(("arguments", "status", "code"), [([], "not run", 0), (["--strict"], "not run", 1),
                                                           (["--strict"], "passed", 0)])  # fmt: skip
def test_strict_wants_everything_proven(
    arguments: list[str], status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [Check(n, "x", status if n == 2 else "passed", 0.0, "") for n in range(1, 10)]
    monkeypatch.setattr("wgpu_lora.cli.proof.proof_run.prove", lambda *_, **__: Result(checks, tmp_path))
    assert main(["prove", *arguments]) == code
    assert Result([], tmp_path).code == 1


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "passed"),
        ({"seconds": 9.0}, "passed"),
        ({"loss": 0.5}, "failed"),
        ({"grad_norm": 2.0}, "failed"),
        (None, "failed"),
    ],
)
def test_resuming_is_judged_by_what_the_resumed_run_wrote(
    tmp_path: Path, changes: dict[str, Any] | None, status: str
) -> None:
    """A stand-in for the command copies the last checkpoint and writes the last line of the log, or leaves it out."""
    whole = {"epoch": 0.0, "learning_rate": 0.1, "grad_norm": 1.0}
    log = [{**whole, "step": i, "loss": 1.0 / i, "seconds": float(i)} for i in (1, 2, 3)]
    steps = tmp_path / "run" / run_checkpoint.STEPS
    for step in (2, 3):
        for name in ("adapter_model.safetensors", run_checkpoint.OPTIMIZER, run_checkpoint.STATE):
            (steps / f"step-{step}").mkdir(parents=True, exist_ok=True)
            (steps / f"step-{step}" / name).write_text(str(step))
    resumed = tmp_path / "resumed"

    def run(name: str, job: str, **options: Any) -> None:
        shutil.copytree(steps / "step-3", resumed / run_checkpoint.STEPS / "step-3")
        with (resumed / LOG).open("a") as file:
            file.write("" if changes is None else json.dumps(log[-1] | changes) + "\n")

    training = SimpleNamespace(directory=tmp_path / "run", log=log, devices=[0])
    proof: Any = SimpleNamespace(
        out=tmp_path,
        finetune_options=lambda output: {"output": str(output)},
        trained=lambda: training,
        children=SimpleNamespace(run=run),
    )
    finding = carry_out(9, "resume", resuming_is_exact, proof)
    assert "the check itself broke" not in finding.reason
    assert finding.status == status, finding.reason
    assert (
        status == "failed" or "adapter and moments byte for byte; losses, rates and gradient norms in" in finding.reason
    )
