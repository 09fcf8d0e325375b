"""The errors of the policy service; the class says who must act."""

from __future__ import annotations


class ServiceError(Exception):
    """Base of all errors of this package."""


class StoreError(ServiceError):
    """The store's file cannot be used: the admin must look at its path, owner or disk."""


class AlreadyRunningError(ServiceError):
    """Another cadenzad owns this store: the admin must stop it or name another store."""


class RequestError(ServiceError):
    """An admin's request cannot be fulfilled: the message gives the reason."""


class HubError(ServiceError):
    """The link to the agents cannot be opened: the admin must look at the keys or the address."""
