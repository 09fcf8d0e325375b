"""The rows of ``gpu_acceptance.py``: a check ends well, misses its limit, or cannot run here; each is a JSON line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

Figures = dict[str, Any]


class MissedError(Exception):
    """A limit of a check is missed."""


class NotRunError(Exception):
    """A check cannot run on this machine; the text says why."""


def require(condition: object, text: str) -> None:
    """Raise MissedError unless a condition holds."""
    if not condition:
        raise MissedError(text)


def tell(**message: Any) -> None:
    """Print one message to gpu_acceptance.py."""
    print(json.dumps(message), flush=True)


def chosen(names: Iterable[str], texts: str, letters: str) -> list[str]:
    """Return the names of rows that have one of some texts in them and begin with one of some letters."""
    return [name for name in names if name.split()[0] in letters and any(text in name for text in texts.split(","))]


def check(name: str, look: Callable[[Figures], None]) -> None:
    """Run a check, which writes its figures down, and print its row."""
    figures: Figures = {}
    outcome, why, began = "passed", "", time.monotonic()
    try:
        look(figures)
    except NotRunError as error:
        outcome, why = "not run", str(error)
    except MissedError as error:
        outcome, why = "FAILED", str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the row names it, and the next check runs
        outcome, why = "FAILED", f"{type(error).__name__}: {error}"[:300]
    tell(name=name, outcome=outcome, why=why, figures=figures, seconds=time.monotonic() - began)
