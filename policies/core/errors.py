"""Errors in the input of policies; the message names file, line or key."""


class PolicyError(Exception):
    """Base of this package's errors."""


class InputError(PolicyError):
    """A file, a setting or an argument is not what it should be: the person who wrote it must act."""


class SolverError(PolicyError):
    """An optimizer found no solution where one must exist: a bug, to be reported with its input."""


class SimulationError(PolicyError):
    """A policy asked for something impossible, such as more GPUs than a node has: a bug of the policy."""
