"""The checkpoint of a training job: save and restore, alone or as one of several ranks."""

from __future__ import annotations

import json
import logging
import threading
import zlib
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from cadenza.sidecar.client import rng_state
from cadenza.sidecar.client.bootstrap import process
from cadenza.sidecar.client.checkpoints import reading, writing
from cadenza.sidecar.client.checkpoints.collective import Ranks
from cadenza.sidecar.client.checkpoints.parts import Part
from cadenza.sidecar.client.checkpoints.reading import Loaded, Skipped
from cadenza.sidecar.client.checkpoints.resumable_sampler import ResumableSampler
from cadenza.sidecar.client.checkpoints.staging import SHARDED, Staging
from cadenza.sidecar.client.errors import CheckpointError, MismatchError, SaveError, UsageError
from cadenza.sidecar.client.session.checkpoint_request import Saved

BARRIER_TIMEOUT = timedelta(seconds=60)
"""Longest wait of the ranks for each other when Cadenza requests a checkpoint; all are at one boundary already."""

_log = logging.getLogger("cadenza.client")


class Checkpoint:
    """The last two checkpoints of a job in a directory; made by ``checkpoint()``.

    With several ranks every method is a collective call: all ranks call it, and it succeeds or fails on all.
    """

    def __init__(self, directory: Path, parts: Mapping[str, Part], sampler: Any, *, background: bool) -> None:
        self._directory, self._parts, self._sampler = directory, parts, sampler
        self._ranks = Ranks()
        self._background = background
        self._staging = Staging(keep=background)
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.skipped: tuple[Skipped, ...] = ()
        """Checkpoints that the last ``restore`` skipped, newest first, with the reasons."""
        self._requested: dict[Path, int] = {}
        """Checkpoints that Cadenza requested from this process, with their steps as counted here."""
        self._session = process.prepare()
        self._registration = self._session.add_saver(self._save_on_request, away=True)
        self._anchor = (0, self._session.trained)
        """A step that the script named, and the session's count of training steps at that time."""
        self._named_step: int | None = None

    def __enter__(self) -> Checkpoint:  # noqa: PYI034 - typing.Self came with Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an error of a save does not replace one that is being raised."""
        try:
            self.close()
        except CheckpointError:
            if error is None:
                raise

    def save(self, step: int) -> None:
        """Save the state as that of a step: a number that grows from save to save.

        Returns when the checkpoint is complete on the disk; with ``background`` when the state is copied to host
        memory, and a thread does the rest. Call it between an optimizer step and the next batch. Raises
        SaveError when it could not be written (with ``background``, at the next ``save``, ``wait`` or ``close``),
        and UsageError for state that cannot be restored; the earlier checkpoints stay.
        """
        self.wait()
        self._compare(step)
        captured = self._capture(step, self._staging)
        if not self._background:
            self._write(step, captured)
            return
        task = (step, captured)
        self._thread = threading.Thread(target=self._write_in_background, args=task, name="cadenza-checkpoint")
        self._thread.start()

    def restore(self) -> int | None:
        """Set everything to the newest intact checkpoint and return its step, or None when there is none.

        Parameters, buffers and optimizer groups stay the same objects. Damaged and unfinished checkpoints are
        skipped, logged, and listed in ``skipped``. Raises MismatchError, with nothing changed, when a name, shape or
        dtype differs, DamagedError when none is intact, VersionError for a later format.
        """
        # 1. Find the newest checkpoint that is intact on all ranks, once the state has its memory.
        self._session.await_state()
        self.wait()
        search = reading.newest(self._directory, self._ranks)
        self.skipped = tuple(search.skipped)
        loaded = search.loaded
        if loaded is None:
            return None
        # 2. Check on all ranks that it fits this job; nothing is changed before.
        targets = self._ranks.all_ranks(lambda: self._check(loaded))
        # 3. Read sharded tensors in place.
        if targets:
            from cadenza.sidecar.client.checkpoints import sharded  # noqa: PLC0415 - a second of imports that few need

            sharded.load(loaded.place.path / writing.SHARDS, targets, self._ranks.group)
        # 4. Set the other state, random numbers last: the rest may draw some.
        self._ranks.all_ranks(lambda: self._restore(loaded, targets))
        self._anchor = (loaded.place.step, self._session.trained)
        return loaded.place.step

    @property
    def step(self) -> int:
        """Step of a checkpoint requested now: the one given to ``at``, else counted by boundaries."""
        named, trained = self._anchor
        return named + self._session.trained - trained if self._named_step is None else self._named_step

    def at(self, step: int) -> None:
        """Set the step of the present state, for scripts that call ``boundary()`` more or less than once a step."""
        if self._named_step is None:
            self._registration.ready = True
        self._named_step = step

    def wait(self) -> None:
        """Wait for the save in the background; raise SaveError when it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait like ``wait``, and free the host memory of background saves."""
        self._registration.withdraw()
        self.wait()
        self._staging = Staging(keep=self._background)

    def _compare(self, step: int) -> None:
        """Compare the script's step with the count of boundaries; if they differ, request no checkpoints any more."""
        counted = self.step
        if self._named_step is None and self._session.trained and step not in (counted, counted + 1):
            _log.warning(
                "step %d after %d boundaries from step %d on: Cadenza cannot count this job's steps and requests no "
                "checkpoints; call keeper.at(step) in each step", step, self._session.trained, self._anchor[0],
            )  # fmt: skip
            self._registration.ready = False

    def _save_on_request(self) -> Saved:
        """Save for Cadenza, with all ranks at one boundary, in the foreground: it is complete when this returns.

        State that is away is written from where it is, because the host's memory may be short.
        """
        try:
            self._ranks.barrier(BARRIER_TIMEOUT)
        except CheckpointError:
            self._registration.ready = False  # the missing rank may be in any other collective
            raise
        self.wait()
        step = self.step
        staging = Staging(keep=False) if self._session.away else self._staging
        written = self._write(step, self._capture(step, staging))
        self._requested[written.path] = step
        return Saved(step, written.nbytes, str(written.path))

    def _capture(self, step: int, staging: Staging) -> writing.Captured:
        """Copy the state; raise UsageError on every rank if it cannot be saved or differs between ranks."""
        with self._session.host_copies():
            captured = self._ranks.all_ranks(lambda: self._capture_own(step, staging))
        position = captured.own["sampler"] if isinstance(self._sampler, ResumableSampler) else None
        # Replicated state has the same names, shapes and dtypes on every rank.
        lines = "\n".join(_lines(captured.shared, ""))
        descriptions = self._ranks.gather((zlib.crc32(lines.encode()), position))
        for rank, one in enumerate(descriptions):
            if one != descriptions[0]:
                other_form = one[0] != descriptions[0][0]
                difference = "keeps state of other names or shapes" if other_form else "is at another sample"
                raise UsageError(f"rank {rank} {difference} than rank 0: the checkpoint would not fit together")
        return captured

    def _capture_own(self, step: int, staging: Staging) -> writing.Captured:
        """Copy this rank's state to host memory."""
        if step < 0:
            raise UsageError(f"step {step} is negative")
        staging.begin()
        shared = {name: staging.take(part.capture(), name) for name, part in self._parts.items()}
        staging.finish()
        state = None if self._sampler is None else self._sampler.state_dict()
        try:
            unchanged = json.loads(json.dumps(state)) == state
        except (TypeError, ValueError) as error:
            raise UsageError(f"sampler: its state_dict() is not plain JSON: {error}") from None
        if not unchanged:
            raise UsageError("sampler: its state_dict() changes when written as JSON (keys must be text, no tuples)")
        own = {"rng": rng_state.capture(), "sampler": state}
        return writing.Captured({"parts": shared}, own, staging.sharded)

    def _write(self, step: int, captured: writing.Captured) -> writing.Written:
        """Write a captured state; a requested checkpoint whose step was counted too high does not prevent it."""
        too_far = (path for path, counted in self._requested.items() if counted > step)
        rejected = frozenset((*(one.path for one in self.skipped), *too_far))
        return writing.write(self._directory, step, captured, self._ranks, rejected)

    def _write_in_background(self, step: int, captured: writing.Captured) -> None:
        """Write in the thread, and keep an error for the next call."""
        try:
            self._write(step, captured)
        except CheckpointError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - the next call raises it
            self._failure = error if isinstance(error, UsageError) else SaveError(f"step {step} is not saved: {error}")
        if self._failure is not None:
            _log.error("%s", self._failure)

    def _check(self, loaded: Loaded) -> dict[str, torch.Tensor]:
        """Check that everything fits; return the tensors to read sharded ones into."""
        saved = loaded.shared["parts"]
        targets: dict[str, torch.Tensor] = {}
        for name, part in self._parts.items():
            if name not in saved:
                raise MismatchError(f"{name}: is not in {loaded.place.path}, which has {', '.join(saved)}")
            part.check(saved[name])
            targets.update(part.targets(saved[name]))
        if ignored := saved.keys() - self._parts.keys():
            _log.warning("checkpoint %s also has %s: not restored", loaded.place.path, ", ".join(sorted(ignored)))
        self._check_sampler(loaded)
        return targets

    def _check_sampler(self, loaded: Loaded) -> None:
        """Check that the position is valid for this number of ranks."""
        state = loaded.own["sampler"]
        if self._sampler is None or (state is not None and isinstance(self._sampler, ResumableSampler)):
            return
        if state is None:
            raise MismatchError(f"sampler: {loaded.place.path} was saved without one")
        if loaded.world_size != self._ranks.size:
            raise MismatchError(
                f"sampler: a {type(self._sampler).__qualname__}'s state of {loaded.world_size} ranks does not fit "
                f"{self._ranks.size}; use ResumableSampler"
            )

    def _restore(self, loaded: Loaded, read: Mapping[str, torch.Tensor]) -> None:
        """Set everything, random numbers last."""
        if self._sampler is not None:
            self._sampler.load_state_dict(loaded.own["sampler"])
        for name, part in self._parts.items():
            part.restore(loaded.shared["parts"][name], read)
        if self._ranks.rank < loaded.world_size:
            rng_state.restore(loaded.own["rng"])
        else:
            rng_state.seed_new_rank(loaded.own["rng"], loaded.place.step, self._ranks.rank)


def _lines(value: Any, name: str) -> Iterable[str]:
    """Yield a line for each tensor of a tree."""
    if isinstance(value, torch.Tensor):
        yield f"{name} {list(value.shape)} {value.dtype}"
    elif isinstance(value, Mapping) and SHARDED in value:
        yield f"{name} {value['size']} {value['dtype']} sharded"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _lines(item, f"{name}/{key}")
