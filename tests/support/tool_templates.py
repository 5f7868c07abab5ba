"""Chat templates with tools, in the words of families of models."""

TURNS = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HERMES_TEMPLATE = "{% if tools %}{{ tools | tojson }} <tool_call></tool_call>{% endif %}" + TURNS
TEMPLATES = {
    "hermes": HERMES_TEMPLATE,
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[TOOL_CALLS]{% endif %}" + TURNS,
    "llama": '{% if tools %}{"name": f, "parameters": x}{{ tools | tojson }}{% endif %}' + TURNS,
}
