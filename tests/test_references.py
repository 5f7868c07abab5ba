"""What comments, docstrings and pages name exists: modules, names in them, files and folders."""

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest
from support import ROOT

FOLDERS = "wgpu_lora|scripts|tests|shaders|bricks|recipes|docs"
# ops/loss.py, families/plain.wgsl.j2, ../docs/usage.md: the end of the path of a file.
FILE = re.compile(r"(?<![\w/.{}<*~-])(?:\.\./)*((?:\w[\w.-]*/)*\w[\w.-]*\.(?:py|wgsl\.j2|wgsl|md))\b(?![\w/*{])")
FOLDER = re.compile(rf"(?<![\w/.{{}}<*~-])((?:{FOLDERS})(?:/[a-z_]\w*)+)/?(?![\w/.*{{-])")
# ops.loss, wgpu_lora.weights.dense.BF16, loss.VocabularyLogprobs: a module by the end of its name, or a name in it.
DOTTED = re.compile(r"(?<![\w/.'\"<@:%-])([a-z_]\w*(?:\.[A-Za-z_]\w*)+)(?![\w/(*-]|\.\w|:\d)")
# By their first line: parsing all sources takes a minute.
STRING = re.compile(r'(?P<docstring>^[ ]*r?)?"""(?P<text>.*?)"""', re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"(?:^|\s)(#[^\n\"]*)")
DATA = re.compile(r".*\.(age|cpp|ggml(\.\w+)?|gguf|gz|html|j2|jinja|js|jsonl?|key|md|py|safetensors|sig|toml|wgsl)$")
# What users, examples or other programs name: files, tables of TOML, modules of transformers and bitsandbytes.
FOREIGN = {
    "FILE.py", "made.py", "make_rows.py", "my_rewards.py", "my_tools.py", "house-style/README.md",
    "objectives/scaled.wgsl", "shaders/objectives/scaled.wgsl", "backends/default/ops.py", "functional.py",
    "modeling_rope_utils.py", "api.GPUError", "tokenizers.Tokenizer",
}  # fmt: skip


@cache
def texts() -> dict[str, str]:
    """The sources and pages of the working tree, by path; those that git ignores are left out."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {
        path: (ROOT / path).read_text(encoding="utf-8") if path.endswith((".py", ".md")) else ""
        for path in listing
        if (ROOT / path).is_file()
    }


@cache
def ends() -> set[str]:
    """Ends of the paths of all files and folders: 'ops/loss.py' and 'loss.py' of 'wgpu_lora/ops/loss/loss.py'."""
    paths = [path.split("/") for path in texts()]
    return {"/".join(p[first:last]) for p in paths for last in range(1, len(p) + 1) for first in range(last)}


@cache
def modules() -> dict[str, list[str]]:
    """The end of a module's name -> the sources of modules whose name ends so."""
    sources = defaultdict(list)
    for path, text in texts().items():
        if path.endswith(".py"):
            steps = path.removesuffix(".py").removesuffix("/__init__").split("/")
            for first in range(len(steps)):
                sources[".".join(steps[first:])].append(text)
    return sources


@cache
def packages() -> set[str]:
    return {step for path in texts() if path.endswith(".py") for step in path.split("/")[:-1]}


def exists(name: str) -> bool:
    """Whether a dotted name is that of a module or of something in one; names of neither say nothing of ours."""
    steps = name.split(".")
    for count in range(len(steps), 0, -1):
        if sources := modules().get(".".join(steps[:count])):
            return count == len(steps) or any(re.search(rf"\b{steps[count]}\b", source) for source in sources)
    return steps[0] not in packages()


def prose(path: str, text: str) -> Iterator[str]:
    """A page, or the comments and docstrings of a module."""
    if path.endswith(".md"):
        yield text
        return
    yield from (match["text"] for match in STRING.finditer(text) if match["docstring"] is not None)
    yield from COMMENT.findall(STRING.sub("", text))


def missing(path: str, text: str) -> Iterator[str]:
    """Names in a file's prose that are of nothing that exists. NAME and MODEL_TYPE stand for any."""
    for piece in prose(path, text):
        for name in [*FILE.findall(piece), *FOLDER.findall(piece)]:
            if name not in ends() and name not in FOREIGN and not re.search(r"\b(NAME|MODEL_TYPE)\b", name):
                yield name
        for name in DOTTED.findall(piece):
            ours = path.endswith(".py") or name.startswith(("wgpu_lora.", "scripts.", "tests."))
            if ours and not DATA.match(name) and name not in FOREIGN and not exists(name):
                yield name


def test_names_in_prose_exist() -> None:
    gone = {
        f"{path}: {name}"
        for path, text in texts().items()
        if path.endswith((".py", ".md")) and path != "CHANGELOG.md" and not path.startswith("tests/test_references")
        for name in missing(path, text)
    }
    assert not gone


@pytest.mark.parametrize(
    ("path", "text", "names"),
    [
        ("a.py", '"""See ops.stack."""', ["ops.stack"]),
        ("a.py", "# models.audit reports it", ["models.audit"]),
        ("a.py", '"""As `formats.checkpoint.Checkpoint.digest`."""', ["formats.checkpoint.Checkpoint.digest"]),
        ("a.py", '"""As `norm.rmsnorm` and ops.norm.gone."""', ["ops.norm.gone"]),
        ("a.py", "x = ops.stack  # see ops/norm.py and ops/stack.py", ["ops/stack.py"]),
        ("a.md", "`wgpu_lora/ops`, `wgpu_lora/op` and `wgpu_lora.gone`", ["wgpu_lora/op", "wgpu_lora.gone"]),
        ("a.md", "`shaders/gone/`, [usage](docs/usage.md), `../docs/gone.md`", ["docs/gone.md", "shaders/gone"]),
    ],
)
def test_names_of_nothing_are_listed(path: str, text: str, names: list[str]) -> None:
    assert list(missing(path, text)) == names
