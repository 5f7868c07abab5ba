"""Writes the tables in docs/figures.md, training speeds by device, from the files in docs/figures.

python -m scripts.bench.figures [FILE.json ...]

Files of `make bench-smollm2`, of `make bench-gpu` or of the page that measures a device in a browser are first
copied into docs/figures, named by their device and content.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import parse_object
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.memory import format_bytes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "figures.md"
FOLDER = PAGE.with_suffix("")
SCHEMAS = ("wgpu-lora-bench-reference/", "wgpu-lora-bench-gpu/")
COLUMNS = ("device", "model", "step", "side", "tokens/s", "of PyTorch", "on device", "process", "mJ", "versions")
WEB_SCHEMA = "wgpu-lora web measurement"
WEB_COLUMNS = ("device", "browser", "model", "tokens", "ms", "tokens/s", "products", "attention")
BROWSERS = {"Edg": "Edge", "Firefox": "Firefox", "Chrome": "Chromium", "Version": "Safari"}  # in user agents


def table_row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(re.sub(r"[|\s]+", " ", cell) for cell in cells) + " |\n"


def table_head(columns: tuple[str, ...]) -> str:
    return table_row(columns) + "|---" * len(columns) + "|\n"


@dataclass(frozen=True)
class WebFigures:
    """What a browser measured: a training step and its bricks."""

    head: ClassVar = table_head(WEB_COLUMNS)
    document: dict[str, Any]

    @property
    def device(self) -> str:
        return str(self.document["device"])

    def table(self) -> Iterator[str]:
        """A line of the table. Products and attention are in GFLOP/s, over all calls of a step."""
        model, results = self.document["model"], self.document["results"]
        [step] = [record["seconds"] for record in results if record["name"] == "training step"]
        bricks = [record for record in results if "multiply_adds" in record]

        def speed(attention: bool) -> str:
            selection = [record for record in bricks if record["name"].startswith("attention") == attention]
            work = sum(2 * record["calls"] * record["multiply_adds"] for record in selection)
            return f"{work / sum(record['calls'] * record['seconds'] for record in selection) / 1e9:,.1f}"

        agent = self.document["browser"]
        versions = [
            f"{name} {match[1]}" for key, name in BROWSERS.items() if (match := re.search(rf"{key}/(\d+)", agent))
        ]
        tokens = self.document["tokens"]
        yield table_row(
            (
                self.device,
                versions[0] if versions else "unknown",
                f"{model['name']}, {count_noun(model['layers'], 'layer')}, {model['base_dtype']}",
                str(tokens),
                f"{1000 * step:,.1f}",
                f"{tokens / step:,.0f}",
                speed(attention=False),
                speed(attention=True),
            )
        )


@dataclass(frozen=True)
class Figures:
    """The training steps of a file, and the device and processor that took them."""

    head: ClassVar = table_head(COLUMNS)
    device: str
    processor: str
    commit: str
    rows: list[dict[str, Any]]

    def table(self) -> Iterator[str]:
        """Lines of the table. Sides that did not run are not in it."""
        for row in self.rows:
            if "not_run" in row:
                continue
            is_ours = row["side"].startswith("ours")
            versions = row["environment"]["versions"] if is_ours else row["versions"]
            packages = ("wgpu-lora", "wgpu") if is_ours else ("torch", "peft")
            version_texts = [f"{name} {versions[name]}" for name in packages if name in versions]
            layers = f", {count_noun(row['layers'], 'layer')}" if row["layers"] else ""
            on_device = row.get("planned", row.get("allocated"))
            ratio, joules = row["ratio"], row.get("joules_per_token")
            cells = (
                self.device if is_ours else self.processor if row["device"] == "cpu" else row["device"],
                f"{row['shape']}{layers}, rank {row['rank']}",
                row["work"],
                row["side"],
                f"{row['tokens_per_second']:,.0f}",
                "" if ratio is None else f"{ratio:.2f}",
                "" if on_device is None else format_bytes(on_device),
                format_bytes(row["resident"]),
                "" if joules is None else f"{1000 * joules:.1f}",
                ", ".join([*version_texts, f"commit {self.commit[:8]}"] if is_ours and self.commit else version_texts),
            )
            yield table_row(cells)


def read_figures(path: Path) -> Figures | WebFigures:
    """The training steps of a result of `make bench-smollm2`, `make bench-reference`, `make bench-gpu` or a browser.

    Raises:
        UserError: it is not such a file, or has no training step that ran on a device.
    """
    try:
        document = parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    schema = str(document.get("schema", ""))
    if schema != WEB_SCHEMA and not schema.startswith(SCHEMAS):
        raise UserError(f"{path} is not a result of 'make bench-smollm2', 'make bench-gpu' or a browser: give one.")
    if document.get("quick"):
        raise UserError(f"{path} was made with --quick, whose figures are meaningless: measure again without.")
    try:
        if schema == WEB_SCHEMA:
            web = WebFigures(document)
            list(web.table())
            return web
        comparisons = [part["results"] for part in document.get("parts", ()) if part["job"]["job"] == "comparison"]
        rows = [row for results in comparisons for row in results] or document.get("steps", [])
        devices = [row["environment"]["device"] for row in rows if "environment" in row]
        if not devices:
            raise UserError(f"{path} has no training step that ran on a device: measure again.")
        name = f"{devices[0]['name']}, {devices[0]['driver']}"
        result = Figures(name, document.get("processor", "CPU"), (document["commit"] or {}).get("id", ""), rows)
        list(result.table())
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        raise UserError(f"{path} has a step without its figures: measure again.") from None
    return result


def page() -> str:
    """The page, with the tables of the files in docs/figures."""
    figures, text = [read_figures(path) for path in sorted(FOLDER.glob("*.json"))], PAGE.read_text()
    for kind in (Figures, WebFigures):
        before, _, after = text.partition(kind.head)
        lines = "".join(line for entry in figures if isinstance(entry, kind) for line in entry.table())
        text = before + kind.head + lines + re.sub(r"\A(\|.*\n)*", "", after)
    return text


def main(files: list[str]) -> int:
    try:
        for file in files:
            figures = read_figures(Path(file))
            content = json.dumps(json.loads(Path(file).read_text()), indent=1) + "\n"
            slug = re.sub("[^a-z0-9]+", "-", figures.device.lower()).strip("-")[:40]
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{slug}-{hashlib.sha256(content.encode()).hexdigest()[:8]}.json").write_text(content)
        PAGE.write_text(page())
    except UserError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
