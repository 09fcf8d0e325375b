"""A framework run's part in the process's session: joins it, ends steps in it, and leaves it as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cadenza.sidecar import client, wire
from cadenza.sidecar.client.bootstrap.process import current, prepare
from cadenza.sidecar.client.errors import UsageError
from cadenza.sidecar.client.session import checkpoint_request

if TYPE_CHECKING:
    from cadenza.sidecar.client.session.job_session import Session


class Participation:
    """Attaches with what ``state`` returns, which is asked again at each stop; a second ``join`` adds nothing."""

    def __init__(self, state: Callable[[], object]) -> None:
        self._state = state
        self._source = self._all  # one object, so that joining a script's session again registers nothing twice
        self._passing: object = None
        self._session: Session | None = None
        self._ours = False
        self._saves = False
        self.joined = False
        self.owed = False
        """Whether Cadenza has asked for a checkpoint that the framework has not saved yet."""

    def join(self, requeue_owner: str = "", *, saves: bool = False) -> None:
        """Attach, or add this run's state to the session that the script attached by itself.

        ``requeue_owner`` is who else requeues this job, for the agent to know before it asks for anything: it is
        then not asked for checkpoints. ``saves``: the framework saves one when it is ``owed``.
        """
        if not self.joined:
            known = current()
            self._ours = known is None or not known.explicit
            if requeue_owner:
                prepare().requeued_by(requeue_owner)
            self.joined = True  # before attach(), which moves the state when the job has no lease yet
            self._saves = saves and not requeue_owner
            if self._saves:
                prepare().set_saver(self._promise)
            self._session = client.attach(tensors=self._source)

    def boundary(self, samples: int = 0, passing: object = None, *, training: bool = True) -> None:
        """End a step, of training or not.

        ``passing`` is what lives for this step only and moves like the state: batch and outputs.
        """
        if self._session is not None:
            self._passing = passing
            try:
                self._session.boundary(samples, training=training)
            finally:
                self._passing = None

    def saved(self, path: Path, step: int) -> None:
        """Bring a checkpoint of the framework's to the disk, say that it is complete, and wait to be requeued."""
        if self.owed and self._session is not None:
            sync(path)
            self.owed = False
            self._session.checkpointed(str(path), step)

    def not_saved(self, error: Exception) -> None:
        """Say why there is no checkpoint; the training goes on."""
        self.owed = False
        if self._session is not None:
            self._session.checkpointed(error=str(error) or repr(error))

    def restart_clock(self) -> None:
        """Leave the time since the last boundary out of the iteration times: it was spent on something else."""
        if self._session is not None:
            self._session.restart_clock()

    def leave(self) -> None:
        """Detach, unless the script attached before this: then the session is the script's to end.

        When an exception ended the wait for the lease, the session stays: parts of the state may be away.
        """
        session, self._session = self._session, None
        self.joined = self.owed = False
        if session is not None and self._saves:
            session.set_saver(None)
        if session is not None and self._ours and session is current() and not _away(session):
            client.detach()

    def refuse_while_away(self, what: str) -> None:
        """Raise UsageError when the state is in host memory now: what is in place has no content then."""
        if self._session is not None and _away(self._session):
            raise UsageError(f"{what} was called while this job's state is in host memory: wait for its lease first")

    def _promise(self) -> object:
        """Take Cadenza's order: the framework saves at the end of its next step."""
        self.owed = True
        return checkpoint_request.DEFERRED

    def _all(self) -> dict[str, object]:
        """Return the state of this run, and nothing once it has left."""
        return {"state": self._state(), "passing": self._passing} if self.joined else {}


def sync(path: Path) -> None:
    """Bring a file, or a directory with all that is in it, to the disk: the frameworks leave that to the kernel."""
    for one in [path, *(path.rglob("*") if path.is_dir() else ()), path.parent]:
        handle = os.open(one, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _away(session: Session) -> bool:
    """Whether a session's state is in host memory."""
    return bool(session.words[wire.PAGE_STATE] == wire.STATE_YIELDED)
