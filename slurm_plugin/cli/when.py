"""Moments on the command line: a time ago, or a date."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import click

UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
AGO = re.compile(r"(\d+(?:\.\d+)?)([mhdw])")


def moment(text: str, now_s: float, option: str) -> float:
    """Return a moment in seconds since the epoch; raise click.BadParameter, exit code 2, for anything else.

    >>> moment("2h", 10000.0, "--since"), moment("1970-01-02T00:00+00:00", 0.0, "--until")
    (2800.0, 86400.0)
    """
    ago = AGO.fullmatch(text)
    if ago is not None:
        return now_s - float(ago[1]) * UNITS_S[ago[2]]
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r}: a time ago (30m, 12h, 7d, 2w) or a date (2026-11-15, 2026-11-15T08:00)", param_hint=option
        ) from None


def local(at_s: float) -> str:
    """Return a moment as the reader's clock shows it."""
    return datetime.fromtimestamp(at_s, UTC).astimezone().strftime("%F %H:%M")
