"""The service's log: one event a line on standard error, where journald or a terminal takes it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

from cadenza.policies.core.actions import Action, DrainNode, OpenNode, Outcome
from cadenza.policies.round import RoundReport


def set_up(*, debug: bool) -> None:
    """Configure the root logger of a daemon; journald adds time and name itself."""
    journal = "JOURNAL_STREAM" in os.environ
    form = "%(levelname)s %(message)s" if journal else "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, format=form)


def action_lines(report: RoundReport) -> Iterator[str]:
    """Return one line for each action that left in a round."""
    for action, outcome in report.outcomes:
        yield action_line(action, outcome)


def action_line(action: Action, outcome: Outcome) -> str:
    """Return ``JOBID=… ACTION=… REASON=…`` (or ``NODE=…``), with the error of an action that failed."""
    target = f"NODE={action.node}" if isinstance(action, DrainNode | OpenNode) else f"JOBID={action.job}"
    failed = "" if outcome.ok else f" ERROR={outcome.error}"
    return f"{target} ACTION={type(action).__name__} REASON={action.reason}{failed}"
