"""The model card of a run: its data, options, results and digests."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from wgpu_lora.formats.hub import PUBLIC, hub_id
from wgpu_lora.formats.model_cards import header, table
from wgpu_lora.formats.peft_adapter import WEIGHTS
from wgpu_lora.formats.tokenizer.examples import Alpaca
from wgpu_lora.formats.tokenizer.label_mask import alpaca_prompt
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.train.options.training_arguments import PATHS
from wgpu_lora.train.options.unused_options import idle_options
from wgpu_lora.train.run.records import RunRecord

# Options that the card leaves out: they do not affect the adapter, and remarks are for the run log.
OWN = ("resume", "overwrite", "goal", "notes", "run_log", "report_to")
MOMENTS = (("unrounded", "before rounding"), ("first", "before"), ("last", "after"), ("best", "at best"))
USE = """With wgpu-lora, on any GPU:

```sh
wgpu-lora generate --model {base} --adapter {adapter} --prompt "..."
```
"""
# The base is in safetensors, or a GGUF file, which PEFT has no weights for and llama.cpp takes as it is.
PEFT = """
With [PEFT](https://github.com/huggingface/peft):

```python
from peft import PeftModel
from transformers import {auto_class}, AutoTokenizer

base = {auto_class}.from_pretrained("{place}")
model = PeftModel.from_pretrained(base, "{adapter}")
tokenizer = AutoTokenizer.from_pretrained("{adapter}")
```

With [llama.cpp](https://github.com/ggml-org/llama.cpp), merged into the base:

```sh
wgpu-lora export gguf --model {base} --adapter {adapter} --quantize q4_k_m --output {adapter}.gguf
llama-cli -m {adapter}.gguf
```"""
# What stands for a model that has a name, if something else than wgpu-lora is to read it.
NAMED = {"demo": "wgpu_lora/demo/model"}
GGUF = """
With [llama.cpp](https://github.com/ggml-org/llama.cpp), beside the base:

```sh
wgpu-lora export gguf --model {base} --adapter {adapter} --lora --output {adapter}.gguf
llama-cli -m {file} --lora {adapter}.gguf
```

With [transformers](https://github.com/huggingface/transformers), merged into the base:

```sh
wgpu-lora merge --model {base} --adapter {adapter} --output {adapter}-merged
```

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{adapter}-merged")
tokenizer = AutoTokenizer.from_pretrained("{adapter}-merged")
```"""
ALPACA = """
It was trained on prompts in Alpaca's wording, which `generate` and `chat` use for it:

```
{wording}
```
"""


USE_BASE = """`last-f16/` and, if a held-out loss was measured, `best-f16/` are models;
`last-f32/` and `best-f32/` are the same with tables and scales in float32. Each is used as any other model:

```sh
wgpu-lora generate --model {place}/last-f16 --prompt "..."
```"""


def card(record: RunRecord, auto_class: str = ModelConfig.AUTO_CLASS) -> str:
    """The text of the card. auto_class: of transformers, which loads the base."""
    options, environment = record.options, record.environment
    model, device = options.model or "demo", environment.device
    base = hub_id(PUBLIC.get(model, model))
    name = base or Path(model).name
    omissions = {*OWN, *(name for name, _ in idle_options(options))}
    option_values = replace(options, learning_rate=options.rate).as_dict()
    shown_values = {name: value for name, value in option_values.items() if name not in omissions and value is not None}
    is_base = options.train == "quant-scales"
    head = header(base, *((None, ["wgpu-lora"]) if is_base else ("peft", ["lora", "wgpu-lora"])))
    return f"""{head}
# {"Trained tables and scales of" if is_base else "LoRA adapter for"} {name}

Trained with wgpu-lora {environment.versions["wgpu-lora"]} on {device.name}
({device.backend}, {device.driver}).

## Use

{_use(model, name, record, auto_class)}

## Data

{table(_data(record))}

## Result

{table(_result(record))}
{_better(record)}
## Options

{table({name: _display_value(name, value) for name, value in shown_values.items()})}

## Digests

{table(_digests(record))}
"""


def _use(model: str, name: str, record: RunRecord, auto_class: str) -> str:
    """How to load the adapter; the directory of a local base model is left for the reader to complete."""
    adapter = record.directory.resolve().name
    if record.options.train == "quant-scales":
        return USE_BASE.format(place=shlex.quote(adapter))
    place = PUBLIC.get(model) or (model if hub_id(model) else f"path/to/{NAMED.get(model, name)}")
    base = model if model in (*NAMED, *PUBLIC) else place
    text = USE + (GGUF if place.lower().endswith(".gguf") else PEFT)
    text = text.format(
        base=shlex.quote(base), file=shlex.quote(place), place=place, adapter=adapter, auto_class=auto_class
    )
    if record.data.prompt_format == "alpaca":
        text += ALPACA.format(wording=alpaca_prompt(Alpaca("{instruction}", "", "", "")))
    return text


def _better(record: RunRecord) -> str:
    """A note if best/ has a lower held-out loss than the adapter itself."""
    state = record.state
    best, last = state.best_eval_loss, state.last_eval_loss
    if best is None or last is None or best >= last:
        return ""
    return (
        f"\n`best/` holds the adapter after step {state.best_step:,}, which has a lower held-out loss: {best:.4f} "
        f"instead of {last:.4f} after the last step.\n"
    )


def _data(record: RunRecord) -> dict[str, str]:
    data, held_out = record.data, record.eval_data
    rows = {"training": data.summary, "SHA-256": data.digest}
    if held_out:
        rows |= {"held out": Path(held_out.path).name, "SHA-256 of the held-out data": held_out.digest}
    return rows


def _result(record: RunRecord) -> dict[str, str]:
    state = record.state
    rounded = {} if state.unrounded_eval_loss is None else {"first": "after rounding", "last": "after training"}
    texts = dict(MOMENTS) | rounded
    moments = [(getattr(state, f"{key}_eval_loss"), text) for key, text in texts.items()]
    heldout = ", ".join(
        f"{_number(loss)} {text}" for loss, text in moments if loss is not None or text == texts["last"]
    )
    return {
        "steps": f"{state.step:,} of {state.total_steps:,} ({record.outcome})",
        "trained tokens": f"{state.tokens:,}",
        "trained parameters": f"{record.trainable_parameters:,}",
        "final loss": _number(state.last_loss),
        **({"held-out loss": heldout} if record.eval_data else {}),
    }


def _digests(record: RunRecord) -> dict[str, str]:
    trained = "constants.safetensors" if record.options.train == "quant-scales" else WEIGHTS
    return {
        f"{trained}, SHA-256": record.adapter_sha256,
        "base model (names, shapes and the edges of its shards)": record.base_digest,
        "initial adapter, SHA-256": record.init_adapter_sha256 or "none",
    }


def _display_value(name: str, value: Any) -> Any:
    return hub_id(str(value)) or Path(str(value)).resolve().name if name in PATHS else value
    # only the last part of local paths; '.' is resolved to a name


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"
