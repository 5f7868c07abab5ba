"""Tasks from the command line, files and recipes: which options win, how they are named, where they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cluster.fake_cluster import FakeCluster

from wgpu_lora.cluster.cluster_file import read_cluster_file
from wgpu_lora.cluster.cluster_tasks import gather_tasks
from wgpu_lora.cluster.messages import Task
from wgpu_lora.cluster.run_status import fetch_results
from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import COMMAND_LINE, naming
from wgpu_lora.train.options.training_arguments import from_values


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, and messages as on the command line."""
    monkeypatch.chdir(tmp_path)
    with naming(COMMAND_LINE):
        yield tmp_path


def gathered(text: str | None = None, options: dict[str, Any] | None = None, **more: Any) -> list[Task]:
    file = None
    if text is not None:
        Path("cluster.toml").write_text('name = "lab"\n' + text)
        file = read_cluster_file(Path("cluster.toml"))
    return gather_tasks(options or {}, file=file, **more)


def test_adapters_of_the_command_line(here: Path) -> None:
    first, second = gathered(options={"lora_r": 4, "model": "demo"}, adapters=["a.jsonl:out/a", "b.jsonl:out/b"])
    assert (first.name, second.name) == ("a", "b")
    assert first.output == str(here / "out/a")
    assert first.options == {"lora_r": 4, "model": "demo", "data": str(here / "a.jsonl")}
    json.dumps(second.options)
    # the options are those of a single run
    assert from_values(second.options, "a task").lora_r == 4


def test_what_goes_before_what(here: Path) -> None:
    Path("r.toml").write_text('data = "r.jsonl"\nlora_r = 2\nlora_alpha = 2\nmax_steps = 2\noutput = "r"\nseed = 2\n')
    text = """
[options]
lora_r = 1
lora_alpha = 1
max_steps = 1
learning_rate = 1
seed = 1
[[recipe]]
recipe = "r.toml"
lora_r = 4
"""
    (task,) = gathered(text, {"lora_alpha": 3, "lora_r": 3})
    assert task.name == "r"
    actual = {name: task.options[name] for name in ("lora_r", "lora_alpha", "max_steps", "learning_rate", "seed")}
    assert actual == {"lora_r": 4, "lora_alpha": 3, "max_steps": 2, "learning_rate": 1, "seed": 2}


def test_adapters_of_a_file_have_any_option_and_the_command_line_replaces_them(here: Path) -> None:
    text = '[[adapter]]\ndata = "a.jsonl"\ncheckpoint = "o/x"\nname = "one"\nrank = 4\noptim = "lion"\n'
    (task,) = gathered(text, {"optim": "sgd"})
    assert (task.name, task.output) == ("one", str(here / "o/x"))
    assert task.options == {"data": str(here / "a.jsonl"), "lora_r": 4, "optim": "lion"}
    (other,) = gathered(text, adapters=["b.jsonl:o/y"])
    assert other.name == "y"
    (alone,) = gathered(text, {"data": "c.jsonl", "output": "o/z"})
    assert (alone.name, alone.options["data"]) == ("z", str(here / "c.jsonl"))


def test_a_file_of_adapters(here: Path) -> None:
    Path("adapters.toml").write_text(
        '[[adapter]]\ndata = "a"\ncheckpoint = "o/a"\n[[adapter]]\ndata="b"\ncheckpoint="o/b"\n'
    )
    assert [task.name for task in gathered(adapters_config=Path("adapters.toml"))] == ["a", "b"]


def test_names_differ() -> None:
    tasks = gathered(adapters=["a:x/best", "a:y/best", "a:z/Best", "a:w/ä ö!"])
    assert [task.name for task in tasks] == ["best", "best-2", "Best-3", "adapter"]
    text = "".join(
        f'[[adapter]]\ndata = "a"\ncheckpoint = "{p}"\n{name}' for p, name in (("x/n", ""), ("y/m", 'name = "n"\n'))
    )
    assert [task.name for task in gathered(text)] == ["n-2", "n"]  # a given name stays


def test_paths_are_those_of_this_directory_or_of_the_root(here: Path) -> None:
    for folder in ("rows", "OWNER"):
        Path(folder).mkdir()
    Path("rows/a.jsonl").touch()
    pairs = ["rows/a.jsonl:1", "/abs/b.jsonl:2", "Anthropic/hh-rlhf:3", "~/c.jsonl:4", "OWNER/typo:5"]
    paths = [task.options["data"] for task in gathered(options={"model": "Qwen/Qwen3-0.6B"}, adapters=pairs)]
    assert paths == [
        str(here / "rows/a.jsonl"),
        "/abs/b.jsonl",
        "Anthropic/hh-rlhf",
        str(Path("~/c.jsonl").expanduser()),
        str(here / "OWNER/typo"),  # as for `finetune`, a path where its folder is
    ]
    text = '[data]\nroot = "/mnt/lab"\n[options]\nmodel = "rows"\neval_data = "rows/v.jsonl"\n'
    first, *_ = gathered(text, adapters=pairs[:1])
    assert first.options["data"] == "/mnt/lab/rows/a.jsonl"
    assert first.options["eval_data"] == "/mnt/lab/rows/v.jsonl"
    assert first.options["model"] == str(here / "rows")


def test_outputs_in_a_shared_folder(here: Path) -> None:
    (task,) = gathered(adapters=["a:out/a"], shared="/mnt/results")
    assert task.output == "/mnt/results/out/a"
    for outside in ("../a", "/elsewhere/a", "."):
        with pytest.raises(UserError, match="is not inside the shared folder /mnt/results"):
            gathered(adapters=[f"a:{outside}"], shared="/mnt/results")


def test_a_shared_folder_of_others_is_looked_into_by_them(here: Path) -> None:
    (here / "lab/used").mkdir(parents=True)
    (here / "lab/used/adapter_config.json").touch()
    with pytest.raises(UserError, match="exists already"):  # this machine has it, too
        gathered(adapters=["a:used"], shared=str(here / "lab"))
    with pytest.raises(UserError, match="is the directory of adapter"):
        gathered(adapters=["a:x", "b:y/../x"], shared="/mnt/nowhere")
    assert gathered(adapters=["a:x"], shared="/proc/nowhere")  # nothing is written there by this machine


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("o/a", "o/a", "is the directory of adapter 'a' and adapter 'a-2'"),
        ("o/a", "o/../o/a", "is the directory of adapter"),
        ("o/a", "o/A", "is the directory of adapter"),
        ("o/a", "link/a", "is the directory of adapter"),
        ("o/a", "o/a/b", "is inside another adapter's directory, .*o/a:"),
        ("link", "o/b", "is inside another adapter's directory, .*/link:"),
    ],
)
def test_two_tasks_with_one_output(here: Path, first: str, second: str, message: str) -> None:
    Path("o").mkdir()
    Path("link").symlink_to("o")
    with pytest.raises(UserError, match=message):
        gathered(adapters=[f"x:{first}", f"x:{second}"])


def test_outputs_in_use_or_unusable(here: Path) -> None:
    Path("used").mkdir()
    Path("used/adapter_config.json").write_text("{}")
    Path("notes").mkdir()
    Path("notes/README.md").touch()
    Path("link").symlink_to("notes")
    Path("file").touch()
    Path("circle").symlink_to("circle")
    for output, message in (
        ("used", r"used: .*/used exists already: give --output another name, or remove it"),
        ("notes", "notes exists already"),
        ("link", "link is a link: give --output the path that it leads to"),
        ("long/" + 250 * "n", r"n cannot be written \(.*too long.*\): choose another"),
        ("n" * 300, "'checkpoint' must be UTF-8 text, neither empty nor too long"),
        ("/proc/nope/n", "/proc/nope/n cannot be written"),
        ("file", "file of adapter 'file' is a file: choose another"),
        ("file/a", "file is not a directory"),
        ("circle", "circle is a link that leads nowhere"),
    ):
        with pytest.raises(UserError, match=message):
            gathered(adapters=[f"x:{output}"])
    Path("empty").mkdir()
    before = sorted(here.rglob("*"))
    assert gathered(adapters=["x:empty", "x:new/place/a", f"x:new/{'n' * 240}"])
    assert sorted(here.rglob("*")) == before  # trying leaves nothing behind


def test_the_longest_name_that_is_accepted_can_be_fetched(here: Path) -> None:
    for length in range(230, 256):
        try:
            (task,) = gathered(adapters=[f"x:{'n' * length}"])
        except UserError:
            break
        cluster = FakeCluster(files={"a": {"x": b"1"}})
        assert not fetch_results(cluster, "r", {"a": task.output}, lambda task: None)["a"]
    assert length == 242  # the file system's 255, without what hidden names have more


ADAPTER = '[[adapter]]\ndata = "a"\ncheckpoint = "o/a"\n'


@pytest.mark.parametrize(
    ("text", "options", "more", "message"),
    [
        (None, {}, {}, "There is nothing to train: give --adapters DATA:CHECKPOINT"),
        ("", {}, {}, "There is nothing to train"),
        (None, {"device": "0"}, {"adapters": ["a:b"]}, "--device cannot be given, since the cluster chooses"),
        (None, {"resume": True}, {"adapters": ["a:b"]}, "--resume cannot be given"),
        (None, {"data": "a"}, {"adapters": ["a:b"]}, "--data and --adapters cannot be combined"),
        (None, {"output": "a"}, {"adapters": ["a:b"]}, "--output and --adapters cannot be combined"),
        (None, {"data": "a"}, {}, "--output is missing"),
        (None, {"output": "a"}, {"recipe": "demo"}, "--data is missing: the recipe demo names no data"),
        (None, {}, {"adapters": ["a"]}, "is not DATA:CHECKPOINT"),
        (None, {}, {"recipe": "nowhere"}, "The recipe nowhere does not exist"),
        (None, {"lora_r": 0}, {"adapters": ["a:b"]}, "--lora-r must be greater than 0"),
        ("[options]\nlora_rr = 3\n" + ADAPTER, {}, {}, "did you mean 'lora_r'"),
        ("[options]\nlora_r = -3\n" + ADAPTER, {}, {}, r"\[options\]: 'lora_r' must be greater than 0"),
        ("[options]\noutput = 'x'\n" + ADAPTER, {}, {}, "'output' cannot be that of all adapters"),
        ("[options]\ndevice = 0\n" + ADAPTER, {}, {}, "'device' cannot be given"),
        (ADAPTER + "lora_rr = 3", {}, {}, "adapter 1 has an unknown key 'lora_rr': did you mean 'lora_r'"),
        (ADAPTER + "rank = 3\nlora_r = 3", {}, {}, "are the same key"),
        (ADAPTER + "rank = 'x'", {}, {}, "'rank' must be a whole number"),
        (ADAPTER + "output = 'x'", {}, {}, "'output' is called 'checkpoint'"),
        (ADAPTER + "device = '0'", {}, {}, "adapter 1: 'device' cannot be given"),
        (ADAPTER + "name = '../x'", {}, {}, r"The name of an adapter is '\.\./x'"),
        (ADAPTER + "weight = 2", {}, {}, "has a 'weight', which is of one pipeline"),
        ("[[adapter]]\ndata = 'a'", {}, {}, "has no 'checkpoint'"),
        ("[[recipe]]\noutput = 'a'", {}, {}, "'recipe' must be a file of options"),
        ("[[recipe]]\nrecipe = 'demo'\noutput = 'a'", {}, {}, "neither it nor the recipe demo has 'data'"),
        ("[[recipe]]\nrecipe = 'demo'\nlora_rr = 1", {}, {}, "did you mean 'lora_r'"),
        ("[[recipe]]\nrecipe = 'demo'\nname = 3", {}, {}, "'name' must be text"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str | None, options: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        gathered(text, options, **more)


def test_two_given_names_alike() -> None:
    text = "".join(
        f'[[adapter]]\ndata = "a"\ncheckpoint = "{p}"\nname = "{name}"\n' for p, name in (("x", "n"), ("y", "N"))
    )
    with pytest.raises(UserError, match="'N' and 'n'"):
        gathered(text)


def test_a_weight_is_batches_per_step() -> None:
    text = ADAPTER + "weight = 2\n"
    (task,) = gathered(text, {"gradient_accumulation_steps": 3})
    assert task.options["gradient_accumulation_steps"] == 6
