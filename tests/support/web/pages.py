"""Reads the HTML pages that the package writes."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Checks that tags nest, and collects what a reader sees and what a browser would fetch."""

    VOID = ("meta", "input")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.fetched: list[str] = []
        self.views: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        named = dict(attributes)
        self.fetched += [tag] if tag in ("script", "link", "img", "iframe") or {"src", "href"} & set(named) else []
        self.views += [named["class"]] if "view" in (named.get("class") or "").split() else []

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass  # an SVG shape

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
