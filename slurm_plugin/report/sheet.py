"""A page of figures and tables without charts (pure)."""

from __future__ import annotations

from typing import NamedTuple

from cadenza.slurm_plugin.report.page import document


class Card(NamedTuple):
    """One highlighted figure: heading, number, unit, a note, and a sentence."""

    title: str
    figure: str
    unit: str
    note: str
    text: str


class Column(NamedTuple):
    """A column of a table; ``text``: its cells hold words instead of figures."""

    name: str
    note: str = ""
    text: bool = False


class Cell(NamedTuple):
    """A cell's text, and the value to sort by (default: the text)."""

    text: str
    value: float | str | None = None

    @property
    def sort_value(self) -> float | str:
        """Return the value to sort by."""
        return self.text if self.value is None else self.value


class Table(NamedTuple):
    """A table; the first column names the rows."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


class Sheet(NamedTuple):
    """Contents of the page; ``notes`` explain the figures at the end."""

    title: str
    facts: tuple[str, ...]
    cards: tuple[Card, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]


def render(sheet: Sheet) -> str:
    """Return the page: one document that loads nothing and needs no script to be read."""
    return document(
        "sheet.html", sheet.title, facts=sheet.facts, cards=sheet.cards, tables=sheet.tables, footnotes=sheet.notes
    )
