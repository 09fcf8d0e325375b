"""Log lines of the service for journald, on standard error."""

from __future__ import annotations

import logging
import os

from cadenza.policies.core.actions import Action, NodeAction, Outcome


def set_up_logging(*, debug: bool) -> None:
    """Configure the root logger of a daemon; journald adds time and name itself."""
    journal = "JOURNAL_STREAM" in os.environ
    form = "%(levelname)s %(message)s" if journal else "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, format=form)


def action_line(action: Action, outcome: Outcome) -> str:
    """Return ``JOBID=… ACTION=… REASON=…`` (or ``NODE=…``), with the error of an action that failed."""
    target = f"NODE={action.node}" if isinstance(action, NodeAction) else f"JOBID={action.job}"
    failed = "" if outcome.ok else f" ERROR={outcome.error}"
    return f"{target} ACTION={type(action).__name__} REASON={action.reason}{failed}"
