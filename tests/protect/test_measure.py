"""Measurements: a byte that changes in what they cover changes a claim."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib.util
import json
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PathDistribution
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.files import assets
from wgpu_lora.files.assets import ASSETS
from wgpu_lora.gpu.backends import WGPU, backend
from wgpu_lora.protect.attestation import measurements


def change(path: Path) -> None:
    """One bit, keeping the size and the times."""
    state, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a part of the package."""
    (tmp_path / "wgpu_lora" / "demo").mkdir(parents=True)
    for name in ("errors.py", "events.py"):
        shutil.copy(measurements.PACKAGE / name, tmp_path / "wgpu_lora" / name)
    (tmp_path / "wgpu_lora" / "demo" / "odd name").write_bytes(b"12")
    for folder in ASSETS:
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "sub" / "file").write_bytes(folder.encode())
    monkeypatch.setattr(measurements, "PACKAGE", tmp_path / "wgpu_lora")
    monkeypatch.setattr(assets, "asset_dir", lambda name: tmp_path / name)
    return tmp_path


def test_every_file_of_the_package_counts(package: Path) -> None:
    whole = measurements.package()
    assert sorted(whole["files"]) == [
        "bricks/sub/file", "recipes/sub/file", "shaders/sub/file",
        "wgpu_lora/demo/odd name", "wgpu_lora/errors.py", "wgpu_lora/events.py",
    ]  # fmt: skip
    for name in whole["files"]:
        before = (package / name).read_bytes()
        change(package / name)
        measurement = measurements.package()
        assert measurement["sha256"] != whole["sha256"]
        assert [path for path in whole["files"] if measurement["files"][path] != whole["files"][path]] == [name]
        (package / name).write_bytes(before)
    assert measurements.package() == whole
    (package / "wgpu_lora" / "more.so").touch()
    assert measurements.package()["sha256"] != whole["sha256"]
    (package / "wgpu_lora" / "more.so").unlink()
    (package / "wgpu_lora" / "errors.py").rename(package / "wgpu_lora" / "other.py")
    assert measurements.package()["sha256"] != whole["sha256"]


def test_a_wheel_measures_as_the_checkout_it_was_built_from(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = measurements.package()
    for folder in ASSETS:
        shutil.move(package / folder, package / "wgpu_lora" / "_assets" / folder)
    monkeypatch.setattr(assets, "asset_dir", lambda name: package / "wgpu_lora" / "_assets" / name)
    (package / "wgpu_lora" / "__pycache__").mkdir()
    (package / "wgpu_lora" / "__pycache__" / "errors.pyc").write_bytes(b"")
    assert measurements.package() == checkout


def test_a_file_that_cannot_be_read_is_an_error(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(measurements, "file_digest", broken)
    with pytest.raises(UserError, match="cannot be measured"):
        measurements.measurements()


def recorded(content: bytes, kind: str = "sha256") -> str:
    raw = hashlib.new(kind, content).digest()
    return f"{kind}={base64.urlsafe_b64encode(raw).rstrip(b'=').decode()}"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Installs a package `made`, whose only file is `made.py`; gives its claims."""
    info = tmp_path / "made-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made\nVersion: 1.0\n")
    (tmp_path / "made.py").write_bytes(b"x = 1\n")

    def claims(record: str | None = None) -> dict[str, Any]:
        lines = record if record is not None else f"made.py,{recorded(b'x = 1' + bytes([10]))},6\n"
        lines += "__pycache__/made.cpython-311.pyc,,\nmade-1.0.dist-info/RECORD,,\n"
        (info / "RECORD").write_text(lines)
        monkeypatch.setattr(measurements, "_required", lambda: {"made": PathDistribution(info)})
        monkeypatch.setattr(measurements, "loaded_files", list)
        return measurements.installed_packages()[0]["made"]

    return claims


def test_a_changed_file_of_a_dependency_shows(install: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    whole = install()
    assert whole["intact"] is True
    assert whole["version"] == "1.0"
    change(tmp_path / "made.py")
    changed = install()
    assert changed["intact"] is False
    assert changed["changed"] == ["made.py"]
    assert changed["sha256"] != whole["sha256"]
    assert changed["record_sha256"] == whole["record_sha256"]
    fitted = install(f"made.py,{recorded((tmp_path / 'made.py').read_bytes())},6\n")  # RECORD edited to fit
    assert fitted["intact"] is True
    assert fitted["sha256"] == changed["sha256"] != whole["sha256"]
    assert fitted["record_sha256"] != whole["record_sha256"]
    (tmp_path / "made.py").unlink()
    assert install()["changed"] == ["made.py"]


def test_records_that_prove_nothing_are_not_intact(install: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    content = (tmp_path / "made.py").read_bytes()
    assert install(f"made.py,{recorded(content, 'sha512')},6\n")["intact"] is True
    for line in (f"made.py,{recorded(content, 'md5')},6", "made.py,sha256=,6", "made.py,sha256,6", "gone.py,a=b,1"):
        assert install(line + "\n")["intact"] is False
    (tmp_path / "made-1.0.dist-info" / "RECORD").unlink()
    distribution = PathDistribution(tmp_path / "made-1.0.dist-info")
    claims = measurements._measure(distribution, measurements._record(distribution))
    assert claims == {"version": "1.0", "intact": False, "changed": ["RECORD"]}


def test_the_requirements_of_requirements_are_found() -> None:
    names = measurements._required()
    assert {"numpy", "wgpu", "cffi", "cryptography", "sigstore"} <= set(names)  # the last one is model-signing's
    assert "wgpu-lora" not in names
    assert "torch" not in names


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module, `placed`, that is loaded and belongs to no package."""
    path = tmp_path / "placed.py"
    path.write_text("x = 1\n")
    spec = importlib.util.spec_from_file_location("placed", path)
    assert spec is not None
    monkeypatch.setitem(sys.modules, "placed", importlib.util.module_from_spec(spec))
    monkeypatch.setattr(measurements, "loaded_files", lambda: [str(path)])
    monkeypatch.setattr(measurements, "_libraries", list)  # reading all takes a while
    monkeypatch.setattr(measurements, "_own_modules", list)
    return path


def test_a_module_of_no_package_is_stated(module: Path) -> None:
    before = measurements.loaded_code([])["unlisted"][str(module)]
    assert before == hashlib.sha256(b"x = 1\n").hexdigest()
    change(module)
    assert measurements.loaded_code([])["unlisted"][str(module)] != before
    assert str(module) not in measurements.loaded_code([os.path.realpath(module)])["unlisted"]
    linked = module.with_name("linked.py")
    linked.symlink_to(module)  # as installers link files to their cache
    assert measurements.accounted(str(linked), [str(linked)])
    assert not measurements.accounted(str(linked), [str(linked) + "x"])


def test_a_module_made_at_run_time_is_stated(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "made_up" not in measurements.loaded_code([])["fileless"]
    monkeypatch.setitem(sys.modules, "made_up", ModuleType("made_up"))
    assert "made_up" in measurements.loaded_code([])["fileless"]
    assert "sys" not in measurements.loaded_code([])["fileless"]


def test_many_modules_of_no_package_count_all(module: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number:02}.py" for number in range(9)]
    for path in paths:
        path.write_text("x = 1\n")
    monkeypatch.setattr(measurements, "loaded_files", lambda: list(map(str, paths)))
    monkeypatch.setattr(measurements, "MOST_NAMED", 4)
    before = measurements.loaded_code([])["unlisted"]
    assert len(before) == 5
    change(paths[-1])
    assert measurements.loaded_code([])["unlisted"] != before


def test_a_compiled_file_that_does_not_fit_its_source_is_stated(module: Path) -> None:
    cached = Path(importlib.util.cache_from_source(str(module)))
    assert measurements.loaded_code([])["compiled_otherwise"] == []  # there is none
    py_compile.compile(str(module), str(cached))
    assert measurements.loaded_code([])["compiled_otherwise"] == []
    whole = cached.read_bytes()
    other = module.with_name("other.py")
    other.write_text("x = 2\n")
    py_compile.compile(str(other), str(cached))
    cached.write_bytes(whole[:16] + cached.read_bytes()[16:])  # the header, which Python trusts, is that of the source
    assert measurements.loaded_code([])["compiled_otherwise"] == [str(module)]
    for broken in (whole[:20], whole[:16] + b"\xff" * 9):
        cached.write_bytes(broken)
        assert measurements.loaded_code([])["compiled_otherwise"] == [str(module)]
    py_compile.compile(str(other), str(cached), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert measurements.loaded_code([])["compiled_otherwise"] == [str(module)]
    for unused in (b"", b"\0" + whole[1:], whole[:8] + b"\0" + whole[9:]):  # of another Python, or of an older source
        cached.write_bytes(unused[:16] + cached.read_bytes()[16:])
        assert measurements.loaded_code([])["compiled_otherwise"] == []


def test_a_hook_and_a_tracer_are_stated(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hook:
        pass

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook()])
    assert "Hook" in measurements.loaded_code([])["import_hooks"]
    monkeypatch.setattr(sys, "gettrace", lambda: print)
    assert measurements.loaded_code([])["traced"] is True


@pytest.mark.skipif(sys.platform != "linux", reason="how libraries are found here is Linux's")
def test_a_library_of_no_package_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "preloaded.so"
    shutil.copy(next(path for path in (m.path for m in psutil.Process().memory_maps()) if "_psutil" in path), library)
    mapped = measurements._libraries
    assert str(library) not in (mapped() or [])
    ctypes.CDLL(str(library))
    monkeypatch.setattr(measurements, "_libraries", lambda: [path for path in mapped() or [] if str(tmp_path) in path])
    monkeypatch.setattr(measurements, "loaded_files", list)
    monkeypatch.setattr(measurements, "_own_modules", list)
    libraries = measurements.loaded_code([])["libraries"]
    assert libraries[str(library)] == hashlib.sha256(library.read_bytes()).hexdigest()
    assert str(library) not in measurements.loaded_code([str(library)])["libraries"]


def test_variables_that_change_behaviour_are_stated_by_digest() -> None:
    names = ("WGPU_LORA_NO_CHECK", "LD_PRELOAD", "PYTHONPATH", "VK_DRIVER_FILES", "vk_icd_filenames", "WGPU_LIB_PATH",
             "LP_NUM_THREADS", "GLIBC_TUNABLES", "GCONV_PATH", "TU_DEBUG", "DYLD_INSERT_LIBRARIES",
             "https_proxy")  # fmt: skip
    variables = measurements.environment(dict.fromkeys([*names, "SECRET_TOKEN", "EDITOR", "PANTRY"], "secret"))
    assert sorted(variables) == sorted(names)
    assert set(variables.values()) == {hashlib.sha256(b"secret").hexdigest()}


@pytest.mark.slow
def test_this_machine_can_be_measured() -> None:
    facts = measurements.measurements()
    assert facts["dependencies"]["wgpu"]["intact"] is True
    library = backend(WGPU).library()
    assert facts["wgpu"]["native_sha256"] == hashlib.sha256(library.read_bytes()).hexdigest()
    assert facts["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert "wgpu_lora/protect/attestation/measurements.py" in facts["package"]["files"]
    assert any(name.startswith("shaders/") and name.endswith(".wgsl") for name in facts["package"]["files"])
    assert facts["kernel"]["system"]
    assert facts["process"]["compiled_otherwise"] == []
    assert not any("wgpu_lora" in path for path in facts["process"]["unlisted"])


MODIFIED = """
import json, os
from wgpu_lora.protect.attestation import measurements
from wgpu_lora.protect.memory_protection import environment_at_start
variables = measurements.environment(environment_at_start() | dict(os.environ))
print(json.dumps([measurements.loaded_code(measurements.own_files()), variables]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="how libraries are preloaded here is Linux's")
def test_what_is_slipped_into_a_trainer_shows(tmp_path: Path) -> None:
    """By who may set its environment: a module that Python runs first, a module in place of another, a library."""
    mapped = [memory_map.path for memory_map in psutil.Process().memory_maps()]
    preloaded = tmp_path / "preloaded.so"
    shutil.copy(next(path for path in mapped if "/libm.so" in path or "/libm-" in path), preloaded)
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nos.environ.pop('LD_PRELOAD')\nos.environ.pop('PYTHONPATH')\n"
    )
    (tmp_path / "filelock.py").write_text("class FileLock: pass\nclass Timeout(Exception): pass\nimport sys\n")
    path = os.pathsep.join([str(tmp_path), str(assets.ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "LD_PRELOAD": str(preloaded)}
    code = "import filelock\n" + MODIFIED
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    facts, variables = json.loads(process.stdout)
    digests = {
        str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in tmp_path.iterdir() if file.is_file()
    }
    assert facts["libraries"][str(preloaded)] == digests.pop(str(preloaded))
    assert {name: facts["unlisted"].get(name) for name in digests} == digests
    assert variables["LD_PRELOAD"] == hashlib.sha256(str(preloaded).encode()).hexdigest()
    assert variables["PYTHONPATH"] == hashlib.sha256(path.encode()).hexdigest()
