"""Chat templates with tools, in the words of families of models."""

TURNS = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% if m.tool_calls %}CALLS{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALLS = {
    "hermes": "{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}",
    "mistral": "[TOOL_CALLS]{{ m.tool_calls | map(attribute='function') | list | tojson }}",
    "llama": '{"name": {{ m.tool_calls[0].function.name | tojson }}, '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}',
}
TEMPLATES = {
    family: "{% if tools %}{{ tools | tojson }} <tool_call></tool_call>{% endif %}" + TURNS.replace("CALLS", calls)
    for family, calls in CALLS.items()
}
HERMES_TEMPLATE = TEMPLATES["hermes"]
