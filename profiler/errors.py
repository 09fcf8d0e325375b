"""Error of a job that cannot be profiled; others are those of ``cadenza.policies.core.errors``."""

from __future__ import annotations

from cadenza.policies.core.errors import CadenzaError


class CommandFailedError(CadenzaError):
    """The command to be profiled ended, never attached or stood still; its author must act."""

    def __init__(self, what: str, *said: str) -> None:
        super().__init__("\n".join((what, *said)))
        self.faults = (what, *(f"  {line}" for line in said))
        """The failure, and the last lines of the command's output."""
