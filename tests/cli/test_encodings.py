"""Output in encodings that lack some of its characters: escaped, never the end of a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from support import MODELS
from support.cli import SMALL, flags, write_rows
from support.models import words_model
from support.sampling import sample
from tokenizers import models, pre_tokenizers

WORDS = "ł→é中😀"  # one of them is in cp1252
ENCODINGS = {
    "cp1252": {"PYTHONIOENCODING": "cp1252"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "UTF-8": {"PYTHONIOENCODING": "utf-8"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows few words in ASCII, rows, and a recipe and names that are not ASCII either."""
    place = tmp_path_factory.mktemp("encodings")
    model = words_model(place / "model")
    words = tokenizers.Tokenizer(models.WordLevel({f"{WORDS}{i}": i for i in range(211)}, unk_token=f"{WORDS}0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(model / "tokenizer.json"))
    (place / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    write_rows(place / "rows.jsonl")
    (place / "goal.toml").write_text(f'goal = "{WORDS}"\n', encoding="utf-8")
    (place / "recipe.toml").write_text(f'output = "{WORDS}"\nlearning_rat = 1\n', encoding="utf-8")
    return place


def run(place: Path, encoding: str, arguments: list[str], stdin: str = "") -> tuple[int, bytes, str]:
    runs = {"XDG_STATE_HOME": str(place), "XDG_DATA_HOME": str(place), "WGPU_LORA_NO_TUNE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "wgpu_lora", *arguments],
        input=stdin.encode(), capture_output=True, cwd=place, env=os.environ | runs | ENCODINGS[encoding], timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr.decode("latin-1")


ASK = ["--model", "model", "--base-dtype", "f32", "--max-new-tokens", "4"]
TRAIN = flags(recipe="goal.toml", model=MODELS / "qwen2", data="rows.jsonl", output="run", **SMALL)
COMMANDS: dict[str, tuple[list[str], str, int]] = {
    "an answer": (["generate", *ASK, "--prompt", "a"], "", 0),
    "two answers": (["generate", *ASK, "--prompt", "a", "--prompt", "b"], "", 0),
    "compared": (["generate", *ASK, "--prompt", "a", "--compare"], "", 2),
    "JSON": (["generate", *ASK, "--prompt", "a", "--json"], "", 0),
    "JSON lines": (["generate", *ASK, "--prompts", "prompts.jsonl"], "", 0),
    "a chat": (["chat", *ASK], "a\n", 0),
    "a run": (["finetune", *TRAIN], "", 0),
    "the run log": (["runs", "last"], "", 0),
    "a wrong recipe": (["finetune", "--recipe", "recipe.toml"], "", 2),
    "a wrong path": (["generate", "--model", f"{WORDS}\udcff", "--prompt", "a"], "", 2),
    "a wrong option": (["generate", f"--{WORDS}"], "", 2),
    "help": (["finetune", "--help-all"], "", 0),
}


WHOLE = sample(list(ENCODINGS), 1 / 4)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_commands_end_well_in_every_encoding(place: Path, tmp_path: Path, encoding: str) -> None:
    """All commands in the commit's encoding, one answer in the others."""
    for name in ("model", "rows.jsonl", "prompts.jsonl", "goal.toml", "recipe.toml"):
        (tmp_path / name).symlink_to(place / name)
    for name, (arguments, stdin, code) in COMMANDS.items():
        if encoding not in WHOLE and name != "an answer":
            continue
        found, out, err = run(tmp_path, encoding, arguments, stdin)
        assert found == code, (name, err)
        assert "Traceback" not in err, (name, err)
        if name.startswith("JSON"):
            assert out.isascii()
            assert WORDS in str([json.loads(line) for line in out.splitlines()] if "lines" in name else json.loads(out))
        elif "answer" in name or name == "a chat":
            codec = {"C": "ascii"}.get(encoding, encoding)
            assert WORDS.encode(codec, "backslashreplace") in out, (name, out)


def test_a_handler_that_somebody_chose_is_kept(tmp_path: Path) -> None:
    said = (
        "from wgpu_lora.closed_streams import discard_when_closed; import sys; "
        "print('ł', file=discard_when_closed(sys.stdout), flush=True)"
    )
    for chosen, shown in (("ascii:replace", b"?\n"), ("ascii:strict", b"\\u0142\n"), ("utf-8", "ł\n".encode())):
        done = subprocess.run(
            [sys.executable, "-c", said], capture_output=True, env=os.environ | {"PYTHONIOENCODING": chosen}
        )
        assert done.stdout == shown, done.stderr
