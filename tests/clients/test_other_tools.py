"""The commands of docs/other-tools.md, as they are printed there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT
from support.serving.serving import save_adapter

from wgpu_lora.files.assets import DEMO_MODEL

PAGE = (ROOT / "docs/other-tools.md").read_text(encoding="utf-8")
TASK = """task: words
dataset_path: json
dataset_kwargs:
  data_files: {test: words.jsonl}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list:
  - metric: acc
"""

SCRIPT = """
import json, lm_eval
from lm_eval.tasks import TaskManager

arguments = {"pretrained": "BASE", "peft": "my-adapter", "tokenizer": "my-adapter", "dtype": "float32"}
manager = TaskManager(include_path=".", include_defaults=False)
result = lm_eval.simple_evaluate(model="hf", model_args=arguments, tasks=["words"], task_manager=manager, device="cpu")
json.dump(result["samples"]["words"], open("hf.json", "w"), default=str)
"""


def blocks(section: str) -> dict[str, str]:
    """The code of a section, by language."""
    text = PAGE[PAGE.index(f"## {section}\n") :].partition("\n## ")[0]
    return dict(re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL))


class Place:
    """A folder with an adapter, and a server of it. run: a program by its lines, with what stands for the reader's."""

    def __init__(self, folder: Path, port: str) -> None:
        self.folder, self.port = folder, port
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {
            **os.environ,
            "PATH": paths,
            "LLM_USER_PATH": str(folder),
            "HF_HUB_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }

    def run(self, program: list[str], text: str) -> str:
        text = text.replace(":8000", f":{self.port}").replace("BASE", str(DEMO_MODEL))
        text = text.replace("--tasks TASK", "--tasks words --include_path .")
        done = subprocess.run([*program, text], cwd=self.folder, env=self.environment, capture_output=True, text=True,
                              timeout=300, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("tools")
    adapter = save_adapter(folder / "my-adapter")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):  # which a run writes beside it
        shutil.copy(DEMO_MODEL / name, adapter)
    command = [sys.executable, "-m", "wgpu_lora", "serve", "--lora-modules", "my-adapter", "--port", "0"]
    command += ["--base-dtype", "f32", "--max-num-seqs", "4", "--max-model-len", "512"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            yield Place(folder, server.stdout.readline().rpartition(":")[2].strip())
        finally:
            server.terminate()


def test_peft(place: Place) -> None:
    code = blocks("PEFT and transformers")["python"]
    assert "Lora" in place.run([sys.executable, "-c"], f"{code}print(model)")


def test_litellm(place: Place) -> None:
    assert place.run([sys.executable, "-c"], blocks("litellm")["python"]).strip()


def test_llm(place: Place) -> None:
    code = blocks("llm")
    (place.folder / "extra-openai-models.yaml").write_text(code["yaml"].replace(":8000", f":{place.port}"))
    assert place.run(["bash", "-c"], code["sh"]).strip()


def test_lm_eval(place: Place) -> None:
    """The command of the page, whose scores are those of the harness with PEFT."""
    pytest.importorskip("lm_eval", reason="lm-eval is installed with WGPU_LORA_TESTS_FULL=1")
    texts = ["def add_one(xs", "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "for x in xs"]
    rows = [{"question": text, "choices": ["):", ":", "<|im_end|>", " x\n\n\n", "."], "label": 0} for text in texts]
    (place.folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place.folder / "words.yaml").write_text(TASK)
    code = blocks("lm-evaluation-harness")["sh"].rstrip() + " --log_samples --output_path results"
    assert "|words" in place.run(["bash", "-c"], code)
    (path,) = (place.folder / "results").rglob("samples_words_*.jsonl")
    served = [json.loads(line) for line in path.read_text().splitlines()]
    place.run([sys.executable, "-c"], SCRIPT)
    expected = json.loads((place.folder / "hf.json").read_text())
    assert len(served) == len(expected) == len(rows)
    for one, other in zip(
        *(sorted(samples, key=lambda sample: sample["doc_id"]) for samples in (served, expected)), strict=True
    ):
        pairs = [[(float(value), str(greedy)) for ((value, greedy),) in sample["resps"]] for sample in (one, other)]
        assert [value for value, _ in pairs[0]] == pytest.approx([value for value, _ in pairs[1]], abs=1e-3)
        assert [greedy for _, greedy in pairs[0]] == [greedy for _, greedy in pairs[1]]
        assert one["acc"] == other["acc"]


def test_gguf(place: Place) -> None:
    place.run(["bash", "-c"], blocks("Ollama, LM Studio and llama.cpp")["sh"])
    assert (place.folder / "Modelfile").read_text() == "FROM ./my-adapter.gguf\n"
    assert (place.folder / "my-adapter.gguf").stat().st_size > 1 << 20
