"""Tokenizers between tokenizer.json and GGUF metadata: the same ids, and the kinds that llama.cpp reads."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_files import byte_level, demo_tokenizer, header_only, write_gguf
from support.gguf_models import DEMO, read, small
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.gguf_header import read_header
from wgpu_lora.formats.tokenizer.gguf_tokenizer import read_tokenizer, splitting_of
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.models.architectures import load_config
from wgpu_lora.models.export.gguf_export import export_model
from wgpu_lora.models.export.gguf_vocabulary import Vocabulary, read_vocabulary

NASTY = [
    "", " ", "  ", "\n", "\r\n\r\n", "\t x", "a  b   c", " lead", "trail ", "It's we'LL they'RE 'tis", "1234567 89",
    "3.14159e-10", "snake_case camelCase HTTPServer", "äöü ÄÖÜ ß", "A\u030a e\u0301 \ufb01", "日本語の文章。", "한국어",
    "עברית", "العربية", "हिन्दी", "🙂👩‍👩‍👧‍👦🇩🇪", "\u200b\ufeff\xa0", "\x00\x01\x7f", "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_end|><|im_end|>", "<|im_", "▁a ▁▁", "<0x41> <s> </s> <unk>", "def f(x):\n    return x  # ok\n", "a" * 300,
    "½ ² ⅷ", "x\u2028y\u2029z", "ſ'ſ K", "DŽ Dž dž", "don’t", "....!!!???", "\U0010ffff",
]  # fmt: skip
CORPUS = [(DEMO / "README.md").read_text(), *NASTY, "the theory of the thing then thanks them"] * 3
texts = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(NASTY), max_size=4).map("".join))


def built(path: Path, stated: Callable[[gguf.GGUFWriter], None], rows: int = 10**6, **keys: Any) -> Tokenizer:
    tokenizer = read_tokenizer(read_header(header_only(path, stated, **keys)), rows)
    assert tokenizer is not None
    return tokenizer


@cache
def of_the_demo() -> tuple[Tokenizer, Tokenizer]:
    """(from GGUF, the original)."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        tokenizer = built(Path(directory) / "demo.gguf", demo_tokenizer)
    original = Tokenizer.load(DEMO)
    assert original is not None
    return tokenizer, original


@settings(max_examples=300, deadline=None)
@given(texts)
def test_the_demos_ids(text: str) -> None:
    tokenizer, original = of_the_demo()
    assert tokenizer.encode_with_offsets(text) == original.encode_with_offsets(text)
    assert tokenizer.encode(text, add_special_tokens=True) == original.encode(text, add_special_tokens=True)
    ids = original.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == original.decode(ids, skip)


@pytest.mark.parametrize("text", NASTY)
def test_the_demos_nasty_ids(text: str) -> None:
    tokenizer, original = of_the_demo()
    assert tokenizer.encode_with_offsets(text) == original.encode_with_offsets(text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_the_demos_settings() -> None:
    tokenizer, original = of_the_demo()
    for name in ("eos_id", "bos_id", "pad_id", "prefix_ids", "stop_ids", "special_ids", "special_texts", "vocab_size"):
        assert getattr(tokenizer, name) == getattr(original, name), name
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.render_with_spans(messages) == original.render_with_spans(messages)


# As the tokenizer.json of Qwen2.5, Llama 3, Mistral Nemo and Qwen3.5 have it.
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRES: dict[str, tuple[list[Any], bool]] = {
    "gpt-2": ([pre_tokenizers.ByteLevel(add_prefix_space=False)], False),
    "smollm": ([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)], False),
    "llama-bpe": ([pre_tokenizers.Split(Regex(LETTERS + "{1,3}" + REST), "isolated")], True),
    "deepseek-r1-qwen": ([pre_tokenizers.Split(Regex(LETTERS + REST), "isolated")], False),
    "tekken": ([pre_tokenizers.Split(Regex(TEKKEN), "isolated")], True),
}


@pytest.mark.parametrize("pre", PRES)
def test_byte_level_vocabularies(tmp_path: Path, pre: str) -> None:
    """Trained with the splitting in question; some tokens are left without merges, which `ignore_merges` finds."""
    steps, whole = PRES[pre]
    if not isinstance(steps[-1], pre_tokenizers.ByteLevel):
        steps = [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    original = tokenizers.Tokenizer(models.BPE())
    original.pre_tokenizer = pre_tokenizers.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    original.train_from_iterator(CORPUS, trainer)
    model = json.loads(original.to_str())["model"]
    merges = [" ".join(merge) for merge in model["merges"]]
    if whole:  # 'then' cannot be merged any more, yet it is a token
        model["vocab"] |= {"Ġthen": len(model["vocab"])}
        merges = [merge for merge in merges if merge.replace(" ", "") != "Ġthen"]
    original.model = models.BPE(model["vocab"], [tuple(m.split(" ")) for m in merges], ignore_merges=whole)
    original.add_special_tokens([AddedToken("<|begin|>", normalized=False), AddedToken("<|eot_id|>", normalized=False)])
    original.add_tokens([AddedToken("<think>", normalized=False)])
    original.decoder = decoders.ByteLevel()
    bos = original.token_to_id("<|begin|>")
    ids = original.get_vocab(with_added_tokens=True)
    tokens = [*sorted(ids, key=ids.__getitem__), "[PAD1]", "[PAD2]"]
    kinds = {"<|begin|>": 3, "<|eot_id|>": 3, "<think>": 4, "[PAD1]": 5, "[PAD2]": 5}
    tokenizer = built(
        tmp_path / "f.gguf", lambda w: byte_level(w, tokens, merges, kinds, pre), bos_token_id=bos, eos_token_id=bos + 1
    )
    for text in [*NASTY, *CORPUS[:1], "<think>a</think><|begin|>", " then 12345 then", "[PAD1]"]:
        assert tokenizer.encode(text) == original.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(tokenizer.encode(text), False) == text
    assert tokenizer.encode("a", add_special_tokens=True) == [bos] * whole + tokenizer.encode("a")
    assert tokenizer.prefix_ids == [bos] * whole
    assert tokenizer.stop_ids == {bos + 1}
    assert tokenizer.vocab_size == len(ids)


def sentence_piece(tokens: list[str], scores: list[float]) -> Callable[[str], list[int]]:
    """SentencePiece's own way, spelled out: join the neighbours whose whole scores best, the leftmost of equals."""
    ids = {token: id for id, token in enumerate(tokens)}

    def encode(text: str) -> list[int]:
        pieces = list("▁" + text.replace(" ", "▁")) if text else []
        while True:
            joined = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
            if not joined:
                break
            at = -max(joined)[1]
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        token_ids: list[int] = []
        for piece in pieces:
            token_ids += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        return token_ids

    return encode


@cache
def sentence_piece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """(tokens, scores, types) trained on whole texts, numbered as Llama 2's are: words by rank, then characters."""
    trained = tokenizers.Tokenizer(models.BPE())
    words = [word for text in CORPUS for word in ("▁" + text.replace(" ", "▁")).replace("\n", "").split("▁")]
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False)
    trained.train_from_iterator(["▁" + word for word in words], trainer)
    model = json.loads(trained.to_str())["model"]
    joined = ["".join(merge) for merge in model["merges"]]
    characters = [token for token in model["vocab"] if len(token) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(joined), *characters]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)]
    return tokens, scores, types


def spm(writer: gguf.GGUFWriter, equal: bool = False) -> None:
    tokens, scores, types = sentence_piece_vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*tokens, "<tool>", "[PAD]"])
    writer.add_token_scores([-1000.0] * (len(tokens) + 2) if equal else [*scores, -1000.0, -1000.0])
    writer.add_token_types([*types, 4, 5])


SPM_KEYS = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}


def same_split(text: str) -> bool:
    """Whether no character follows itself: where one does, transformers and SentencePiece may join other neighbours."""
    return all(a != b for a, b in pairwise(" " + text.replace("▁", " ")))


@pytest.mark.parametrize("equal", [False, True])
def test_sentence_piece_vocabularies(tmp_path: Path, equal: bool) -> None:
    """Also where the converter gave every token the same score, as one of llama.cpp's does."""
    tokens, scores, _ = sentence_piece_vocabulary()
    tokenizer = built(tmp_path / "f.gguf", lambda writer: spm(writer, equal), **SPM_KEYS)
    encode = sentence_piece(tokens, scores)

    @settings(max_examples=200, deadline=None)
    @given(texts)
    def property_of(text: str) -> None:
        if not any(special in text for special in ("<s>", "</s>", "<unk>", "<tool>")):
            ids = tokenizer.encode(text)
            if same_split(text):
                assert ids == encode(text)
            assert tokenizer.decode(ids) == text.replace("▁", " ")

    property_of()
    assert len(tokenizer.encode("the theory")) < 6  # merges there are
    assert tokenizer.encode("曜") == [tokens.index("▁"), *(tokens.index(f"<0x{byte:02X}>") for byte in "曜".encode())]
    assert tokenizer.encode("a", add_special_tokens=True) == [1, *tokenizer.encode("a")]
    assert tokenizer.encode("<tool>") == [len(tokens)]
    assert tokenizer.encode("a</s>b") == [*tokenizer.encode("a"), 2, *tokenizer.encode("b")]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, len(tokens) + 1)
    assert tokenizer.stop_ids == {2}


def test_sentence_piece_settings(tmp_path: Path) -> None:
    def without_prefix(writer: gguf.GGUFWriter) -> None:
        spm(writer)
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(True)

    tokenizer = built(tmp_path / "f.gguf", without_prefix, **SPM_KEYS)
    assert tokenizer.decode(tokenizer.encode(" a b")) == " a b"
    assert tokenizer.encode("a", add_special_tokens=True) == [*tokenizer.encode("a"), 2]
    assert tokenizer.encode(" a")[0] != tokenizer.encode("a")[0]


def test_chat_templates_by_name(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = built(tmp_path / "f.gguf", demo_tokenizer, chat_template=templates)
    assert tokenizer.render([{"role": "user", "content": "a"}]) == "plain"
    assert tokenizer.render([{"role": "user", "content": "a"}], tools=[{}]) == "tools"


LETTERS_ONLY = [chr(code) for code in range(33, 127)]


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (lambda w: byte_level(w, ["a", "a"], [], {}), "the token 'a' twice"),
        (lambda w: byte_level(w, [], [], {}), "without tokens|not an array"),
        (lambda w: byte_level(w, ["a"] * 2001, [], {}), "at most 2,000 strings"),
        (lambda w: byte_level(w, LETTERS_ONLY, ["a b"], {}), "merge 'a b'"),
        (lambda w: byte_level(w, LETTERS_ONLY, ["ab"], {}), "merge 'ab'"),
        (lambda w: byte_level(w, LETTERS_ONLY, [], {}, "some-new"), "pre 'some-new' of .* is not supported"),
        (lambda w: (spm(w), w.add_add_bos_token(3)), "expected true or false"),
        (lambda w: (w.add_tokenizer_model("llama"), w.add_token_list(LETTERS_ONLY)), "no score for each"),
        (lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_list(LETTERS_ONLY)), "pre None"),
        (lambda w: (w.add_tokenizer_model("llama"), w.add_token_list(["a"]), w.add_token_types([1, 2])), "array of 1"),
        (
            lambda w: (spm(w), w.add_string("tokenizer.chat_template.../../etc/x", "a")),
            r"names a chat template '\.\./\.\./etc/x'",
        ),
        (lambda w: w.add_tokenizer_model("t5"), "The tokenizer 't5'"),
    ],
)
def test_what_cannot_be_built_is_said(tmp_path: Path, stated: Any, message: str) -> None:
    def tolerant(writer: gguf.GGUFWriter) -> None:
        writer.add_add_bos_token = lambda value: writer.add_uint32("tokenizer.ggml.add_bos_token", value)
        stated(writer)

    with pytest.raises(UserError, match=message):
        read_tokenizer(read_header(header_only(tmp_path / "f.gguf", tolerant)), 2000)


@pytest.mark.parametrize("run", ["\u2581\u2581", "  ", " \u2581", "\u2581 "])
def test_runs_of_spaces_are_found_however_they_are_written(tmp_path: Path, run: str) -> None:
    """Gemma's runs of U+2581 are user-defined tokens, which GGUF files hold as spaces."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "  ", "   "]

    def gemma(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(id) for id in range(len(tokens))])
        writer.add_token_types([2, 3, 3, *[6] * 256, 1, 1, 1, 4, 4])
        writer.add_add_space_prefix(False)

    path = header_only(tmp_path / "f.gguf", gemma, **SPM_KEYS)
    tokenizer = read_tokenizer(read_header(path), len(tokens))
    assert tokenizer is not None
    a, b, two, three, single = (tokens.index(token) for token in ("a", "b", "  ", "   ", "\u2581"))
    assert tokenizer.encode(f"a{run}b") == [a, two, b]
    assert tokenizer.encode(f"a{run}\u2581b") == [a, three, b]
    assert tokenizer.encode("a b\u2581a") == [a, single, b, single, a]
    assert tokenizer.decode([a, two, b]) == "a  b"


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["demo", "llama"])
def test_transformers_reads_the_same(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: make test-reference does that"
    )
    if kind == "demo":
        write_gguf(DEMO, tmp_path / "m.gguf", tokenizer=demo_tokenizer)
    else:
        header_only(tmp_path / "m.gguf", spm, **SPM_KEYS)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = read_tokenizer(read_header(tmp_path / "m.gguf"), 10**6)
    assert ours is not None
    for text in [*NASTY, CORPUS[0]]:
        if kind == "llama" and (text.startswith((" ", "▁")) or any(s in text for s in ("<s>", "</s>", "<unk>"))):
            continue  # transformers puts no space before a text that begins with one, nor after special tokens
        # theirs leaves NFC out, which Qwen's tokenizer.json has
        nfc_text = unicodedata.normalize("NFC", text) if kind == "demo" else text
        assert ours.encode(text) == theirs(nfc_text, add_special_tokens=False).input_ids, text


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
PREPEND = [
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
]


def vocabulary(model: Path) -> Vocabulary:
    return read_vocabulary(Tokenizer.load(model), load_config(model), model)


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def stated(*pieces: dict[str, Any], normalizers: list | None = None, **model: Any) -> dict[str, Any]:
    whole = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], **model}
    return {
        "model": whole,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pieces)} if pieces else None,
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
    }


def metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}


DIGITS = {"type": "Digits", "individual_digits": True}
GPT2 = {**BYTES, "use_regex": True}
KNOWN: dict[str, tuple[dict[str, Any], tuple[str, str, bool, int]]] = {
    "qwen2": (stated(split(LETTERS + REST), BYTES, normalizers=[{"type": "NFC"}]), ("gpt2", "qwen2", False, 0)),
    "qwen35": (stated(split(QWEN35), BYTES, normalizers=[{"type": "NFC"}]), ("gpt2", "qwen35", False, 0)),
    "llama3": (stated(split(LETTERS + "{1,3}" + REST), BYTES, ignore_merges=True), ("gpt2", "llama-bpe", False, 0)),
    "llama3 merging": (stated(split(LETTERS + "{1,3}" + REST), BYTES), ("gpt2", "llama-bpe", False, 0)),
    "llama3 unreachable": (
        stated(split(LETTERS + "{1,3}" + REST), BYTES, vocab={"a": 0, "b": 1, "ab": 2, "ba": 3}),
        ("gpt2", "llama-bpe", False, 1),
    ),
    "tekken": (stated(split(TEKKEN), BYTES, ignore_merges=True), ("gpt2", "tekken", False, 1)),
    "smollm": (stated(DIGITS, GPT2), ("gpt2", "smollm", False, 0)),
    "gpt2": (stated(GPT2), ("gpt2", "gpt-2", False, 0)),
    "prepend": (stated(normalizers=PREPEND, byte_fallback=True), ("llama", "default", True, 0)),
    "replace": (stated(normalizers=PREPEND[1:], byte_fallback=True), ("llama", "default", False, 0)),
    "always": (stated(metaspace("always"), byte_fallback=True), ("llama", "default", True, 1)),
    "first": (stated(metaspace("first"), byte_fallback=True), ("llama", "default", True, 1)),
    "never": (stated(metaspace("never"), byte_fallback=True), ("llama", "default", False, 0)),
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_kinds(case: str) -> None:
    content, (model, pre, space, notes) = KNOWN[case]
    splitting = splitting_of(content, "It")
    assert (splitting.model, splitting.pre, splitting.space_prefix, len(splitting.notes)) == (model, pre, space, notes)


UNKNOWN = {
    "another regex": stated(split(LETTERS + "{1,2}" + REST), BYTES),
    "behaviour": stated({**split(LETTERS + REST), "behavior": "Removed"}, BYTES),
    "two splits": stated(split(LETTERS + REST), split(LETTERS + "{1,3}" + REST), BYTES),
    "prefix space": stated({**GPT2, "add_prefix_space": True}),
    "lower case": stated(split(LETTERS + REST), BYTES, normalizers=[{"type": "Lowercase"}]),
    "split marks": stated({**metaspace("always"), "split": True}, byte_fallback=True),
    "no fallback": stated(normalizers=PREPEND),
    "nothing": stated(),
    "unigram": stated(metaspace("always"), type="Unigram"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_kinds_are_refused(case: str) -> None:
    with pytest.raises(UserError, match=r"merge|only BPE"):
        splitting_of(UNKNOWN[case], "It")


def sentence_piece_model(directory: Path) -> Path:
    """A model whose tokenizer is as transformers converts one of SentencePiece."""
    model = small(directory, "llama", vocab_size=280)
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    content = {
        "version": "1.0",
        "added_tokens": [token(0, "<unk>"), token(1, "<s>"), token(2, "</s>"), token(265, "▁mine", special=False)],
        "normalizer": {"type": "Sequence", "normalizers": PREPEND},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: id for id, text in enumerate(texts)},
            "merges": ["▁ a", "a b", "▁a b", "▁ ab"],
        },
    }
    (model / "tokenizer.json").write_text(json.dumps(content))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("chat_template.jinja", "generation_config.json"):
        (model / name).unlink()
    return model


def token(id: int, text: str, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": text, "special": special, **flags}


def test_sentence_pieces(tmp_path: Path) -> None:
    model = sentence_piece_model(tmp_path / "model")
    export_model(model, tmp_path / "model.gguf")
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text().replace("<0x0A>", "<0xZZ>"))
    with pytest.raises(UserError, match="no token <0x0A>"):
        vocabulary(model)
    facts, _ = read(tmp_path / "model.gguf")
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in facts.items() if "tokenizer" in key}
    assert (fields["model"], fields["pre"], fields["add_space_prefix"], fields["add_bos_token"]) == (
        "llama",
        "default",
        1,
        1,
    )
    assert (fields["bos_token_id"], fields["eos_token_id"], fields["unknown_token_id"]) == (1, 2, 0)
    assert "merges" not in fields
    assert len(fields["tokens"]) == 280
    # unknown, control, bytes, normal, mine, padding
    assert fields["token_type"] == [2, 3, 3, *[6] * 256, *[1] * 6, 4, *[5] * 14]
    assert fields["tokens"][265:267] == [" mine", "[PAD266]"]
    order = dict(zip(fields["tokens"], fields["scores"], strict=True))
    assert order["▁a"] > order["ab"] > order["▁ab"] > order["a"]


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_kinds_ends_and_templates(tmp_path: Path) -> None:
    model = small(tmp_path / "model", "qwen2", vocab_size=4100)
    tokens = json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    tokens += [token(4096, "<|mark|>", False), token(4097, "<think>", False), token(4098, "<stop>") | {"lstrip": True}]
    edit(model / "tokenizer.json", added_tokens=tokens)
    # The tokenizer's eos is no end of a turn, as in base models; llama.cpp has place for one end that it does not know.
    edit(model / "tokenizer_config.json", eos_token="<|endoftext|>")
    edit(model / "generation_config.json", eos_token_id=[4093, 4097, 4098, 99999])
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{% generation %}x{%- endgeneration %}")
    gguf_vocabulary = vocabulary(model)
    assert gguf_vocabulary.kinds[4093:] == [3, 3, 3, 3, 4, 3, 5]
    assert gguf_vocabulary.tokens[4099] == "[PAD4099]"
    assert gguf_vocabulary.special == {"eos": 4093, "eot": 4095, "eom": 4097, "pad": 4093}
    assert gguf_vocabulary.notes == [
        "llama.cpp keeps spaces next to <stop>, which this tokenizer removes.",
        "llama.cpp does not stop at <stop>: pass them as stop strings.",
    ]
    export_model(model, tmp_path / "model.gguf")
    facts, _ = read(tmp_path / "model.gguf")
    assert facts["tokenizer.chat_template.tool_use"] == gguf_vocabulary.templates["tool_use"] == "{# #}x{#- #}"
    assert facts["tokenizer.chat_templates"] == ["tool_use"]
    assert "<|im_start|>" in facts["tokenizer.chat_template"]
