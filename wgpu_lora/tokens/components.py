"""The components that a tokenizer.json may contain: those of published tokenizers, with their parameters.

Each component is checked field by field, and a chain of them as a whole: the number of components, repetitions, and how
much the chain may lengthen a text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wgpu_lora.tokens.charsmap import CharsmapError, check_charsmap
from wgpu_lora.tokens.patterns import PatternError, shape_of

MAX_PARTS = 24  # of a chain; DeepSeek's has ten
MAX_NESTED = 3  # depth of nested sequences
MAX_GROWTH = 128.0  # bytes that a chain may make of one byte of text; published ones make up to 72
MAX_TEXT = 64  # characters of a parameter
MAX_IDS = 16  # that a template adds to a text
MAX_ID = 1 << 22  # sixteen times the largest vocabularies


class DocumentError(ValueError):
    """A tokenizer.json is not accepted; the text says why."""


Check = Callable[[Any], None]
Fields = Mapping[str, Check]


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise DocumentError(reason)


def boolean(value: Any) -> None:
    require(isinstance(value, bool), "must be true or false")


def boolean_or_null(value: Any) -> None:
    require(value is None or isinstance(value, bool), "must be true, false or null")


def whole(least: int, most: int) -> Check:
    def check(value: Any) -> None:
        require(type(value) is int and least <= value <= most, f"must be a whole number from {least} to {most:,}")

    return check


def text(least: int = 0, most: int = MAX_TEXT) -> Check:
    def check(value: Any) -> None:
        size = f"{least} to {most} characters" if least < most else f"{most} character"
        size = size if least else f"at most {most} characters"
        require(isinstance(value, str) and least <= len(value) <= most, f"must be a text of {size}")

    return check


def anything(value: Any) -> None:
    """Accept any value; it is checked elsewhere."""


def text_or_null(value: Any) -> None:
    if value is not None:
        text()(value)


def one_of(*names: str) -> Check:
    def check(value: Any) -> None:
        require(isinstance(value, str) and value in names, f"must be one of {', '.join(names)}")

    return check


def pattern(value: Any) -> None:
    require(isinstance(value, dict) and len(value) == 1, "must be a String or a Regex")
    ((kind, given),) = value.items()
    require(kind in ("String", "Regex") and isinstance(given, str), "must be a String or a Regex")
    least_match(kind, given)


def least_match(kind: str, given: str) -> int:
    """Length in bytes of the shortest match of a pattern."""
    if kind == "String":
        text()(given)
        return _bytes(given)
    try:
        return shape_of(given).least
    except PatternError as error:
        raise DocumentError(f"is {given!r:.60}: {error}") from None


def _bytes(value: str) -> int:
    return len(value.encode(errors="surrogatepass"))  # lone surrogates are refused at the end


def charsmap(value: Any) -> None:
    require(isinstance(value, str), "must be a text")
    try:
        check_charsmap(value)
    except CharsmapError as error:
        raise DocumentError(f"is damaged or malicious: {error}") from None


def token(value: Any) -> None:
    require(isinstance(value, list) and len(value) == 2, "must be a token and its id")
    text()(value[0])
    whole(0, MAX_ID)(value[1])


_BEHAVIOR = one_of("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_BYTE_LEVEL: Fields = {"add_prefix_space": boolean, "trim_offsets": boolean, "use_regex": boolean}
_METASPACE: Fields = {
    "replacement": text(1, 1),
    "prepend_scheme": one_of("always", "first", "never"),
    "split": boolean,
    "add_prefix_space": boolean,  # with str_rep, in files from before 2024
    "str_rep": text(),
}
_REPLACE: Fields = {"pattern": pattern, "content": text()}

NORMALIZERS: dict[str, Fields] = {
    "NFC": {}, "NFD": {}, "NFKC": {}, "NFKD": {}, "Nmt": {}, "Lowercase": {}, "StripAccents": {}, "ByteLevel": {},
    "Strip": {"strip_left": boolean, "strip_right": boolean},
    "Replace": _REPLACE,
    "Prepend": {"prepend": text(0, 8)},
    "Precompiled": {"precompiled_charsmap": charsmap},
    "BertNormalizer": {
        "clean_text": boolean, "handle_chinese_chars": boolean, "strip_accents": boolean_or_null, "lowercase": boolean,
    },
}  # fmt: skip
PRE_TOKENIZERS: dict[str, Fields] = {
    "BertPreTokenizer": {}, "Whitespace": {}, "WhitespaceSplit": {}, "UnicodeScripts": {},
    "ByteLevel": _BYTE_LEVEL,
    "Metaspace": _METASPACE,
    "Split": {"pattern": pattern, "behavior": _BEHAVIOR, "invert": boolean},
    "Digits": {"individual_digits": boolean},
    "Punctuation": {"behavior": _BEHAVIOR},
    "CharDelimiterSplit": {"delimiter": text(1, 1)},
    "FixedLength": {"length": whole(1, 1 << 16)},
}  # fmt: skip
PROCESSORS: dict[str, Fields] = {
    "ByteLevel": _BYTE_LEVEL,
    "BertProcessing": {"sep": token, "cls": token},
    "RobertaProcessing": {"sep": token, "cls": token, "trim_offsets": boolean, "add_prefix_space": boolean},
    "TemplateProcessing": dict.fromkeys(("single", "pair", "special_tokens"), anything),
}
DECODERS: dict[str, Fields] = {
    "Fuse": {}, "ByteFallback": {},
    "ByteLevel": _BYTE_LEVEL,
    "Metaspace": _METASPACE,
    "Replace": _REPLACE,
    "BPEDecoder": {"suffix": text(1)},
    "WordPiece": {"prefix": text(), "cleanup": boolean},
    "CTC": {"pad_token": text(1), "word_delimiter_token": text(1), "cleanup": boolean},
    "Strip": {"content": text(1, 1), "start": whole(0, 64), "stop": whole(0, 64)},
}  # fmt: skip

_NEEDED = {"Replace": {"pattern", "content"}, "Prepend": {"prepend"}}  # the library checks the others
_START_OF_TEXT = r"(?<!\n)^"  # as in LLM-jp's tokenizers

# Bytes that a component may make of one byte. Unicode normalization and charsmaps (which have their own limit) expand a
# few characters once, and leave the result as it is.
_GROWTH = {"ByteLevel": 2.0, "Metaspace": 4.0, "BertNormalizer": 2.0, "WordPiece": 2.0}
_AT_MOST = {
    "ByteLevel": 1,
    "BertNormalizer": 1,
    "Precompiled": 1,
    "Metaspace": 2,
    "WordPiece": 1,
    "Prepend": 2,
    "CTC": 1,
}
_AT_MOST |= {"TemplateProcessing": 1, "BertProcessing": 1, "RobertaProcessing": 1}


@dataclass
class Chain:
    """Totals of a chain of components."""

    name: str
    parts: int = 0
    growth: float = 1.0
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, part: Mapping[str, Any]) -> None:
        kind = part["type"]
        self.parts += 1
        self.kinds[kind] += 1
        require(self.parts <= MAX_PARTS, f"there are more than {MAX_PARTS} parts in {self.name}")
        if kind == "Sequence":
            return
        most = _AT_MOST.get(kind, MAX_PARTS)
        require(self.kinds[kind] <= most, f"there is more than {most} {kind} in {self.name}")
        self.growth *= _growth(part)
        require(self.growth <= MAX_GROWTH, f"a text becomes much longer in {self.name}")


def _growth(part: Mapping[str, Any]) -> float:
    kind = part["type"]
    if kind == "Replace":
        ((form, given),) = part["pattern"].items()
        least = least_match(form, given)
        added = _bytes(part["content"])
        if given == _START_OF_TEXT:
            return 1.0 + added
        require(least > 0, f"Replace has a pattern, {given!r:.60}, that matches the empty text")
        return max(1.0, added / least)
    if kind == "Prepend":
        return 1.0 + _bytes(part["prepend"])
    return _GROWTH.get(kind, 1.0)


def check_chain(chain: Chain, part: Any, known: Mapping[str, Fields], inner: str, nested: int = 0) -> Any:
    """Check a component of a chain, or a Sequence with its list in `inner`, and drop unknown fields; None passes."""
    if part is None:
        return None
    require(
        isinstance(part, dict) and isinstance(part.get("type"), str), f"there is a part without a type in {chain.name}"
    )
    kind = part["type"]
    if kind != "Sequence":
        require(kind in known, f"there is an unknown part, {kind!r:.40}, in {chain.name}")
        part = check_fields(kind, part, known[kind])
        missing = _NEEDED.get(kind, set()) - part.keys()
        require(not missing, f"{kind} has no {min(missing, default='')}")
        if kind == "TemplateProcessing":
            _check_template(part)
        chain.add(part)
        return part
    chain.add(part)
    parts = part.get(inner)
    require(nested < MAX_NESTED, f"parts are nested too deeply in {chain.name}")
    require(isinstance(parts, list), f"there is a Sequence without {inner} in {chain.name}")
    require(None not in parts, f"there is a part without a type in {chain.name}")
    return {"type": kind, inner: [check_chain(chain, each, known, inner, nested + 1) for each in parts]}


def check_fields(name: str, part: Mapping[str, Any], known: Fields) -> dict[str, Any]:
    """Drop unknown fields and check the others. Raises DocumentError."""
    found = {key: value for key, value in part.items() if key in known or key == "type"}
    for key, value in found.items():
        try:
            known.get(key, anything)(value)
        except DocumentError as error:
            raise DocumentError(f"{key!r} of {name} {error}") from None
    return found


def _check_template(part: Mapping[str, Any]) -> None:
    special: Any = part.get("special_tokens")
    require(isinstance(special, dict) and len(special) <= 1024, "TemplateProcessing has no special_tokens")
    for value in special.values():
        named = isinstance(value, dict) and value.keys() == {"id", "ids", "tokens"}
        require(named, "TemplateProcessing has an invalid special token")
        check_fields("special_tokens", value, {"id": text(1, 1024), "ids": _ids, "tokens": _tokens})
        require(len(value["ids"]) == len(value["tokens"]), "TemplateProcessing has an invalid special token")
    for name in ("single", "pair"):
        pieces: Any = part.get(name)
        require(isinstance(pieces, list) and len(pieces) <= MAX_IDS, f"TemplateProcessing has too long a {name}")
        used = Counter(_piece(piece, special) for piece in pieces)
        require(max(used["A"], used["B"]) <= 1, f"TemplateProcessing repeats a text in its {name}")
        require(name != "single" or not used["B"], "TemplateProcessing has a second text in its single")


def _piece(piece: Any, special: Mapping[str, Any]) -> str:
    """The text that a piece of a template stands for: A, B or ""."""
    require(isinstance(piece, dict) and len(piece) == 1, "TemplateProcessing has an invalid piece")
    ((kind, value),) = piece.items()
    require(isinstance(value, dict) and value.keys() == {"id", "type_id"}, "TemplateProcessing has an invalid piece")
    check_fields(kind, value, {"id": text(1, 1024), "type_id": whole(0, 1 << 16)})
    if kind == "Sequence":
        require(value["id"] in ("A", "B"), "TemplateProcessing has a text that is neither A nor B")
        return str(value["id"])
    require(kind == "SpecialToken" and value["id"] in special, "TemplateProcessing has an invalid piece")
    return ""


def _ids(value: Any) -> None:
    require(isinstance(value, list) and len(value) <= MAX_IDS, f"must be a list of at most {MAX_IDS} ids")
    for item in value:
        whole(0, MAX_ID)(item)


def _tokens(value: Any) -> None:
    require(isinstance(value, list) and len(value) <= MAX_IDS, f"must be a list of at most {MAX_IDS} texts")
    for item in value:
        text(0, 1024)(item)
