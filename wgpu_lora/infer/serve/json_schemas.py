"""JSON schemas of answers: closed objects, and the check of finished answers against what no grammar can hold.

An object that a schema does not call open has the properties that the schema names and no others, as in OpenAI's
structured outputs. A grammar leaves out keywords that it cannot hold, such as `uniqueItems` or `not`; the finished
answer is checked by the library jsonschema, in a child process with limits, since schemas are hostile.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from wgpu_lora.processes.child_process import ChildEnded, ChildProcess, Limits, python_command, serve

Json = dict[str, Any]
Pairs = Sequence[tuple[Any, str]]  # schemas and texts
Verdict = tuple[bool | None, str | None]
LIMITS = Limits(memory=512 << 20, seconds=2.0)  # of all choices of a request
MAX_CHECKS = 8  # requests that wait for theirs
# States take up to 2 KB each; the others are llguidance's defaults, written down since they are promised.
GRAMMAR_LIMITS = LLParserLimits(
    max_items_in_row=2_000, initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000,
    max_lexer_states=20_000, max_grammar_size=100_000, verbose_errors=False,
)  # fmt: skip
MAX_STEPS = 200_000  # properties that joined schemas name, counted each time
# One space after ',' and ':', as most text has it: with free whitespace, a model may go on with it forever.
JSON: Any = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True, "coerce_one_of": True,
}  # fmt: skip
MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords whose values have a schema by name
SCHEMAS = ("items", "prefixItems", "additionalItems", "additionalProperties")  # a schema, or a list of them
BRANCHES = ("allOf", "anyOf", "oneOf")  # lists of schemas of the same value
CONDITIONS = ("then", "else")
TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(MAPS, (dict, "an object of schemas")), **dict.fromkeys(BRANCHES, (list, "a list of schemas")),
    **dict.fromkeys(SCHEMAS, ((dict, bool, list), "a schema, or a list of schemas")),
    **dict.fromkeys(CONDITIONS, ((dict, bool), "a schema")), "$ref": (str, "a text"),
    "required": (list, "a list of texts"),
}  # fmt: skip
# What a grammar allows and few programs read: February 29 of any year, year 0, leap seconds, numbers without end.
_DATE = (
    "^([^0]|0[^0]|00[^0]|000[^0])[0-9]*-(0[13-9]|1[0-2]|02-[01]|02-2[0-8])"
    "|^([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29"
)
_TIME = "^[^:]*:[^:]*:[0-5]"
FORMATS = {"date": (_DATE,), "time": (_TIME,), "date-time": (_DATE, _TIME), "duration": ("^P(T?[0-9]{1,6}[A-Z])*$",)}
_IRREGULAR = re.compile(r"\(\?<?[=!]|\\[1-9k]")  # look-arounds and backreferences
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/]+)")


def grammar_schema(schema: Any, strict: bool | None) -> tuple[Json, set[str]]:
    """(a schema whose objects are closed, keywords of it that a grammar leaves out).

    Raises:
        ValueError, RecursionError: it is no schema, or too large.
    """
    closed = _ClosedSchema(schema, bool(strict))
    left_out = closed.left_out
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar_from(closed.schema), limits=GRAMMAR_LIMITS)
    for message in [] if failed else messages:
        if message.startswith("Unimplemented keys: "):
            left_out.update(json.loads(message.partition(": ")[2]))
        else:
            left_out.add("format" if message.startswith("Unknown format") else "oneOf")
    return closed.schema, left_out


def grammar_from(schema: Json) -> str:
    """llguidance's form of a schema. Raises ValueError."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON)


class _ClosedSchema:
    """A copy of a schema whose objects have no other properties than it names, unless it says otherwise.

    An object that must follow several schemas, as in `allOf`, is closed once, around the properties of all of them.

    Args:
        strict: whether objects with `additionalProperties: true` are closed, too.

    Attributes:
        left_out: keywords with patterns that no grammar can hold.
    """

    def __init__(self, schema: Any, strict: bool) -> None:
        if schema is False:
            raise ValueError("it allows nothing")
        if not isinstance(schema, dict | bool):
            raise ValueError("it must be an object")
        self._root: Json = schema if isinstance(schema, dict) else {}
        self._checked: dict[int, bool] = {}  # whether what a schema needs is checked, too, by its id
        self._strict, self._steps, self.left_out = strict, 0, set[str]()
        self._parts: dict[tuple[str, str], Any] = {}  # definitions of objects that are closed elsewhere
        self.schema: Json = self._visit(self._root, True)
        for (keyword, name), value in self._parts.items():
            self.schema[keyword][name] = value

    def _visit(self, node: Any, closes: bool) -> Any:
        """A schema whose inner objects are closed, and its own, too, if `closes`."""
        if isinstance(node, list):
            return [self._visit(item, closes) for item in node]
        if not isinstance(node, dict):
            return node
        self._check(node)
        joins, result = self._joins(node), Json()
        for key, value in node.items():
            if key in MAPS:
                value = {name: self._visit(item, True) for name, item in value.items()}
            elif key in SCHEMAS:
                value = self._visit(value, True)
            elif key in BRANCHES:
                value = self._visit(value, closes and not joins)
            elif key == "$ref" and not (closes and not joins):
                value = self._part(value)
            if key == "patternProperties" and (wrong := [name for name in value if _IRREGULAR.search(name)]):
                value = {name: item for name, item in value.items() if name not in wrong}
                self.left_out.add(key)
            if key == "pattern" and _IRREGULAR.search(str(value)):
                self.left_out.add(key)
            elif not (key == "uniqueItems" and value is False):
                result[key] = value
        if patterns := FORMATS.get(str(result.get("format"))):
            result["allOf"] = [*result.get("allOf", ()), *({"pattern": pattern} for pattern in patterns)]
        names: dict[str, Any] = {}
        if closes and self._gather(node, names, joins, set()):
            types = node.get("type")
            if names or "properties" in node or (self._strict and "object" in (types or ())):
                result.pop("unevaluatedProperties", None)
                result |= {"properties": {**names, **result.get("properties", {})}, "additionalProperties": False}
                if not joins and "properties" in node and not node.keys() & {"enum", "const"}:
                    result.setdefault("type", "object")
        return result

    def _check(self, node: Any) -> None:
        """Raises ValueError: a keyword has a value of a wrong type, or a value follows this schema only if it does."""
        if not isinstance(node, dict) or self._checked.get(id(node)):
            return
        if id(node) in self._checked:
            raise ValueError("it has a '$ref' to itself, which says nothing: refer to it from a property or an item")
        self._checked[id(node)] = False
        for key, value in node.items():
            kind, words = TYPES.get(key, (object, ""))
            inner: list[Any] = value if isinstance(value, list) and words else []
            if key in MAPS and isinstance(value, dict):
                inner = [*value.values()]
            part = str if key == "required" else dict | bool
            if not isinstance(value, kind) or not all(isinstance(item, part) for item in inner):
                raise ValueError(f"'{key}' must be {words}")
            for branch in inner if key in BRANCHES else []:
                self._check(branch)
        if re.match("#(/|$)", node.get("$ref", "")):
            target: Any = self._root
            for part in node["$ref"].split("/")[1:]:
                target = target.get(part) if isinstance(target, dict) else None
            self._check(target)
        self._checked[id(node)] = True

    def _joins(self, node: Json) -> bool:
        """Whether a value must follow several schemas, none of which knows the properties of the others."""
        single = sum(key in node for key in ("anyOf", "oneOf", "$ref", "properties"))
        return single + len(node.get("allOf", ())) > 1 or any(key in node for key in CONDITIONS)

    def _gather(self, node: Any, names: dict[str, Any], joins: bool, seen: set[str]) -> bool:
        """Add the properties that a schema names, and if it joins them, its branches; False if one says whether
        there are others."""
        if not isinstance(node, dict):
            return True
        self._check(node)
        extra = node.get("additionalProperties")
        if extra is not None and not (extra is True and self._strict):
            return False
        if node.get("unevaluatedProperties", False) or "patternProperties" in node:
            return False
        own = [*node.get("properties", ()), *node.get("required", ())]
        names.update({name: {} for name in own})
        self._steps += 1 + len(own)
        if self._steps > MAX_STEPS:
            raise ValueError("its branches have too many properties")
        if not joins:
            return True
        branches = [node.get(key) for key in CONDITIONS]
        branches += [branch for key in BRANCHES for branch in node.get(key, ())]
        match = _REFERENCE.fullmatch(str(node.get("$ref", "")))
        if match and match[0] not in seen:
            seen.add(match[0])
            branches.append(self._root.get(match[1], {}).get(match[2]))
        return min([self._gather(branch, names, True, seen) for branch in branches], default=True)

    def _part(self, reference: Any) -> Any:
        """A reference to the same definition without its object's end."""
        match = _REFERENCE.fullmatch(str(reference))
        if not match or match[2] not in self._root.get(match[1], {}):
            return reference
        key = match[1], f"{match[2]}.part"
        if key not in self._parts:
            self._parts[key] = None  # it may refer to itself
            self._parts[key] = self._visit(self._root[match[1]][match[2]], False)
        return f"#/{key[0]}/{key[1]}"


class SchemaChecker:
    """Compares finished answers with their schemas, in a child process that is started when it is first needed. One
    request is checked at a time, and `MAX_CHECKS` wait."""

    def __init__(self) -> None:
        self._child: ChildProcess | None = None
        self._thread = ThreadPoolExecutor(1, "serve-check")
        self._count = 0

    async def check(self, choices: Sequence[Pairs]) -> list[Verdict]:
        """For each choice of a request, (whether texts follow their schemas, None if it is not known; the first fault).
        It is not checked if this is cancelled before its turn."""
        if self._count > MAX_CHECKS:
            return [(None, "It is not checked, since the server has too many others to check.") for _ in choices]
        self._count += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, choices)
        finally:
            self._count -= 1

    def _ask(self, choices: Sequence[Pairs]) -> list[Verdict]:
        try:
            if not self._child or not self._child.running:
                self._child = ChildProcess(python_command(__name__, LIMITS), LIMITS)
            return [(valid, error) for valid, error in self._child.ask([*choices])]
        except ChildEnded as error:
            return [(None, f"The check has failed: {error}.") for _ in choices]


def _check(pairs: Pairs) -> Verdict:
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    for schema, text in pairs:
        kind = validator_for(schema, Draft202012Validator)
        try:
            value = json.loads(text)
            # With a registry of its own, it fetches no references.
            check = kind(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER)
            error = next(check.iter_errors(value), None)
        except ValueError:
            return False, "The answer is not complete JSON."
        except Exception as problem:  # of a schema that the library refuses
            return None, f"The check has failed: {type(problem).__name__}: {problem!s:.200}."
        if error:
            return False, f"{error.json_path}: {error.message!s:.200}."
    return True, None


def main() -> None:
    for draft in ("2020-12/schema", "2019-09/schema"):
        _check([({"$schema": f"https://json-schema.org/draft/{draft}", "format": "date", "not": {}}, '"a"')])
    serve(lambda choices: [_check(pairs) for pairs in choices])
