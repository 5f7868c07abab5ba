"""What `push` sends, what it keeps, and what it says where it may not: against a hub of this test's own."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.models import FIXTURES, save_golden_adapter
from support.sampling import sample

from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.formats.hub import hub_id
from wgpu_lora.formats.hub_upload import prepare
from wgpu_lora.models.architectures import ARCHITECTURES
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.model_card import card
from wgpu_lora.train.run.records import Data, Environment, HeldOut, Memory, RunRecord, UsedDevice
from wgpu_lora.train.run.run_state import RunState


class FakeHub(BaseHTTPRequestHandler):
    """The four requests of a commit whose files all go inline."""

    status = 200
    odd = False
    requests: list[tuple[str, Any]]

    def do_GET(self) -> None:
        self._answer({"name": "me"})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        lines = [json.loads(line) for line in data.splitlines()]
        self.requests.append((self.path, lines))
        if self.path == "/api/repos/create":
            self._answer({"url": f"http://{self.headers['Host']}/me/x", "name": "me/x", "id": "me/x"})
        elif self.path.endswith("/preupload/main"):
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in lines[0]["files"]]
            self._answer({"files": files})
        else:
            self._answer({"commitUrl": f"http://{self.headers['Host']}/me/x/commit/abc", "commitOid": "abc"})

    def _answer(self, value: object) -> None:
        body = json.dumps([1] if self.odd else value).encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, type[FakeHub]]]:
    handler = type("Handler", (FakeHub,), {"requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An adapter and what a run leaves beside it."""
    directory = save_golden_adapter("qwen2", tmp_path / "run", base_model_name_or_path="Qwen/Qwen2.5-0.5B")
    for name in ("run.json", "log.jsonl", "README.md", ".lock", "checkpoints/step-1/optimizer.safetensors"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("{}")
    return directory


def cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: the hub's library reads the environment once."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    code = "import sys; from wgpu_lora.cli.app import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "push", *arguments]
    whole = clean | {"HF_HOME": arguments[0] + ".hub"} | environment  # nobody's token
    return subprocess.run(command, env=whole, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("public", [False, True])
def test_one_commit_of_the_adapter_and_its_card(run: Path, hub: tuple[str, type[FakeHub]], public: bool) -> None:
    address, handler = hub
    process = cli(str(run), "me/x", *["--public"] * public, HF_ENDPOINT=address, HF_TOKEN="hf_abc")
    assert process.returncode == 0, process.stderr
    assert "/me/x/commit/abc" in process.stdout
    (_, created), (path, lines) = handler.requests[0], handler.requests[-1]
    assert created[0]["name"] == "x"
    private = created[0].get("private") is True or created[0].get("visibility") == "private"
    assert private == (not public)
    assert path == "/api/models/me/x/commit/main"
    sent = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
    assert set(sent) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    for name, content in sent.items():
        assert base64.b64decode(content) == (run / name).read_bytes()


NOWHERE, TOKEN = {"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_TOKEN": "hf_abc"}


REFUSALS: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"status": 401}, TOKEN, "hf auth login"),
    ({"status": 403}, TOKEN, "may not write"),
    ({"status": 404}, TOKEN, "OWNER/NAME"),
    ({"status": 500}, TOKEN, "try again"),
    ({"odd": True}, TOKEN, "unexpected response"),
    ({}, NOWHERE, "hf auth login"),
    ({}, NOWHERE | TOKEN, "cannot be reached"),
    ({}, NOWHERE | TOKEN | {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
    ({}, NOWHERE | {"HF_TOKEN": "hf_\u00e9"}, "oken"),
    ({}, NOWHERE | {"HF_TOKEN": "hf a\tb"}, "oken"),
]


@pytest.mark.parametrize(("answer", "environment", "says"), sample(REFUSALS, 1 / 3))
def test_a_refusal_is_a_sentence(
    run: Path, hub: tuple[str, type[FakeHub]], answer: dict[str, Any], environment: dict[str, str], says: str
) -> None:
    address, handler = hub
    for name, value in answer.items():
        setattr(handler, name, value)
    process = cli(str(run), "me/x", **{"HF_ENDPOINT": address, **environment})
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert says in process.stderr


@pytest.mark.parametrize(
    ("include", "exclude", "names"),
    [
        (["*.safetensors"], [], {"adapter_model.safetensors"}),
        (["*.json"], ["adapter_*"], {"notes.json"}),
        (["checkpoints/*"], [], {"checkpoints/step-1/optimizer.safetensors"}),
        ([], ["*.safetensors", "README.md"], {"adapter_config.json"}),
        (["run.json"], [], {"run.json"}),
        (["?*"], [], {"README.md", "adapter_config.json", "adapter_model.safetensors", "notes.json"}),
        (["[!*]*"], ["*.md"], {"adapter_config.json", "adapter_model.safetensors", "notes.json"}),
        (["r*", "c*", "l*"], [], set()),
        (["*/run.json"], [], {"sub/run.json"}),
    ],
)
def test_patterns(run: Path, include: list[str], exclude: list[str], names: set[str]) -> None:
    (run / "sub").mkdir()
    (run / "sub" / "run.json").write_text("{}")
    (run / "notes.json").write_text("{}")
    if not names:
        with pytest.raises(UserError, match="leave no files"):
            prepare(run, include, exclude)
        return
    upload = prepare(run, include, exclude)
    assert set(upload.files) == names
    assert upload.card is None


PRIVATE = (
    "credentials.json", "tokenizer_notes_private.txt", "train-data.safetensors", "tokenizer_backup.json", "notes.md",
    "config.json.bak", "model-00009-of-00009.safetensors", "secrets.model", "my.jinja", "vocab.csv",
    "LICENSE-keys.json", "README.private.md", "state.json", "manifest.json", "metadata.json", "optimizer.safetensors",
    "token", "a.part", "additional_chat_templates/notes.txt", "sub/tokenizer.json", "sub/config.json",
    "TOKENIZER.JSON", ".env", "id_rsa",
)  # fmt: skip
PUBLIC = (
    "README.md", "LICENSE", "NOTICE.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)  # fmt: skip


def scattered(directory: Path) -> Path:
    for name in (*PRIVATE, *PUBLIC):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        if not (directory / name).exists():
            (directory / name).write_text("{}")
    return directory


def test_what_only_lies_beside_stays(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exact names, and the shards of the index: whatever else a folder holds is sent only where --include says so."""
    models = FIXTURES / "models"
    single, sharded, gguf = (tmp_path / name for name in ("single", "sharded", "gguf"))
    shutil.copytree(models / "qwen2", single)
    shutil.copytree(models / "llama", sharded)
    gguf.mkdir()
    (gguf / "m.gguf").write_bytes(b"GGUF")
    shards = {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)} | {"model.safetensors.index.json"}
    usual = {
        run: {"adapter_model.safetensors", "adapter_config.json"},
        single: {"config.json", "model.safetensors"},
        sharded: {"config.json"} | shards,
        gguf: {"m.gguf"},
    }
    for directory, own in usual.items():
        upload = prepare(scattered(directory))
        assert set(upload.files) - {"generation_config.json"} == {*own, *PUBLIC}
        assert set(upload.reasons) == set(upload.files)
        assert set(prepare(directory, include=["credentials.json", "sub/*"]).files) == {
            "credentials.json", "sub/tokenizer.json", "sub/config.json"
        }  # fmt: skip
    assert main(["push", str(sharded), "me/x", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "nothing was uploaded" in shown
    assert "private if created" in shown
    for name in upload.files:
        assert name in shown or name == "m.gguf"
    assert "shard that model.safetensors.index.json names" in shown


def test_a_card_is_made_where_there_is_none(run: Path) -> None:
    (run / "README.md").unlink()
    text = prepare(run).card or ""
    assert text.startswith("---\n")
    assert "| adapter_model.safetensors, SHA-256 | " in text
    assert prepare(run, exclude=["README.md"]).card is None


def test_models_and_what_is_not_one(tmp_path: Path) -> None:
    assert prepare(FIXTURES / "models" / "llama").kind == "model"
    place = tmp_path / "downloads"
    (place / "models").mkdir(parents=True)
    for path, content in ((place / "letter.txt", b"dear"), (place / "models" / "m.gguf", b"GGUF")):
        path.write_bytes(content)
    for source, include, message in (
        (place, [], "no adapter, .*no GGUF file|no GGUF file"),
        (place / "letter.txt", [], "not a directory"),
        (FIXTURES / "models" / "llama", ["*.gguf"], "leave no files"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(source, include)
    (place / "m.gguf").write_bytes(b"GGUF")
    assert set(prepare(place).files) == {"m.gguf"}


def test_a_damaged_adapter_and_a_link_out_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (run / "notes").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="link to a file outside"):
        prepare(run, include=["*"])
    assert "notes" not in prepare(run).files
    (run / "notes").unlink()
    (run / "adapter_model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(UserError, match="adapter_model"):
        prepare(run)


def test_a_base_that_others_do_not_find_is_said(tmp_path: Path) -> None:
    for name, notes in (("/home/me/m", 1), ("models/m.gguf", 1), ("Qwen/Qwen2.5-0.5B", 0)):
        adapter = save_golden_adapter("qwen2", tmp_path / str(len(name)), base_model_name_or_path=name)
        assert len(prepare(adapter).notes) == notes
    assert "it cannot be loaded" in prepare(adapter, include=["README.md", "*.safetensors"]).notes[0]


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert hub_id("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert [hub_id(name) for name in ("demo", "models/mine", "./m", "/a/b", "../m")] == [None] * 5


def test_a_card_states_the_run_and_no_paths() -> None:
    options = TrainingArguments(
        data="/home/me/secret dir/rows|1.jsonl", output="/home/me/out", model="Qwen/Qwen2.5-0.5B",
        objective="dpo", beta=0.1, reference_adapter="/home/me/sft",
    )  # fmt: skip
    device = UsedDevice("G", "D", "Vulkan", "discrete", subgroup_size=32, checked_shaders=False)
    record = RunRecord(
        stop_reason="max steps",
        signal=None,
        damaged_log_lines=0,
        options=options,
        state=RunState(3, total_steps=9, tokens=1234, last_loss=0.5, first_eval_loss=2.0, last_eval_loss=1.5,
                       best_eval_loss=1.0, best_step=2),
        data=Data("/home/me/rows.jsonl", "d1", "rows.jsonl: 4 rows"),
        eval_data=HeldOut("/home/me/valid.jsonl", "d4"),
        base_digest="d2",
        base_sha256=None,
        init_adapter_sha256=None,
        adapter_sha256="d3",
        trainable_parameters=5678,
        memory=Memory({}, 0, 0),
        environment=Environment({"wgpu-lora": "9"}, "", device, []),
    )  # fmt: skip
    text = card(record)
    listed = {line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")}
    assert listed & {"beta", "desirable_weight", "completion_only_loss"} == {"beta"}  # those of the objective
    assert "from transformers import AutoModelForCausalLM, AutoTokenizer\n\nbase = AutoModelForCausalLM.from" in text
    whole = card(record, ARCHITECTURES["mistral3"].AUTO_CLASS)
    assert whole == text.replace("AutoModelForCausalLM", "AutoModelForImageTextToText")
    assert "/home/me" not in text
    for fact in ("base_model: Qwen/Qwen2.5-0.5B",
                 "3 of 9 (finished)", "1,234", "5,678", "d1", "d2", "d3", "2.0000 before, 1.5000 after",
                 "--model Qwen/Qwen2.5-0.5B --adapter out --prompt", 'from_pretrained(base, "out")',
                 "export gguf --model Qwen/Qwen2.5-0.5B --adapter out",
                 "after step 2, which has a lower held-out loss: 1.0000",
                 "rows&#124;1.jsonl", "| learning_rate |"):  # fmt: skip
        assert fact in text
