"""A framework run's part in the process's session: joins it, ends steps in it, and leaves it as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cadenza.sidecar import client, wire
from cadenza.sidecar.client.errors import UsageError
from cadenza.sidecar.client.session import current

if TYPE_CHECKING:
    from cadenza.sidecar.client.session import Session


class Participation:
    """Attaches with what ``state`` returns, which is asked again at each stop; a second ``join`` adds nothing."""

    def __init__(self, state: Callable[[], object]) -> None:
        self._state = state
        self._source = self._all  # one object, so that joining a script's session again registers nothing twice
        self._passing: object = None
        self._session: Session | None = None
        self._ours = False
        self.joined = False

    def join(self) -> None:
        """Attach, or add this run's state to the session that the script attached by itself."""
        if not self.joined:
            known = current()
            self._ours = known is None or known.automatic
            self.joined = True  # before attach(), which moves the state when the job has no lease yet
            self._session = client.attach(tensors=self._source)

    def boundary(self, samples: int = 0, passing: object = None) -> None:
        """End a step; ``passing`` is what lives for this step only and moves like the state: batch and outputs."""
        if self._session is not None:
            self._passing = passing
            try:
                self._session.boundary(samples)
            finally:
                self._passing = None

    def leave(self) -> None:
        """Detach, unless the script attached before this: then the session is the script's to end.

        When an exception ended the wait for the lease, the session stays: parts of the state may be away.
        """
        session, self._session = self._session, None
        self.joined = False
        if session is not None and self._ours and session is current() and not _away(session):
            client.detach()

    def refuse_while_away(self, what: str) -> None:
        """Raise UsageError when the state is in host memory now: what is in place has no content then."""
        if self._session is not None and _away(self._session):
            raise UsageError(f"{what} was called while this job's state is in host memory: wait for its lease first")

    def _all(self) -> dict[str, object]:
        """Return the state of this run, and nothing once it has left."""
        return {"state": self._state(), "passing": self._passing} if self.joined else {}


def _away(session: Session) -> bool:
    """Whether a session's state is in host memory."""
    return bool(session.words[wire.PAGE_STATE] == wire.STATE_YIELDED)
