"""The log line of an action."""

from __future__ import annotations

import logging

from cadenza.policies.core.actions import Action, NodeAction, Outcome

log = logging.getLogger(__name__)


def log_action(action: Action, outcome: Outcome) -> None:
    """Log ``JOBID=… ACTION=… REASON=…`` (or ``NODE=…``), with the error of an action that failed, and as fields."""
    kind = type(action).__name__
    fields = {"CADENZA_ACTION": kind, "CADENZA_REASON": action.reason}
    if isinstance(action, NodeAction):
        target, fields["CADENZA_NODE"] = f"NODE={action.node}", action.node
    else:
        target, fields["CADENZA_JOB"] = f"JOBID={action.job}", str(action.job.id)
    failed = "" if outcome.ok else f" ERROR={outcome.error}"
    level = logging.INFO if outcome.ok else logging.WARNING
    log.log(level, "%s", f"{target} ACTION={kind} REASON={action.reason}{failed}", extra=fields)
