"""The agent's log: what jobs say comes as one printable line, and no job or user has more than its lines a minute."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from cadenza.policies.core.model import JobKey
from cadenza.policies.core.text import printable

LINES_A_MINUTE = 60
MINUTE_S = 60.0
KEPT_SOURCES = 1000
MAX_ERROR = 500
"""Characters of an error of the agent itself, which may name a path."""


class ForeignText(logging.Filter):
    """Cleans the arguments of each record, and drops those beyond their source's budget.

    The source of a record is the job that it names, or else the ``uid`` that it has as an attribute. Records of the
    agent itself have none, and are never dropped. The next line after a gap says how many are missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[Hashable, tuple[float, int]] = {}
        """Begin of the minute and number of lines of each source, by the records' own times."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a record beyond its budget; clean any other."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        named = next((one for one in arguments if isinstance(one, JobKey)), None)
        source = named or getattr(record, "uid", None)
        missing = 0 if source is None else self._count(source, record.created)
        if missing is None:
            return False
        record.args = tuple(_clean(one) for one in arguments) or record.args
        if record.exc_info:
            lines = logging.Formatter().formatException(record.exc_info).splitlines()
            record.exc_text = "\n".join(f"  {printable(line, MAX_ERROR)}" for line in lines)
        if missing:
            record.msg = f"{record.msg} ({missing} more lines about this in the minute before)"
        return True

    def _count(self, source: Hashable, now: float) -> int | None:
        """Count a line of a source; return the lines that were dropped before it, None if it is dropped too."""
        began, lines = self._lines.get(source, (now, 0))
        if now - began < MINUTE_S:
            self._lines[source] = began, lines + 1
            return 0 if lines < LINES_A_MINUTE else None
        if len(self._lines) >= KEPT_SOURCES:
            self._lines = {one: kept for one, kept in self._lines.items() if now - kept[0] < MINUTE_S}
        self._lines[source] = now, 1
        return max(0, lines - LINES_A_MINUTE)


def _clean(argument: object) -> object:
    """Return an argument of a record that holds no line break or control character."""
    if isinstance(argument, str):
        return printable(argument)
    return printable(str(argument), MAX_ERROR) if isinstance(argument, Exception) else argument
