"""Makes preference pairs from the demo's rows.

    python scripts/demo/preferences.py OUTPUT [style|steps]

writes OUTPUT/train.jsonl and OUTPUT/valid.jsonl, from the demo's training and held-out rows. The chosen answer is the
row's. The rejected one is, for `style`, the same function with a comprehension instead of a loop; for `steps`, the same
answer with two lines (of the filter, the map and the reduction) of other rows' answers.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

DATA = Path(__file__).parents[2] / "wgpu_lora" / "demo" / "data"
STEPS = (3, 4, -1)  # lines of an answer: the filter, the map, the reduction


def with_comprehension(lines: list[str]) -> list[str]:
    define, _, _, condition, append, result = lines
    condition, value = condition.strip().removesuffix(":"), append.strip().removeprefix("out.append(").removesuffix(")")
    return [define, f"    out = [{value} for x in xs {condition}]", result]


def pairs(rows: list[dict], kind: str, seed: int) -> list[dict]:
    """A pair for each row."""
    rng = random.Random(seed)
    answers = [row["messages"][1]["content"].split("\n") for row in rows]
    made = []
    for row, lines in zip(rows, answers, strict=True):
        wrong = with_comprehension(lines) if kind == "style" else [*lines]
        for step in rng.sample(STEPS, 2) if kind == "steps" else ():
            wrong[step] = rng.choice(sorted({answer[step] for answer in answers} - {lines[step]}))
        prompt, chosen = row["messages"]
        made.append({"prompt": [prompt], "chosen": [chosen], "rejected": [{**chosen, "content": "\n".join(wrong)}]})
    return made


def main(output: Path, kind: str = "style") -> None:
    output.mkdir(parents=True, exist_ok=True)
    for name, source, seed in (("train", "train", 1), ("valid", "heldout", 2)):
        rows = [json.loads(line) for line in (DATA / f"{source}.jsonl").read_text().splitlines()]
        lines = "".join(json.dumps(pair) + "\n" for pair in pairs(rows, kind, seed))
        (output / f"{name}.jsonl").write_text(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
