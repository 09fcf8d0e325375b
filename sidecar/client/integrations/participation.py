"""A framework run's part in the process's session: join, end steps, leave; and the framework's state and requeue."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cadenza.sidecar import client, wire
from cadenza.sidecar.client.bootstrap.process import current, prepare
from cadenza.sidecar.client.errors import CheckpointError, UsageError
from cadenza.sidecar.client.loader_workers import living_workers
from cadenza.sidecar.client.session import checkpoint_request

if TYPE_CHECKING:
    from cadenza.sidecar.client.session.job_session import Session
    from cadenza.sidecar.client.session.savers import Place, Registration

CONTAINERS = (list, tuple, dict, set)
LIGHTNING = (
    "Lightning requeues this job by itself when Slurm signals it, so Cadenza takes turns in place and leaves "
    "requeueing to Lightning. To let Cadenza do it: Trainer(plugins=[SLURMEnvironment(auto_requeue=False)])"
)
SUBMITIT = (
    "submitit requeues this job by itself when Slurm signals it, so Cadenza takes turns in place and leaves "
    "requeueing to submitit. To let Cadenza do it, submit the training script with sbatch --cadenza instead"
)

_log = logging.getLogger("cadenza.client")


class Participation:
    """A run's part in the session; ``state`` returns its tensors at each stop; a second ``join`` adds nothing."""

    def __init__(self, state: Callable[[], object]) -> None:
        self._state = state
        self._source = self._all  # one object, so that joining a script's session again registers nothing twice
        self._passing: object = None
        self._session: Session | None = None
        self._registration: Registration | None = None
        self._ours = False
        self._saves = False
        self.joined = False
        self.checkpoint_due = False
        """True after Cadenza has requested a checkpoint, until the framework has saved it."""

    def join(self, requeue_owner: str = "", *, saves: bool = False, at_epoch_end: Callable[[], bool] = bool) -> None:
        """Attach, or add this run's state to the session that the script attached by itself.

        ``requeue_owner`` is a framework that requeues this job; the agent then requests no checkpoints. With
        ``saves`` the framework saves one when ``checkpoint_due`` is true; ``at_epoch_end`` returns True where work of
        its own is still to come.
        """
        if not self.joined:
            existing = current()
            self._ours = existing is None or not existing.explicit
            if requeue_owner:
                prepare().requeued_by(requeue_owner)
            self.joined = True  # before attach(), which moves the state when the job has no lease yet
            self._saves = saves and not requeue_owner
            if self._saves:

                def may(place: Place) -> int:
                    return place.obstacle(at_epoch_end=at_epoch_end(), after_evaluation=True)

                self._registration = prepare().add_saver(self._defer, may, holds=self._state)
            self._session = client.attach(tensors=self._source)

    def boundary(self, samples: int = 0, passing: object = None, *, training: bool = True) -> None:
        """End a step, of training or not.

        ``passing`` are tensors that live for this step only, batch and outputs; they move like the state.
        """
        if self._session is not None:
            self._passing = passing
            try:
                self._session.boundary(samples, training=training)
            finally:
                self._passing = None

    def saved(self, path: Path, step: int) -> None:
        """Sync the framework's checkpoint to the disk, report it, and wait for the requeue."""
        if self.checkpoint_due and self._session is not None:
            sync(path)
            self.checkpoint_due = False
            self._session.checkpointed(str(path), step)

    def not_saved(self, error: Exception) -> None:
        """Report that there is no checkpoint; the training continues."""
        self.checkpoint_due = False
        if self._session is not None:
            self._session.checkpointed(error=str(error) or repr(error))

    def refuse(self, reason: str) -> None:
        """Take no more requests for a checkpoint."""
        if self._registration is not None:
            self._registration.tell(reason)

    def restored(self, path: object, step: int) -> None:
        """Say that this run goes on from a checkpoint that the framework has loaded."""
        if self._session is not None:
            self._session.restored(path, step)

    def restart_clock(self) -> None:
        """Exclude the time since the last boundary from the iteration times: it was not spent on training."""
        if self._session is not None:
            self._session.restart_clock()

    def leave(self) -> None:
        """Detach, unless the script attached before: then the script ends the session.

        When an exception ended the wait for the lease, the session stays, because parts of the state may be away.
        """
        session, self._session = self._session, None
        self.joined = self.checkpoint_due = False
        if self._registration is not None:
            self._registration.withdraw()
            self._registration = None
        if session is not None and self._ours and session is current() and not _away(session):
            client.detach()

    def refuse_while_away(self, call: str) -> None:
        """Raise UsageError when the state is in host memory: the tensors have no content then."""
        if self._session is not None and _away(self._session):
            raise UsageError(f"{call} was called while this job's state is in host memory: wait for its lease first")

    def _defer(self) -> object:
        """Accept Cadenza's request: the framework saves at the end of its next step."""
        if (reason := living_workers()) and self._registration is not None:
            self._registration.tell(reason)
            raise CheckpointError(reason)
        self.checkpoint_due = True
        return checkpoint_request.DEFERRED

    def _all(self) -> dict[str, object]:
        """Return the state of this run, and nothing once it has left."""
        return {"state": self._state(), "passing": self._passing} if self.joined else {}


def sync(path: Path) -> None:
    """Sync a file, or a directory with its contents, to the disk; the frameworks leave this to the kernel."""
    for one in [path, *(path.rglob("*") if path.is_dir() else ()), path.parent]:
        handle = os.open(one, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _away(session: Session) -> bool:
    """Return whether a session's state is in host memory."""
    return bool(session.words[wire.PAGE_STATE] == wire.STATE_YIELDED)


# --- the framework's state ---------------------------------------------------------------------------------


def containers(module: torch.nn.Module) -> dict[str, object]:
    """Return the lists, dicts and tuples that a module and its children keep as plain attributes, by name.

    Collecting metrics, and the outputs that a LightningModule gathers for the end of an epoch, are kept there.
    """
    return {
        f"{path}.{key}" if path else key: value
        for path, child in module.named_modules()
        for key, value in vars(child).items()
        if isinstance(value, CONTAINERS) and value and not key.startswith("_")
    }


def wrapper(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the DistributedDataParallel around a module, if any; a stop must know its gradient buckets."""
    kind = torch.nn.parallel.DistributedDataParallel
    # isinstance() would ask `__class__`, in which a script's lazy objects run code of their own.
    wrappers = (thing for thing in gc.get_objects() if issubclass(type(thing), kind))
    return next((one for one in wrappers if one.module is module), None)


def samples_in(batch: object) -> int:
    """Return the length of a batch's first tensor, 0 when it has none.

    >>> samples_in({"text": torch.zeros(4, 7), "label": torch.zeros(4)})
    4
    """
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 0
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(parts, (list, tuple)):
        return next(filter(None, map(samples_in, parts)), 0)
    return 0


# --- requeue by the framework ------------------------------------------------------------------------------


def other_owner(cluster_environment: object = None) -> str | None:
    """Return the message about a framework that requeues this job, if one does.

    It is Lightning's SLURMEnvironment with ``auto_requeue``, its default under srun, or submitit, which marks its
    jobs by ``SUBMITIT_EXECUTOR``. Their signal handlers stay as they are; Cadenza's client has none.
    """
    if getattr(cluster_environment, "auto_requeue", False):
        return LIGHTNING
    return SUBMITIT if os.environ.get("SUBMITIT_EXECUTOR") == "slurm" else None


def warn_of_other_owner(cluster_environment: object = None) -> str:
    """Warn in a Slurm job that a framework requeues it; return the framework's name on the wire, "" for none."""
    message = other_owner(cluster_environment)
    if message and os.environ.get("SLURM_JOB_ID"):
        _log.warning(message)
    return {LIGHTNING: "lightning", SUBMITIT: "submitit"}.get(message or "", "")
