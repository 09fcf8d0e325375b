"""A page of figures and tables without charts: what it holds, and how it looks as HTML (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cadenza.slurm_plugin.report.html import Html, tag
from cadenza.slurm_plugin.report.page import document, scroll, section
from cadenza.slurm_plugin.report.units import NARROW


class Card(NamedTuple):
    """One figure that stands out: its heading, number and unit, what it is, and a sentence on it."""

    title: str
    figure: str
    unit: str
    what: str
    text: str


class Column(NamedTuple):
    """A column of a table, with a word on what is in it; ``text``: it holds words and no figures."""

    name: str
    note: str = ""
    text: bool = False

    @property
    def style(self) -> str | None:
        """Return the style sheet's class for its cells."""
        return "text" if self.text else None


class Cell(NamedTuple):
    """A cell as it is read, and the value by which rows are sorted."""

    text: str
    value: float | str | None = None


class Table(NamedTuple):
    """A table; the first column names the rows."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


class Sheet(NamedTuple):
    """Everything on the page."""

    title: str
    facts: tuple[str, ...]
    cards: tuple[Card, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    """How the figures are meant, at the end."""


def render(sheet: Sheet) -> str:
    """Return the page: one document that needs nothing from outside and no script to be read."""
    header = tag("header", tag("h1", sheet.title), tag("p", " · ".join(sheet.facts), class_="facts"))
    footer = tag("footer", *(tag("p", note) for note in sheet.notes), tag("p", "Made by cadenza report."))
    return document(sheet.title, (header, tag("main", *_sections(sheet)), footer))


def _sections(sheet: Sheet) -> Iterator[Html]:
    yield section("summary", "In short", tag("div", *map(_card, sheet.cards), class_="cards"))
    for table in sheet.tables:
        if table.rows:
            yield section(table.key, table.title, scroll(_table(table), table.title))


def _card(card: Card) -> Html:
    unit = tag("span", f"{NARROW}{card.unit}", class_="unit")
    figure = tag("p", tag("span", card.figure, unit, class_="big"), tag("span", card.what, class_="what"),
                 class_="headline")  # fmt: skip
    return tag("article", tag("h3", card.title), figure, tag("p", card.text), class_="card")


def _table(table: Table) -> Html:
    heads = [_head(column, first=at == 0) for at, column in enumerate(table.columns)]
    rows = [tag("tr", *_cells(table.columns, row)) for row in table.rows]
    parts = (tag("thead", tag("tr", *heads)), tag("tbody", *rows))
    return tag("table", *parts, class_="sortable", id=f"{table.key}-table")


def _head(column: Column, *, first: bool) -> Html:
    note = tag("small", column.note) if column.note else None
    return tag("th", column.name, note, scope="col", class_="name" if first else column.style)


def _cells(columns: Sequence[Column], row: Sequence[Cell]) -> Iterator[Html]:
    for at, (column, cell) in enumerate(zip(columns, row, strict=True)):
        value = cell.text if cell.value is None else cell.value
        if at == 0:
            yield tag("th", cell.text, scope="row", class_="name", data_value=value)
        else:
            yield tag("td", cell.text, class_=column.style, data_value=value)
