"""Mutations that keep a file's shape, so that what lies behind its parser is reached: for `scripts/fuzz.py`."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**30, -0.5, 1e300, float("nan"), "", "F32", "U8", "NF4", "demo",
    "../x", "a" * 300, "\ud800", "\u0000", "(a+)+$", "[", [], [[]], [0], [1, 2], [2**40, 2**40], {}, {"a": {}},
    [[[[[1]]]]],
]  # fmt: skip
STATEMENTS = """
{% for m in messages %}{{ m.content }}{% endfor %}
{% for i in range(99999) %}{{ i }}{% endfor %}
{% set x = [1] %}
{% set x = x * 99999 %}
{% set x = [x, x] %}
{{ x | tojson }}
{{ x ~ x }}
{{ x + x }}
{{ x | join(x) }}
{{ x | sort | string }}
{{ 'a'.replace('a', x | string) }}
{{ x == messages }}
{% set ns = namespace(x=1) %}
{% set ns.x = ns.x * 7 %}
{% for i in range(99999) if false %}{% endfor %}
{{ 0.5 in range(99999) }}
{{ x | string | replace(new=x, old='a') }}
{{ messages | map(attribute='content.a.b') | join(attribute=0, d=x) }}
{{ x | string | indent(8, true) }}
{{ x | round(9) }}
{{ '%9d' % 1 }}
{{ '%*d' % (9, 1) }}
{{ '{:>9}'.format(x) }}
{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}
{% generation %}a{% endgeneration %}
{{ messages[1:] }}
{{ messages | map(attribute='role') | list }}
{{ x[::-1] }}
{{ raise_exception(x) }}
{{ strftime_now('%Y') }}
{{ strftime_now('%99d') }}
{% if x is defined and x in messages %}{% endif %}
{{ (x, x) }}
{{ {x: 1} }}
{{ 2 ** 99 }}
{% break %}
{{ x | indent(9) | center(99) | trim }}
{{ self }}
{{ loop.index }}
{{ x.__class__ }}
{{ x | groupby(0) }}
""".strip().splitlines()


def of_rows(data: bytes, rng: random.Random) -> bytes:
    """Lines of which one is another's, or has other values."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = of_json(rng.choice(lines), rng)
    return b"\n".join(lines)


def of_json(text: bytes, rng: random.Random) -> bytes:
    """A JSON text with some of its values changed, left out, doubled or swapped; unchanged where it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for _ in range(rng.randint(1, 3)):
        value = _changed(value, rng)
    document = json.dumps(value)
    if rng.random() < 0.05 and document.startswith("{") and len(document) > 2:
        document = "{" + document[1:-1] + "," + document[1:]  # every key twice
    return document.encode()


def _changed(root: Any, rng: random.Random) -> Any:
    """One change at a place reached by a walk from the root."""
    place, keys = root, list(_keys(root))
    while keys:
        key = rng.choice(keys)
        inner = list(_keys(place[key]))
        if inner and rng.random() < 0.7:
            place, keys = place[key], inner
            continue
        kind = rng.random()
        if kind < 0.15:
            del place[key]
        elif kind < 0.3:
            place[key] = copy.deepcopy(place[rng.choice(keys)])
        elif kind < 0.4 and isinstance(place[key], int):
            place[key] += rng.choice([-1, 1, 2, 64, -64])
        elif kind < 0.5 and isinstance(place, dict):
            place[rng.choice(["", "x", key + "x", "model.layers.0.self_attn.q_proj.weight"])] = place.pop(key)
        else:
            place[key] = copy.deepcopy(rng.choice(ODD))
        return root
    return copy.deepcopy(rng.choice(ODD))


def _keys(value: Any) -> Any:
    return value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()


def of_safetensors(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with a changed header, whose length is right again."""
    length = int.from_bytes(data[:8], "little")
    header = of_json(data[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def of_parts(data: bytes, rng: random.Random) -> bytes:
    """Two files with a blank line between: JSON, then JSON or safetensors."""
    first, _, second = data.partition(b"\n\n")
    if rng.random() < 0.5:
        first = of_json(first, rng)
    else:
        second = of_json(second, rng) if second[:1] == b"{" else of_safetensors(second, rng)
    return first + b"\n\n" + second


def of_template(data: bytes, rng: random.Random) -> bytes:
    """A template with statements put in where its own end."""
    text = data.decode("utf-8", "replace")
    ends = [0, *(i + 2 for i in range(len(text)) if text[i : i + 2] in ("%}", "}}"))]
    at = rng.choice(ends)
    return (text[:at] + "".join(rng.choices(STATEMENTS, k=rng.randint(1, 4))) + text[at:]).encode()
