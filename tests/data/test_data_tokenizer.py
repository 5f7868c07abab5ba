"""Reading a tokenizer directory, special tokens, and streaming decoding."""

from __future__ import annotations

import gzip
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rows.data import NAMED, SPECIAL, backend_json, chat, small_tokenizer, template_source, write_jsonl
from support.rows.hostile import memory_below
from support.rows.sources import prepared, refused
from tokenizers import processors

from wgpu_lora.cli import console
from wgpu_lora.data import StreamDecoder, Tokenizer, json_rows
from wgpu_lora.data.compressed_files import opened
from wgpu_lora.data.example_formats import EXAMPLES
from wgpu_lora.data.row_files import read_parquet
from wgpu_lora.errors import UserError
from wgpu_lora.infer import prompt_file
from wgpu_lora.infer.prompt_file import FORMATS, read_requests

CHATML = template_source("chatml")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(backend_json(), encoding="utf-8")
    return tmp_path


def write(folder, name, value):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


load = Tokenizer.load


def test_no_tokenizer_json_is_none(tmp_path):
    assert Tokenizer.load(tmp_path) is None


def test_a_bare_tokenizer(folder):
    tokenizer = load(folder)
    assert tokenizer.decode(tokenizer.encode("größer 🦜 <|im_end|>")) == "größer 🦜 "
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.render(chat("Hi"))


BOS, EOS, IM_END, EOT = (SPECIAL.index(text) for text in ("<s>", "</s>", "<|im_end|>", "<|eot_id|>"))
FIRST = max([*json.loads(backend_json())["model"]["vocab"].values(), len(SPECIAL) - 1]) + 1  # the first free id
CONFIG, MAP, GENERATION = "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"
MAPPED = {"eos_token": "<|im_end|>", "pad_token": "<|eot_id|>"}
# Files beside tokenizer.json, and what the tokenizer has of them.
FILES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"eos_id": None, "bos_id": None, "stop_ids": set(), "has_chat_template": False, "vocab_size": FIRST}),
    ({CONFIG: {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}}, {"bos_id": BOS, "eos_id": EOS}),
    ({MAP: MAPPED, CONFIG: {"eos_token": "</s>", "pad_token": None}}, {"eos_id": IM_END}),  # of an old folder
    ({MAP: MAPPED, CONFIG: {"eos_token": "</s>", "added_tokens_decoder": {}}}, {"eos_id": EOS, "pad_id": EOT}),
    (
        {CONFIG: {"eos_token": "</s>", "chat_template": CHATML}, GENERATION: {"eos_token_id": [0, 6]}},
        {"stop_ids": {0, 6, EOS, IM_END}},
    ),
    ({CONFIG: {}, GENERATION: {"eos_token_id": 5}}, {"stop_ids": {5}, "eos_id": 5}),
    ({CONFIG: {"eos_token": "<|end|>"}, GENERATION: {"eos_token_id": 1}}, {"stop_ids": {1, FIRST}}),
]


@pytest.mark.parametrize(("files", "expected"), FILES)
def test_what_files_beside_the_tokenizer_say(folder, files, expected):
    for name, value in files.items():
        write(folder, name, value)
    tokenizer = load(folder)
    assert {name: getattr(tokenizer, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("template", "end"), [("headers", "<|eot_id|>"), ("strict", "</s>"), ("thinking", "<|im_end|>")]
)
def test_the_end_of_a_turn_is_read_off_the_template(template, end):
    assert SPECIAL.index(end) in small_tokenizer(template).stop_ids
    assert len(small_tokenizer(template).stop_ids) == (1 if end == "</s>" else 2)


NAMED_TEMPLATES = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "with tools"}]
JSON = {"chat_template.json": {"chat_template": "json"}}


@pytest.mark.parametrize(
    ("files", "tools", "text"),
    [
        ({CONFIG: {"chat_template": "config"}}, None, "config"),
        ({CONFIG: {"chat_template": NAMED_TEMPLATES}}, None, "named"),
        ({CONFIG: {"chat_template": NAMED_TEMPLATES}}, [{}], "with tools"),
        (JSON, None, "json"),
        (JSON | {CONFIG: {"chat_template": "config"}}, None, "config"),
        (JSON | {"chat_template.jinja": "file {{ eos_token }}{{ eager }}"}, [{}], "file 1"),
    ],
)
def test_where_the_template_is_found(folder, files, tools, text):
    for name, value in files.items():
        write(folder, name, value)
    assert load(folder).render(chat("Hi"), tools=tools, variables={"eager": 1}) == text


def test_opening_is_what_the_post_processor_puts_in_front():
    backend = tokenizers.Tokenizer.from_str(backend_json())
    assert Tokenizer(backend, special_tokens=NAMED).prefix_ids == []
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = Tokenizer(backend, special_tokens=NAMED)
    assert tokenizer.prefix_ids == [0]
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


# -- tokens that only the files beside a tokenizer.json name are added as transformers adds them -----------------------

TEXT = "<tool>the sky</tool><|end|> <pad>"
WRONG = "an added token without a text or a whole id"
PLAIN = {"lstrip": False, "rstrip": False, "single_word": False}


def added(content: str, **attributes: Any) -> dict[str, Any]:
    return {"content": content, **PLAIN, "normalized": False, "special": True, **attributes}


DECODER = {str(FIRST): added("<tool>"), str(FIRST + 1): added("</tool>", special=False, normalized=True)}
# Files beside tokenizer.json, and the ids that the tokens of TEXT get.
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "decoder": ({"tokenizer_config.json": {"added_tokens_decoder": DECODER}}, {"<tool>": 0, "</tool>": 1}),
    "additional": (
        {"tokenizer_config.json": {"additional_special_tokens": ["<tool>", added("</tool>", __type="AddedToken")]}},
        {"<tool>": 0, "</tool>": 1},
    ),
    "extra": ({"tokenizer_config.json": {"extra_special_tokens": ["</tool>", "<tool>"]}}, {"</tool>": 0, "<tool>": 1}),
    "named": (
        {"tokenizer_config.json": {"eos_token": "<|end|>", "pad_token": added("<pad>", __type="AddedToken")}},
        {"<|end|>": 0, "<pad>": 1},
    ),
    "map": ({"special_tokens_map.json": {"eos_token": "<|end|>", "additional_special_tokens": ["<tool>"]}},
            {"<|end|>": 0, "<tool>": 1}),
    "added_tokens": (
        {"added_tokens.json": {"<tool>": FIRST, "</tool>": FIRST + 1}, "tokenizer_config.json": {}},
        {"<tool>": 0, "</tool>": 1},
    ),
    "all": (
        {"tokenizer_config.json": {"added_tokens_decoder": DECODER, "eos_token": "<|end|>", "bos_token": "<s>"}},
        {"<tool>": 0, "</tool>": 1, "<|end|>": 2},
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, int]]:
    files, ids = CASES[request.param]
    (tmp_path / "tokenizer.json").write_text(backend_json(), encoding="utf-8")
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value), encoding="utf-8")
    return tmp_path, {token: FIRST + place for token, place in ids.items()}


def test_tokens_beside_the_file_are_added(case: tuple[Path, dict[str, int]]) -> None:
    directory, ids = case
    tokenizer = load(directory)
    assert tokenizer.vocab_size == FIRST + len(ids)
    for token, id in ids.items():
        assert tokenizer.encode(f"a{token}b")[1:-1] == [id]
    again = tokenizer.files()  # also what is saved has them
    (directory / "tokenizer.json").write_text(again["tokenizer.json"], encoding="utf-8")
    assert load(directory).encode(TEXT) == tokenizer.encode(TEXT)


@pytest.mark.reference
def test_ids_are_those_of_transformers(case: tuple[Path, dict[str, int]]) -> None:
    from transformers import AutoTokenizer

    directory, _ = case
    config = directory / "tokenizer_config.json"
    stated = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps({**stated, "tokenizer_class": "PreTrainedTokenizerFast"}))
    theirs, ours = AutoTokenizer.from_pretrained(directory), load(directory)
    assert ours.encode(TEXT) == theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert (ours.vocab_size, ours.eos_id, ours.pad_id) == (len(theirs), theirs.eos_token_id, theirs.pad_token_id)
    assert ours.decode(ours.encode(TEXT)) == theirs.decode(theirs(TEXT)["input_ids"], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (CONFIG, {"added_tokens_decoder": {str(FIRST + 7): added("<x>")}}, f"'<x>' the id {FIRST + 7}, but"),
        (CONFIG, {"added_tokens_decoder": {"x": added("<x>")}}, WRONG),
        (CONFIG, {"added_tokens_decoder": {"5": {"id": 3}}}, WRONG),
        (CONFIG, {"added_tokens_decoder": 3}, WRONG),
        (CONFIG, {"added_tokens_decoder": {str(FIRST): added("<x>", lstrip=3)}}, WRONG),
        (CONFIG, {"additional_special_tokens": [3]}, WRONG),
        ("added_tokens.json", {"<x>": "y"}, WRONG),
    ],
)  # fmt: skip
def test_entries_that_are_not_tokens_are_refused(tmp_path: Path, name: str, value: Any, words: str) -> None:
    (tmp_path / "tokenizer.json").write_text(backend_json(), encoding="utf-8")
    (tmp_path / name).write_text(json.dumps(value))
    with pytest.raises(UserError, match=words):
        load(tmp_path)


# -- bounds ------------------------------------------------------------------------------------------------------------


ROW = {"text": "the sky is blue"}


def test_a_text_that_parquet_repeats_is_not_decoded_as_often(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    big, path = "a" * (12 << 20), tmp_path / "a.parquet"
    turns = [[{"role": "user", "content": big}, {"role": "assistant", "content": big}]] * 8
    for columns in ({"text": [big] * 64}, {"messages": turns}, {"text": ["b", big, "b"]}):
        too_much = len(columns.get("text", ())) > 3
        grows = pytest.raises(UserError, match="expands to more than 200 times") if too_much else None
        parquet.write_table(
            pyarrow.table(columns), path, compression="zstd", dictionary_pagesize_limit=1 << 30, use_dictionary=True
        )
        assert path.stat().st_size < 1 << 16
        before, count = pyarrow.total_allocated_bytes(), 0
        with memory_below(96 << 20), grows or nullcontext():
            for _, row in read_parquet(path, FORMATS if "messages" in columns else EXAMPLES):
                count += 1
                assert isinstance(row, dict) or ("reason" in vars(row)) is ("messages" in columns)
                assert pyarrow.total_allocated_bytes() - before < 96 << 20
        assert count == (5 if grows else len(next(iter(columns.values()))))


def test_parquet_that_states_more_than_it_can_hold(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"input_ids": [[0] * 10_000_000]}), path)
    assert "expands to more than 200 times its size" in refused(path)
    parquet.write_table(pyarrow.table({"text": ["the same"] * 60_000}), path)
    assert sum(1 for _ in read_parquet(path, EXAMPLES)) == 60_000
    texts = ["a" * 1000 + str(n) for n in range(80_000)]
    parquet.write_table(pyarrow.table({"text": texts}), path, compression="zstd", use_dictionary=False)
    assert "expands to more than 200 times its size" in refused(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz"])
def test_blank_lines_end_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = tmp_path / name
    begin = b"text\na\n" if "csv" in name else b'{"text": "a"}\n'
    path.write_bytes(gzip.compress(begin + b"\n" * (json_rows.MAX_BLANK + 10) + b"x"))
    assert "have more than 1,048,576 blank lines up to line 1,048," in refused(path)
    path.write_bytes(gzip.compress(begin + b"\n" * 1000 + begin.removeprefix(b"text\n")))
    assert len(prepared(path).rows) == 2


def test_blank_lines_of_prompts_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_file, "MAX_TEXT_BYTES", 9 << 20)
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"w1\n" + b"\n" * (8 << 20) + b"w2\n")
    with memory_below(48 << 20):
        assert [request.prompt for request in read_requests(path)] == ["w1", "w2"]


def test_many_bad_rows_end_reading_and_say_how_many_were_read(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROW, *[{"x": 1}] * 5000)
    assert refused(path).startswith(
        f"{path} has 1,023 rows among the first 1,024 that cannot be used; fix them, or skip"
    )
    assert len(prepared(path, skip_bad_rows=True).account.bad) == 5000
    few = write_jsonl(tmp_path / "b.jsonl", ROW, *[{"x": 1}] * 20)
    assert refused(few).startswith(f"{few} has 20 rows that cannot be used; ")


def test_rows_that_do_not_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=200_000))
    path = write_jsonl(tmp_path / "a.jsonl", *[ROW] * 100)
    assert len(prepared(path).rows) == 100
    path = write_jsonl(tmp_path / "a.jsonl", *[ROW] * 1000)
    assert "does not fit in memory: 256 rows of it take more than 0.0 GiB, half of this machine's memory;" in refused(
        path
    )


def test_long_reading_is_shown_in_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "TICK", 0.01)
    monkeypatch.setattr(console, "SOON", 0.05)
    path = write_jsonl(tmp_path / "a.jsonl", *[ROW] * 10)

    def read(seconds: float) -> str:
        with console.long_work_shown(), opened(path) as file:
            file.read(path.stat().st_size // 2)
            time.sleep(seconds)
        return capsys.readouterr().err

    assert read(0.0) == ""
    monkeypatch.setattr(console, "OFTEN", 0.0)
    assert "reading a.jsonl: 50 of 100% after" in read(0.5)
    with console.Bar("other", 3) as bar:
        bar.advance()
        capsys.readouterr()
        assert "reading" not in read(0.3), "another bar is shown"
    assert not sys.stdout.closed
