"""The page in headless Chromium: the numbers of a native run on the same driver, and all that people do there."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers as huggingface
from safetensors import numpy as safetensors
from support import ROOT
from support.rows import tokenizers
from support.web.browser import Browser, browser, served

import wgpu_lora
from wgpu_lora.data.example_formats import parse_example
from wgpu_lora.files.assets import DEMO_MODEL, DEMO_TRAIN
from wgpu_lora.formats.peft_adapter import CONFIG, WEIGHTS
from wgpu_lora.formats.tokenizer.label_mask import tokenize_example
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.web import site as web_site
from wgpu_lora.train.web.recording import web_device
from wgpu_lora.train.web.site import WebOptions, tokenizer_facts, write_site

OPTIONS = {"rows": 1, "tokens": 64, "context": 128}
STEPS, ROWS, HELD_OUT = 20, 48, 8
PATIENCE = 400  # seconds, on a machine that others use
QUESTION = "Write a Python function frost_violin(xs). Skip every zero, add 13 to each one, and reverse the result."
SWIFTSHADER = Path(os.environ.get("WGPU_LORA_SWIFTSHADER", "/usr/lib/chromium/libvk_swiftshader.so"))  # Chromium's own
READY = "document.getElementById('main')?.inert === false"
BYTES = """async blob => {
  const data = new Uint8Array(await blob.arrayBuffer());
  let text = "";
  for (let i = 0; i < data.length; i += 30000) text += String.fromCharCode(...data.subarray(i, i + 30000));
  return btoa(text);
}"""


block_digests = web_site.block_digests


@cache
def blocks_of(document: str) -> str:
    return block_digests(Tokenizer(huggingface.Tokenizer.from_str(document)))


@pytest.fixture(autouse=True)
def blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode every code point once for each tokenizer, since that takes a second."""
    monkeypatch.setattr(web_site, "block_digests", lambda tokenizer: blocks_of(tokenizer.files()["tokenizer.json"]))


def element(name: str) -> str:
    return f"document.getElementById('{name}')"


class Native:
    """A run of `finetune` in a process of its own, with the kernels of a browser."""

    def __init__(self, directory: Path, driver: Path | None = None):
        self.output, environment = directory / "output", dict(os.environ, WGPU_LORA_NO_CHECK="1")
        if driver:
            driver_file = directory / "driver.json"
            icd = {"library_path": str(driver), "api_version": "1.3.0"}
            driver_file.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": icd}))
            environment["VK_DRIVER_FILES"] = str(driver_file)
        rows = DEMO_TRAIN.read_text().splitlines(keepends=True)[:ROWS]
        (directory / "train.jsonl").write_text("".join(rows[:-HELD_OUT]))
        (directory / "heldout.jsonl").write_text("".join(rows[-HELD_OUT:]))
        arguments = {
            "name": "demo", "layers": 0, "options": OPTIONS, "steps": STEPS, "output": str(self.output),
            "data": str(directory / "train.jsonl"), "heldout": str(directory / "heldout.jsonl"),
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.support.web.web_run", json.dumps(arguments)]
        process = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        self.result: dict[str, Any] = json.loads(process.stdout)

    def file(self, name: str) -> bytes:
        return (self.output / name).read_bytes()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("web") / "site"
    write_site(open_model("demo", web_device()), WebOptions(**OPTIONS), directory)
    return directory


class Trained(NamedTuple):
    """What a page has trained. files: as they are downloaded."""

    losses: list[float]
    heldout: list[float]
    files: dict[str, bytes]
    answers: list[str]
    page: Browser
    url: str


def use_rows(page: Browser, rows: list[str]) -> None:
    page.evaluate(
        f"{element('rows')}.value = {json.dumps(''.join(rows))}; {element('rows')}.dispatchEvent(new Event('change'))"
    )


@pytest.fixture(scope="module")
def trained(site: Path) -> Iterator[Trained]:
    """A page on which rows were pasted, trained on for STEPS steps, a question asked, and the adapter downloaded."""
    with served(site) as url, browser() as page:
        page.open(url)
        page.wait_for(READY)
        use_rows(page, DEMO_TRAIN.read_text().splitlines(keepends=True)[:ROWS])
        page.evaluate(
            f"{element('heldout')}.value = {HELD_OUT}; {element('steps')}.value = {STEPS}; {element('train')}.click()"
        )
        page.wait_for("document.getElementById('progress-text').textContent.includes('→')", PATIENCE)
        page.evaluate(f"{element('question')}.value = {json.dumps(QUESTION)}; {element('most')}.value = 16")
        page.evaluate(f"{element('ask')}.click()")
        page.wait_for(f"!{element('ask')}.disabled && {element('after')}.textContent", PATIENCE)
        files = page.evaluate(
            "const { adapterFiles } = await import('./adapter.js'), files = await adapterFiles(app.player);"
            f"const bytes = {BYTES}; const made = {{}};"
            "for (const [name, blob] of Object.entries(files)) made[name] = await bytes(blob); return made;"
        )
        losses, heldout = page.evaluate("return [app.trainer.losses, app.heldout]")
        answers = page.evaluate(f"return [{element('before')}.textContent, {element('after')}.textContent]")
        decoded = {name: base64.b64decode(data) for name, data in files.items()}
        yield Trained(losses, heldout, decoded, answers, page, url)


def test_the_numbers_are_those_of_a_native_run(trained: Trained, tmp_path: Path) -> None:
    """On Chromium's own SwiftShader, every bit."""
    native = Native(tmp_path, SWIFTSHADER)
    assert trained.losses == native.result["losses"]
    assert len(trained.losses) == STEPS
    assert trained.heldout[1] == native.result["heldout"] < trained.heldout[0]
    assert trained.files[CONFIG] == native.file(CONFIG)
    page, run = (
        safetensors.load(data) for data in (trained.files[WEIGHTS], native.file(WEIGHTS))
    )  # whose file has digests, too
    assert {name: values.tobytes() for name, values in page.items()} == {
        name: values.tobytes() for name, values in run.items()
    }


def test_the_numbers_are_those_of_another_driver(trained: Trained, tmp_path: Path) -> None:
    native = Native(tmp_path)
    np.testing.assert_allclose(trained.losses, native.result["losses"], rtol=0, atol=1e-5)
    assert trained.heldout[1] == pytest.approx(native.result["heldout"], abs=1e-5)


def test_nothing_leaves_the_page(trained: Trained) -> None:
    page = trained.page
    assert page.errors == []
    assert page.requests
    assert all(request.startswith((trained.url, "blob:")) for request in page.requests)
    assert page.evaluate("return fetch('http://127.0.0.1:1/').then(() => 'sent', error => String(error))").startswith(
        "TypeError"
    )
    assert any("Content Security Policy" in error for error in page.errors)
    page.errors.clear()


def test_the_adapter_is_loaded_by_others(trained: Trained, tmp_path: Path) -> None:
    for name, data in trained.files.items():
        (tmp_path / name).write_bytes(data)
    assert trained.answers[0] != trained.answers[1]
    model = wgpu_lora.load("demo")
    for adapter, answer in zip((None, tmp_path), trained.answers, strict=True):
        [completion] = wgpu_lora.generate(model, [QUESTION], adapter=adapter, max_new_tokens=16)
        assert completion.strip() == answer.strip()
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path))
    state = peft.get_peft_model_state_dict(loaded)
    assert len(state) == len(json.loads((trained.files["adapter_model.safetensors"])[8:].split(b"}}")[0] + b"}}")) - 1
    assert max(float(value.abs().max()) for name, value in state.items() if "lora_B" in name) > 0


def test_an_adapter_is_loaded_again(trained: Trained, tmp_path: Path) -> None:
    page, path = trained.page, tmp_path / "adapter_model.safetensors"
    path.write_bytes(trained.files[path.name])
    page.evaluate("await app.trainer.restore({ ...app.trainer, state: app.initial })")  # forgets it
    load(page, path)
    page.wait_for("document.getElementById('adapter-text').textContent.includes('is loaded')")
    heldout = "const { Trainer } = await import('./training.js'), trainer = new Trainer(app.player, app.rows);"
    assert page.evaluate(f"{heldout} return trainer.heldoutLoss(app.rows.slice(-{HELD_OUT}))") == trained.heldout[1]
    path.write_bytes(trained.files[path.name][:-4])
    load(page, path)
    page.wait_for("!document.getElementById('error').hidden")
    assert "it is cut off" in error_of(page)


def load(page: Browser, path: Path) -> None:
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=root, selector="#load")["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])


def error_of(page: Browser) -> str:
    return page.evaluate(f"return {element('error')}.textContent")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ('{"prompt": "a"\n', "line 1 is not JSON"),
        ('{"question": "a", "reply": "b"}\n', "line 1: its keys are 'question', 'reply', but rows need 'messages'"),
        ('{"prompt": 1, "completion": "b"}\n', "line 1: 'prompt' is not a text"),
        ('{"messages": [{"role": "user"}]}\n', "'messages' is not a list of objects with 'role' and 'content'"),
        ('prompt,completion\na,"b" c\n', "line 2 is not CSV"),
        ('{"prompt": "a", "completion": ""}\n', "There are no rows to train on"),
    ],
)
def test_rows_that_cannot_be_read(trained: Trained, rows: str, sentence: str) -> None:
    page = trained.page
    use_rows(page, [rows])
    page.wait_for("!document.getElementById('error').hidden")
    assert sentence in error_of(page)
    assert page.errors == []


# Rows of each format; a token across an edge, a lone eos and text outside ASCII among them.
EXAMPLES: list[dict[str, Any]] = [
    *map(json.loads, DEMO_TRAIN.read_text().splitlines()[:40]),
    {"prompt": "Two and two?", "completion": " Four."},
    {"prompt": "Straße ", "completion": "naïve 🙂 日本語"},
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"instruction": "Say hi.", "output": "hi", "system": "Be brief."},
    {"text": "All of this is trained.\n\n  indented"},
    {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"},
                  {"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "Bye"},
                  {"role": "assistant", "content": "Bye\n"}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0},
                  {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]},
    {"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "y"}]},
]  # fmt: skip
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", ["of the model", "without marks", "none"])
def test_tokens_and_labels_are_those_of_the_package(trained: Trained, template: str) -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert tokenizer
    if template != "of the model":
        tokenizer._chat_templates = {"default": CHATML} if template == "without marks" else {}
    examples = [row for row in EXAMPLES if template != "none" or not {"messages", "prompt"} & row.keys() or
                isinstance(row.get("prompt"), str)]  # fmt: skip
    examples = [row for row in examples if template != "none" or "messages" not in row]
    facts = json.dumps(tokenizer_facts(tokenizer))
    pairs = trained.page.evaluate(
        "const { Text } = await import('./rows.js'), { Tokenizer } = await import('./vendor/tokenizers.mjs');"
        f"const text = new Text(app.text.tokenizer, {facts});"
        f"return {json.dumps(examples)}.map(row => text.tokenize(row)).map(({{ ids, labels }}) => [ids, labels])"
    )
    for row, (ids, labels) in zip(examples, pairs, strict=True):
        [expected] = tokenize_example(parse_example(row), tokenizer)
        assert (ids, labels) == expected, row


def told(page: Browser, rows: list[Any], tokenizer: Tokenizer) -> list[Any]:
    """(ids, labels) of each row on a page with a tokenizer, or why the page does not take it."""
    files = tokenizer.files()
    return page.evaluate(
        "const { Text } = await import('./rows.js'), { Tokenizer } = await import('./vendor/tokenizers.mjs');"
        f"const facts = {json.dumps(tokenizer_facts(tokenizer))};"
        f"const text = new Text(new Tokenizer({files['tokenizer.json']}, facts.config), facts);"
        f"return {json.dumps(rows)}.map(row => {{"
        " try { const { ids, labels } = text.tokenize(row); return [ids, labels]; }"
        " catch (error) { return error.message; } })"
    )


def turns(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **fields}]}


OTHER_KEYS: list[tuple[dict[str, Any], str | None]] = [
    (turns(weight=None), None),
    (turns(tool_calls=None, name=""), None),
    ({**turns(), "id": 3, "source": "web", "score_chosen": 1, "tools": [], "images": None}, None),
    ({"text": "private \ue000 use \ue001"}, None),
    (turns(tool_calls=[{"function": {"name": "f"}}], content=""), "message 1: 'tool_calls' is not read"),
    (turns(reasoning_content="hm"), "message 1: 'reasoning_content' is not read"),
    (turns(loss_mask=0), "message 1: 'loss_mask' is not read"),
    (turns(weight=0.5), "the weight of message 1 is not 0 or 1"),
    (turns(role="bot"), "has the role 'bot'"),
    ({**turns(), "tools": [{"name": "f"}]}, "'tools' is not read"),
    ({**turns(), "functions": [{"name": "f"}]}, "'functions' is not read"),
    ({**turns(), "chat_template_kwargs": {"enable_thinking": False}}, "'chat_template_kwargs' is not read"),
    ({**turns(), "label": False}, "'label' is not read"),
    ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "'history' is not read"),
    ({"prompt": "a", "completion": "b", "context": "c"}, "'context' is not read"),
    ({"text": "a", "weight": 0}, "'weight' is not read"),
]


def test_the_page_reads_a_row_as_the_package_or_refuses_it(trained: Trained) -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert tokenizer
    results = told(trained.page, [row for row, _ in OTHER_KEYS], tokenizer)
    for (row, refusal), result in zip(OTHER_KEYS, results, strict=True):
        if refusal is None:
            [expected] = tokenize_example(parse_example(row), tokenizer)
            assert result == [*expected], row
        else:
            assert refusal in result, row


CASES = ROOT / "tests" / "fixtures" / "data" / "rows.jsonl"


def test_rows_of_public_reports_are_the_same_or_refused(trained: Trained) -> None:
    """Never other ids or labels than those of the package."""
    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert tokenizer
    rows = [json.loads(line) for line in CASES.read_text().splitlines()]
    for row, result in zip(rows, told(trained.page, rows, tokenizer), strict=True):
        if not isinstance(result, str):
            [expected] = tokenize_example(parse_example(row), tokenizer)
            assert result == [*expected], row


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ("{{ m.content.lstrip('\\n') }}", True),  # the page's engine strips all white space
        ("{{ m.content.split('</think>')[-1] }}", False),
        ("{{ m.content }}", False),
    ],
)
def test_templates_that_the_page_renders_otherwise_are_refused(trained: Trained, answer: str, refused: bool) -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert tokenizer
    start, end = CHATML.split("' + message['content'] + '")
    source = f"{start}' }}}}{answer.replace('m.', 'message.')}{{{{ '{end}"
    tokenizer._chat_templates = {"default": source}
    plain, thinking = told(trained.page, [turns(), turns(content="<think>c</think>d")], tokenizer)
    if refused:
        assert "the page's template engine differs" in plain
    else:
        [expected] = tokenize_example(parse_example(turns()), tokenizer)
        assert plain == [*expected]
        assert ("leaves out a part of message 1" in thinking) == ("split" in answer)


def test_characters_that_the_page_tokenises_otherwise_are_refused(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other characters, also those of the blocks beside theirs, have the ids of the package."""
    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert tokenizer
    digests, location = blocks_of(tokenizer.files()["tokenizer.json"]), 8 * (ord("\u00e9") >> 4)
    monkeypatch.setattr(
        web_site, "block_digests", lambda tokenizer: f"{digests[:location]}ffffffff{digests[location + 8 :]}"
    )
    texts = [
        "plain 12 text",
        "\u00d8l \u00ab\u00a7\u00bb",
        "caf\u00e9",
        "\u0661\u0662 a",
        "\u00bd \u2460",
        "\u65e5\u672c",
    ]
    results = told(trained.page, [{"text": text} for text in texts], tokenizer)
    for text, result in zip(texts, results, strict=True):
        if isinstance(result, str):
            assert "the page's tokenizer differs from the model's own at characters like" in result
        else:
            [expected] = tokenize_example(parse_example({"text": text}), tokenizer)
            assert result == [*expected], text
    assert [isinstance(result, str) for result in results[:3]] == [False, False, True]


TEXTS = ["the the  the", "a  b\n\n c", "I'll they've 1 22 333 4444", '{"name": "Anna"}', "x<s>y</s> z", " lead",
         "trail ", "", "HTTPServer fooBar", "½ ² ① ｆｕｌｌ", "a\u00a0b\u200b", "```py\nif x:\n    y\n```"]  # fmt: skip
REFUSED = {"t5", "xlm-roberta", "albert", "words"}  # no decoders; the library normalises or splits otherwise


@pytest.mark.parametrize("name", tokenizers.PIPELINES)
def test_other_tokenizers(trained: Trained, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The page gives the ids of the model's own tokenizer, or says that it does not."""
    document = tokenizers.document(name)
    tokenizer = Tokenizer(huggingface.Tokenizer.from_str(json.dumps(document)))
    monkeypatch.setattr(web_site, "block_digests", lambda tokenizer: "")
    tokens = trained.page.evaluate(
        "const { Text } = await import('./rows.js'), { Tokenizer } = await import('./vendor/tokenizers.mjs');"
        f"const facts = {json.dumps(tokenizer_facts(tokenizer))};"
        f"try {{ var text = new Text(new Tokenizer({json.dumps(document)}, facts.config), facts); }}"
        "catch (error) { return error.message; }"
        f"return {json.dumps(TEXTS)}.map(one => text.ids(one));"
    )
    if name in REFUSED:
        assert tokens.startswith("The page's tokenizer differs from the model's own at")
    else:
        assert tokens == tokenizer.encode_all(TEXTS)


def test_training_goes_on_without_a_network(site: Path, tmp_path: Path) -> None:
    """A training is paused, the server ends, and the page goes on from what was kept."""
    rows = DEMO_TRAIN.read_text().splitlines(keepends=True)[:8]
    with browser() as page:
        with served(site) as url:
            page.open(url)
            page.wait_for(READY)
            use_rows(page, rows)
            page.evaluate(f"{element('steps')}.value = 4; {element('heldout')}.value = 0; {element('train')}.click()")
            page.wait_for("app.trainer?.step >= 1", PATIENCE)
            page.evaluate(f"{element('pause')}.click()")
            page.wait_for("document.getElementById('progress-text').textContent.includes('paused')", PATIENCE)
            step, losses = page.evaluate("return [app.trainer.step, app.trainer.losses]")
        page.open(url)
        page.wait_for(f"document.readyState === 'complete' && {READY}")
        assert f"A training of {step} of 4 steps is kept in this browser." in page.text()
        page.evaluate(f"{element('resume')}.click()")
        page.wait_for("app.trainer?.step >= 1")
        page.evaluate(f"{element('train')}.click()")
        page.wait_for(f"app.trainer.step === 4 && !{element('train')}.disabled", PATIENCE)
        resumed = page.evaluate("return app.trainer.losses")
        assert resumed[:step] == losses
        page.evaluate("await app.trainer.restore({ ...app.trainer, step: 0, losses: [], state: app.initial })")
        again = page.evaluate(
            "const all = []; for (let i = 0; i < 4; i++) all.push((await app.trainer.train()).loss); return all"
        )
        assert resumed == again
        page.call("Browser.crashGpuProcess")
        page.wait_for("!document.getElementById('error').hidden", 20)
        assert "lost the GPU" in error_of(page)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("weights", "The file weights-000.bin is damaged"),
        ("tokenizer", "The file tokenizer.json is damaged"),
        ("cut", "The file model.json is damaged"),
        ("version", "has another version than this page (2)"),
        ("limits", "This GPU is too small for the model, which needs maxBufferSize of"),
        ("memory", "MiB of the GPU's memory, more than this tab may have"),
        ("adapter", "This browser offers no GPU to WebGPU"),
        ("gpu", "This browser has no WebGPU"),
    ],
)
def test_what_a_page_lacks_is_said(other: Browser, site: Path, tmp_path: Path, damage: str, sentence: str) -> None:
    copy, page = tmp_path / "site", other
    shutil.copytree(site, copy)
    path = copy / {"weights": "weights-000.bin", "tokenizer": "tokenizer.json"}.get(damage, "model.json")
    data = bytearray(path.read_bytes())
    model = json.loads((copy / "model.json").read_text())
    match damage:
        case "weights" | "tokenizer":
            data[len(data) // 2] ^= 1
        case "cut":
            del data[len(data) // 2 :]
        case "version":
            data = bytearray(json.dumps(model | {"version": 2}).encode())
        case "limits":
            model["limits"]["maxBufferSize"] = 1 << 50
            data = bytearray(json.dumps(model).encode())
        case "memory":
            size = model["limits"]["maxBufferSize"] = 1 << 30
            model["buffers"] += [{"name": "large", "bytes": size}] * 200
            data = bytearray(json.dumps(model).encode())
    path.write_bytes(data)
    scripts = {"gpu": "Object.defineProperty(navigator, 'gpu', { value: undefined })",
               "adapter": "navigator.gpu.requestAdapter = async () => null"}  # fmt: skip
    script = page.call("Page.addScriptToEvaluateOnNewDocument", source=scripts.get(damage, ""))["identifier"]
    with served(copy) as url:
        page.open(url)
        page.wait_for("document.getElementById('error') && !document.getElementById('error').hidden")
        assert sentence in error_of(page)
        assert page.evaluate(f"return {element('main')}.inert")
    page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)


def test_a_device_is_measured(other: Browser, site: Path, tmp_path: Path) -> None:
    copy = tmp_path / "site"
    shutil.copytree(site, copy)
    model = json.loads((copy / "model.json").read_text())
    model["bricks"] = [brick for brick in model["bricks"] if brick["kernel"] in ("nf4_matmul", "attention_forward")][:3]
    (copy / "model.json").write_text(json.dumps(model))
    with served(copy) as url:
        other.open(f"{url}/measure.html")
        other.wait_for(f"{element('measure')}?.disabled === false")
        other.evaluate(f"{element('measure')}.click()")
        other.wait_for("globalThis.measured", PATIENCE)
        result = other.evaluate("return globalThis.measured")
        other.screenshot(screenshots(tmp_path) / "measure.png", width=360, height=740)
        assert other.evaluate("return document.documentElement.scrollWidth <= innerWidth")
    *bricks, step = result["results"]
    assert [brick["calls"] for brick in bricks] == [brick["calls"] for brick in model["bricks"]]
    assert step["name"] == "training step"
    assert 0 < sum(brick["calls"] * brick["seconds"] for brick in bricks) < 2 * step["seconds"]
    assert (result["device"], result["tokens"]) == ("google swiftshader", OPTIONS["tokens"])


def test_kernels_of_the_size_of_subgroups(other: Browser, tmp_path: Path) -> None:
    """SwiftShader has subgroups of 4: the page chooses their kernels, which compute what those of another size do."""
    sizes, rows = WebOptions(**OPTIONS, subgroup_sizes=(4, 8)), DEMO_TRAIN.read_text().splitlines(keepends=True)[:ROWS]
    write_site(open_model("demo", web_device()), sizes, tmp_path / "site")
    with served(tmp_path / "site") as url:
        other.open(url)
        other.wait_for(READY)
        assert "subgroups of 4" in other.text()
        use_rows(other, rows)
        code = "const { Trainer } = await import('./training.js'), trainer = new Trainer(app.player, app.rows);"
        loss = other.evaluate(f"{code} return trainer.heldoutLoss(app.rows)")
    expected = wgpu_lora.evaluate("demo", [json.loads(row) for row in rows], max_length=OPTIONS["tokens"])
    assert loss == pytest.approx(expected.loss, abs=1e-5)


@pytest.fixture(scope="module")
def other() -> Iterator[Browser]:
    with browser() as page:
        yield page


def screenshots(directory: Path) -> Path:
    """Where they go: to look at, if the environment says so."""
    result = Path(os.environ.get("WGPU_LORA_SCREENSHOTS") or directory)
    result.mkdir(exist_ok=True)
    return result


def test_looks(trained: Trained, tmp_path: Path) -> None:
    """No sideways scrolling at 360 pixels, in both colours; every control has a name, and the keyboard reaches it."""
    page, shots = trained.page, screenshots(tmp_path)
    for name, options in (("light", {}), ("dark", {"dark": True}), ("narrow", {"width": 360, "height": 740})):
        page.screenshot(shots / f"{name}.png", **options)
        assert page.evaluate("return document.documentElement.scrollWidth <= innerWidth")
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "spinbutton", "progressbar", "image", "list", "link"}
    named = [node for node in tree if node.get("role", {}).get("value") in roles and not node["ignored"]]
    assert len(named) > 12
    assert [node for node in named if not node.get("name", {}).get("value")] == []
    reached = set()
    for _ in range(30):
        page.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        page.call("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.add(page.evaluate("return document.activeElement.id"))
    assert {
        "rows",
        "file",
        "example",
        "steps",
        "rate",
        "heldout",
        "train",
        "question",
        "ask",
        "download",
        "load",
    } <= reached
