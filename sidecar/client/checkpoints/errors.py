"""Errors of checkpoints; each subclass says who must act."""

from __future__ import annotations

from cadenza.sidecar.client.errors import ClientError


class CheckpointError(ClientError):
    """Base of the errors of saving and restoring."""


class SaveError(CheckpointError):
    """A checkpoint could not be written; those before it are untouched. Look at the file and cause it names."""


class DamagedError(CheckpointError):
    """There are checkpoints and none of them is intact; the message says what is wrong with each."""


class MismatchError(CheckpointError):
    """The checkpoint is intact and does not fit the job's objects; nothing was changed. It names the key."""


class VersionError(CheckpointError):
    """The checkpoint is of a later version of this format; upgrade, nothing is skipped silently."""
