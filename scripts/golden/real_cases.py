"""What the tests of published models train, say and tokenise; the same for the references of `real_models.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

# Token ids are to be those of the reference on these.
ODD_TEXTS = (
    "", " ", "   ", "\n", "  two  spaces \n\n\n three\t tabs\r\n", "a▁▁b", "▁", "12345 678.90", "don't we'll I'VE",
    "naïve Ünïcödé, e\u0301 vs é, x\u0300\u0301\u0302", "ﬁ ½ ① Å Å", "日本語のテキスト", "مرحبا שלום",
    "👩‍👩‍👧‍👦 🇩🇪 🤷🏽 1️⃣", "𝕳𝖊𝖑𝖑𝖔 \U0010ffff", "\u200bzero\u200dwidth\ufeff \u00a0nbsp\u2028line", "\x00\x01\x7f",
    "def f(x):\n    return x**2  # ok\n", "<0x0A><unk><s></s>", "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|> <|endoftext|>x<|im_end", "<bos><eos><start_of_turn>user\nhi<end_of_turn>",
)  # fmt: skip

TEXT = (
    "The lighthouse at Cape Arden was built in 1871, and its lamp can be seen for 23 miles. Every spring the keeper "
    "climbs its 184 steps with a bucket of white paint, because salt eats the old coat within a year.\n\n"
    "| month | days of fog |\n|---|---|\n| May | 9 |\n| June | 14 |\n\n"
    "```python\ndef visible(miles: float) -> bool:\n    return miles <= 23\n```\n"
    "„Wie weit?“, fragte sie. 『二十三海里です。』 🌊"
)
LOGIT_ROWS, LOGIT_STRIDE = 40, 998  # logits of these first tokens, and of every 998th id, are kept

PROMPTS = (
    "Write a short story about a lighthouse keeper who paints the tower.",
    "Explain to a child why the sea is salty.",
    "Describe how bread is baked, step by step.",
)
SYSTEM = {"role": "system", "content": "Look up the catalogue."}
CATALOGUE = (
    ("Borvo lamp", "14 zorks, in green"), ("Kessit chair", "230 zorks, in oak"), ("Tunno cup", "3 zorks, in blue"),
    ("Alvar rug", "95 zorks, in grey"), ("Pim clock", "41 zorks, in brass"), ("Dorrit shelf", "120 zorks, in ash"),
    ("Welm kettle", "28 zorks, in steel"), ("Orsa bench", "310 zorks, in teak"),
)  # fmt: skip
CHATS: tuple[dict[str, Any], ...] = tuple(
    {"messages": [SYSTEM, {"role": "user", "content": f"{name}?"},
                  {"role": "assistant", "content": f"The {name} is {facts}."}]}
    for name, facts in CATALOGUE
)  # fmt: skip
PAIRS = tuple(
    {"prompt": f"The {name} is", "chosen": f" {facts}.", "rejected": " not in the catalogue."}
    for name, facts in CATALOGUE[:4]
)

RANK, ALPHA, WEIGHT_DECAY = 4, 8, 0.01
EPSILON = 1e-5  # so that the sign of a gradient that is almost 0, which is rounding, does not decide a step
STEPS, LEARNING_RATE = 20, 2e-4
PREFERENCE_STEPS, PREFERENCE_LEARNING_RATE, BETA = 10, 1e-4, 0.3
ANSWERS, ANSWER_TOKENS = 2, 16  # of the trained model, to the first of CHATS
WHOLE = ("0.q_proj", "14.down_proj", "29.gate_proj")  # whose matrices after training are kept; of others, norms


def initial_adapter(shapes: Mapping[str, tuple[int, int]]) -> dict[str, np.ndarray]:
    """A uniform as PEFT draws it, B zero, named `0.q_proj.A`. shapes: (out, in) of the matrices, by `0.q_proj`."""
    rng, adapter = np.random.default_rng(11), {}
    for name, (outputs, inputs) in sorted(shapes.items()):
        adapter[f"{name}.A"] = rng.uniform(-(inputs**-0.5), inputs**-0.5, (RANK, inputs)).astype(np.float32)
        adapter[f"{name}.B"] = np.zeros((outputs, RANK), np.float32)
    return adapter


def adapter_summary(adapter: Mapping[str, np.ndarray], start: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """How far each matrix moved (`moved`, sorted by name), and the matrices of WHOLE."""
    moved = [np.linalg.norm(adapter[name].astype(np.float64) - start[name]) for name in sorted(adapter)]
    matrices = {name: value for name, value in adapter.items() if name.rpartition(".")[0] in WHOLE}
    return matrices | {"moved": np.array(moved, np.float32)}
