"""What a row says is what is trained, or it is named: spellings of conversations, lost parts, ends, and second bos."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.rows.data import NAMED, backend_json, chat, small_tokenizer, template_source, write_jsonl
from support.rows.sources import ids_of, prepared, refused, write_source
from tokenizers import Tokenizer as Backend

from wgpu_lora.data import UNTRAINED, Tokenizer, parse_example, tokenize_example, tokenize_source
from wgpu_lora.data.example_formats import EXAMPLES
from wgpu_lora.data.preference_formats import PAIRS
from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.chat_template import arguments_of
from wgpu_lora.formats.tokenizer.examples import Conversation
from wgpu_lora.formats.tokenizer.label_mask import tokenize_examples

CALL = {"type": "function", "function": {"name": "area", "arguments": {"w": 3}}}
SCHEMA = {"type": "function", "function": {"name": "area"}}
TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "({{ c.function.arguments | tojson }})</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT = "{% if add_generation_prompt %}assistant: {% endif %}"
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + PROMPT
ENDLESS_MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'user' %}{{ m.content }}{% else %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}\n{% endfor %}" + PROMPT
)


def with_template(source: str, **options: Any) -> Tokenizer:
    named = {"special_tokens": NAMED, "chat_templates": {"default": source}}
    return Tokenizer(Backend.from_str(backend_json()), **{**named, **options})


def trained(row: dict[str, Any], tokenizer: Tokenizer) -> list[str]:
    """The trained text of each run of trained tokens."""
    texts: list[str] = []
    for ids, labels in tokenize_example(parse_example(row), tokenizer):
        runs: list[list[int]] = [[]]
        for id, label in zip(ids, labels, strict=True):
            runs = [*runs[:-1], [*runs[-1], id]] if label != UNTRAINED else [*runs, []]
        texts += [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]
    return texts


def normal(**row: Any) -> Conversation:
    example = parse_example(row)
    assert isinstance(example, Conversation)
    return example


# -- one normal form of a conversation ---------------------------------------------------------------------------------

TURNS = [("user", "one"), ("assistant", "BAD"), ("user", "two"), ("assistant", "GOOD")]
FROM = {"user": "human", "assistant": "gpt"}
SPELLINGS = {
    "messages": lambda role, text, more: {"role": role, "content": text, **more},
    "conversations": lambda role, text, more: {"from": FROM[role], "value": text, **more},
    "conversations ": lambda role, text, more: {"role": role, "content": text, **more},
    "messages ": lambda role, text, more: {"from": FROM[role], "value": text, **more},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("no", "yes"),
    [
        ({"weight": 0}, {"weight": 1}),
        ({"weight": 0.0}, {"weight": None}),
        ({"train": False}, {"train": True}),
        ({"trainable": False}, {}),
        ({"training": 0}, {"training": 1}),
        ({"loss": False, "weight": 0}, {"loss": None}),
        ({"train_on_turn": False}, {"train_on_turn": True}),
    ],
)
def test_turns_that_say_so_are_not_trained_on_in_every_spelling(spelling: str, no: dict, yes: dict) -> None:
    turn = SPELLINGS[spelling]
    more = [{"weight": None}, no, {}, yes]
    messages = [turn(role, text, extra) for (role, text), extra in zip(TURNS, more, strict=True)]
    tokenizer = small_tokenizer("chatml")
    assert trained({spelling.strip(): messages}, tokenizer) == ["GOOD<|im_end|>"]
    pair = {
        "chosen": [*messages[:3], turn("assistant", "A", {})],
        "rejected": [*messages[:3], turn("assistant", "B", {})],
    }
    assert [example.trained for example in PAIRS.read(pair).examples] == [{3}, {3}]  # type: ignore[union-attr]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"weight": 7}, r"\[1\]' has the weight 7, but it must be 0 \(do not train on it\) or 1"),
        ({"weight": "0"}, r"\[1\]' has the weight \"0\""),
        ({"train": "no"}, r"\[1\]' has 'train': \"no\", but it must be true or false"),
        ({"weight": 1, "train": False}, r"\[1\]' has 'weight' and 'train', which contradict each other"),
        ({"tool_calls": 3}, r"\[1\]' has 'tool_calls' that are not a list"),
        ({"function_call": "f"}, r"\[1\]' has a 'function_call' that is not an object"),
        ({"function_call": {"name": "f"}, "tool_calls": [CALL]}, "both 'tool_calls' and 'function_call'"),
    ],
)
def test_wrong_fields_are_refused_in_every_spelling(spelling: str, field: dict[str, Any], words: str) -> None:
    turn = SPELLINGS[spelling]
    with pytest.raises(UserError, match=words):
        parse_example({spelling.strip(): [turn("user", "a", {}), turn("assistant", "b", field)]})


ASKED, SILENT = chat("a"), {"role": "assistant", "content": None}
HUMAN, NULLS = {"from": "human", "value": "a"}, {"name": None, "arguments": None}
OLDER = {"name": "area", "arguments": '{"w": 3}'}
CALL_TURN, FUNCTIONS = {"from": "function_call", "value": json.dumps(OLDER)}, '[{"name": "area"}]'


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*ASKED, SILENT | {"function_call": OLDER}], "functions": [{"name": "area"}]},
        {"messages": [*ASKED, SILENT | {"tool_calls": [CALL]}], "tools": [SCHEMA]},
        {"conversations": [HUMAN, CALL_TURN], "tools": json.dumps([SCHEMA])},
        {"conversations": [HUMAN, {"from": "gpt", "tool_calls": json.dumps([CALL])}], "functions": FUNCTIONS},
        {"messages": [*ASKED, SILENT | {"tool_calls": [CALL], "function_call": NULLS}], "tools": [SCHEMA]},
    ],
)  # fmt: skip
def test_calls_and_schemas_of_every_spelling_become_tool_calls_and_tools(row: dict[str, Any]) -> None:
    example = normal(**row)
    [call] = example.messages[-1]["tool_calls"]
    call["function"]["arguments"] = {**arguments_of(call["function"]["arguments"])}  # text is rendered alike
    assert example.messages == [*chat("a"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert (example.tools, example.trained) == ([SCHEMA], {1})
    assert trained(row, with_template(TOOLS)) == ['<call>area({"w": 3})</call><|im_end|>']


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ({"name": "area", "arguments": '{"w": 3}'}, '{"w": 3}'),
        ({"name": "area", "parameters": {"w": 3}}, {"w": 3}),
        ({"type": "function", "function": {"name": "area"}}, {}),
        ({"function": {"name": "area", "arguments": ""}}, {}),
        ({"function": {"name": "area", "arguments": None}}, {}),
        ({"function": {"name": "area", "arguments": "w=3"}}, "w=3"),
    ],
)
def test_calls_have_one_form(call: dict[str, Any], arguments: Any) -> None:
    [_, turn] = normal(messages=[*chat("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]).messages
    [tool_call] = turn["tool_calls"]
    assert tool_call["function"] == {"name": "area", "arguments": arguments}
    if "function" not in call:
        older = {"role": "assistant", "content": "", "function_call": call}
        assert normal(messages=[*chat("a"), older]).messages[1]["tool_calls"][0]["function"] == tool_call["function"]


@pytest.mark.parametrize(
    "call",
    [{"tool": "w", "args": {}}, {"function": "w"}, {"type": "custom", "custom": {"name": "w"}}, {"function": {}}, {}],
)
def test_calls_without_a_name_are_refused(call: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="has a tool call without the name of a function"):
        normal(messages=[*chat("a"), {"role": "assistant", "content": "", "tool_calls": [call]}])


def test_schemas_of_either_form_in_functions_are_tools() -> None:
    assert normal(messages=chat("a", "b"), functions=[SCHEMA]).tools == [SCHEMA]


def test_a_system_column_means_the_same_in_every_spelling_and_is_named_elsewhere(tmp_path: Path) -> None:
    for key, turn in SPELLINGS.items():
        messages = [turn(role, text, {}) for role, text in TURNS]
        example = normal(**{key.strip(): messages, "system": "Be kind."})
        assert example.messages[0] == {"role": "system", "content": "Be kind."}
        assert example.trained == {2, 4}
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "q", "completion": "a", "system": "s"})
    assert "the column 'system' is not used (rows of messages use it) (line 1)" in prepared(path).summary()


def test_fields_and_roles_of_turns_are_kept() -> None:
    turns = [
        {"from": "human", "value": "area?", "name": "Ann"},
        {"from": "function_call", "value": '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'},
        {"from": "observation", "value": '{"area": 9}', "name": "area"},
        {"from": "gpt", "value": "It is 9.", "reasoning_content": "3 * 3"},
    ]
    example = normal(conversations=turns)
    assert example.messages[0] == {"role": "user", "content": "area?", "name": "Ann"}
    assert [call["function"]["name"] for call in example.messages[1]["tool_calls"]] == ["f", "g"]
    assert example.messages[2] == {"role": "tool", "content": '{"area": 9}', "name": "area"}
    assert example.messages[3] == {"role": "assistant", "content": "It is 9.", "reasoning_content": "3 * 3"}
    assert (
        normal(messages=[*chat("a"), {"role": "function", "name": "f", "content": "1"}]).messages[1]["role"] == "tool"
    )


@pytest.mark.parametrize("role", ["model", "chatgpt", "bing", "bot", "Assistant ", "AI"])
def test_other_names_of_roles_get_a_hint(role: str) -> None:
    for key, other, words in (("from", "value", "write 'gpt'"), ("role", "content", "write 'assistant'")):
        turns = [{key: "user", other: "a"}, {key: role, other: "b"}]
        with pytest.raises(UserError, match=words if role.strip().lower() != "assistant" else "the roles are"):
            parse_example({"conversations": turns})


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"conversation": [{"from": "human", "value": "a"}]}, "rename 'conversation' to 'conversations'."),
        ({"dialog": chat("a", "b")}, "rename 'dialog' to 'messages'."),
        ({"prompt": {"0": "a", "1": "b"}, "completion": {"0": "c", "1": "d"}}, "orient='records', lines=True)."),
        ({"data": [{"text": "a"}]}, "its rows seem to be the list 'data': write only that list to the file."),
    ],
)
def test_advice_for_rows_of_other_shapes(row: dict[str, Any], advice: str) -> None:
    with pytest.raises(UserError) as raised:
        EXAMPLES.read(row)
    assert str(raised.value).endswith(advice)


# -- what the template leaves out --------------------------------------------------------------------------------------

CHATML, THINKING = template_source("chatml"), template_source("thinking")
ASSISTANT = {"role": "assistant", "content": "answer"}
REASONED = {**ASSISTANT, "reasoning_content": "r"}
RESULT = [{"role": "tool", "content": "9"}, {"role": "assistant", "content": "It is 9."}]
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
FIRST_CALL = TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
TEXT_OR_CALLS = TOOLS.replace(
    "{{ m.content or '' }}{% for", "{% if m.content %}{{ m.content }}{% endif %}{% for"
).replace("m.tool_calls or []", "([] if m.content else (m.tool_calls or []))")
USERS_ONLY = CHATML.replace("message['content']", "(message['content'] if message.role == 'user' else '')")
NO_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "turns", "unrendered", "untrained", "texts"),
    [
        (CHATML, [ASSISTANT], {"'tools'"}, 0, ["answer<|im_end|>"]),
        (CHATML, [REASONED], {"'tools'", "'reasoning_content'"}, 0, ["answer<|im_end|>"]),
        (CHATML, [{**CALLING, "content": "a"}, *RESULT], {"'tools'", "'tool_calls'"}, 1, ["It is 9.<|im_end|>"]),
        (CHATML, [CALLING, *RESULT], {"'tools'", "'tool_calls'"}, 1, ["It is 9.<|im_end|>"]),
        (TOOLS, [{**ASSISTANT, "tool_calls": [CALL]}], set(), 0, ['answer<call>area({"w": 3})</call><|im_end|>']),
        (TEXT_OR_CALLS, [{**ASSISTANT, "tool_calls": [CALL]}, *RESULT], {"'tool_calls'"}, 1, ["It is 9.<|im_end|>"]),
        (FIRST_CALL, [{**CALLING, "tool_calls": [CALL, CALL]}, *RESULT], {"'tool_calls'"}, 1, ["It is 9.<|im_end|>"]),
        (TOOLS, [{**ASSISTANT, "mood": True, "name": "Ann"}], {"'name'", "'mood'"}, 0, ["answer<|im_end|>"]),
        (NO_SYSTEM, [ASSISTANT], {"content of the role 'system'", "'tools'"}, 0, None),
        (THINKING, [REASONED, *chat("x", "y")], set(), 0, None),
    ],
)  # fmt: skip
def test_what_leaves_no_trace_is_named_and_never_trained_as_silence(
    template: str, turns: list[dict[str, Any]], unrendered: set[str], untrained: int, texts: list[str] | None
) -> None:
    row = {"messages": [{"role": "system", "content": "Be brief."}, *chat("area?"), *turns], "tools": [SCHEMA]}
    [example] = tokenize_examples([parse_example(row)], with_template(template))
    assert (example.unrendered, example.untrained_turns) == (unrendered, untrained)
    assert texts is None or trained(row, with_template(template)) == texts


@pytest.mark.parametrize("completion_only_loss", [True, False])
@pytest.mark.parametrize(
    ("template", "turn", "words"),
    [
        (CHATML, {"content": "", "tool_calls": [CALL]}, "does not render 'tool_calls' of message 1, an answer"),
        (CHATML, {"content": "let me see", "tool_calls": [CALL]}, "does not render 'tool_calls' of message 1"),
        (FIRST_CALL, {"content": "", "tool_calls": [CALL, CALL]}, "does not render 'tool_calls' of message 1"),
        (USERS_ONLY, {"content": "x"}, "'content' of message 1"),
    ],
)  # fmt: skip
def test_a_row_whose_answer_is_not_rendered_is_refused(
    tmp_path: Path, template: str, turn: dict[str, Any], words: str, completion_only_loss: bool
) -> None:
    row = {"messages": [*chat("area?"), {"role": "assistant", **turn}]}
    path = write_jsonl(tmp_path / "a.jsonl", row, {"messages": chat("a", "b")})
    with pytest.raises(UserError, match=words):
        tokenize_source(path, with_template(template), max_length=64, completion_only_loss=completion_only_loss)
    data = tokenize_source(path, with_template(TOOLS), max_length=99, completion_only_loss=completion_only_loss)
    assert len(data.rows) == 2


SHORT = CHATML.replace("message['content']", "message['content'][:5]")
DESCRIBED = {"function": {"name": "f", "description": "d"}}
NAMES = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + CHATML


@pytest.mark.parametrize(
    ("template", "row", "unrendered"),
    [
        (SHORT, {"messages": chat("q", "ok")}, set()),
        (SHORT, {"messages": chat("q", "a long answer")}, {"a part of content of the role 'assistant'"}),
        (NAMES, {"messages": chat("q", "a"), "tools": [DESCRIBED]}, {"a part of 'tools'"}),
        (CHATML, {"messages": chat("q", "a"), "tools": [{"type": "web_search"}]}, {"'tools'"}),
    ],
)  # fmt: skip
def test_a_part_that_is_left_out_is_told_from_the_whole(
    template: str, row: dict[str, Any], unrendered: set[str]
) -> None:
    [example] = tokenize_examples([parse_example(row)], with_template(template))
    assert example.unrendered == unrendered
    assert example.pairs


def test_turns_cut_one_by_one_are_not_trained_on_as_empty_answers() -> None:
    source = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    source = source.replace("'<|im_end|>' + '\\n'", "('!' if loop.last else '') + '<|im_end|>' + '\\n'")
    assert "loop.last" in source
    texts = trained({"messages": chat("a", "<think>b</think>", "c", "d")}, with_template(source))
    assert all("d" in text for text in texts)


def test_an_answer_that_the_template_strips_is_not_trained_on() -> None:
    strips = with_template(CHATML.replace("message['content']", "message['content'].split('</think>')[-1]"))
    assert "split" in strips.chat_templates["default"], "the fixture has another spelling"
    with pytest.raises(UserError, match="renders the answer as an empty one"):
        trained({"messages": chat("a", "<think>b</think>")}, strips)
    assert trained({"messages": chat("a", "<think>b</think>", "c", "d")}, strips) == ["d<|im_end|>"]


def test_summary_names_what_is_left_out(tmp_path: Path) -> None:
    rows = [{"messages": [*chat("q"), {**ASSISTANT, "tool_calls": [CALL]}, *RESULT], "tools": [SCHEMA]}] * 2
    summary = prepared(write_jsonl(tmp_path / "a.jsonl", *rows)).summary()
    assert "the chat template leaves out 'tool_calls' of 2 rows (lines 1, 2), " in summary
    assert "the chat template leaves out 'tools' of 2 rows" in summary
    assert "2 such answers not trained on (lines 1, 2)" in summary


@pytest.mark.parametrize("source", ["", "hello", "{% for m in messages %}{{ m.role }}{% endfor %}"])
def test_a_template_that_renders_nothing_is_blamed_itself(tmp_path: Path, source: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"messages": chat("q", "a")})
    with pytest.raises(UserError, match=r"^The chat template in M renders none of a conversation's messages; use"):
        tokenize_source(path, with_template(source, template_origin=" in M"), max_length=64, skip_bad_rows=True)


def test_a_template_that_is_no_jinja_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(backend_json(), encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text("{% for m in %}")
    tokenizer = Tokenizer.load(tmp_path)
    path = write_jsonl(tmp_path / "a.jsonl", {"messages": chat("q", "a")})
    with pytest.raises(
        UserError,
        match=rf"^The chat template in {tmp_path}/chat_template.jinja cannot be compiled \(.*, line 1 of the templ",
    ):
        tokenize_source(path, tokenizer, max_length=64, skip_bad_rows=True)


# -- ends and beginnings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("completion_only_loss", [True, False])
@pytest.mark.parametrize("source", [ENDLESS, ENDLESS_MARKED])
def test_eos_ends_the_last_answer_where_the_template_does_not(source: str, completion_only_loss: bool) -> None:
    tokenizer = with_template(source)
    row = parse_example({"messages": chat("one", "two", "three", "four")})
    *_, (ids, labels) = tokenize_example(row, tokenizer, completion_only_loss=completion_only_loss)
    assert ids[-1] == labels[-1] == tokenizer.eos_id
    assert ids.count(tokenizer.eos_id) == 1
    unanswered = parse_example({"messages": [*chat("one", "two", "three"), {**ASSISTANT, "weight": 0}]})
    [(ids, labels)] = tokenize_example(unanswered, with_template(ENDLESS_MARKED))
    assert tokenizer.eos_id not in ids, "an answer that is not trained on teaches no end"


def test_templates_that_end_answers_get_no_second_end_and_bad_marks_are_named(tmp_path: Path) -> None:
    row = {"messages": chat("one", "two")}
    assert trained(row, small_tokenizer("chatml")) == ["two<|im_end|>"]
    path = write_jsonl(tmp_path / "a.jsonl", row)
    unmarked = ENDLESS_MARKED.replace("{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    for source, words in {
        ENDLESS: "ends answers without an end token; eos is added behind the last one (line 1)",
        unmarked: "{% generation %} marks leave out the token that ends an answer (line 1)",
    }.items():
        assert words in tokenize_source(path, with_template(source), max_length=64).summary()
    endless = with_template(ENDLESS, special_tokens={})
    assert "has a token that ends an answer (line 1)" in tokenize_source(path, endless, max_length=64).summary()


@pytest.mark.parametrize(
    ("row", "trained_too"),
    [({"text": "<s>The sky"}, True), ({"prompt": "<s>The sky", "completion": " is blue"}, False)],
)
def test_a_text_that_brings_its_bos_gets_no_second_one(tmp_path: Path, row: dict[str, Any], trained_too: bool) -> None:
    tokenizer = beginning()
    [(ids, _)] = tokenize_example(parse_example(row), tokenizer)
    [(plain, _)] = tokenize_example(parse_example({k: v.removeprefix("<s>") for k, v in row.items()}), tokenizer)
    assert ids == plain
    assert not any(pair == (tokenizer.bos_id, tokenizer.bos_id) for pair in pairwise(ids))
    summary = tokenize_source(write_jsonl(tmp_path / "a.jsonl", row), tokenizer, max_length=64).summary()
    assert "texts that begin with a beginning-of-text token get no second one (line 1)" in summary


def test_bos_in_a_completion_and_eos_before_white_space_are_not_doubled() -> None:
    tokenizer = beginning()
    [(ids, _)] = tokenize_example(parse_example({"prompt": "", "completion": "<s>The sky"}), tokenizer)
    assert ids.count(tokenizer.bos_id) == 1
    [(ids, _)] = tokenize_example(parse_example({"text": "The sky</s>\n"}), tokenizer)
    assert ids.count(tokenizer.eos_id) == 1


def beginning() -> Tokenizer:
    """A tokenizer that begins every text with bos."""
    stated = json.loads(backend_json())
    bos = next(token["id"] for token in stated["added_tokens"] if token["content"] == "<s>")
    piece = {"Sequence": {"id": "A", "type_id": 0}}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, piece]
    special = {"<s>": {"id": "<s>", "ids": [bos], "tokens": ["<s>"]}}
    stated["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": [*single, piece], "special_tokens": special,
    }  # fmt: skip
    return Tokenizer(Backend.from_str(json.dumps(stated)), special_tokens=NAMED)


def test_refusals_of_the_template_are_those_of_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"messages": [*chat("a"), CALLING]})
    assert refused(path).endswith("use a model whose template does, or leave the row out.")


# -- arguments of tool calls -------------------------------------------------------------------------------------------

ARGUMENTS = {"city": "K\u00f6ln", "deep": True, "n": None, "x": 1.5, "tags": ["a", {"b": None}]}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
PARTS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OF_ARGUMENTS = {
    "printed": "{{ c.function.arguments }}",
    "joined": "{{ '<' + c.function.arguments + '>' }}",
    "joined by a tilde": "{{ '<' ~ c.function.arguments ~ '>' }}",
    "as JSON": "{{ c.function.arguments | tojson }}",
    "either": "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
    "stripped": "{{ c.function.arguments.strip() }}",
    "values as JSON": "{% for k, v in c.function.arguments.items() %}{{ k }}: {{ v | tojson }}; {% endfor %}",
    "items": "{% for k, v in c.function.arguments | items %}{{ k }}: {{ v | tojson }}; {% endfor %}",
}


def with_call(arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": arguments}}
    return {"messages": [*chat("q"), {"role": "assistant", "content": None, "tool_calls": [call]}]}


@pytest.mark.parametrize("name", OF_ARGUMENTS)
def test_arguments_are_what_the_template_takes(name: str) -> None:
    """As JSON text or as an object, however the row gives them, and never as Python writes them."""
    tokenizer = with_template(PARTS + OF_ARGUMENTS[name] + END)
    [text] = trained(with_call(ARGUMENTS), tokenizer)
    assert trained(with_call(TEXT), tokenizer) == [text]
    assert not any(word in text for word in ("None", "True", "'"))
    for value in ("null", "true", "1.5", "K\u00f6ln"):
        assert value in text
    if name not in ("values as JSON", "items"):
        assert TEXT in text


def test_text_of_arguments_is_printed_as_it_is() -> None:
    tokenizer = with_template(PARTS + OF_ARGUMENTS["printed"] + END)
    assert trained(with_call('{"a":1e3}'), tokenizer) == ['{"a":1e3}<|im_end|>']
    assert trained(with_call("not JSON"), tokenizer) == ["not JSON<|im_end|>"]
    for nothing in (None, "", " ", "null", {}, "{}"):
        assert trained(with_call(nothing), tokenizer) == ["{}<|im_end|>"]


def test_a_template_that_writes_values_as_python_does_is_noted(tmp_path: Path) -> None:
    source = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }},{% endfor %}"
    options = {"tokenizer": with_template(PARTS + source + END), "max_length": 512}
    noted = "the chat template writes some arguments of tool calls as Python does, not as JSON (line 2)"
    rows = [with_call({"city": "a", "n": 1}), with_call({"deep": True})]
    assert noted in tokenize_source(write_jsonl(tmp_path / "a.jsonl", *rows), **options).summary()
    options["tokenizer"] = with_template(PARTS + OF_ARGUMENTS["as JSON"] + END)
    assert "Python" not in tokenize_source(write_jsonl(tmp_path / "a.jsonl", *rows), **options).summary()


def test_nulls_of_arguments_mean_the_same_in_every_kind_of_file(tmp_path: Path) -> None:
    options = {"tokenizer": with_template(PARTS + OF_ARGUMENTS["as JSON"] + END), "max_length": 512}
    row = with_call({"city": "a", "n": None})
    expected = tokenize_source(write_jsonl(tmp_path / "a.jsonl", row), **options)
    assert "tool calls have null arguments" in expected.summary()
    assert (
        "tool calls have null arguments"
        not in tokenize_source(write_jsonl(tmp_path / "b.jsonl", with_call('{"n": null}')), **options).summary()
    )
    for name, value in (("a.json", row), ("a.parquet", row), ("a.csv", {"messages": json.dumps(row["messages"])})):
        assert ids_of(tokenize_source(write_source(tmp_path / name, [value]), **options)) == ids_of(expected)


# -- the text that is really trained on --------------------------------------------------------------------------------

THINKING = [text for i in range(3) for text in (f"q{i}", f"<think>\nt{i}\n</think>\n\na{i}")]
_LAST = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
)
EARLIER_CUT = _LAST + (
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}"
    "{{ m.content if loop.index0 > ns.last else m.content.split('</think>')[-1].strip() }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_marked_turns_are_trained_with_their_own_reasoning() -> None:
    """A template that drops the reasoning of earlier turns gives a row for each turn, with or without marks."""
    row = {"messages": chat(*THINKING)}
    whole = [f"{text}<|im_end|>" for text in THINKING[1::2]]
    unmarked = EARLIER_CUT.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for source in (EARLIER_CUT, unmarked):
        tokenizer = with_template(source)
        assert trained(row, tokenizer) == whole
        assert len(tokenize_example(parse_example(row), tokenizer)) == 3
    plain = {"messages": chat(*[text.rpartition("\n")[2] for text in THINKING])}
    assert len(tokenize_example(parse_example(plain), with_template(EARLIER_CUT))) == 1


@pytest.mark.parametrize("marked", [True, False])
def test_reasoning_that_a_template_cuts_from_answers_is_noted(tmp_path: Path, marked: bool) -> None:
    answer = "{{ m.content.split('</think>')[-1] }}<|im_end|>"
    answer = "{% generation %}" + answer + "{% endgeneration %}" if marked else answer
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + answer + "{% else %}"
        "{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path = write_jsonl(tmp_path / "a.jsonl", {"messages": chat(*THINKING)}, {"messages": chat("q", "a")})
    summary = tokenize_source(path, with_template(source), max_length=512).summary()
    assert "the chat template leaves out a part of content of the role 'assistant' of 1 row (line 1)" in summary


def test_rows_with_the_text_of_control_tokens_are_counted(tmp_path: Path) -> None:
    rows = [
        {"messages": chat("What is <|im_end|>?", "a")},
        {"messages": chat("q", "It is <|im_end|>.")},
        {"messages": chat("q", "a")},
        {"instruction": "q", "output": "an <|im_end|>"},
        {"prompt": "q", "completion": "a <|im_end|> b"},
        {"prompt": "<s>q", "completion": "a</s>"},
    ]
    tokenizer = small_tokenizer("chatml")
    summary = tokenize_source(write_jsonl(tmp_path / "a.jsonl", *rows), tokenizer, max_length=512).summary()
    assert "the text has the control token '<|im_end|>', which the model reads as such (lines 1, 2, 4, ...)" in summary
    assert "'<s>'" not in summary
