"""wgpu-lora export web: what a site holds, and that Chromium's compiler takes its shaders."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from support import MODELS
from support.cli import Run, commands
from support.gguf_models import make_model

from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import DEMO_MODEL
from wgpu_lora.gpu.backends import DAWN, tint_text
from wgpu_lora.gpu.device import Device, DeviceOptions
from wgpu_lora.models.export.gguf_export import export_model
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.web import recording
from wgpu_lora.train.web.recording import web_capabilities, web_device
from wgpu_lora.train.web.server import site_server
from wgpu_lora.train.web.site import SCHEMA, VERSION, WebModel, WebOptions

SIZES = (0, 4, 8, 16, 32)  # of subgroups


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return commands(capsys)


def test_a_site_is_whole(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "FILE_BYTES", 1 << 20)
    site = tmp_path / "site"
    options = ("--rows", "1", "--tokens", "32", "--context", "64", "--subgroup-size", "8")
    assert "bytes of weights" in run("export", "web", "--output", str(site), *options).output()
    model = json.loads((site / "model.json").read_text())
    assert (model["schema"], model["version"]) == (SCHEMA, VERSION)
    assert [item["subgroup_size"] for item in model["variants"]] == [0, 8]
    stream = b""
    for file in [*model["files"], {"name": "tokenizer.json", **model["tokenizer"]}]:
        data = (site / file["name"]).read_bytes()
        assert len(data) == file["bytes"]
        assert hashlib.sha256(data).hexdigest() == file["sha256"]
        assert len(data) <= 1 << 20
        stream += data if file["name"] != "tokenizer.json" else b""
    assert len(model["files"]) > 1
    filled = [buffer for buffer in model["buffers"] if "at" in buffer]
    assert sum(buffer["bytes"] for buffer in filled) == len(stream)
    a = next(tensor for tensor in model["adapter"]["tensors"] if tensor["name"].endswith("lora_A.weight"))
    at = model["buffers"][a["buffer"]]["at"] + a["offset"]
    values = np.frombuffer(stream, np.float32, int(np.prod(a["shape"])), at)
    assert 0 < np.abs(values).max() <= a["shape"][1] ** -0.5  # as PEFT begins with
    for variant in model["variants"]:
        for steps in variant["programs"].values():
            for shader, *buffers in steps:
                assert 0 <= shader < len(model["shaders"])
                for buffer, offset, size in zip(buffers[3::3], buffers[4::3], buffers[5::3], strict=True):
                    assert offset % 256 == 0
                    assert offset + size <= model["buffers"][buffer]["bytes"]
    worker = (site / "worker.js").read_text()
    assert worker.startswith("const SITE = ")
    assert '"weights-000.bin"' in worker
    assert {"page.js", "index.html", "vendor/jinja.js", "vendor/jinja-LICENSE.txt"} <= {
        path.relative_to(site).as_posix() for path in site.rglob("*")
    }


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--subgroup-size", "5"), "--subgroup-size 5 is not one of 4, 8, 16, 32."),
        (("--tokens", "8"), "--rows must be at least 1, --tokens and --context at least 16: raise them."),
        (("--tokens", "100000"), "positions: lower --tokens and --context"),
        (("--model", str(MODELS / "qwen3_5_text")), "choose a model of plain attention"),
        (("--model", str(MODELS / "qwen3")), "has no tokenizer, which the page needs"),
    ],
)
def test_refusals(run: Run, tmp_path: Path, options: tuple[str, ...], sentence: str) -> None:
    small = () if "--tokens" in options else ("--tokens", "16", "--context", "16")
    assert sentence in run("export", "web", "--output", str(tmp_path / "site"), *small, *options).refusal()
    assert not (tmp_path / "site").exists()


def test_web_refuses_what_is_no_site(run: Run, tmp_path: Path) -> None:
    assert "give a directory that 'wgpu-lora export web' has written" in run("web", str(tmp_path)).refusal()


def status(port: int, path: str, host: str = "127.0.0.1") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers={"Host": f"{host}:{port}"})
    result = connection.getresponse().status
    connection.close()
    return result


def test_only_the_sites_own_files_are_served_to_its_own_name(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "folder").mkdir(parents=True)
    for name in ("model.json", "index.html", ".hidden", "../outside"):
        (site / name).write_text("{}")
    (site / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(site / "pipe")
    with site_server(site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            port = server.server_port
            assert [status(port, path) for path in ("/", "/model.json", "/index.html?x=1")] == [200] * 3
            refused = ["/folder", "/folder/", "/.hidden", "/link", "/pipe", "/../outside", "/%2e%2e/outside", "/none"]
            assert {path: status(port, path) for path in refused} == dict.fromkeys(refused, 404)
            assert [status(port, "/", host) for host in ("localhost", "attacker.example")] == [200, 403]
        finally:
            server.shutdown()
            thread.join()


def test_modules_are_served_as_such(tmp_path: Path) -> None:
    for name in ("model.json", "page.js", "tokenizers.mjs"):
        (tmp_path / name).write_text("{}")
    with site_server(tmp_path) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for name in ("page.js", "tokenizers.mjs"):
                with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/{name}") as answer:
                    assert answer.headers["Content-Type"] == "text/javascript"
            with (
                pytest.raises(UserError, match="choose another with port"),
                site_server(tmp_path, server.server_port),
            ):
                pass
        finally:
            server.shutdown()
            thread.join()


# -- Tint --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tint() -> Device:
    pytest.importorskip("wgpudawn")
    return Device(options=DeviceOptions(backend=DAWN))


def compiles(tint: Device, code: str) -> None:
    """Raises the backend's GPUError unless Tint takes the text."""
    tint.raw.create_shader_module(code=code)


def test_tint_refuses(tint: Device) -> None:
    with pytest.raises(tint.webgpu.api.GPUError):
        compiles(tint, "@compute @workgroup_size(1) fn main() { let a = 1u + 1f; }")


def every_shader(tint: Device, model: str, base_dtype: str) -> int:
    """Compiles every shader of a page in every tiling that a browser may run, and counts them."""
    options = WebOptions(tokens=32, context=64)
    opened = open_model(model, web_device(), base_dtype)
    web, shaders = WebModel(opened, options.arguments(opened, 16), options), set()
    for capabilities in map(web_capabilities, SIZES):
        for step in (step for program in web.recording.programs.values() for step in program.dispatches):
            for tiling in step.tilings(capabilities):
                tiled = step.tiled(tiling)
                if tiled.shader not in shaders:
                    shaders.add(tiled.shader)
                    compiles(tint, tint_text(tiled.kernel.source(tiled.present, tiled.constants, tiling)))
    return len(shaders)


@pytest.mark.parametrize("base_dtype", ["nf4", "f32", "bf16", "f16", "lut4", "lut3-g16", "lut2-row", "q2a4"])
def test_every_shader_compiles_in_tint(tint: Device, base_dtype: str) -> None:
    assert every_shader(tint, "demo", base_dtype) > 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q8_0", "q6_k", "q5_k_m", "q4_k_m", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_shaders_of_gguf_types_compile_in_tint(tint: Device, kind: str, tmp_path: Path) -> None:
    export_model(DEMO_MODEL, tmp_path / "model.gguf", kind)
    assert every_shader(tint, str(tmp_path / "model.gguf"), "auto") > 100


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3"])
def test_shaders_of_other_models_compile_in_tint(tint: Device, architecture: str, tmp_path: Path) -> None:
    stated = json.loads((MODELS / architecture / "config.json").read_text())
    wide = {"vocab_size": 4096, "max_position_embeddings": 64, "hidden_size": 64, "intermediate_size": 96}
    make_model(tmp_path / "model", {**stated, **wide})
    assert every_shader(tint, str(tmp_path / "model"), "nf4") > 100
