"""Tools: their schemas and calls, and the turns behind them in the words of families of models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.rows.sources import write_source
from support.rows.tool_templates import CALLS, HERMES_TEMPLATE, TEMPLATES
from support.serving.serving import demo_tokenizer

from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import DEMO_MODEL
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.rewards.function_process import Tools
from wgpu_lora.train.session.tool_turns import ToolTurns

FUNCTIONS = """
with open(__file__ + ".loads", "a") as file:
    file.write("x")
def even(completions, **columns):
    return [0.0] * len(completions)
def add(a: int, b: int = 1) -> int:
    'The sum of two numbers.'
    print('out of band')
    return a + b
async def shout(text: str):
    return text.upper()
def broken():
    raise KeyError('no such thing')
def slow():
    import time
    time.sleep(60)
def untyped(a: object()):
    pass
"""


def tools(place: Path, *names: str, seconds: float = 20.0) -> Tools:
    (place / "tools.py").write_text(FUNCTIONS)
    return Tools(",".join(f"{place / 'tools.py'}:{name}" for name in names), seconds)


@pytest.fixture(scope="module")
def toolbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    result = tools(tmp_path_factory.mktemp("tools"), "add")
    yield result
    result.close()


def test_calls_and_their_failures(tmp_path: Path) -> None:
    toolbox = tools(tmp_path, "add", "shout", "broken")
    add = toolbox.schemas[0]["function"]
    assert (add["name"], add["description"]) == ("add", "The sum of two numbers.")
    assert add["parameters"]["required"] == ["a"]
    assert add["parameters"]["properties"]["b"]["type"] == "integer"
    assert toolbox.call("add", {"a": 3, "b": "4"}) == ("7", False)
    assert toolbox.call("shout", {"text": "a"}) == ("A", False)
    assert toolbox.call("shout", {"text": "\ud800"}) == ("?", False)
    for name, arguments, text in [
        ("broken", {}, "KeyError"),
        ("add", {}, "Missing required argument"),
        ("add", {"a": "x"}, "valid integer"),
        ("add", [1, 2], "not a JSON object"),
        ("shout", {"text": "a" * 200_000}, "it returned 200,000 characters"),
        ("other", {}, "there is no tool 'other', but add, shout, broken"),
    ]:
        result, failed = toolbox.call(name, arguments)
        assert failed
        assert text in json.loads(result)["error"]
        assert "errors.pydantic.dev" not in result
    toolbox.close()
    slow = tools(tmp_path, "slow", "add", seconds=0.5)
    assert "took more than 0.5 seconds" in slow.call("slow", {})[0]
    assert slow.call("add", {"a": 1}) == ("2", False)
    slow.close()


@pytest.mark.parametrize("family", TEMPLATES)
def test_turns_behind_calls(family: str, tmp_path: Path) -> None:
    tokenizer = demo_tokenizer(TEMPLATES[family])
    call = {"hermes": '<tool_call>{"name": "add", "arguments": {"a": 20}}</tool_call>',
            "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 20}}]',
            "llama": '{"name": "add", "parameters": {"a": 20}}'}[family]  # fmt: skip
    tool_turns = ToolTurns(tools(tmp_path, "add"), tokenizer, max_iterations=1)
    turns: list[dict[str, Any]] = []
    stop = tokenizer.token_id("<|im_end|>")
    assert stop is not None
    more = tool_turns.follow(turns, [*tokenizer.encode(call), stop], True)
    expected = "\n<|im_start|>tool\n21<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(more, skip_special_tokens=False) == expected
    assert [turn["role"] for turn in turns] == ["assistant", "tool"]
    assert turns[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 20}}
    assert turns[1]["content"] == "21"
    assert tool_turns.follow(turns, [*tokenizer.encode(call), stop], True) == []  # beyond `most`
    for arguments in ("[20]", '"20"', '"{"'):
        odd, wrong = call.replace('{"a": 20}', arguments), list[dict[str, Any]]()
        assert tool_turns.follow(wrong, [*tokenizer.encode(odd), stop], True)
        assert wrong[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}
        assert "not a JSON object" in wrong[1]["content"]
    assert tool_turns.counts() == (4, 3)
    assert tool_turns.follow(turns, tokenizer.encode("It is 21."), False) == []
    assert turns[-1] == {"role": "assistant", "content": "It is 21."}
    assert tool_turns.counts() == (0, 0)
    tool_turns.close()


THINKING = """{%- set last = namespace(user=0) %}{% for m in messages if m.role == 'user' %}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last and loop.index0 > last.user %}<think>

</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
OTHER_FORMS = {  # how they write a call; each has the words of a family above in its hint or in its call
    "glm": "<tool_call>{{ c.function.name }}\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "qwen3.5": "<tool_call>\n<function={{ c.function.name }}>\n<parameter=x>1</parameter>\n</function>\n</tool_call>",
    "muse": '<invoke name="{{ c.function.name }}">"parameters" "name"</invoke>',
    "text": '<tool_call>{"name": "{{ c.function.name }}", "arguments": "x = 1"}</tool_call>',
    "lost": '<tool_call>{"name": "{{ c.function.name }}", "arguments": {}}</tool_call>',
    "fails": "{{ raise_exception('no calls') }}",
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_templates_of_other_forms_are_refused(form: str, toolbox: Tools) -> None:
    """Whatever family's words they print: only a call that is parsed back counts."""
    template = HERMES_TEMPLATE.replace(
        CALLS["hermes"], "{% for c in m.tool_calls %}" + OTHER_FORMS[form] + "{% endfor %}"
    )
    with pytest.raises(UserError, match="in a form that is not known here"):
        ToolTurns(toolbox, demo_tokenizer(template), None)
    silent = "{% set messages = messages[:2] %}" + HERMES_TEMPLATE
    with pytest.raises(UserError, match="does not write results of tools"):
        ToolTurns(toolbox, demo_tokenizer(silent), None)


@pytest.mark.parametrize("thinking", [None, False])
def test_what_is_behind_a_call_is_rendered_as_the_prompt(thinking: bool | None, toolbox: Tools) -> None:
    """By a template that, as Qwen3's, rewrites a turn once a tool answers; with the variables of the run or the row."""
    tokenizer, variables = demo_tokenizer(THINKING), {} if thinking is None else {"enable_thinking": thinking}
    stop = tokenizer.token_id("<|im_end|>")
    ids = [*tokenizer.encode('<tool_call>{"name": "add", "parameters": {"a": 20}}</tool_call>'), stop]
    user = {"role": "user", "content": "20 + 1?"}
    for run, row in [(variables, None), ({"enable_thinking": True}, variables)]:
        if row == {}:
            continue
        tool_turns, turns = ToolTurns(toolbox, tokenizer, None, run), list[dict[str, Any]]()
        behind = tokenizer.decode(tool_turns.follow(turns, ids, True, row), skip_special_tokens=False)
        whole = tokenizer.render([user, *turns], toolbox.schemas, True, variables)
        call = '{"name": "add", "arguments": {"a": 20}}\n</tool_call><|im_end|>'
        assert whole.endswith(call + behind)
        assert behind.count("think") == (0 if thinking is None else 2)


def trl_template(name: str) -> str:
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


@pytest.mark.reference
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "llama3_1", "llama3_2"])
def test_what_is_behind_a_call_is_that_of_trl(name: str, toolbox: Tools) -> None:
    """The published templates of families whose calls are known, rendered by transformers as TRL does it."""
    transformers = pytest.importorskip("transformers")
    template = trl_template(name)
    texts = {"eot": "<|eot_id|>"} if name.startswith("llama") else {"eot": "<|im_end|>"}
    tokenizer = demo_tokenizer(template)
    tool_turns = ToolTurns(toolbox, tokenizer, None, {"enable_thinking": False})
    answer = {"role": "tool", "tool_call_id": "1", "name": "add", "content": "21"}
    behind = tokenizer.decode(tool_turns._behind([answer], tool_turns.variables), skip_special_tokens=False)
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(DEMO_MODEL / "tokenizer.json"))
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    dummy = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    whole = reference.apply_chat_template(
        [*dummy, answer], chat_template=template, tools=toolbox.schemas, tokenize=False,
        add_generation_prompt=True, enable_thinking=False,
    )  # fmt: skip
    assert whole.rpartition("21")[0].rpartition(texts["eot"])[2] + "21" + whole.rpartition("21")[2] == behind


@pytest.mark.reference
@pytest.mark.parametrize("name", ["glm4moe", "muse_glimmer", "gptoss", "qwen3_5_think", "nemotron_3_nano", "gemma4"])
def test_published_templates_of_other_forms_are_refused(name: str, toolbox: Tools) -> None:
    with pytest.raises(UserError, match="in a form that is not known here"):
        ToolTurns(toolbox, demo_tokenizer(trl_template(name)), None)


def test_a_run_with_tools(tmp_path: Path) -> None:
    """Prompts have the tools; models without them, and prompts that are texts, are refused. Tools and rewards of one
    file share its module, which is loaded once."""
    (tmp_path / "tools.py").write_text(FUNCTIONS)
    rows = [{"messages": [{"role": "user", "content": f"What is {n} + {n}?"}], "answer": str(2 * n)} for n in range(4)]
    model = tmp_path / "model"
    model.mkdir()
    for file in DEMO_MODEL.iterdir():
        (model / file.name).symlink_to(file)
    options: dict[str, Any] = {
        "model": str(model), "data": str(write_source(tmp_path / "rows.jsonl", rows)), "output": str(tmp_path / "run"),
        "objective": "grpo", "reward_funcs": f"{tmp_path / 'tools.py'}:even", "tools": f"{tmp_path / 'tools.py'}:add",
        "max_steps": 2,
        "max_completion_length": 16, "num_generations": 2, "gradient_accumulation_steps": 4, "save_steps": 0,
    }  # fmt: skip
    with pytest.raises(UserError, match="has no tools"):
        prepare_job(TrainingArguments(**options))
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").write_text(TEMPLATES["hermes"])
    (tmp_path / "tools.py.loads").unlink()
    job = prepare_job(TrainingArguments(**options))
    run = job.run
    assert run.rollouts
    assert run.rollouts.tokenizer
    prompt = run.rollouts.tokenizer.decode(run.stream.prepared.rows[0].input_ids, skip_special_tokens=False)
    assert '"description": "The sum of two numbers."' in prompt
    assert job.train().state.step == 2
    assert (tmp_path / "tools.py.loads").read_text() == "x"
    texts = str(write_source(tmp_path / "texts.jsonl", [{"prompt": "What?"}] * 4))
    for changes, text in [
        ({"data": texts}, "tools are called in conversations"),
        ({"tools": f"{tmp_path / 'tools.py'}:nothing"}, "cannot be loaded"),
        ({"tools": f"{tmp_path / 'tools.py'}:untyped"}, "have no JSON schema"),
        ({"tools": "add"}, "give functions as FILE.py:NAME"),
        ({"tools": " , "}, "is empty"),
    ]:
        with pytest.raises(UserError, match=text):
            prepare_job(TrainingArguments(**options | changes, overwrite=True))
