"""Errors of all programs but the client in the job; the class says who must act, and has the exit code."""

from __future__ import annotations

from typing import ClassVar


class CadenzaError(Exception):
    """Base of our errors; the message says what is wrong and, where there is one, the next step."""

    exit_code: ClassVar[int] = 1


class InputError(CadenzaError):
    """A file, a setting or an argument is not what it should be: the person who wrote it must act."""

    exit_code = 2


class EnvironmentLacks(CadenzaError):  # noqa: N818 (named for what is wrong, as elsewhere)
    """The machine lacks something that the message names: the admin must provide it."""

    exit_code = 3


class SolverError(CadenzaError):
    """An optimizer found no solution where one must exist: a bug, to be reported with its input."""


class SimulationError(CadenzaError):
    """A policy asked for something impossible, such as more GPUs than a node has: a bug of the policy."""
