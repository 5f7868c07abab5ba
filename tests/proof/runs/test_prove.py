"""`wgpu-lora prove`, run as a child: it passes where it should and, above all, fails where it should."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from html import unescape
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cli import QWEN2, ROWS, write_rows
from support.web.pages import Page

from wgpu_lora.cli.app import main
from wgpu_lora.files.assets import DEMO_HELDOUT

CODE = "import sys; from wgpu_lora.cli.app import main; sys.exit(main(['prove', *sys.argv[1:]]))"
PROVE = [sys.executable, "-c", CODE]
LINUX = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs Linux: reads /proc and preloads a library"
)


def recipe(tmp_path: Path, **changes: Any) -> Path:
    """A run of 24 small steps on a tiny model, whose held-out rows count as the others do, from other numbers."""
    rows = write_rows(tmp_path / "rows.jsonl")
    heldout_rows = [{"input_ids": [i + 3 for i in row["input_ids"]]} for row in ROWS]
    heldout = write_rows(tmp_path / "heldout.jsonl", heldout_rows)
    options: dict[str, Any] = {
        "model": QWEN2, "data": str(rows), "eval_data": str(heldout), "output": "unused", "max_length": 16, "lora_r": 4,
        "packing": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 24,
        "save_steps": 20, "learning_rate": 5e-3, "lr_scheduler_type": "constant",
    }  # fmt: skip
    path = tmp_path / "recipe.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in (options | changes).items()))
    return path


def prove(
    tmp_path: Path, *arguments: object, to: str = "proof", **environment: str
) -> tuple[int, dict[int, dict[str, Any]], str]:
    """The exit code, the checks of proof.json in `to` by number ({} where there is none), and stderr."""
    out = tmp_path / to
    process = subprocess.run(
        [*PROVE, "--out", str(tmp_path / "proof"), *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    file = out / "proof.json"
    checks = json.loads(file.read_text())["checks"] if file.is_file() else []
    return process.returncode, {check["number"]: check for check in checks}, process.stderr


def statuses(checks: dict[int, dict[str, Any]]) -> dict[int, str]:
    return {number: check["status"] for number, check in checks.items()}


def in_an_empty_home(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """An empty directory, and the environment that names it as all those of the user."""
    home = tmp_path / "home"
    home.mkdir()
    names = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "TMPDIR")
    return home, dict.fromkeys(names, str(home))


# -- where it passes, and where it fails -------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_device_at_a_learning_rate_of_zero(tmp_path: Path) -> None:
    """All nine checks: those of what was learnt fail, and the others pass as far as one device can."""
    home, environment = in_an_empty_home(tmp_path)
    code, checks, errors = prove(
        tmp_path, "--recipe", recipe(tmp_path, learning_rate=0), "--devices", "0", **environment
    )
    assert code == 1, (statuses(checks), errors)
    passed, failed = dict.fromkeys((1, 3, 5, 6, 8), "passed"), dict.fromkeys((4, 9), "failed")
    assert statuses(checks) == passed | failed | {2: "not run", 7: "not run"}, checks
    reasons = {number: check["reason"] for number, check in checks.items()}
    assert "nothing to compare" in reasons[2]
    assert "measured on device 0 before training" in reasons[3]
    assert "afterwards" in reasons[3]
    assert "held-out loss went from" in reasons[4]
    assert "no unit checks" in reasons[7]
    assert "changed the adapter" in reasons[9]
    assert "differ" not in reasons[9]
    assert checks[5]["figures"]["clock"]["loss"] == pytest.approx(checks[5]["figures"]["logged_loss"], rel=1e-6)
    assert checks[6]["figures"]["looks"] > 20
    assert len(checks[6]["figures"]["opened_by_python"]) == 7
    assert any("wgpu_native" in path for path in checks[6]["figures"]["searched"]["libraries"])
    assert checks[9]["figures"]["same_log"]
    assert all(checks[9]["figures"]["same"].values())
    proof = tmp_path / "proof"
    facts = json.loads((proof / "proof.json").read_text())
    assert not facts["proven"]
    assert facts["verdict"].startswith("Not proven: 5 of 9")
    assert facts["schema"] == 1
    page = Page((proof / "proof.html").read_text())
    assert "CUDA libraries mapped beside NVIDIA's Vulkan driver" in page.text
    assert not page.fetched
    assert {path.name for path in proof.iterdir()} == {"proof.json", "proof.html", "logs", "run", "resumed", "work"}
    assert not list(home.iterdir())  # nothing is written outside of --out


@LINUX
def test_a_preloaded_cuda_library_is_found_though_it_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory whose name is taken, and with a driver that has no cache but the proof's."""
    small = next(path for line in Path("/proc/self/maps").read_text().splitlines()
                 if (path := line.split()[-1]).startswith("/") and ".so" in path and "libz" in path)  # fmt: skip
    fake = tmp_path / "libcudart.so.12"
    shutil.copyfile(small, fake)
    notes = tmp_path / "proof" / "notes"
    notes.parent.mkdir()
    notes.write_text("kept")
    home, environment = in_an_empty_home(tmp_path)
    monkeypatch.delenv("MESA_SHADER_CACHE_DIR", raising=False)
    out = tmp_path / "proof-2"
    code, checks, _ = prove(tmp_path, "--only", "1,6", to=out.name, LD_PRELOAD=str(fake), **environment)
    assert code == 1
    assert checks[6]["status"] == "failed"
    assert "libcudart.so.12" in checks[6]["reason"]
    assert checks[1]["status"] == "passed"
    assert checks[2]["reason"] == "left out by --only"
    assert json.loads((out / "proof.json").read_text())["outcome"] == "refuted"
    assert (out / "proof.html").is_file()
    assert notes.read_text() == "kept"
    assert not list(home.iterdir())


@LINUX
def test_no_device_fails(tmp_path: Path) -> None:
    none = str(tmp_path / "none.json")
    # Nor OpenGL, which wgpu falls back to.
    nothing = dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES", "__EGL_VENDOR_LIBRARY_FILENAMES"), none)
    code, checks, errors = prove(tmp_path, "--only", "1,2,3,4,6", **nothing)
    assert code == 1, errors
    results = statuses(checks)
    assert results.pop(1) == "failed"
    assert set(results.values()) == {"not run"}
    assert "no device" in checks[3]["reason"]
    facts = json.loads((tmp_path / "proof" / "proof.json").read_text())
    assert (facts["devices"], facts["proven"]) == ([], False)


def test_too_few_real_gpus_prove_nothing_and_say_so_at_once(tmp_path: Path) -> None:
    begin = time.monotonic()
    code, checks, errors = prove(tmp_path, "--require-discrete", "99")
    assert time.monotonic() - begin < 60  # all nine take minutes
    assert code == 1, errors
    assert statuses(checks) == {1: "failed"} | dict.fromkeys(range(2, 10), "not run")
    assert all("--require-discrete 99 is not met" in check["reason"] for check in checks.values())
    facts = json.loads((tmp_path / "proof" / "proof.json").read_text())
    assert (facts["proven"], facts["require_discrete"]) == (False, 99)
    assert facts["devices"][facts["used"][0]]["name"] in facts["used_on"]
    assert facts["verdict"].startswith("Not proven: 0 of 9 checks passed on ")
    assert facts["verdict"] in unescape((tmp_path / "proof" / "proof.html").read_text())


# -- mistakes and interrupts -------------------------------------------------------------------------------------------


MISTAKES: list[tuple[list[str], str]] = [
    (["--only", "1,10"], "1 to 9"),
    (["--devices", "7", "--only", "1"], "no device 7"),
    (["--devices", "0,0", "--only", "1"], "twice"),
    (["--devices", ""], "mpty"),
    (["--require-discrete", "-1"], "--require-discrete must be 0 or more, not -1"),
    (["--require-discrete", "some"], "--require-discrete"),
    (["--devices", "0,", "--only", "1"], "empty entry"),
    (["--recipe", "nothing"], "does not exist"),
    (["--recipe", "recipe.toml"], "NF4"),
    (["--out", "file"], "is not a directory"),
    (["--out", "file/x"], "is not a directory"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "file").write_text("kept")
    recipe(tmp_path, base_dtype="f32")
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    code = main(["prove", *arguments])
    errors = capsys.readouterr().err
    assert (code, len(errors.splitlines())) == (2, 1), errors
    assert message in errors
    assert sorted(tmp_path.iterdir()) == before


@LINUX
@pytest.mark.slow
def test_an_interrupt_ends_the_children_and_leaves_their_logs(tmp_path: Path) -> None:
    path = recipe(tmp_path, max_steps=100_000, save_steps=0)
    out = tmp_path / "proof"
    process = subprocess.Popen(
        [*PROVE, "--out", str(out), "--recipe", str(path), "--devices", "0", "--only", "3"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in a shell's background ignores it
    )  # fmt: skip
    log = out / "logs" / "finetune.jsonl"
    deadline = time.monotonic() + 300
    while not (log.is_file() and log.stat().st_size) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert f"{out}/logs/" in output
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert log.stat().st_size
    assert not (out / "cache").exists()


def test_the_recipe_s_requests_have_checks() -> None:
    """What check 7 of the bundled recipe stands on."""
    assert all("check" in json.loads(line) for line in DEMO_HELDOUT.read_text().splitlines())
