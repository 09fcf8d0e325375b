"""Errors that keep a job from being profiled; bad input is an InputError of ``cadenza.policies.core.errors``."""

from __future__ import annotations


class ProfilerError(Exception):
    """Base of this package's errors."""


class CommandFailedError(ProfilerError):
    """The command to be profiled ended, never attached or stood still; its author must act."""

    def __init__(self, what: str, *said: str) -> None:
        super().__init__("\n".join((what, *said)))
        self.faults = (what, *(f"  {line}" for line in said))
        """The failure, and the last lines of the command's output."""


class EnvironmentLacks(ProfilerError):  # noqa: N818 (named for what is wrong, as elsewhere)
    """The machine lacks something; the message names it (exit code 3)."""
