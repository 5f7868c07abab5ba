"""The pipelines of published tokenizers, by the models that have them, over vocabularies of some letters."""

from __future__ import annotations

from typing import Any

from tokenizers import pre_tokenizers

from support import FIXTURES

Part = dict[str, Any]
CHARSMAP = (FIXTURES / "data" / "charsmap.txt").read_text()  # of a few rules of nmt_nfkc
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
KIMI_UPPER, KIMI_LOWER = f"{UPPER[:-1]}&&[^\\p{{Han}}]]", f"{LOWER[:-1]}&&[^\\p{{Han}}]]"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^" + "\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["
    "\r\n" + r"]*|\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+"
)


def of(kind: str, **fields: Any) -> Part:
    return {"type": kind, **fields}


def replace(pattern: str, content: str, kind: str = "String") -> Part:
    return of("Replace", pattern={kind: pattern}, content=content)


def split(regex: str, behavior: str = "Isolated", invert: bool = False) -> Part:
    return of("Split", pattern={"Regex": regex}, behavior=behavior, invert=invert)


def byte_level(use_regex: bool = False, prefix: bool = False) -> Part:
    return of("ByteLevel", add_prefix_space=prefix, trim_offsets=True, use_regex=use_regex)


def normalizing(*parts: Part) -> Part:
    return of("Sequence", normalizers=list(parts))


def splitting(*parts: Part) -> Part:
    return of("Sequence", pretokenizers=list(parts))


def decoding(*parts: Part) -> Part:
    return of("Sequence", decoders=list(parts))


def around(before: str = "", after: str = "") -> Part:
    """A template that puts special tokens around a text."""
    special = {"<s>": 1, "</s>": 2}

    def piece(name: str) -> list[Part]:
        return [{"SpecialToken": {"id": name, "type_id": 0}}] if name else []

    def text(name: str) -> Part:
        return {"Sequence": {"id": name, "type_id": 0}}

    return of(
        "TemplateProcessing",
        single=[*piece(before), text("A"), *piece(after)],
        pair=[*piece(before), text("A"), *piece(after), text("B"), *piece(after)],
        special_tokens={name: {"id": name, "ids": [id], "tokens": [name]} for name, id in special.items()},
    )


def metaspace(scheme: str = "always", **fields: Any) -> Part:
    return of("Metaspace", replacement="▁", prepend_scheme=scheme, **fields)


ADDED = [
    {"id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
     "special": True}
    for id, text in enumerate(("<unk>", "<s>", "</s>"))
]  # fmt: skip


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: id for id, token in enumerate(dict.fromkeys([*(str(token["content"]) for token in ADDED), *tokens]))}


_LETTERS = [*"abcdefghijklmnopqrstuvwxyzABC0123456789 .,!'▁"]
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTE_BPE = of("BPE", dropout=None, unk_token=None, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False,
              vocab=_ids([*_BYTES, "he", "the", "Ġt", "Ġthe"]), merges=["h e", "t he", "Ġ t", "Ġt he"])  # fmt: skip
LLAMA3_BPE = {**BYTE_BPE, "ignore_merges": True, "merges": [["h", "e"], ["t", "he"]]}
PIECES = [*(f"<0x{byte:02X}>" for byte in range(256)), *_LETTERS, "th", "the", "▁the", "▁t"]
SP_BPE = of("BPE", dropout=None, unk_token="<unk>", fuse_unk=True, byte_fallback=True, vocab=_ids(PIECES),
            merges=[["t", "h"], ["th", "e"], ["▁", "the"], ["▁", "t"]])  # fmt: skip
CLIP_BPE = {**BYTE_BPE, "unk_token": "<unk>", "end_of_word_suffix": "</w>",
            "vocab": _ids([*_BYTES, *(f"{b}</w>" for b in _BYTES)]), "merges": []}  # fmt: skip
WORD_PIECE = of("WordPiece", unk_token="<unk>", continuing_subword_prefix="##", max_input_chars_per_word=100,
                vocab=_ids([*_LETTERS, *(f"##{c}" for c in _LETTERS), "the", "##ing"]))  # fmt: skip
UNIGRAM = of(
    "Unigram",
    unk_id=0,
    byte_fallback=False,
    vocab=[[token, 0.0 if i < 3 else -2.5 - i / 7] for i, token in enumerate(_ids([*_LETTERS, "▁the", "▁th"]))],
)
NAMELESS = {name: value for name, value in BYTE_BPE.items() if name != "type"}  # as GPT-2's own file has it
SPACES = replace(" ", "▁")
BACK = replace("▁", " ")
BYTES_TO_TEXT = byte_level(use_regex=True, prefix=True)
SENTENCE_PIECE = decoding(BACK, of("ByteFallback"), of("Fuse"), of("Strip", content=" ", start=1, stop=0))

# model: (model, normalizer, pre_tokenizer, post_processor, decoder)
PIPELINES: dict[str, tuple[Part, Part | None, Part | None, Part | None, Part | None]] = {
    "gpt2": (NAMELESS, None, byte_level(True), byte_level(True), BYTES_TO_TEXT),
    "qwen2, qwen3": (BYTE_BPE, of("NFC"), splitting(
        split(rf"{CONTRACTIONS}|{WORD}\p{{L}}+|\p{{N}}|{REST}"), byte_level()), byte_level(), byte_level()),
    "llama 2, mistral 0.1, phi 3": (SP_BPE, normalizing(of("Prepend", prepend="▁"), SPACES), None, around("<s>"),
                                    SENTENCE_PIECE),
    "llama 3, smollm3": (LLAMA3_BPE, None,
                         splitting(split(rf"{CONTRACTIONS}|{WORD}\p{{L}}+|\p{{N}}{{1,3}}|{REST}"), byte_level()),
                         of("Sequence", processors=[byte_level(True, True), around("<s>")]), BYTES_TO_TEXT),
    "mistral 0.3": (SP_BPE, None, metaspace("first", split=False), around("<s>"), SENTENCE_PIECE),
    "mistral nemo": (LLAMA3_BPE, None, splitting(
        split(rf"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*|\p{{N}}|{REST.replace('n]*', 'n/]*', 1)}"),
        byte_level()), around("<s>"), BYTES_TO_TEXT),
    "gemma": (SP_BPE, SPACES, of("Split", pattern={"String": " "}, behavior="MergedWithPrevious", invert=False),
              around("<s>"), decoding(BACK, of("ByteFallback"), of("Fuse"))),
    "gpt-oss": (LLAMA3_BPE, None, splitting(split(
        rf"{WORD}{UPPER}*{LOWER}+{CONTRACTIONS}?|{WORD}{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}|"
        rf"{REST.replace('n]*', 'n/]*', 1)}"), byte_level()), None, BYTES_TO_TEXT),
    "phi 4": (BYTE_BPE, None, splitting(split(
        rf"'(?i:[sdmt]|ll|ve|re)|{WORD}+\p{{L}}+|\p{{N}}{{1,3}}+| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|"
        r"\s+(?!\S)|\s+", "Removed", True), byte_level()), None, BYTES_TO_TEXT),
    "deepseek": (BYTE_BPE, normalizing(), splitting(
        split("[\r\n]"), split(r"\s?[A-Za-zµÀ-ÖØ-öø-ƺ𐐀-𐑏]+"), split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"), split(r"\s+$"),
        split("[一-龥ࠀ-一가-퟿]+"), of("Digits", individual_digits=True), byte_level()), around("<s>"), BYTES_TO_TEXT),
    "deepseek 3": (BYTE_BPE, normalizing(), splitting(
        split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK), byte_level()), around("<s>"), BYTES_TO_TEXT),
    "kimi": (BYTE_BPE, None, splitting(split(
        rf"[\p{{Han}}]+|{WORD}{KIMI_UPPER}*{KIMI_LOWER}+{CONTRACTIONS}?|{WORD}{KIMI_UPPER}+{KIMI_LOWER}*{CONTRACTIONS}?|"
        rf"\p{{N}}{{1,3}}|{REST}"), byte_level()), None, BYTES_TO_TEXT),
    "falcon": (BYTE_BPE, None, splitting(
        of("Punctuation", behavior="Contiguous"), byte_level(True), of("Digits", individual_digits=False),
        split("[0-9][0-9][0-9]")), None, BYTES_TO_TEXT),
    "starcoder, smollm": (BYTE_BPE, None, splitting(of("Digits", individual_digits=True), byte_level(True)), None,
                          BYTES_TO_TEXT),
    "bloom": (BYTE_BPE, None, splitting(split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), byte_level()), byte_level(),
              BYTES_TO_TEXT),
    "superbpe": (BYTE_BPE, None, splitting(split(r"\p{N}+"), split(r"(?=(\d{3})+(?!\d))"), byte_level()), None,
                 BYTES_TO_TEXT),
    "gpt-neox, olmo, modernbert": (BYTE_BPE, of("NFC"), byte_level(True), around("<s>", "</s>"), BYTES_TO_TEXT),
    "roberta": (BYTE_BPE, None, byte_level(True), of("RobertaProcessing", sep=["</s>", 2], cls=["<s>", 1],
                trim_offsets=True, add_prefix_space=False), BYTES_TO_TEXT),
    "clip": (CLIP_BPE, normalizing(of("NFC"), replace(r"\s+", " ", "Regex"), of("Lowercase")), splitting(
        split(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+", "Removed", True), byte_level()),
        of("RobertaProcessing", sep=["</s>", 2], cls=["<s>", 1], trim_offsets=False, add_prefix_space=False),
        BYTES_TO_TEXT),
    "bert": (WORD_PIECE, of("BertNormalizer", clean_text=True, handle_chinese_chars=True, strip_accents=None,
             lowercase=True), of("BertPreTokenizer"), around("<s>", "</s>"),
             of("WordPiece", prefix="##", cleanup=True)),
    "t5": (UNIGRAM, normalizing(of("Precompiled", precompiled_charsmap=CHARSMAP),
           of("Strip", strip_left=False, strip_right=True), replace(" {2,}", "▁", "Regex")), metaspace(split=True),
           around("", "</s>"), metaspace(split=True)),
    "xlm-roberta": (UNIGRAM, of("Precompiled", precompiled_charsmap=CHARSMAP), splitting(of("WhitespaceSplit"), of(
        "Metaspace", replacement="▁", str_rep="▁", add_prefix_space=True)), around("<s>", "</s>"), metaspace()),
    "albert": (UNIGRAM, normalizing(replace("``", '"'), replace("''", '"'), of("NFKD"), of("StripAccents"),
               of("Lowercase"), of("Precompiled", precompiled_charsmap=CHARSMAP)), metaspace(), around("<s>", "</s>"),
               metaspace()),
    "llm-jp": (UNIGRAM, normalizing(replace(r"(?<!\n)^", "▁", "Regex"), replace(" ", "▁", "Regex")), None,
               around("<s>"), metaspace()),
    "words": (of("WordLevel", unk_token="<unk>", vocab=_ids(["the", "cat", "."])), of("Lowercase"), of("Whitespace"),
              None, None),
}  # fmt: skip


def document(name: str) -> Part:
    """A tokenizer.json with the pipeline of that name."""
    model, normalizer, pre_tokenizer, post_processor, decoder = PIPELINES[name]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": ADDED, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": post_processor, "decoder": decoder, "model": model,
    }  # fmt: skip
