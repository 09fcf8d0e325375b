"""Errors of data loading; each subclass says who must act."""

from __future__ import annotations

from cadenza.sidecar.client.errors import ClientError, UsageError


class DataUsageError(UsageError, ValueError):
    """The loader or the cache was given something it cannot take; the caller must act."""


class WorkerDiedError(ClientError, RuntimeError):
    """A loader's worker process ended while its batches were awaited; the message says how, and what to do."""


class CacheUnsafeError(ClientError):
    """The cache's place could belong to, or be written by, another user; nothing in it is read."""


class NotStorableError(ClientError):
    """An item holds something that the cache's format does not know; it is served uncached."""
