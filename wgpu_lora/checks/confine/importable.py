"""The modules that an answer may import, of which those that it names are imported before it is confined."""

from __future__ import annotations

import encodings
import encodings.aliases
import pkgutil
import re
from functools import cache

# Modules that an answer can import. They are imported before the process is confined and can no longer open files.
IMPORTABLE = (
    "abc array base64 binascii bisect calendar cmath codecs collections contextlib copy dataclasses datetime decimal "
    "difflib enum fractions functools hashlib heapq io itertools json keyword math numbers operator os pprint queue "
    "random re reprlib statistics string struct textwrap threading time timeit traceback types typing "
    "unicodedata uuid warnings weakref zlib"
)
# Modules that these import on first use.
NEEDS = {
    "collections": "collections.abc copy heapq",
    "datetime": "_strptime",
    "fractions": "decimal",
    "functools": "types weakref",
    "hashlib": "_md5 _sha1 _sha2 _sha256 _sha512 _sha3 _blake2",
    "singledispatch": "typing",
    "singledispatchmethod": "typing",
    "time": "_strptime",
    "timeit": "linecache traceback",
    "traceback": "ast unicodedata",
    "types": "functools",
    "uuid": "hashlib",
    "warnings": "linecache traceback tracemalloc",
    "weakref": "copy",
}
# Codecs that are always imported, since an answer may compute their names; others only if the answer contains them.
CODECS = (
    "ascii latin_1 utf_8_sig utf_7 utf_16 utf_16_le utf_16_be utf_32 utf_32_le utf_32_be cp437 cp1252 iso8859_15 "
    "rot_13 hex_codec base64_codec unicode_escape raw_unicode_escape"
)


def modules_for(code: str) -> list[str]:
    """The modules that an answer may import: those whose names it contains."""
    words = set(re.findall(r"\w+", code))
    found = set(IMPORTABLE.split()) & words
    found |= {needed for name in words & NEEDS.keys() for needed in NEEDS[name].split()}
    codecs = set(CODECS.split()) if words & {"encode", "decode", "encoding", "codecs"} else set()
    for name in re.findall(r"""['"]([\w .-]{2,40})['"]""", code):
        name = encodings.normalize_encoding(name.lower())
        codecs.add(encodings.aliases.aliases.get(name, name))
    found |= {f"encodings.{name}" for name in codecs & _all_codecs()}
    if not code.isascii() or r"\N" in code:
        found |= {"unicodedata"}  # used by Python's parser
    return sorted(found)


@cache
def _all_codecs() -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules(encodings.__path__))
