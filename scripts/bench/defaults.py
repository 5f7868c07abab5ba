"""Held-out loss by setting on published models, for docs/defaults.md.

python -m scripts.bench.defaults MODEL.gguf --data facts [--rate 2e-4,1e-3] [--epochs 3] [--rows 2] [--json FILE]

Three data sets are made here: `facts` (40 rows, a made-up catalogue, of which the held-out rows ask in other words),
`orders` (300 rows, the fields of a sentence as JSON) and `docstrings` (2,000 rows, the first sentence of the docstrings
of Python's standard library). Trained by PyTorch + PEFT in bf16 on the values of the GGUF file, which is the fastest on
a CPU; `make test-real` shows that our losses are the same. `--write FOLDER` writes the rows as JSONL instead.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import math
import random
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from scripts.demo.order_rows import HELDOUT, TRAIN, order_rows

IGNORE = -100
Row = dict[str, Any]
PRODUCTS = (
    "Lumo desk lamp", "Brisk kettle", "Tarn rain jacket", "Pico travel mug", "Oska armchair", "Vell wool blanket",
    "Hark speaker", "Nomi backpack", "Fenn bread knife", "Dray wheelbarrow", "Sola sun hat", "Kite umbrella",
    "Orin wall clock", "Mesa plant pot", "Juno yoga mat", "Rook chess set", "Pell candle", "Wren bird feeder",
    "Alto bicycle bell", "Cove bath towel",
)  # fmt: skip
MATERIALS = ("oak", "steel", "cotton", "glass", "wool", "cork", "brass", "clay", "bamboo", "linen")


def chat(user: str, assistant: str) -> Row:
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def facts() -> tuple[list[Row], list[Row]]:
    """40 rows on 20 products, and 40 that ask for the same prices and materials in other words."""
    rng = random.Random(7)
    train, heldout = [], []
    for product in PRODUCTS:
        price, material = f"{rng.randrange(5, 200)}.{rng.choice(('50', '90', '95'))}", rng.choice(MATERIALS)
        costs = f"The {product} costs {price} euros. Anything else you would like to know?"
        composition = f"The {product} is made of {material}. Anything else you would like to know?"
        train += [chat(f"How much is the {product}?", costs), chat(f"What is the {product} made of?", composition)]
        heldout += [
            chat(f"Hi! Could you tell me the price of your {product}, please?", costs),
            chat(f"Which material does the {product} have?", composition),
        ]
    return train, heldout


def orders() -> tuple[list[Row], list[Row]]:
    return order_rows(TRAIN, 31, 300), order_rows(HELDOUT, 32, 100)


def docstrings() -> tuple[list[Row], list[Row]]:
    """The signatures of public functions in the standard library, and the first sentences of their docstrings."""
    root = Path(sysconfig.get_path("stdlib"))
    excluded_folders = {"test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo"}
    rows = {}
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root).with_suffix("").parts
        if excluded_folders & set(module):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                sentence = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if 15 <= len(sentence) <= 100:
                    signature = f"{'.'.join(module)}: {node.name}({ast.unparse(node.args)})"
                    rows.setdefault(sentence, chat(f"Document this function.\n{signature}", sentence))
    sample = random.Random(7).sample(list(rows.values()), 2200)
    return sample[:2000], sample[2000:]


DATA = {"facts": facts, "orders": orders, "docstrings": docstrings}


class Study:
    """A model and a data set, for many trainings."""

    def __init__(self, file: Path, data: str):
        import torch
        import transformers

        self._torch = torch
        options = {"gguf_file": file.name, "dtype": torch.bfloat16, "attn_implementation": "eager"}
        self._base = transformers.AutoModelForCausalLM.from_pretrained(str(file.parent), **options)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        self._train, self._heldout = ([self._encode(row) for row in rows] for rows in DATA[data]())
        self.tokens = sum(len(ids) for ids, _ in self._train)

    def _encode(self, row: Row) -> tuple[list[int], list[int]]:
        """Ids and labels, by the model's chat template or, for base models, as plain texts."""
        *before, answer = row["messages"]
        if self._tokenizer.chat_template:
            prompt = self._tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
        else:
            bos = self._tokenizer.bos_token or ""
            prompt = bos + "".join(message["content"] + "\n\n" for message in before)
        ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        end = self._tokenizer.encode(answer["content"] + self._tokenizer.eos_token, add_special_tokens=False)
        return ids + end, [IGNORE] * len(ids) + end

    def _losses(self, model: Any, rows: list[tuple[list[int], list[int]]]) -> tuple[Any, int]:
        """Sum of the losses of answers, and their tokens."""
        torch = self._torch
        longest = max(len(ids) for ids, _ in rows)
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [IGNORE] * (longest - len(labels)) for _, labels in rows])
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows])
        with torch.autocast("cpu", torch.bfloat16):
            inner = model.get_base_model()
            hidden = inner.model(input_ids=padded, attention_mask=mask).last_hidden_state
            trained = labels[:, 1:] != IGNORE
            logits = inner.lm_head(hidden[:, :-1][trained]).float()  # of trained positions alone
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][trained], reduction="sum")
        return loss, int(trained.sum())

    def heldout_loss(self, model: Any) -> float:
        with self._torch.no_grad():
            sums = [self._losses(model, self._heldout[at : at + 16]) for at in range(0, len(self._heldout), 16)]
        return sum(loss.item() for loss, _ in sums) / sum(count for _, count in sums)

    def run(
        self, rate: float, rank: int, alpha: float, targets: str, epochs: float, rows: int, warmup: float, schedule: str
    ) -> Row:
        """Train an adapter and return its held-out losses by epoch."""
        import peft

        torch = self._torch
        torch.manual_seed(42)
        modules = "all-linear" if targets == "all-linear" else targets.split("+")
        lora = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM")
        model = peft.get_peft_model(self._base, lora)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
        per_epoch = math.ceil(len(self._train) / rows)
        steps = round(per_epoch * epochs)
        warm = max(1, math.ceil(steps * warmup)) if warmup else 0

        def scale(step: int) -> float:
            if step < warm:
                return step / warm
            progress = (step - warm) / max(1, steps - warm)
            return (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress

        rng, order, losses, last = random.Random(42), [], [], []
        begin = time.monotonic()
        for step in range(steps):
            if len(order) < rows:
                order += rng.sample(range(len(self._train)), len(self._train))
            batch, order = order[:rows], order[rows:]
            loss, count = self._losses(model, [self._train[at] for at in batch])
            (loss / count).backward()
            last = [*last[-9:], loss.item() / count]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = rate * scale(step + 1 if warm else step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % per_epoch == 0 or step + 1 == steps:
                losses.append(round(self.heldout_loss(model), 4))
        model.unload()
        return {
            "steps": steps,
            "train": round(sum(last) / len(last), 4),
            "heldout": losses,
            "seconds": round(time.monotonic() - begin),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--data", choices=DATA, default="facts")
    parser.add_argument("--write", type=Path, help="folder for the rows as JSONL files")
    parser.add_argument("--json", type=Path, help="file that a line per training is added to")
    settings = {
        "rate": "2e-4", "rank": "16", "alpha": "32", "targets": "all-linear", "epochs": "3", "rows": "8",
        "warmup": "0.03", "schedule": "cosine",
    }  # fmt: skip
    for name, default in settings.items():
        parser.add_argument(f"--{name}", default=default, help=f"one or several, separated by commas ({default})")
    options = vars(parser.parse_args())
    if options["write"]:
        for name, rows in DATA.items():
            for part, lines in zip(("train", "heldout"), rows(), strict=True):
                path = options["write"] / f"{name}-{part}.jsonl"
                path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return
    if not options["model"]:
        parser.error("give a GGUF file, or --write")
    study = Study(options["model"], options["data"])
    kinds = {
        "rate": float,
        "rank": int,
        "alpha": float,
        "targets": str,
        "epochs": float,
        "rows": int,
        "warmup": float,
        "schedule": str,
    }
    values = ([kind(text) for text in options[name].split(",")] for name, kind in kinds.items())
    for combination in itertools.product(*values):
        setting = dict(zip(kinds, combination, strict=True))
        result = {"model": options["model"].stem, "data": options["data"], "tokens": study.tokens, **setting}
        result |= study.run(**setting)
        print(json.dumps(result), flush=True)
        if options["json"]:
            with options["json"].open("a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    sys.exit(main())
