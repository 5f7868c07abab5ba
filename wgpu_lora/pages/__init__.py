"""Pages of HTML that are whole by themselves: no script, nothing fetched, light and dark, read on a telephone too."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def render(template: Path, **values: Any) -> str:
    """A page from a template that extends base.html.j2; every value is taken for text, and escaped."""
    import jinja2

    loader = jinja2.FileSystemLoader([template.parent, Path(__file__).parent])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template.name).render(**values)
