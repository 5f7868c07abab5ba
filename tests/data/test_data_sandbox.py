"""The computation limit of chat templates."""

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
    "format in other digits": "{{ '{:３５０００００００}'.format('x') }}",
    "format in Arabic digits": "{{ '{:>٣٥٠٠٠٠٠٠٠}'.format(1) }}",
    "precision in other digits": "{{ '{:.３５０００００００f}'.format(1.5) }}",
    "format of safe text": "{{ ('{:３５０００００００}' | safe).format('x') }}",
    "format behind an index": "{{ '{0[}]:>999999999}'.format({'}': 1}) }}",
    "format behind a colon": "{{ '{0[:]:>999999999}'.format({':': 1}) }}",
    "format of a repr": "{{ '{0!r:>999999999}'.format(1) }}",
    "format nested in braces": "{{ '{0:{{{1}}}}'.format(1, 10 ** 9) }}",
    "format % behind a key": "{{ '%(a(b))999999999d' % {'a(b)': 1} }}",
    "format % behind brackets": "{{ '%((a)b)999999999d' % {'(a)b': 1} }}",
    "format % with a precision": "{{ '%.999999999f' % 1 }}",
    "format % of zeros": "{{ '%" + "0" * 40 + "9d' % 1 }}",
    "format % mapped": "{{ ['%999999999d'] | map('format', 1) | list }}",
    "format % of safe text": "{{ ('%999999999d' | safe) % 1 }}",
    "format many widths": "{{ ('{:9999}' * 20000).format(*range(20000)) }}",
    "indent of other lines": "{% set x = ('\r' * 90000) | indent(16, true, true) %}",
    "indent of separators": "{% set x = ('\u2028' * 90000) | indent(16, true, true) %}",
    "repeated tuple": "{{ (0,) * 999999999 }}",
    "repeated from the left": "{{ 999999999 * 'a' }}",
    "repeated safe text": "{{ ('a' | safe) * 999999999 }}",
    "subtraction": NS + "{% set ns.x = 1 %}{% for i in range(99999) %}{% set ns.x = ns.x - (0 - ns.x) %}{% endfor %}",
    "digits of 36": "{{ ('z' * 2000000) | int(base=36) }}",
    "a message": "{{ raise_exception('a' * 2000000) }}",
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
    "for if": "{% for i in range(30000) %}{% for x in range(99999) if false %}{% endfor %}{% endfor %}",
    "in range": "{% for i in range(20000) %}{% if 0.5 in range(99999) %}{% endif %}{% endfor %}",
    "range max": "{% for i in range(20000) %}{% set x = range(99999) | max %}{% endfor %}",
    "round": "{% for i in range(20000) %}{% set x = 1 | round(100000, 'ceil') %}{% endfor %}",
    "replace by name": "{% set x = ('a' * 20000) | replace(new='b' * 50000, old='a') %}",
    "indent with a text": "{% set x = ('\n' * 20000) | indent('b' * 50000, true, true) %}",
    "join a range": "{% set x = range(20000) | join('b' * 50000) %}",
    "join by name": "{% set x = (['a'] * 20000) | join(attribute=0, d='b' * 50000) %}",
    "translate with a list": "{% set x = ('\\x00' * 20000).translate(['b' * 50000]) %}",
    "format many *": "{% set x = ('%*d' * 9000) % ((100000, 1) * 9000) %}",
    "format many nested": "{% set x = ('{0:{1}}' * 9000).format(1, 100000) %}",
    "join bytes": "{% set x = ('b' * 50000).encode().join([''.encode()] * 20000) %}",
    "replace bytes": "{% set x = ('a' * 20000).encode().replace('a'.encode(), ('b' * 50000).encode()) %}",
    "striptags": "{% set x = ('<!---->' * 150000) | striptags %}",
    "punycode": "{% set x = ('\u0101\u4e02\u0203' * 40000).encode('punycode') %}",
    "path": "{% set x = [1] * 3000 | map(attribute='" + "b." * 20000 + "b', default={'a': 1}) | list %}",
    "path of many": "{% set l = [1] * 3000 %}{% set x = l | map(attribute='" + "b." * 20000 + "b') | list %}",
    "tuple hashed": "{% set t = (" + "1," * 40000 + ") %}{% for i in range(20000) %}{{ {}[t] }}{% endfor %}",
    "product hashed": "{% set t, d = (1,) * 9000, {} %}{% for i in range(20000) %}{% set x = d[t] %}{% endfor %}",
    "long body": "{% for i in range(40000) %}" + "{% set a = not a %}" * 20000 + "{% endfor %}",
    "long body that compiles": "{% for i in range(99999) %}" + "{% set a = not a %}" * 700 + "{% endfor %}",
    "many expressions": "{{a}}" * 200000,
    "many words": "{{a}}" * 26000,
    "many statements": "{% if a %}x{% endif %}" * 45000,
    "many parts": "{% if a %}x{% endif %}" * 900,
    "json indent of nested": "{% set ns = namespace(x=[1] * 20000) %}{% for i in range(800) %}{% set ns.x = [ns.x] %}"
    "{% endfor %}{% set y = ns.x | tojson(indent=16) %}",
    "date": "{% set x = strftime_now('%c' * 500000) %}",
    "short date": "{% set x = strftime_now('%c' * 500) %}",
    "date with a width": "{% set x = strftime_now('%0100000d' * 3) %}",
    "date with widths": "{% set x = strftime_now('%99999d' * 9000) %}",
    "floats": "{{ ('%f' * 20000) % ((1e308,) * 20000) }}",
    "large numbers": "{% set l = [2 ** 120] * 20000 %}" + "{{ l | string }}" * 9,
    "sums": "{% for i in range(60000) %}" + "{% set x = i + 1 + 1 + 1 + 1 + 1 + 1 %}" * 20 + "{% endfor %}",
    "views": "{% set d = dict(messages[0]) %}{% for i in range(99999) %}{{ 3 in d.values() }}{% endfor %}",
    "searching backwards": "{% set x = ('a' * 500000).rsplit('b' + 'a' * 250000) %}",
    "stripping": "{% set x = ('a' * 500000).strip('b' * 500000 + 'a') %}",
    "escaping": "{{ ('&' * 500000) | e | e | e | e }}",
    "escaping joined": "{{ ('' | safe).join(['&' * 1000] * 1000) }}",
    "escaping output": "{% autoescape true %}{{ '&' * 100 }}{% endautoescape %}",
    "sorting texts": "{% set s = '\U0001f600' * 100000 %}{% set x = ([s] * 300) | sort %}",
    "fromkeys": "{% set x = dict.fromkeys(range(9999)) %}",
    "method by name": "{% set x = ''['translate']({}) %}",
    "format_map": "{{ '{a}'.format_map({'a': 1}) }}",
    "source": "a" * (1 << 20) + "b",
    "refill": "{{ 1|_turn(-1000000000000) }}{{ ('a'*3000000000)|length }}",
    "refill by name": "{{ [1]|map('<_turn>', -1000000000000)|list }}{{ ('a'*3000000000)|length }}",
    "refill by indent": "{% set l=[[[[[[1]]]]]] %}{% for i in range(9000) %}{{ (l|tojson(indent=-16))[:0] }}"
    "{% endfor %}{{ ('a'*999999)|length }}",
    "odd text": "{{ '%1500000000d' is odd }}",
    "even texts": "{{ ['%1500000000d']|select('even')|list }}",
    "divisible text": "{{ [{'a': '%1500000000d'}]|rejectattr('a', 'divisibleby', 3)|list }}",
    "round text": "{{ 'a'|round(9, 'ceil') }}",
    "round list": "{{ [[1]]|map('round', 9, 'floor')|list }}",
    "join of attributes": "{% set ns=namespace(b='a'*150000) %}{{ ([ns]*12000)|join('',attribute='b') }}",
    "join by places": "{% set ns=namespace(b='a'*150000) %}{{ ([ns]*12000)|join('','b') }}",
    "join of cyclers": "{% set c=cycler('a'*150000) %}{{ ([c]*12000)|join('',attribute='current') }}",
    "format of attributes": "{% set ns=namespace(b='a'*150000) %}{{ ('{0.b}'*2000).format(ns)|length }}",
    "sort of attributes": "{% set ns=namespace(b='A'*150000) %}{{ ([ns]*12000)|sort(false,false,'b')|length }}",
    "unique of attributes": "{% set ns=namespace(b=('a'*150000,)*9) %}{{ ([ns]*12000)|unique(attribute='b')|list }}",
    "sum of attributes": "{% set ns=namespace(b=(1,)*9999) %}{{ ([ns]*9999)|sum(attribute='b',start=())|length }}",
    "sum of keys": "{{ {('a',): 1}|sum(start=()) }}",
    "namespaces of dicts": NS + "{% set d={} %}{% set t=range(30000)|map('string')|list %}"
    "{% for i in range(9000) %}{% set ns.l=[ns.l, namespace(t|map('list'))] %}{% endfor %}",
    "arguments kept": NS + "{% set l=[1]*30000 %}{% macro m() %}{% set ns.l=[ns.l, varargs] %}{% endmacro %}"
    "{% for i in range(3000) %}{{ m(*l) }}{% endfor %}",
    "a long name": "{% macro " + "a" * 59999 + "() %}{% endmacro %}{{ ([" + "a" * 59999 + "]*9999)|join|length }}",
    "safe list": "{{ ([('a'*10000)]*9999)|safe|length }}",
    "trim a list": "{{ ['a'*1000000]|trim('b'*1000000 ~ \"a['\") }}",
    "title of a list": "{{ ['a-'*900000]|title|length }}",
    "lower of a list": "{{ (['\U000e0001' * 100000] * 30) | lower | length }}",
    "upper of a list": "{{ (['\U000e0001' * 100000] * 30) is upper }}",
    "differences": NS + "{% set ns.x=1 %}{% for i in range(20000) %}{% set ns.x=ns.x-(0-ns.x) %}"
    "{% set ns.l=[ns.l,ns.x] %}{% endfor %}",
    "colliding members": "{% set ns=namespace(l=[]) %}{% for i in range(9999) %}"
    "{% set ns.l=ns.l+[i*2305843009213693951] %}{% if i>99 %}{{ ns.l|unique|list|length }}{% endif %}{% endfor %}",
    "colliding keys": "{{ dict([[2305843009213693951, 1], [4611686018427387902, 1]]) }}",
    "colliding literals": "{{ {2305843009213693951: 1} }}",
    "colliding tuples": "{{ [(1, 2), (3, 4)]|unique|list }}",
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
        (
            "{% for i in range(2, 9, 3) if i != 5 %}{{ loop.length }}{{ i }}{% endfor %}{{ range(3) | list }}",
            "2228[0, 1, 2]",
        ),
        (
            "{% for k, v in messages[0].items() %}{{ k }}{% endfor %}{{ 'role' in messages[0].keys() }}",
            "rolecontentTrue",
        ),
        ("{{ 'a\nb' | indent(4, first=true) }}{{ 2.345 | round(1) }}{{ [1, 2] | sum }}", "    a\n    b2.33"),
        ("{{ [{'a': 2}, {'a': 1}] | sort(attribute='a') | map(attribute='a') | join(', ') }}", "1, 2"),
        ("{{ '用户 {} %s，{:05.1f}{{}}'.format('é', 2) }}{{ '%d%% 用户 %(é)s' | length }}", "用户 é %s，002.0{}13"),
        ("{{ '%5.1f%%，%s' % (1.25, '用') }}{{ '%(a b)-3s|' % {'a b': 1} }}", "  1.2%，用1  |"),
        ("{{ '{} {{}} {b:>3}'.format(1, b=2) }}{{ '%(a)s' % {'a': 3} }}", "1 {}   23"),
        ("{{ 'xaxbx'.strip('x').rsplit('x', 1)[-1] }}{{ ('<' | safe) + '<' }}{{ '<' | e }}", "b<&lt;&lt;"),
        ("{{ messages[0].get('tool_calls', 'none') }}{{ 'a, b'.split(', ') | reverse | list }}", "none['b', 'a']"),
        ("{{ namespace(a=1).a }}{{ dict(a=1).a }}{{ {'b': 1, 'a': 2} | dictsort }}", "11[('a', 2), ('b', 1)]"),
        ("{% set ns = namespace(a=1) %}{% set l = [ns, ns] %}{{ l }}", "[<Namespace>, <Namespace>]"),
        (
            "{{ [{'a': 2}, {'a': 3}]|sum(attribute='a') }}{{ [3, 1, 3]|unique|join }}{{ 1.26|round(1, 'floor') }}",
            "5311.2",
        ),
        (
            "{{ [{'a': 'x'}, {}]|join('-', attribute='a') }}{{ [{'b': 2, 'a': 'x'}]|sort(attribute='a,b')|length }}",
            "x-1",
        ),
        (
            "{{ 3 is odd }}{{ [1, 2, 3]|select('odd')|list }}{{ dict([['a', 1]]) }}{{ namespace({'a': 1}).a }}",
            "True[1, 3]{'a': 1}1",
        ),
        ("{{ [{'a': 1}, {'a': 2, 'b': 3}]|groupby('b', default=0)|length }}{{ [1]|tojson(indent=-1)|length }}", "25"),
        ("{{ missing }}{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}", "a1B"),
    ],
)
def test_ordinary_templates_read_as_they_do_in_jinja2(source: str, text: str) -> None:
    assert template.render(source, USER)[0] == text


def test_what_a_template_raises_is_told_in_short() -> None:
    with pytest.raises(UserError, match="refuses this conversation: aaa") as caught:
        template.render("{{ raise_exception('a' * 100000) }}", USER)
    assert len(str(caught.value)) < 1000


def test_the_bound_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wgpu_lora.data.sandbox.MOST_WORK", 1 << 21)
    turns = [{"role": "user", "content": "word " * 200_000}]
    assert template.render("{{ messages[0].content }}", turns)[0] == turns[0]["content"]
    with pytest.raises(UserError, match="too much work"):
        template.render("{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}", turns)


def test_the_bound_grows_with_the_conversation() -> None:
    turns = [{"role": role, "content": "word " * 200} for role in ("user", "assistant")] * 1000
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% if 'x' in m.content %}!{% endif %}{% endfor %}"
    )
    assert len(template.render(source, turns)[0]) > 2_000_000
