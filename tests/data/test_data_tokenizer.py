"""Reading a tokenizer directory, special tokens, and streaming decoding."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data import NAMED, SPECIAL, backend_json, chat, small_tokenizer, template_source
from tokenizers import processors

from wgpu_lora.data import StreamDecoder, Tokenizer
from wgpu_lora.errors import UserError

CHATML = template_source("chatml")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(backend_json(), encoding="utf-8")
    return tmp_path


def write(folder, name, value):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def load(folder) -> Tokenizer:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


def test_no_tokenizer_json_is_none(tmp_path):
    assert Tokenizer.load(tmp_path) is None


def test_a_bare_tokenizer(folder):
    tokenizer = load(folder)
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.stop_ids) == (None, None, set())
    assert not tokenizer.has_chat_template
    ids = json.loads(backend_json())["model"]["vocab"].values()
    assert tokenizer.vocab_size == max(ids) + 1
    assert tokenizer.decode(tokenizer.encode("größer 🦜 <|im_end|>")) == "größer 🦜 "
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.render(chat("Hi"))


def test_special_tokens_are_strings_or_objects(folder):
    write(folder, "tokenizer_config.json", {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"})
    tokenizer = load(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (SPECIAL.index("<s>"), SPECIAL.index("</s>"))


def test_special_tokens_map_wins_only_in_old_folders(folder):
    write(folder, "special_tokens_map.json", {"eos_token": "<|im_end|>", "pad_token": "<|eot_id|>"})
    write(folder, "tokenizer_config.json", {"eos_token": "</s>", "pad_token": None})
    assert load(folder).eos_id == SPECIAL.index("<|im_end|>")
    write(folder, "tokenizer_config.json", {"eos_token": "</s>", "added_tokens_decoder": {}})
    tokenizer = load(folder)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (SPECIAL.index("</s>"), SPECIAL.index("<|eot_id|>"))


def test_stop_ids_come_from_everywhere(folder):
    write(folder, "tokenizer_config.json", {"eos_token": "</s>", "chat_template": CHATML})
    write(folder, "generation_config.json", {"eos_token_id": [0, 6]})
    assert load(folder).stop_ids == {0, 6, SPECIAL.index("</s>"), SPECIAL.index("<|im_end|>")}
    write(folder, "generation_config.json", {"eos_token_id": 5})
    write(folder, "tokenizer_config.json", {})
    assert load(folder).stop_ids == {5}
    assert load(folder).eos_id == 5


@pytest.mark.parametrize(
    ("template", "end"), [("headers", "<|eot_id|>"), ("strict", "</s>"), ("thinking", "<|im_end|>")]
)
def test_the_end_of_a_turn_is_read_off_the_template(template, end):
    assert SPECIAL.index(end) in small_tokenizer(template).stop_ids
    assert len(small_tokenizer(template).stop_ids) == (1 if end == "</s>" else 2)


def test_where_the_template_is_found(folder):
    write(folder, "tokenizer_config.json", {"chat_template": "config"})
    assert load(folder).render(chat("Hi")) == "config"
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "with tools"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert load(folder).render(chat("Hi")) == "named"
    assert load(folder).render(chat("Hi"), tools=[{}]) == "with tools"
    write(folder, "chat_template.jinja", "file {{ eos_token }}{{ eager }}")
    assert load(folder).render(chat("Hi"), tools=[{}], variables={"eager": 1}) == "file 1"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "a"'])
def test_a_broken_file_is_named(folder, name, text):
    write(folder, name, text)
    with pytest.raises(UserError, match=name):
        Tokenizer.load(folder)


def test_opening_is_what_the_post_processor_puts_in_front():
    backend = tokenizers.Tokenizer.from_str(backend_json())
    assert Tokenizer(backend, special_tokens=NAMED).opening == []
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = Tokenizer(backend, special_tokens=NAMED)
    assert tokenizer.opening == [0]
    assert tokenizer.encode("Hi") == tokenizer.encode("Hi", add_special_tokens=True)[1:-1]


def test_offsets_cover_every_character_whatever_the_post_processor():
    backend = tokenizers.Tokenizer.from_str(backend_json())
    backend.post_processor = processors.ByteLevel(trim_offsets=True)  # as many checkpoints have it
    text = "The  sky\n\n is größer"
    ids, offsets = Tokenizer(backend).encode_with_offsets(text)
    assert len(ids) == len(offsets)
    assert set(range(len(text))) == {i for start, end in offsets for i in range(start, end)}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_a_stream_gives_the_whole_text_and_never_half_a_character(text):
    tokenizer = small_tokenizer()
    stream = StreamDecoder(tokenizer)
    ids = [token for token in tokenizer.encode(text) if token not in tokenizer.special_ids]
    pieces = [stream.push(token) for token in ids]
    whole = tokenizer.decode(ids)
    so_far = ""
    for piece in pieces:
        so_far += piece
        assert whole.startswith(so_far)
    assert so_far + stream.flush() == whole
    if "\ufffd" not in text:
        assert "\ufffd" not in so_far


def test_a_stream_of_broken_bytes_goes_on():
    tokenizer = small_tokenizer()
    half = tokenizer.encode("🦜")[:2]
    stream = StreamDecoder(tokenizer)
    assert [stream.push(token) for token in half] == ["", ""]
    assert stream.flush() == "\ufffd"
    stream = StreamDecoder(tokenizer)
    assert any(stream.push(half[0]) for _ in range(20))


def test_special_tokens_do_not_delay_the_stream():
    tokenizer = small_tokenizer()
    stream = StreamDecoder(tokenizer)
    bird = tokenizer.encode("🦜")
    assert "".join(stream.push(token) for token in [2] * 20 + bird) == "🦜"
    shown = StreamDecoder(tokenizer, skip_special_tokens=False)
    assert shown.push(3) == "<|im_end|>"
