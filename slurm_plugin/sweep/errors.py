"""Errors of sweeps; the class names who must act."""

from __future__ import annotations


class SweepError(Exception):
    """Base of this package's errors."""


class InputError(SweepError):
    """Wrong file, setting or argument: its author must act."""


class SubmitError(SweepError):
    """Slurm refused a submission: the user must read its message."""


class BusyError(SweepError):
    """Another process controls the sweep: the user must end it or let it continue."""


class SlurmUnavailable(SweepError):  # noqa: N818 (named for what is wrong, as elsewhere)
    """Slurm's commands are missing or slurmctld does not answer."""


class EnvironmentLacks(SweepError):  # noqa: N818
    """Missing package that the sweep needs; the message names it."""
