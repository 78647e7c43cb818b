"""Reads a page as a browser would, and lists what is wrong with it."""

import re
from html.parser import HTMLParser

# What may bring a script or something from outside into a page.
NEVER = {"script", "iframe", "object", "embed", "base", "form", "foreignobject", "audio", "video"}
# Attributes that are read out or shown, and never followed.
SHOWN = {"aria-label", "title", "alt", "content"}


class Reader(HTMLParser):
    """problems: in words. tags: how often each came. text: all that is shown."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.problems: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.tags: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, dict(attrs))
        if tag not in {"meta", "link", "br", "img", "hr"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)

    def _note(self, tag: str, values: dict[str, str | None]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag in NEVER:
            self.problems.append(f"<{tag}>")
        for name, value in values.items():
            said = "" if name in SHOWN else value or ""
            if name.startswith("on") or re.search(r"javascript:|https?:|//", said):
                self.problems.append(f"{tag} {name}={said[:60]}")
            if name == "href" and not said.startswith("#") and said != "data:,":
                self.problems.append(f"link to {said[:60]}")
        if "id" in values:
            self.ids.append(values["id"] or "")
        self.links += [v[1:] for k, v in values.items() if k == "href" and v and v[0] == "#"]
        self.links += re.findall(r"url\(#([^)]+)\)", " ".join(v or "" for v in values.values()))
        self.links += (values.get("aria-labelledby") or "").split()
        if tag == "th" and values.get("scope") not in ("col", "row"):
            self.problems.append("th without scope")
        if tag == "svg" and (values.get("role") != "img" or not values.get("aria-labelledby")):
            self.problems.append("svg without a name")
        if tag == "img" and not values.get("alt"):
            self.problems.append("img without alt")


def read(page: str) -> Reader:
    """The page, with every problem found."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    if reader.open:
        reader.problems.append(f"left open: {reader.open}")
    twice = {name for name in reader.ids if reader.ids.count(name) > 1}
    reader.problems += [f"id {name} twice" for name in sorted(twice)]
    reader.problems += [f"no #{name}" for name in sorted({*reader.links} - {*reader.ids})]
    # addresses in text are text; in style they would be loaded
    for style in re.findall(r"<style>(.*?)</style>", page, re.DOTALL):
        if "url(" in style or "@import" in style:
            reader.problems.append("style loads something")
    return reader
