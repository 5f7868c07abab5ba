"""An adapter's own chat template and tokenizer, in files beside it, are used wherever the adapter is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest
from support.cli import flags
from support.models import save_golden_adapter, words_and_adapters, words_model
from support.rows.data import chat
from support.serving.serving import FakeEngine, save_adapter, serving

import wgpu_lora
from wgpu_lora.cli.app import main
from wgpu_lora.data import Tokenizer
from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import DEMO_MODEL
from wgpu_lora.formats.tokenizer.tokenizer_files import tokenizer_files, write_tokenizer
from wgpu_lora.infer.answers import notes_for, tokenizer_of
from wgpu_lora.infer.chat import Chat
from wgpu_lora.infer.generation_options import GenerationOptions
from wgpu_lora.models.export.adapter_merge import MergedModel
from wgpu_lora.models.model_files import read_model

TEMPLATE = "{% for m in messages %}w1 {{ m.content }} {% endfor %}"
OWN = "{% for m in messages %}w7 w8 {{ m.content }} {% endfor %}"
NOTE = "has its own tokenizer or chat template"
EVERY = ["chat_template.jinja", "tokenizer_config.json", "chat_template.json", "additional_chat_templates"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A model with adapters a and b, of which b has its own template."""
    result = words_and_adapters(tmp_path, TEMPLATE)
    (result / "b" / "chat_template.jinja").write_text(OWN)
    return result


def own_template(adapter: Path, kind: str) -> None:
    """Give an adapter a template of its own in one of the files where other programs keep it."""
    if kind == "chat_template.jinja":
        (adapter / kind).write_text(OWN)
    elif kind == "additional_chat_templates":
        (adapter / kind).mkdir()
        (adapter / kind / "default.jinja").write_text(OWN)
    else:
        (adapter / kind).write_text(json.dumps({"chat_template": OWN}))


@pytest.mark.parametrize("kind", EVERY)
def test_every_file_of_a_template_is_read(tmp_path: Path, kind: str) -> None:
    base = Tokenizer.load(words_model(tmp_path / "model", TEMPLATE))
    assert base
    adapter = save_golden_adapter("mistral", tmp_path / "a")
    assert base.for_adapter(adapter) is base
    own_template(adapter, kind)
    messages = [{"role": "user", "content": "w3"}]
    assert base.for_adapter(adapter).render(messages) == "w7 w8 w3 "
    assert base.render(messages) == "w1 w3 "


def test_what_a_run_leaves_beside_an_adapter_is_the_models(place: Path) -> None:
    base = Tokenizer.load(place / "model")
    assert base
    write_tokenizer(place / "a", tokenizer_files(place / "model", base))
    assert (place / "a" / "tokenizer.json").exists()
    assert base.for_adapter(place / "a") is base
    document = json.loads((place / "a" / "tokenizer.json").read_text())
    (place / "a" / "tokenizer.json").write_text(json.dumps(document, indent=4))  # as another version writes it
    assert base.for_adapter(place / "a") is base
    vocabulary = document["model"]["vocab"]
    vocabulary["w3"], vocabulary["w4"] = vocabulary["w4"], vocabulary["w3"]
    (place / "a" / "tokenizer.json").write_text(json.dumps(document))
    assert base.for_adapter(place / "a").encode("w3 w4") == base.encode("w4 w3")


def test_tokens_that_the_model_lacks_are_refused(place: Path) -> None:
    document = json.loads((place / "model" / "tokenizer.json").read_text())
    document["added_tokens"] = [
        {"id": 5000, "content": "<new>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
    ]  # fmt: skip
    (place / "b" / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"has 212 tokens, but the model has 211: adapters with new tokens"):
        tokenizer_of(wgpu_lora.load(str(place / "model")), place / "b")


def test_answers_are_worded_for_each_adapter(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = wgpu_lora.load(str(place / "model"))
    adapters = {"a": place / "a", "b": place / "b"}
    assert [NOTE in note for note in notes_for(model, adapters.values())] == [True]
    options = {"max_new_tokens": 4, "temperature": 0.0}
    whole = {"prompt_format": "text", **options}
    for name, text in (("a", "w1 w3 "), ("b", "w7 w8 w3 ")):
        [asked] = wgpu_lora.answer(model, ["w3"], adapter=adapters[name], **options)
        [continued] = wgpu_lora.answer(model, [text], adapter=adapters[name], **whole)
        assert asked.token_ids == continued.token_ids
        assert "".join(wgpu_lora.generate(model, "w3", adapter=adapters[name], stream=True, **options)) == asked.text
        assert wgpu_lora.compare(model, "w3", adapters, **options)[name].text == asked.text
    with Chat(model, adapters, ["base", "a", "b"], GenerationOptions(max_new_tokens=4, temperature=0.0)) as chat:
        texts = dict.fromkeys(chat.lanes, "")
        for name, piece in chat.ask("w3"):
            texts[name] += piece
        assert texts["b"] == wgpu_lora.generate(model, "w3", adapter=adapters["b"], **options)
        assert texts["base"] == wgpu_lora.generate(model, "w3", **options)
        (place / "c").mkdir()
        for path in (place / "b").iterdir():
            shutil.copy(path, place / "c")
        chat.add("c", place / "c")
        chat.select(["c"])
        assert "".join(piece for _, piece in chat.ask("w3")).strip()
        assert chat.tokenizer.render([{"role": "user", "content": "w3"}]) == "w7 w8 w3 "
    model.unload()
    assert main(["generate", *flags(model=place / "model", adapter=place / "b", prompt="w3", max_new_tokens=2)]) == 0
    assert NOTE in capsys.readouterr().err


def test_losses_are_of_the_adapters_rows(place: Path, tmp_path: Path) -> None:
    model, rows = str(place / "model"), [{"messages": chat("w3", "w4 w5")}]
    options = {"completion_only_loss": False, "run_log": False}
    own = wgpu_lora.evaluate(model, rows, adapter=place / "b", **options)
    as_text = wgpu_lora.evaluate(model, [{"text": "w7 w8 w3 w7 w8 w4 w5 "}], adapter=place / "b", **options)
    assert own.loss == as_text.loss
    with pytest.raises(UserError, match="different tokenizers or chat templates: evaluate one at a time"):
        wgpu_lora.evaluate_several(model, rows, {"a": place / "a", "b": place / "b"}, **options)


def test_models_with_the_adapter_have_its_template(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert MergedModel(place / "model", place / "a").notes == []
    options = {"model": place / "model", "adapter": place / "b"}
    assert main(["merge", *flags(**options, output=place / "merged")]) == 0
    assert NOTE in capsys.readouterr().out
    merged = Tokenizer.load(place / "merged")
    assert merged
    assert merged.render([{"role": "user", "content": "w3"}]) == "w7 w8 w3 "
    assert (place / "merged" / "tokenizer.json").read_bytes() == (place / "model" / "tokenizer.json").read_bytes()


def test_a_server_words_conversations_for_each_adapter(tmp_path: Path) -> None:
    def make() -> FakeEngine:
        result = FakeEngine()
        result.model.config = read_model(DEMO_MODEL).config
        return result

    own, plain = save_adapter(tmp_path / "own"), save_adapter(tmp_path / "plain")
    (own / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    with serving(make, allow_runtime_lora=True) as server:
        for name, path in (("own", own), ("plain", plain)):
            load = {"lora_name": name, "lora_path": str(path)}
            assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=load).status_code == 200
        texts = {}
        for name in ("base", "own", "plain"):
            ids = httpx.post(f"{server.url}/tokenize", json={**body, "model": name}).json()["tokens"]
            texts[name] = httpx.post(f"{server.url}/detokenize", json={"tokens": ids, "model": name}).json()["prompt"]
            answer = server.client.chat.completions.create(model=name, max_tokens=2, **body)
            assert answer.usage.prompt_tokens == len(ids)
        assert texts["own"] == "<Hello>"
        assert texts["plain"] == texts["base"] != texts["own"]
        assert len(server.service.notes) == 1
