"""Every snippet of a model card runs, as a reader would copy it, with the base under the path that the card names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.cli import Run, commands
from support.gguf_files import DEMO

from wgpu_lora.assets import DEMO_TRAIN

BLOCK = re.compile(r"```(sh|python)\n(.*?)```", re.DOTALL)


@pytest.fixture(params=["base", "base.gguf"])
def card(
    request: pytest.FixtureRequest, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> tuple[list[tuple[str, str]], Run]:  # fmt: skip
    """The snippets of the card of a short run on a directory or a GGUF file, and what runs commands."""
    run = commands(capsys)
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "path" / "to" / request.param
    base.parent.mkdir(parents=True)
    if base.suffix:
        assert run("export", "gguf", "--model", DEMO, "--output", base).code == 0
    else:
        base.symlink_to(DEMO)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(DEMO_TRAIN.open(encoding="utf-8").readlines()[:4]), encoding="utf-8")
    run("finetune", "--model", base, "--data", rows, "--max-steps", 1, "--output", "out", "--no-tune").output()
    return BLOCK.findall((tmp_path / "out" / "README.md").read_text()), run


def run_shell(blocks: list[tuple[str, str]], run: Run) -> list[str]:
    """Run the commands of wgpu-lora; return the first words of all commands."""
    programs = []
    for line in (line for kind, text in blocks if kind == "sh" for line in text.splitlines()):
        program, *arguments = shlex.split(line)
        programs.append(program)
        if program == "wgpu-lora":
            more = ["--max-new-tokens", "1"] if arguments[0] == "generate" else []
            run(*arguments, *more).output()
        else:
            files = [argument for argument in arguments if argument.endswith(".gguf")]
            assert files, line
            assert all(Path(file).is_file() for file in files), line
    return programs


def test_commands_run(card: tuple[list[tuple[str, str]], Run]) -> None:
    programs = run_shell(*card)
    assert programs.count("llama-cli") == 1
    assert programs.count("wgpu-lora") >= 2


@pytest.mark.reference
def test_python_runs(card: tuple[list[tuple[str, str]], Run]) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make test-reference does that")
    blocks, run = card
    run_shell(blocks, run)
    [source] = [text for kind, text in blocks if kind == "python"]
    names: dict[str, object] = {}
    exec(source, names)
    model, tokenizer = names["model"], names["tokenizer"]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], return_tensors="pt", return_dict=True)  # type: ignore[attr-defined]
    assert model(**ids).logits.shape[0] == 1  # type: ignore[operator]
