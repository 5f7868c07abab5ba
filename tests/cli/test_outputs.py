"""Output appears whole or not at all: beside another process, after a kill, on a full disk, behind links."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.cli import Run, write_rows
from support.gguf_models import DEMO, make_adapter, read, small
from support.models import save_golden_adapter, words_model
from support.sampling import sample

from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import file_digest, new_directory, replace_directory
from wgpu_lora.files.locks import is_directory, locked
from wgpu_lora.protect.overhead_results import PUBLISHED
from wgpu_lora.protect.sealed.keys import DataKey, write_private

KEY = DataKey.generate()
MODEL = "{place}/model"
# The arguments of commands by name; {out} is what they write, with its ending. `place` prepares what they read.
DIRECTORIES = {
    "merge": ["merge", "--model", MODEL, "--adapter", "{place}/adapter", "--output", "{out}"],
    "import": ["import", MODEL, "--output", "{out}"],
    "quantize": ["quantize", "--model", MODEL, "--scheme", "nf4", "--output", "{out}"],
    "data prepare": ["data", "prepare", "{place}/rows.jsonl", "--output", "{out}"],
    "protect open": ["protect", "open", "{place}/folder.tar.age", "--key", "{place}/key", "--output", "{out}"],
}
FILES = {
    "export gguf": ["export", "gguf", "--model", "demo", "--output", "{out}.gguf"],
    "export gguf --lora": [
        "export", "gguf", "--model", MODEL, "--adapter", "{place}/adapter", "--lora", "--output", "{out}.gguf"
    ],
    "recipes data": ["recipes", "data", "hive-mind-0.5b", "{out}", "--rows", "3"],
    "generate": ["generate", "--model", MODEL, "--prompt", "w1", "--max-new-tokens", "1", "--output", "{out}"],
    "protect seal": ["protect", "seal", "{place}/rows.jsonl", "--to", KEY.recipient, "--output", "{out}.age"],
    "protect keygen": ["protect", "keygen", "{out}"],
}  # fmt: skip
REPLACED = {  # what is there may be written again
    "bench": ["bench", "--brick", "rope", "--model", MODEL, "--tokens", "8", "--time-limit", "0.01", "--json", "{out}"],
    "data stats": [
        "data", "stats", "--data", "{place}/rows.jsonl", "--model", MODEL, "--no-measure", "--max-length", "16",
        "--page", "{out}",
    ],
    "report": ["report", str(PUBLISHED), "--output", "{out}"],
    "teacher-cache": [
        "teacher-cache", "--model", MODEL, "--data", "{place}/rows.jsonl", "--length", "9", "--top-k", "4",
        "--random", "3", "--output", "{out}",
    ],
}  # fmt: skip
WITHIN = {"report": "report.html", "teacher-cache": "cache.json"}  # a directory that may exist
COMMANDS = DIRECTORIES | FILES | REPLACED


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an adapter of it, rows, a key and what it opens."""
    directory = tmp_path_factory.mktemp("inputs")
    words_model(directory / "model")
    save_golden_adapter("qwen2", directory / "golden")
    write_rows(directory / "rows.jsonl", [{"prompt": f"w{i} w{i + 1}", "completion": "w3 w4"} for i in range(4)])
    write_private(directory / "key", KEY.file_text())
    (directory / "folder").mkdir()
    (directory / "folder" / "a").write_text("a")
    run(["finetune", "--model", str(directory / "model"), "--data", str(directory / "rows.jsonl"), "--max-length", "16",
         "--max-steps", "1", "--output", str(directory / "adapter"), "--no-run-log"])  # fmt: skip
    run(["protect", "seal", str(directory / "folder"), "--to", KEY.recipient])
    return directory


def run(arguments: Sequence[str]) -> None:
    assert main(arguments) == 0


def arguments_of(name: str, place: Path, out: Path) -> list[str]:
    return [word.format(place=place, out=out) for word in COMMANDS[name]]


def target(name: str, out: Path) -> Path:
    """What a command locks."""
    ending = re.search(r"\{out\}(\S*)", " ".join(COMMANDS[name]))
    return out / WITHIN[name] if name in WITHIN else out.with_name(out.name + ending[1])


def names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> None:
    capsys.readouterr()
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, message
    assert [word for word in words if word not in message and not re.search(word, message)] == [], message


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="cannot tell which file is flushed")
@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"generate"}))  # which keeps its answers
def test_one_writer_at_a_time(
    name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What another process is writing, what a dead one left, and a full disk."""
    monkeypatch.setattr("wgpu_lora.bench.device_ceilings.RUNS", 1)
    monkeypatch.setattr("wgpu_lora.bench.device_ceilings.COPY_BYTES", 1 << 22)
    out = tmp_path / "out"
    final, arguments = target(name, out), arguments_of(name, place, out)
    with locked(final, "--output"):
        refused(arguments, capsys, f"Another process is writing to {final}: wait for it, or choose another")
    assert names(final.parent) == []

    def full(descriptor: int) -> None:
        if str(tmp_path) in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        words = " cannot be written (No space left on device): free space, or choose another"
        refused(arguments, capsys, str(out), "No space left on device" if name == "teacher-cache" else words)
        assert names(final.parent) == []
    for leftover in (f".{final.name}.abcd1234.tmp", f".{final.name}.tmp"):
        (final.parent / leftover).mkdir(parents=True)
        (final.parent / leftover / "part").touch()
    assert main(arguments) in (0, 1)  # 1: a brick that is too slow here
    assert [path.name for path in final.parent.iterdir() if path.name.startswith(".")] == []
    assert final.exists()
    if name not in REPLACED:
        before = {path: file_digest(path) for path in tmp_path.rglob("*") if path.is_file()}
        refused(arguments, capsys, str(final), " already: give ")
        assert {path: file_digest(path) for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", COMMANDS)
def test_links(name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    link = out if name in WITHIN else target(name, out)
    for to, words in (("nowhere", "is a link that leads nowhere"), (link.name, "is a link that leads nowhere")):
        link.symlink_to(tmp_path / to)
        refused(arguments_of(name, place, out), capsys, f"{link} {words}: ")
        link.unlink()
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "out"
    refused(arguments_of(name, place, below), capsys, f"{tmp_path / 'file'} is not a directory: ")
    if name not in REPLACED:
        (tmp_path / "empty").mkdir()
        link.symlink_to(tmp_path / "empty")
        refused(arguments_of(name, place, out), capsys, f"{link} is a link: give ")
        assert names(tmp_path) == sorted(["empty", "file", link.name])


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "{link}"],
        ["generate", "--model", "{link}", "--prompt", "a"],
        ["generate", "--adapter", "{link}", "--prompt", "a"],
        ["finetune", "--data", "{link}/rows.jsonl", "--output", "{link}"],
        ["finetune", "--adapters", "{rows}:{link}", "--max-steps", "1"],
        ["data", "prepare", "{rows}", "{link}", "--output", "out"],
        ["bench", "compare", "{rows}", "{link}"],
        ["protect", "seal", "{link}", "--to", KEY.recipient],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
@pytest.mark.parametrize("to", ["nowhere", "link"])
def test_links_that_are_given(
    arguments: list[str], to: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / to)
    filled = [word.format(link=link, rows=place / "rows.jsonl") for word in arguments]
    refused(filled, capsys, f"{link} is a link that leads nowhere: ")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="has no file system that holds no files")
@pytest.mark.parametrize("name", COMMANDS)
def test_places_that_hold_no_files(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "/proc/self is not writable" if name == "teacher-cache" else "out.* cannot be written \\(No such file"
    refused(arguments_of(name, place, Path("/proc/self/out")), capsys, words)


KILLED = """
import os, signal, sys
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
from wgpu_lora.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.name == "nt", reason="has no SIGKILL")
@pytest.mark.parametrize("name", sample(["merge", "export gguf", "data prepare", "protect seal", "report"], 1 / 3))
def test_what_a_killed_process_left_is_swept(name: str, place: Path, tmp_path: Path) -> None:
    arguments = arguments_of(name, place, tmp_path / "out")
    assert subprocess.run([sys.executable, "-c", KILLED, *arguments]).returncode == -signal.SIGKILL
    final = target(name, tmp_path / "out")
    assert not final.exists()
    assert any(path.name.endswith(".tmp") for path in final.parent.iterdir())
    run(arguments)
    assert not [path for path in final.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", sample(["merge", "export gguf", "data prepare", "protect seal"], 1 / 3))
def test_of_two_processes_one_writes(name: str, place: Path, tmp_path: Path) -> None:
    run(arguments_of(name, place, tmp_path / "alone"))
    arguments = [sys.executable, "-m", "wgpu_lora", *arguments_of(name, place, tmp_path / "out")]
    processes = [subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate()[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 2], errors
    (loser,) = (text for process, text in zip(processes, errors, strict=True) if process.returncode)
    assert "Another process is writing to" in loser or " already: give " in loser
    digests = []
    for run_name in ("alone", "out"):
        final = target(name, tmp_path / run_name)
        files = [final] if final.is_file() else sorted(final.rglob("*"))
        digests.append([file_digest(path) for path in files if path.is_file() and path.name != "README.md"])
    assert digests[0] == digests[1] or name == "protect seal"  # which is random
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_who_gets_a_lock_has_the_file_of_that_name(tmp_path: Path) -> None:
    with locked(tmp_path / "a", "--output"):
        file = tmp_path / ".a.lock"
        descriptor = os.open(file, os.O_RDWR)
    assert not file.exists()  # removed while it was held
    with locked(tmp_path / "a", "--output"):
        assert not os.path.sameopenfile(descriptor, os.open(file, os.O_RDWR))
        with pytest.raises(UserError, match="Another process"), locked(tmp_path / "a", "--output"):
            pass
        assert file.exists()
    os.close(descriptor)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks(
    number: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fcntl

    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    refused(
        arguments_of("data prepare", place, tmp_path / "out"), capsys, f"out cannot be written ({os.strerror(number)})"
    )
    assert names(tmp_path) in ([], [".out.lock"])


def test_what_was_moved_away_comes_back(tmp_path: Path) -> None:
    """A process was killed between the two renames of a replacement."""
    (tmp_path / ".a.previous").mkdir()
    (tmp_path / ".a.previous" / "x").touch()
    with pytest.raises(UserError, match="exists already"), new_directory(tmp_path / "a", "--output"):
        pass
    assert names(tmp_path) == ["a", "a/x"]


def directory_of(place: Path, text: str) -> Path:
    place.mkdir()
    (place / "x").write_text(text)
    return place


@pytest.mark.skipif(sys.platform != "linux", reason="has no renameat2")
def test_a_replaced_directory_is_there_at_every_moment(tmp_path: Path) -> None:
    final, ended = directory_of(tmp_path / "a", "0"), threading.Event()

    def look() -> None:
        while not ended.is_set():
            (final / "x").read_text()  # raises if there is none

    with ThreadPoolExecutor(1) as pool:
        watch = pool.submit(look)
        for number in range(1, 100):
            replace_directory(directory_of(tmp_path / ".b.tmp", str(number)), final)
        ended.set()
        watch.result()
    assert (final / "x").read_text() == "99"
    assert names(tmp_path) == ["a", "a/x"]


def test_without_an_exchange_a_reader_finishes_what_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that restores the directory amid a replacement costs it nothing."""
    monkeypatch.setattr("wgpu_lora.files.atomic._exchange", lambda *_: False)
    final, rename, restored = directory_of(tmp_path / "a", "old"), Path.rename, list[bool]()

    def killed(path: Path, target: Path) -> Path:
        if path.name == ".b.tmp":
            raise KeyboardInterrupt
        return rename(path, target)

    def beside_a_reader(path: Path, target: Path) -> Path:
        if path.name == ".b.tmp" and not restored:
            restored.append(is_directory(final))
        return rename(path, target)

    new = directory_of(tmp_path / ".b.tmp", "new")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        patched.setattr("wgpu_lora.files.atomic.restore", lambda path: None)
        with pytest.raises(KeyboardInterrupt):
            replace_directory(new, final)
    assert not final.exists()
    assert is_directory(final)
    monkeypatch.setattr(Path, "rename", beside_a_reader)
    replace_directory(new, final)
    assert restored == [True]
    assert (final / "x").read_text() == "new"
    assert names(tmp_path) == ["a", "a/x"]


READERS = {
    "adapter": ["generate", "--model", MODEL, "--adapter", "{moved}", "--prompt", "w1", "--max-new-tokens", "1"],
    "model": ["plan", "--model", "{moved}", "--data", "{place}/rows.jsonl", "--max-length", "16"],
    "folder": ["data", "stats", "--data", "{moved}", "--model", MODEL, "--no-measure", "--max-length", "16"],
}


@pytest.mark.parametrize("kind", READERS)
def test_every_reader_finishes_a_killed_replacement(place: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(place / kind, tmp_path / ".moved.previous")
    if kind == "folder":
        shutil.copy(place / "rows.jsonl", tmp_path / ".moved.previous" / "train.jsonl")
    run([word.format(place=place, moved=tmp_path / "moved") for word in READERS[kind]])
    assert (tmp_path / "moved").is_dir()


@pytest.mark.usefixtures("fresh_device")
def test_a_ledger_where_no_lock_can_be(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WGPU_LORA_SHARE_DIR", "/proc/self")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits"))
    refused(["generate", "--prompt", "hi", "--max-new-tokens", "1"], capsys, "The ledger /proc/self/", "cannot be used")


# -- wgpu-lora export gguf ---------------------------------------------------------------------------------------------


def export(*arguments: str | Path) -> int:
    return main(["export", "gguf", *map(str, arguments)])


def test_a_model_and_its_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small(tmp_path / "model", "llama", max_position_embeddings=64)
    adapter = make_adapter(tmp_path / "adapter", model, base_model_name_or_path=str(model))
    merged, alone = tmp_path / "merged.gguf", tmp_path / "lora.gguf"
    assert export("--adapter", adapter, "--quantize", "Q8_0", "--output", merged) == 0
    first, second, following = capsys.readouterr().out.splitlines()
    assert following == f"next      llama-cli -m {merged}"
    assert first == f"exported  {model} and {adapter} into {merged}"
    assert second == f"size      {merged.stat().st_size:,} bytes, q8_0, 8.51 bits per weight"
    assert export("--adapter", adapter, "--lora", "--output", alone) == 0
    assert f"{alone.stat().st_size:,} bytes, adapter, f32, 32.00 bits per weight" in capsys.readouterr().out
    facts, tensors = read(merged)
    assert (facts["general.name"], facts["general.finetune"]) == ("model", "adapter")
    assert tensors["blk.1.ffn_down.weight"].tensor_type.name == "Q8_0"
    assert read(alone)[0]["general.type"] == "adapter"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "lora.gguf", "merged.gguf", "model"]


def test_notes_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small(tmp_path / "model", "mistral", sliding_window=16)
    assert export("--model", model, "--output", tmp_path / "out.gguf") == 0
    printed = capsys.readouterr().out.splitlines()
    assert "f16" in printed[1]
    assert printed[2].startswith("note      llama.cpp ignores this model's sliding window")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora"], "give it with --adapter DIR"),
        (["--quantize", "q2_k"], "--quantize q2_k is not known: choose one of f16, q8_0"),
        (["--quantize", ""], "--quantize is empty"),
        (["--model", "/nowhere/at/all"], "does not exist"),
        (["--adapter", "/nowhere/at/all"], "is not a directory"),
        (["--adapter", "ADAPTER", "--lora", "--quantize", "f16"], "cannot be combined with --lora"),
        (["--adapter", "ADAPTER", "--model", "demo"], "does not fit"),
        (["--adapter", "ADAPTER", "--model", "demo", "--lora"], "does not fit"),
        (["--model", str(DEMO / "model.safetensors")], "is a file"),
    ],
)
def test_mistakes(tmp_path: Path, run: Run, arguments: list[str], message: str) -> None:
    adapter = make_adapter(tmp_path / "adapter", small(tmp_path / "model", "qwen2"))
    filled = [str(adapter) if argument == "ADAPTER" else argument for argument in arguments]
    assert message in run("export", "gguf", *filled, "--output", tmp_path / "out.gguf").refusal()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model"]


def test_help_names_every_type(capsys: pytest.CaptureFixture[str]) -> None:
    from wgpu_lora.models.export.gguf_export import FILE_TYPES

    assert export("--help") == 0
    output = capsys.readouterr().out
    assert all(kind in output for kind in FILE_TYPES)


@pytest.mark.parametrize("command", ["export gguf", "merge --adapter nowhere", "import"])
def test_an_output_that_exists_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, run: Run, command: str
) -> None:
    output = tmp_path / "out.gguf"
    output.write_text("kept")
    model = ["nobody/nothing"] if command == "import" else ["--model", "nobody/nothing"]
    assert (
        f"{output} exists already: give --output another name, or remove it."
        in run(*command.split(), *model, "--output", str(output)).refusal()
    )
