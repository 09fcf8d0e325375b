"""Errors of the client; each subclass says who must act."""

from __future__ import annotations


class ClientError(Exception):
    """Base of the client's own errors."""


class UsageError(ClientError):
    """attach() or ``cadenza run`` was called with something it cannot take; the caller must act."""


class AgentRefusedError(ClientError):
    """The agent does not take this process; its message says why, and who must act."""


class LinkLostError(ClientError):
    """The agent cannot be reached now; nobody must act, the client tries again by itself."""


class MoveError(ClientError):
    """The state could not be moved out; it is where it was, and the job goes on."""


class RestoreError(ClientError):
    """The lease is there but the GPU has no room for the state; the admin must look at what occupies it."""
