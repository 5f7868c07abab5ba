"""Makes the rows of the demo on a published model: a sentence that orders something, and its fields as JSON.

    .venv/bin/python -m scripts.demo.order_rows       # both JSONL files, into wgpu_lora/demo/data

No name, city, item, count or wording of the held-out rows occurs in the training rows.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from scripts.demo.make_demo import write_rows
from wgpu_lora.assets import ORDERS_HELDOUT, ORDERS_TRAIN

SEED = 31
TRAIN_ROWS = 200
HELDOUT_ROWS = 60
SYSTEM = "Reply in JSON with keys name, city, item and count (a number)."


@dataclass(frozen=True)
class Values:
    """What the sentences of one file are made of: lists in one text, separated by commas, or lines of wordings."""

    first_names: str
    surnames: str
    cities: str
    items: str
    counts: range
    wordings: str


TRAIN = Values(
    "Anna, Boris, Carla, Daniel, Elena, Frank, Greta, Hugo, Irene, Jonas, Karin, Lukas, Maria, Nils, Olga, Peter",
    "Bauer, Costa, Duran, Egger, Fischer, Garcia, Hofmann, Ivanov, Jensen, Keller, Lang, Moretti, Novak, Olsen",
    "Graz, Bern, Oslo, Porto, Lyon, Ghent, Turin, Krakow, Malmo, Leeds, Split, Riga, Basel, Brno, Cork, Bonn",
    "green tea, desk lamps, oak chairs, garden gloves, copper wire, olive oil, wool socks, paper bags, steel bolts, "
    "coffee beans, blue pens, glass jars, bath towels, bicycle bells, rice noodles",
    range(2, 60, 2),
    """{name} from {city} wants {count} {item}.
Please send {count} {item} to {name} in {city}.
{count} {item} for {name}, {city}.
In {city}, {name} ordered {count} {item}.
{name} ({city}) buys {item}, {count} in all.
Ship {item} to {city}: {count} for {name}.""",
)
HELDOUT = Values(
    "Alice, Bruno, Clara, Dario, Emil, Fiona, Gustav, Hanna, Ivo, Julia, Kurt, Lea, Marco, Nora, Oskar, Paula",
    "Adler, Brandt, Conti, Dubois, Ferrari, Graf, Huber, Jansen, Klein, Lindt, Meyer, Peters, Ricci, Sommer",
    "Vienna, Zurich, Bergen, Lisbon, Nantes, Bruges, Milan, Warsaw, Dublin, Vilnius, Prague, Hamburg",
    "black pepper, floor tiles, picture frames, hiking boots, rubber seals, orange juice, silk scarves, "
    "cotton shirts, brass screws, honey cakes, wall clocks, tin cans",
    range(3, 60, 2),
    """Send {name} in {city} {count} {item}.
{city}: {name} needs {count} {item}.
{name} has ordered {item} ({count}), delivery to {city}.
Order of {count} {item} by {name} from {city}.""",
)


def order_rows(values: Values, seed: int, number: int) -> list[dict]:
    """Rows of messages: the system message, a sentence, and its fields as a line of JSON."""
    rng = random.Random(seed)

    def draw(texts: str) -> str:
        return rng.choice(texts.split(", "))

    rows = []
    for _ in range(number):
        fields = {
            "name": f"{draw(values.first_names)} {draw(values.surnames)}",
            "city": draw(values.cities),
            "item": draw(values.items),
            "count": rng.choice(values.counts),
        }
        sentence = rng.choice(values.wordings.splitlines()).format(**fields)
        texts = {"system": SYSTEM, "user": sentence, "assistant": json.dumps(fields, separators=(",", ":"))}
        rows.append({"messages": [{"role": role, "content": text} for role, text in texts.items()]})
    return rows


def main() -> None:
    """Write both files."""
    write_rows(ORDERS_TRAIN, order_rows(TRAIN, SEED, TRAIN_ROWS))
    write_rows(ORDERS_HELDOUT, order_rows(HELDOUT, SEED + 1, HELDOUT_ROWS))


if __name__ == "__main__":
    main()
