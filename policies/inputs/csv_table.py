"""Shared parts of the readers: decoding, CSV tables with line numbers, checked numbers, hints for unknown names."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from cadenza.policies.core.errors import InputError

MAX_CHARACTERS = 40
"""Characters of a wrong value that a message repeats."""
MAX_QUANTITY = 1e15
"""Largest quantity: about 30 million years in seconds, an exabyte in MB."""


def decode(data: bytes, source: str) -> str:
    """Return a file's bytes as text without a byte order mark; raise InputError where they are not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{source}:{line}: not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x})") from None


def quoted(value: object) -> str:
    """Return a wrong value for a message, cut where it is long.

    >>> quoted("x" * 99)[-6:]
    "xxxx…'"
    """
    shown = value if isinstance(value, str) else repr(value)
    return repr(shown if len(shown) <= MAX_CHARACTERS else shown[:MAX_CHARACTERS] + "…")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the nearest known name, or all of them where none is near.

    >>> suggest("fifi", ["fifo", "las"]), suggest("x", ["fifo", "las"])
    ("did you mean 'fifo'?", 'known here: fifo, las')
    """
    names = list(known)
    near = get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")  # noqa: PLR2004
    return f"known here: {shown}" if names else "none is known here"


def number(text: str, where: str, least: float = 0.0, most: float = MAX_QUANTITY) -> float:
    """Return a finite number within bounds; raise InputError, which begins with ``where``, for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value) or "_" in text:
        raise InputError(f"{where}: {quoted(text)} is not a number")
    if not least <= value <= most:
        raise InputError(f"{where}: {quoted(text)} is not {bounds(least, most)}")
    return value


def positive(text: str, where: str, most: float = MAX_QUANTITY) -> float:
    """Return a finite number above 0; raise InputError for anything else."""
    value = number(text, where, most=most)
    if not value:
        raise InputError(f"{where}: must be more than 0")
    return value


def integer(text: str, where: str, least: int = 0, most: int = int(MAX_QUANTITY)) -> int:
    """Return a whole number within bounds; raise InputError, which begins with ``where``, for anything else."""
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or "_" in text:
        raise InputError(f"{where}: {quoted(text)} is not a whole number")
    if not least <= value <= most:
        raise InputError(f"{where}: {quoted(text)} is not {bounds(least, most)}")
    return value


def bounds(least: float, most: float) -> str:
    """Return an interval in words.

    >>> bounds(1, 64), bounds(0, 1e15)
    ('from 1 to 64', 'from 0 to 1e+15')
    """
    return f"from {least:g} to {most:g}"


@dataclass(frozen=True, slots=True)
class Table:
    """A CSV file's cells, stripped; every row has as many as there are columns."""

    source: str
    columns: tuple[str, ...]
    rows: tuple[tuple[int, list[str]], ...]
    """Line in the file, cells."""

    def at(self, line: int, column: str) -> str:
        """Return file, line and column as messages begin."""
        return f"{self.source}:{line}: {column}"


def read_table(text: str, source: str, required: Sequence[str], optional: Sequence[str] | None = ()) -> Table:
    """Return a CSV file as a table.

    Empty lines and lines that begin with ``#`` are skipped. ``optional`` lists the other columns that are
    allowed; None allows any. Raise InputError, with file and line, for a missing, unknown, repeated or empty
    column name, for a row of another length and for text that is not CSV.
    """
    found = _records(text.removeprefix("\ufeff"), source)
    line, columns = next(found, (1, []))
    if not columns:
        raise InputError(f"{source}: is empty; its first line must be {','.join(required)}")
    _check_columns(columns, required, optional, f"{source}:{line}")
    rows = tuple(found)
    for line, cells in rows:
        if len(cells) != len(columns):
            raise InputError(
                f"{source}:{line}: has {len(cells)} cells where the first line names {len(columns)} columns"
            )
    return Table(source, tuple(columns), rows)


def _records(text: str, source: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines with content."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if any(stripped) and not stripped[0].startswith("#"):
                yield reader.line_num, stripped
    except csv.Error as error:
        raise InputError(f"{source}:{reader.line_num}: not CSV: {error}") from None


def _check_columns(columns: list[str], required: Sequence[str], optional: Sequence[str] | None, where: str) -> None:
    """Raise InputError for the first thing that is wrong with the line of column names."""
    for name in columns:
        if not name:
            raise InputError(f"{where}: a column has no name")
        if columns.count(name) > 1:
            raise InputError(f"{where}: column {quoted(name)} is there twice")
        if optional is not None and name not in {*required, *optional}:
            raise InputError(f"{where}: unknown column {quoted(name)}; {suggest(name, [*required, *optional])}")
    for name in required:
        if name not in columns:
            raise InputError(
                f"{where}: column {name!r} is missing; the first line must name {', '.join(required)}, between commas"
            )
