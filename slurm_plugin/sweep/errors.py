"""The errors of sweeps; the class says who must act."""

from __future__ import annotations


class SweepError(Exception):
    """Base of this package's errors."""


class InputError(SweepError):
    """A file, a setting or an argument is not what it should be: the person who wrote it must act."""


class SubmitError(SweepError):
    """Slurm refused a submission: the user must look at its message."""


class BusyError(SweepError):
    """Another process controls the sweep: the user must end that one, or let it go on."""


class SlurmUnavailable(SweepError):  # noqa: N818 (named for what is wrong, as elsewhere)
    """Slurm's commands are missing or slurmctld does not answer."""


class EnvironmentLacks(SweepError):  # noqa: N818
    """Something that the sweep needs is not installed; the message names it."""
