"""Makes the rows of the demo on a published model: a sentence that orders something, and its fields as JSON.

    .venv/bin/python -m scripts.demo.order_rows       # both JSONL files, into wgpu_lora/demo/data

No name, item, color, count or wording of the held-out rows occurs in the training rows. Values begin with a word that
is one token for SmolLM2 after a quotation mark, too: so small a model copies names of several tokens badly.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from scripts.demo.make_demo import write_rows
from wgpu_lora.files.assets import ORDERS_HELDOUT, ORDERS_TRAIN

SEED = 31
TRAIN_ROWS = 200
HELDOUT_ROWS = 60
SYSTEM = "Reply in JSON with keys name, item, color and count (a number)."


@dataclass(frozen=True)
class Values:
    """What the sentences of one file are made of: lists in one text, separated by commas, or lines of wordings."""

    names: str
    items: str
    colors: str
    counts: range
    wordings: str


TRAIN = Values(
    "Anna, Daniel, Frank, Maria, Peter, James, Robert, Michael, William, Richard, Joseph, Thomas, Charles, Sarah, "
    "Anne, Samuel, Alexander, Jack, Henry, Christian, Arthur, Louis, Simon, Martin, Max, Jane, Rose, Tom, Ben, "
    "Tim, Jim, Bob, Paul, George, Edward, Fred, Matt, Andrew, Stephen, Scott, Ray, Elizabeth, Jacob, Kim",
    "paper bags, wood screws, iron gates, plastic cups, stone tiles, school desks, table lamps, wall clocks, bath "
    "towels, water bottles, oil cans, phone cases, travel mugs, hand saws, baby shoes, dog leads, bird cages, "
    "fish tanks, book shelves, key rings, car seats, train sets, light bulbs, rice bowls, music stands, winter "
    "coats, door bells",
    "red, blue, white, brown, yellow, gray, orange",
    range(2, 60, 2),
    """{name} wants {count} {color} {item}.
Please send {count} {color} {item} to {name}.
{count} {color} {item} for {name}.
Today {name} ordered {count} {color} {item}.
{name} buys {item} in {color}, {count} in all.
Ship {color} {item}: {count} for {name}.""",
)
HELDOUT = Values(
    "Alice, John, David, Mary, Emily, Adam, Carl, Victor, Maya, Sam, Dan, Mark, Luke, Chris, Jeff, Alex, Nick, Jean",
    "glass jars, metal pipes, office chairs, floor mats, window frames, bed sheets, fire doors, gas stoves, "
    "camera straps, computer screens, summer hats, face masks, cat toys, boat covers, tool boxes, machine parts, "
    "video games",
    "green, black, purple, gold",
    range(3, 60, 2),
    """Send {name} {count} {color} {item}.
{name} needs {count} {item} in {color}.
{name} has ordered {color} {item} ({count}).
Order of {count} {color} {item} by {name}.""",
)


def order_rows(values: Values, seed: int, number: int) -> list[dict]:
    """Rows of messages: the system message, a sentence, and its fields as a line of JSON."""
    rng = random.Random(seed)

    def draw(texts: str) -> str:
        return rng.choice(texts.split(", "))

    rows = []
    for _ in range(number):
        fields = {
            "name": draw(values.names),
            "item": draw(values.items),
            "color": draw(values.colors),
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
