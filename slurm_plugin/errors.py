"""Errors of the Slurm side; the class says who must act, and has the exit code."""

from __future__ import annotations

from cadenza.policies.core.errors import CadenzaError

NO_ROUND = "no round is on record yet: is cadenzad running?"


class GatewayError(CadenzaError):
    """Base of the errors between the service and Slurm."""


class SlurmUnavailable(GatewayError):  # noqa: N818
    """No answer from slurmctld, or none in time. The admin looks at slurmctld; the next round tries again."""

    exit_code = 3


class WorkerLost(SlurmUnavailable):
    """The worker process hung, died or answered nonsense; the next request starts a new one."""


class WorkerHung(WorkerLost):
    """The worker did not answer in time and has been ended; asking again at once would wait as long again."""


class NotAuthorized(GatewayError):  # noqa: N818
    """Slurm does not let our user do this. The admin grants the AdminLevel that the message names."""


class StaleState(GatewayError):  # noqa: N818
    """The job or node has changed since the snapshot. No one has to act: the next round reads the new state."""


class ActionRefused(GatewayError):  # noqa: N818
    """Slurm understood and refused; ``errno`` is Slurm's number, see slurm_errno.h."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class NotForSlurm(GatewayError):  # noqa: N818
    """The caller gave the Slurm side an action that the agents carry out."""


class ServiceError(CadenzaError):
    """Base of the service's errors, and its refusal of a request."""


class StoreError(ServiceError):
    """The store's file cannot be used: the admin must look at its path, owner or disk."""

    exit_code = 3


class AlreadyRunningError(ServiceError):
    """Another cadenzad owns this store: the admin must stop it or name another store."""


class RequestError(ServiceError):
    """An admin's request cannot be fulfilled: the message gives the reason."""

    exit_code = 2


class HubError(ServiceError):
    """The link to the agents cannot be opened: the admin must look at the keys or the address."""

    exit_code = 3


class SubmitError(CadenzaError):
    """Slurm refused a submission: the user must read its message."""


class BusyError(CadenzaError):
    """Another process controls the sweep: the user must end it or let it continue."""
