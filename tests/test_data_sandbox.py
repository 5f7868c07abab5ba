"""A chat template computes no more than a conversation needs, whatever it says."""

from __future__ import annotations

import tracemalloc

import pytest

from wgpu_lora.data import template
from wgpu_lora.errors import UserError

USER = [{"role": "user", "content": "Hi there"}]
LONG = "{% set s = 'a' * 100000 %}"
NS = "{% set ns = namespace(x='a' * 1000, l=[]) %}"
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "output": "{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}",
    "set block": "{% set x %}{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}{% endset %}",
    "filter block": "{% filter upper %}{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}{% endfilter %}",
    "product": "{{ 'a' * 10 ** 10 }}",
    "product of a list": "{{ ([1] * 10 ** 10) | length }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "squares": "{% set n = namespace(x=7) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "format %": "{{ '%1000000000d' % 1 }}",
    "format *": "{{ '%*d' % (10 ** 9, 1) }}",
    "format {}": "{{ '{:>1000000000}'.format(1) }}",
    "format nested": "{{ '{0:{1}}'.format(1, 10 ** 9) }}",
    "format again": LONG + "{{ ('%s' * 100000) | format(s) }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "center many": "{{ range(99999) | map('center', 99999) | list | length }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "indent": "{{ ('a\n' * 10000) | indent(90000) }}",
    "doubling": NS + "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "concat": "{% set x = 'abc' %}" + "{% set x = x ~ x %}" * 50,
    "keeping": NS + "{% for i in range(99999) %}{% set ns.l = ns.l + [ns.x ~ i] %}{% endfor %}",
    "slices": NS + LONG + "{% for i in range(99999) %}{% set ns.l = [ns.l, s[i:]] %}{% endfor %}",
    "replace": LONG + "{{ s | replace('a', s) }}",
    "replace method": LONG + "{{ s.replace('a', s) }}",
    "join": LONG + "{{ ([s] * 10000) | join(s) }}",
    "join method": LONG + "{{ s.join(['a'] * 100000) }}",
    "join mapped": "{{ range(99999) | map('string') | join('x' * 1000) }}",
    "sum of lists": "{{ ([[1] * 1000] * 1000) | sum(start=[]) | length }}",
    "laughs": "{% set x = ['ha'] %}" + "{% set x = [x, x] %}" * 40 + "{{ x }}",
    "laughs in json": "{% set x = ['ha'] %}" + "{% set x = [x, x] %}" * 40 + "{{ x | tojson }}",
    "laughs compared": "{% set x, y = [1], [1] %}" + "{% set x, y = [x, x], [y, y] %}" * 40 + "{{ x == y }}",
    "laughs hashed": "{% set x = (1, 2) %}" + "{% set x = (x, x) %}" * 40 + "{{ {x: 1} | length }}",
    "json indent": "{{ ([1] * 10000) | tojson(indent=99999) }}",
    "counting": LONG + "{% for i in range(99999) %}{{ s.count('b') }}{% endfor %}",
    "searching": "{% set l = range(99999) | list %}{% for i in range(99999) %}{{ -1 in l }}{% endfor %}",
    "translate": "{{ ('a' * 1000).translate({97: 'b' * 100000}) }}",
    "source": "a" * (1 << 20) + "b",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_what_has_no_end_is_ended(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="chat template"):
            template.render(source, USER)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'of %s in 20241231 %d' % ('a', 5) }}", "of a in 20241231 5"),
        ("{{ '%05.2f' | format(1.5) }}{{ '{:>4}'.format('a') }}", "01.50   a"),
        ("{{ 'a' ~ 1 ~ none }}{{ 'a' + 'b' }}{{ 'ab' * 2 }}{{ 2 ** 3 }}{{ 7 % 4 }}", "a1Noneababab83"),
        ("{% for a, b in [(1, 2), (3, 4)] %}{{ loop.index }}{{ a }}{{ b }}{% endfor %}", "112234"),
        ("{% set (a, b) = (1, 2) %}{{ a }}{{ (1, 2) }}{{ (1,) == (1,) }}", "1(1, 2)True"),
        ("{{ ['b', 'a'] | sort | join('-') }}{{ '-'.join(['x', 'y']) }}{{ 'a-b'.replace('-', '+') }}", "a-bx-ya+b"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}", "['Hi there']"),
        ("{% macro m(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call m(1) %}2{% endcall %}", "<12>"),
        ("{% if 1 < 2 <= 2 and 'i' in messages[0].content and 3 is not divisibleby 2 %}yes{% endif %}", "yes"),
        ("{{ messages[0].content[::-1] }}{{ messages[0]['content'].split(' ')[-1] | trim | upper }}", "ereht iHTHERE"),
        ("{{ {'a': [1, 'é']} | tojson(indent=2) }}", '{\n  "a": [\n    1,\n    "é"\n  ]\n}'),
        ("{{ missing }}{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}", "a1B"),
    ],
)
def test_ordinary_templates_read_as_they_do_in_jinja2(source: str, text: str) -> None:
    assert template.render(source, USER)[0] == text


def test_the_bound_grows_with_the_conversation() -> None:
    turns = [{"role": role, "content": "word " * 200} for role in ("user", "assistant")] * 1000
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% if 'x' in m.content %}!{% endif %}{% endfor %}"
    )
    assert len(template.render(source, turns)[0]) > 2_000_000
