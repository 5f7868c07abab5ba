"""Labels for every format of rows and every kind of chat template."""

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rows.data import NAMED, SPECIAL, backend_json, chat, small_tokenizer, template_source, trained_text
from tokenizers import models, pre_tokenizers, processors

from wgpu_lora.data import UNTRAINED, Tokenizer, parse_example, tokenize_example
from wgpu_lora.errors import UserError

EOS = SPECIAL.index("</s>")
FOUR = chat("Hi", "Hello", "And?\n", "So.\n\n")


def rows(row, template=None, **options):
    return tokenize_example(parse_example(row), small_tokenizer(template), **options)


def learnt(row, template=None, **options):
    """For each row of an example, the pieces of text that are trained on."""
    return [trained_text(small_tokenizer(template), labels) for _, labels in rows(row, template, **options)]


def whole(row, template=None, **options):
    return [
        small_tokenizer(template).decode(ids, skip_special_tokens=False) for ids, _ in rows(row, template, **options)
    ]


def with_template(source: str, *, bos: bool = False) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(backend_json())
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend, special_tokens=NAMED, chat_templates={"default": source} if source else {})


def test_tokens_are_taken_as_they_are_without_a_tokenizer():
    example = parse_example({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})
    assert tokenize_example(example, None) == [([5, 6, 7], [-100, 6, 7])]
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        tokenize_example(parse_example({"text": "a"}), None)


PAIR = {"prompt": "What is", "completion": " blue?"}
ALPACA = {"instruction": "Count {x}.", "input": "", "output": "One."}
WITH_SYSTEM = {"instruction": "Count.", "input": "to two", "output": "One.", "system": "Be brief."}
HELLO = {"messages": chat("Hi", "Hello")}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
THOUGHT = "<think>\n\n</think>\n\nHello<|im_end|>"
# Row, template, options -> what is learnt, and in some cases the whole text.
LEARNT: list[tuple[dict[str, Any], str | None, dict[str, Any], str, str | None]] = [
    ({"text": "The sky"}, None, {}, "The sky</s>", None),
    ({"text": "The sky</s>"}, None, {}, "The sky</s>", "The sky</s>"),  # an end that is there is not doubled
    (PAIR, None, {}, " blue?</s>", "What is blue?</s>"),
    (PAIR, None, {"completion_only_loss": False}, "What is blue?</s>", None),
    (ALPACA, None, {}, "One.</s>",
     "Below is an instruction that describes a task. Write a response that appropriately completes the request."
     "\n\n### Instruction:\nCount {x}.\n\n### Response:One.</s>"),
    (ALPACA | {"input": "to two"}, None, {}, "One.</s>",
     "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
     "response that appropriately completes the request.\n\n### Instruction:\nCount {x}.\n\n### Input:\nto two\n\n"
     "### Response:One.</s>"),
    (WITH_SYSTEM, "chatml", {}, "One.<|im_end|>",
     "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCount.\n\nto two<|im_end|>\n"
     "<|im_start|>assistant\nOne.<|im_end|>\n"),
    (HELLO, "thinking", {}, THOUGHT, None),
    (HELLO, "thinking", QUIET, "Hello<|im_end|>", None),
    (HELLO | {"chat_template_kwargs": {"enable_thinking": True}}, "thinking", QUIET, THOUGHT, None),  # the row's wins
]  # fmt: skip


@pytest.mark.parametrize(("row", "template", "options", "expected", "text"), LEARNT)
def test_what_is_learnt_of_a_row(row, template, options, expected, text):
    assert learnt(row, template, **options) == [[expected]]
    assert text is None or whole(row, template, **options) == [text]


def test_bos_is_learnt_only_with_a_text():
    [(ids, labels)] = tokenize_example(parse_example({"text": "The sky"}), with_template("", bos=True))
    assert ids == labels == [0, *small_tokenizer().encode("The sky"), EOS]
    [(ids, labels)] = tokenize_example(parse_example(PAIR), with_template("", bos=True))
    assert (ids[0], labels[0]) == (0, UNTRAINED)


def test_the_boundary_of_a_completion_is_exact_where_tokens_would_straddle_it():
    tokenizer = small_tokenizer()
    prompt, completion = "the col", "our of"
    assert tokenizer.encode(prompt + completion)[: len(tokenizer.encode(prompt))] != tokenizer.encode(prompt)
    [(ids, labels)] = rows({"prompt": prompt, "completion": completion})
    assert ids == [*tokenizer.encode(prompt), *tokenizer.encode(completion), EOS]
    assert trained_text(tokenizer, labels) == ["our of</s>"]


def test_a_tokenizer_that_puts_a_space_in_front_puts_none_into_the_middle():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "b": 2}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("b") == [0, 2]
    example = parse_example({"prompt": "a", "completion": "b"})
    assert tokenize_example(example, tokenizer) == [([0, 1, 2], [UNTRAINED, UNTRAINED, 2])]


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        ("chatml", ["Hello<|im_end|>", "So.\n\n<|im_end|>"]),
        ("chatml_marked", ["Hello<|im_end|>", "So.\n\n<|im_end|>"]),
        ("headers", ["Hello<|eot_id|>", "So.<|eot_id|>"]),
        ("strict", [" Hello</s>", " So.\n\n</s>"]),
    ],
)
def test_every_assistant_turn_is_learnt_with_its_end_in_one_row(template, turns):
    assert learnt({"messages": FOUR}, template) == [turns]
    tokenizer = small_tokenizer(template)
    [(ids, _)] = rows({"messages": FOUR}, template)
    assert ids == tokenizer.encode(tokenizer.render(FOUR)), "ids are those of the whole rendering"
    assert learnt({"messages": FOUR}, template, completion_only_loss=False) == [[tokenizer.render(FOUR)]]


def test_marks_of_reasoning_are_refused_where_thinking_is_off():
    reasoned = {"messages": chat("Hi", "<think>Well.</think>Hello")}
    for row in (reasoned, {"prompt": "Hi", "completion": "<think>Well.</think>Hello"}, {"text": "a </think> b"}):
        rows(row, "chatml")
        rows(row, "chatml", chat_template_kwargs={"enable_thinking": True})
        with pytest.raises(UserError, match=r"think>' is left in trained text, but 'enable_thinking' is off"):
            rows(row, "chatml", chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(UserError, match="left in trained text"):
        rows({**reasoned, "chat_template_kwargs": {"enable_thinking": False}}, "chatml")
    question = {"messages": chat("<think>", "Hello")}  # a question is not trained
    rows(question, "chatml", chat_template_kwargs={"enable_thinking": False})


def test_a_template_that_forgets_thinking_gives_a_row_for_each_turn():
    four = chat("Hi", "<think>\none\n</think>\n\nHello", "And?", "<think>\ntwo\n</think>\n\nSo.")
    assert learnt({"messages": four}, "thinking") == [
        ["<think>\none\n</think>\n\nHello<|im_end|>"],
        ["<think>\ntwo\n</think>\n\nSo.<|im_end|>"],
    ]
    tokenizer = small_tokenizer("thinking")
    assert whole({"messages": four}, "thinking") == [tokenizer.render(four[:2]), tokenizer.render(four)]
    for (ids, labels), turn in zip(rows({"messages": four}, "thinking"), (1, 3), strict=True):
        prompt = tokenizer.encode(tokenizer.render(four[:turn], add_generation_prompt=True))
        assert ids[: len(prompt)] == prompt, "the turn is learnt behind just what the model sees before it"
        assert labels[: len(prompt)] == [UNTRAINED] * len(prompt)
        assert labels[len(prompt)] == ids[len(prompt)]


@pytest.mark.parametrize("template", ["chatml", "chatml_marked", "headers", "strict"])
def test_only_the_turns_that_are_to_be_learnt(template):
    [turns] = learnt({"messages": FOUR}, template)
    silent = [{**message, "weight": 0} if message["content"] == "Hello" else message for message in FOUR]
    assert learnt({"messages": silent}, template) == [turns[1:]]
    assert learnt({"prompt": FOUR[:3], "completion": FOUR[3:]}, template) == [turns[1:]]
    assert whole({"prompt": FOUR[:3], "completion": FOUR[3:]}, template) == whole({"messages": FOUR}, template)
    assert learnt({"messages": FOUR[:1]}, template) == [[]]


def test_tool_calls_are_learnt_and_tool_results_are_not():
    call: dict[str, Any] = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        *chat("Hi"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "Cold."},
    ]
    texts = learnt({"messages": messages, "tools": [{"name": "f"}]}, "thinking")
    call_text = '\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert texts[0] == [f"<think>\n\n</think>\n\n{call_text}"]
    assert texts[1] == ["<think>\n\n</think>\n\nCold.<|im_end|>"]
    assert '{"name": "f"}\n</tools>' in whole({"messages": messages, "tools": [{"name": "f"}]}, "thinking")[0]


def test_a_generation_prompt_that_no_turn_starts_with():
    """As for DeepSeek-R1: the prompt opens a thought, but finished turns are rendered without one."""
    source = template_source("chatml").replace("assistant\\n' -}}", "assistant\\n<think>\\n' -}}")
    tokenizer = with_template(source)
    pairs = tokenize_example(parse_example({"messages": FOUR}), tokenizer)
    assert [trained_text(tokenizer, labels) for _, labels in pairs] == [["Hello<|im_end|>"], ["So.\n\n<|im_end|>"]]
    assert tokenizer.decode(pairs[1][0], skip_special_tokens=False) == tokenizer.render(FOUR)


def test_a_conversation_that_the_assistant_opens():
    source = "{{ messages[0]['role'] + ': ' }}" + template_source("chatml")  # takes no empty conversation
    tokenizer = with_template(source)
    pairs = tokenize_example(parse_example({"messages": FOUR[1:]}), tokenizer)
    assert [trained_text(tokenizer, labels) for _, labels in pairs] == [["Hello<|im_end|>"], ["So.\n\n<|im_end|>"]]


def test_a_turn_that_merges_with_its_header_is_tokenised_apart():
    source = "{% for m in messages %}{{ m.role + '\n' + m.content + '\n' }}{% endfor %}"
    tokenizer = with_template(source + "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}")
    messages = chat("Hi", "\nblue")
    header = tokenizer.encode("user\nHi\nassistant\n")
    assert tokenizer.encode(tokenizer.render(messages))[: len(header)] != header
    [(ids, labels)] = tokenize_example(parse_example({"messages": messages}), tokenizer)
    assert ids[: len(header)] == header
    assert trained_text(tokenizer, labels) == ["\nblue\n</s>"], "eos ends an answer that the template does not end"


def test_turns_whose_header_changes_with_what_follows_get_a_row_each():
    """GPT-2's pre-tokenizer makes one token of a header's "\\n\\n", but two if a word follows it."""
    backend = tokenizers.Tokenizer.from_str(backend_json(as_gpt2=True))
    tokenizer = Tokenizer(backend, special_tokens=NAMED, chat_templates={"default": template_source("headers")})
    pairs = tokenize_example(parse_example({"messages": FOUR}), tokenizer)
    assert [trained_text(tokenizer, labels) for _, labels in pairs] == [["Hello<|eot_id|>"], ["So.<|eot_id|>"]]
    for (ids, _), turn in zip(pairs, (1, 3), strict=True):
        header = tokenizer.encode(tokenizer.render(FOUR[:turn], add_generation_prompt=True))
        assert ids[: len(header)] == header
        assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render(FOUR[: turn + 1])


HIDING = "{% for m in messages %}{{ messages[-1].content | length }}{{ m.content | upper }}{% endfor %}"


@pytest.mark.parametrize(
    ("row", "template", "options", "words"),
    [
        ({"messages": FOUR}, None, {}, "no chat template"),
        ({"messages": FOUR[1:]}, "strict", {}, "must alternate"),
        (HELLO, "thinking", {"chat_template_kwargs": {"tools": []}}, "must not set tools"),
    ],
)
def test_what_is_refused(row, template, options, words):
    with pytest.raises(UserError, match=words):
        rows(row, template, **options)


def test_a_template_that_hides_the_turn_is_told():
    with pytest.raises(UserError, match="start of message 1"):
        tokenize_example(parse_example(HELLO), with_template(HIDING))


@pytest.mark.reference
@pytest.mark.parametrize("messages", [FOUR, chat("Hi", " größer 🦜"), chat("a", "b", "c")])
def test_marks_are_read_as_transformers_reads_them(messages):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: make test-reference does that"
    )
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(backend_json()), **NAMED
    )
    theirs.chat_template = template_source("chatml_marked")
    out: Any = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    [(ids, labels)] = rows({"messages": messages}, "chatml_marked")
    assert ids == out["input_ids"]
    assert [int(label != UNTRAINED) for label in labels] == out["assistant_masks"]


WORDS = st.text(alphabet="ab \n:öß🦜'<", max_size=8)
CHATS = st.lists(WORDS, min_size=1, max_size=5).map(lambda texts: chat(*texts))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(CHATS, st.sampled_from(["chatml", "chatml_marked", "thinking", "strict"]))
def test_what_is_learnt_is_what_the_assistant_says(messages, template):
    tokenizer = small_tokenizer(template)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    pairs = rows({"messages": messages}, template)
    for ids, labels in pairs:
        assert len(ids) == len(labels)
        assert all(label in (UNTRAINED, token) for token, label in zip(ids, labels, strict=True))
    texts = [text for _, labels in pairs for text in trained_text(tokenizer, labels)]
    end = {"strict": "</s>"}.get(template, "<|im_end|>")
    assert len(texts) == len(answers)
    for text, words in zip(texts, answers, strict=True):
        learnt = text.removeprefix("<think>\n\n</think>\n\n").removesuffix(end)
        # A token may hold the end of the template's own header and the newlines that an answer begins with.
        assert learnt.removeprefix(" " if template == "strict" else "").lstrip("\n") == words.lstrip("\n")
        assert text.endswith(end)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(WORDS, WORDS)
def test_a_completion_decodes_to_itself(prompt, completion):
    tokenizer = small_tokenizer()
    [(ids, labels)] = rows({"prompt": prompt, "completion": completion})
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt + completion + "</s>"
    assert trained_text(tokenizer, labels) == [completion + "</s>"]
    start = len(tokenizer.encode(prompt))
    assert ids[:start] == tokenizer.encode(prompt)
