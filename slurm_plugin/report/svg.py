"""From matplotlib's SVG document to a small inline drawing: accessible, in the page's colours and letters (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree as ET

from cadenza.slurm_plugin.report.chart import Chart
from cadenza.slurm_plugin.report.draw import Size
from cadenza.slurm_plugin.report.theme import replacements

SPACE = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"
NUMBER = re.compile(r"-?\d+\.\d+")
NAMED = re.compile(r"(series|band)-(\d+)")
ANCHOR = re.compile(r"text-anchor: (\w+)")
DECIMALS = 1
"""Of coordinates: a tenth of a pixel."""
DROPPED = {f"{SPACE}style", f"{SPACE}metadata"}


def inline(document: str, chart: Chart, size: Size) -> str:
    """Return a drawing as an ``svg`` element for the page, with the chart's title and description."""
    root = ET.fromstring(document)  # noqa: S314 (our own drawing, not somebody's file)
    _drop(root)
    for element in root.iter():
        _rewrite(element, {line.index: line.label for line in chart.lines})
    root.attrib = {"class": f"drawing {size.name}", "viewBox": f"0 0 {size.width:g} {size.height:g}"}
    _describe(root, chart, f"{chart.key}-{size.name}")
    for element in root.iter():
        element.tag = element.tag.removeprefix(SPACE)
        element.text = element.text and element.text.strip()
        element.tail = None
    return ET.tostring(root, encoding="unicode")


def _describe(root: ET.Element, chart: Chart, name: str) -> None:
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-text"}
    for at, (tag, text) in enumerate((("title", chart.title), ("text", f"{chart.caption} {chart.text}"))):
        element = ET.Element("title" if tag == "title" else "desc", {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(at, element)


def _drop(element: ET.Element) -> None:
    """Remove what says nothing: matplotlib's style sheet, which would be the whole page's, and empty groups."""
    for child in list(element):
        _drop(child)
        if child.tag in DROPPED or (child.tag in (f"{SPACE}g", f"{SPACE}defs") and not len(child)):
            element.remove(child)


def _rewrite(element: ET.Element, labels: dict[int, str]) -> None:
    if element.tag == f"{SPACE}g":
        _group(element, labels)
    if "d" in element.attrib:
        element.set("d", _path(element.attrib["d"]))
    if LINK in element.attrib:
        element.set("href", element.attrib.pop(LINK))
    for name in {"x", "y"} & element.attrib.keys():
        element.set(name, _rounded(element.attrib[name]))
    if element.tag == f"{SPACE}text":
        _letters(element)
    if "style" in element.attrib:
        element.set("style", _colours(element.attrib["style"]).replace("; ", ";").replace(": ", ":"))


def _group(element: ET.Element, labels: dict[int, str]) -> None:
    """Mark the group of a result's line; other names go, since they would be there once for each drawing."""
    named = NAMED.fullmatch(element.attrib.pop("id", ""))
    if named:
        element.set("class", f"{named[1]} n{named[2]}")
        title = ET.Element(f"{SPACE}title")
        title.text = labels[int(named[2])]
        element.insert(0, title)


def _letters(element: ET.Element) -> None:
    """Let text have the page's font; keep where it is anchored and its colour."""
    style = element.attrib.pop("style", "")
    anchor = ANCHOR.search(style)
    element.attrib.pop("transform", None)
    if anchor and anchor[1] != "start":
        element.set("text-anchor", anchor[1])
    element.set("style", ";".join(part for part in style.split("; ") if part.startswith("fill:")))


def _path(data: str) -> str:
    """Return a path with rounded coordinates; a point right after another needs no letter of its own."""
    return " ".join(_commands(NUMBER.sub(lambda found: _rounded(found[0]), data).split()))


def _commands(words: list[str]) -> Iterator[str]:
    """Leave out the letter of a line that follows a move or a line, which SVG implies."""
    last = ""
    for word in words:
        if not (word == "L" and last in ("M", "L")):
            yield word
        if word.isalpha():
            last = word


def _rounded(text: str) -> str:
    """Return a number with few decimals.

    >>> _rounded("12.04"), _rounded("-0.01"), _rounded("7")
    ('12', '0', '7')
    """
    short = f"{float(text):.{DECIMALS}f}".rstrip("0").rstrip(".")
    return "0" if short == "-0" else short


def _colours(style: str) -> str:
    for placeholder, colour in replacements().items():
        style = style.replace(placeholder, colour)
    return style
