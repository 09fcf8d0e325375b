"""Errors of the client, of checkpoints and of data loading; the docstring of each subclass names who must act."""

from __future__ import annotations


class ClientError(Exception):
    """Base of the client's own errors."""


class UsageError(ClientError):
    """attach() or ``cadenza run`` was called with a wrong argument; the caller must act."""


class AgentRefusedError(ClientError):
    """The agent does not accept this process; the message gives the reason, and who must act."""


class LinkLostError(ClientError):
    """The agent cannot be reached now; no action is needed, because the client retries by itself."""


class MoveError(ClientError):
    """The state could not be moved out; it is where it was, and the job continues."""


class RestoreError(ClientError):
    """The state cannot be brought back; it stays in host memory, or in its file, and the message gives the cause."""


class NoRoomError(RestoreError):
    """The lease is there but the GPU is too full for the state; the admin must find the process that occupies it."""


class CheckpointError(ClientError):
    """Base of the errors of saving and restoring."""


class SaveError(CheckpointError):
    """A checkpoint could not be written; earlier ones are untouched. The message names the file and the cause."""


class DamagedError(CheckpointError):
    """There are checkpoints and none of them is intact; the message gives the damage of each."""


class OtherJobError(CheckpointError):
    """The newest checkpoint is another job's; the message names that job, and how to adopt it on purpose."""


class InUseError(CheckpointError):
    """Another live process saves its checkpoints in this directory; the message names it."""


class LostCheckpointError(CheckpointError):
    """A moved job does not find the checkpoint that it was requeued with; its user must mend the path."""


class MismatchError(CheckpointError):
    """The checkpoint is intact and does not fit the job's objects; nothing was changed. The message names the key."""


class VersionError(CheckpointError):
    """The checkpoint has a later version of this format: upgrade. It is never skipped silently."""


class DataUsageError(UsageError, ValueError):
    """The loader or the cache was given a wrong argument; the caller must act."""


class WorkerDiedError(ClientError, RuntimeError):
    """A loader's worker process ended while its batches were awaited; the message gives the cause and a remedy."""


class CacheUnsafeError(ClientError):
    """Another user could own or write the cache's directory; nothing in it is read."""


class NotStorableError(ClientError):
    """An item holds a type that the cache's format cannot store; it is served uncached."""
