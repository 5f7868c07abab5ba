"""Self-contained HTML pages: no scripts, nothing fetched, light and dark mode, readable on phones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"


def render(template: Path, **values: Any) -> str:
    """Render a template that extends base.html.j2; all values are escaped."""
    import jinja2

    loader = jinja2.FileSystemLoader([template.parent, TEMPLATES])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template.name).render(**values)
