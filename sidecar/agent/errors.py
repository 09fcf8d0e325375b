"""Errors of the agent; each subclass says who must act."""

from __future__ import annotations

from cadenza.policies.core.errors import CadenzaError


class AgentError(CadenzaError):
    """Base of the agent's own errors."""


class RefusedError(AgentError):
    """A peer's message cannot be accepted; the sender must act."""


class NotAuthorizedError(RefusedError):
    """The peer lacks the identity for this; the job's owner, or the admin, must act."""


class LeaseConflictError(AgentError):
    """Two leases would meet on one GPU: a fault of this program, never of its peers."""


class StateFileError(AgentError):
    """The leases cannot be read or written; the admin must look at the state directory."""
