"""A plot's SVG as part of the page: one drawing for light and dark, ids of its own, no address.

matplotlib writes colours, a style for the whole document, metadata with addresses, and the same ids
into every file. Here colours become variables of the page, and the rest goes.
"""

import re
from html import escape

from mlxstacks.errors import InputError
from mlxstacks.study.render.drawings import INK, PAPER, RULE, SERIES

# Colour in the file -> variable of the page's style.
VARIABLES = {
    INK: "var(--ink)", RULE: "var(--rule)", PAPER: "var(--page)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES)},
}  # fmt: skip
_COLOURS = re.compile("|".join(VARIABLES), re.IGNORECASE)
_GONE = (
    re.compile(r"<\?xml.*?\?>", re.DOTALL),
    re.compile(r"<!DOCTYPE.*?>", re.DOTALL),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"<metadata>.*?</metadata>", re.DOTALL),
    re.compile(r"<style type=\"text/css\">.*?</style>", re.DOTALL),
)
_VIEW = re.compile(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"')
_TAG = re.compile(r"<(?!!)[^>]*>")
_POINTS_IN_PIXELS = 4 / 3


def inline_svg(text: str, name: str, alt: str) -> str:
    """An <svg> element for the page. name: unique in it; alt: what the picture shows.

    Laws: colours and ids change inside tags only, never in a label; no address is left.
    Raises: InputError for a text that is no SVG of matplotlib.
    """
    for part in _GONE:
        text = part.sub("", text)
    view = _VIEW.search(text)
    start, end = text.find("<svg"), text.rfind("</svg>")
    if view is None or start < 0 or end < start:
        raise InputError(f"{name}: matplotlib wrote no SVG with a viewBox; another version of it?")
    body = text[text.index(">", start) + 1 : end]
    body = _TAG.sub(lambda tag: _of_page(tag.group(), name), body)
    width, height = float(view.group(1)), float(view.group(2))
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="{name}-alt" '
        f'style="width:{width * _POINTS_IN_PIXELS:.0f}px">'
        f'<title id="{name}-alt">{escape(alt)}</title>{_lean(body)}</svg>'
    )


def _of_page(tag: str, name: str) -> str:
    """A tag with the page's colours, ids that begin with `name`, and links without a namespace."""
    tag = _COLOURS.sub(lambda found: VARIABLES[found.group().lower()], tag)
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = tag.replace("url(#", f"url(#{name}-")
    return re.sub(r'xlink:href="#', f'href="#{name}-', tag)


def _lean(body: str) -> str:
    """Without blanks between tags."""
    return re.sub(r">\s*\n\s*<", "><", body).strip()
