"""The checkpoint of a training job: save and restore, alone or as one of several ranks."""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from cadenza.sidecar import wire
from cadenza.sidecar.client import rng_state
from cadenza.sidecar.client.bootstrap import process
from cadenza.sidecar.client.checkpoints import reading, writing
from cadenza.sidecar.client.checkpoints.collective import Ranks
from cadenza.sidecar.client.checkpoints.directory import Facts
from cadenza.sidecar.client.checkpoints.optimizers import OptimizerPart
from cadenza.sidecar.client.checkpoints.ownership import WriterLock, check_owner, owner_here
from cadenza.sidecar.client.checkpoints.parts import GeneratorPart, ModelPart, Part, fits, tensors_in
from cadenza.sidecar.client.checkpoints.periodic import Periodic
from cadenza.sidecar.client.checkpoints.reading import Loaded, Skipped
from cadenza.sidecar.client.checkpoints.resumable_sampler import ResumableSampler, latest
from cadenza.sidecar.client.checkpoints.round_trip import LeftOut, RoundTrips, ScheduleOrder
from cadenza.sidecar.client.checkpoints.staging import SHARDED, Staging
from cadenza.sidecar.client.checkpoints.step_units import NAMED, OWN, Restored, Units
from cadenza.sidecar.client.errors import CheckpointError, InUseError, MismatchError, SaveError, UsageError
from cadenza.sidecar.client.loader_workers import LoaderEnds, living_workers
from cadenza.sidecar.client.offload.held_signals import HeldSignals
from cadenza.sidecar.client.session.checkpoint_request import Saved
from cadenza.sidecar.client.session.savers import Place
from cadenza.sidecar.client.zip_equal import zip_equal

_log = logging.getLogger("cadenza.client")

UNUSED = "no sample of its ResumableSampler was counted: give it to the DataLoader, and take batches from batches()"
UNKEPT = "its batches come from a ResumableSampler that no keeper has: make one for all epochs, and give it as sampler="
LEFT_EARLY = (
    "its loop leaves epochs of the ResumableSampler before their end, and a start in the middle of one would not know "
    "where: give the sampler as many samples as an epoch has, or count steps instead of reading sampler.epoch"
)


class Checkpoint:
    """The last two checkpoints of a job in a directory; made by ``checkpoint()``.

    With several ranks every method is a collective call: all ranks call it, and it succeeds or fails on all. A rank
    that does not call it is named after ``patience_s``.
    """

    def __init__(
        self,
        directory: Path,
        parts: Mapping[str, Part],
        generators: Mapping[str, GeneratorPart],
        sampler: Any,
        *,
        background: bool,
        patience_s: float,
    ) -> None:
        self._directory, self._parts, self._generators, self._sampler = directory, parts, generators, sampler
        self._ranks = Ranks(patience_s)
        self._background = background
        self._staging = Staging(keep=background)
        self._lock = WriterLock(directory, owner_here(), self._displace)
        self._writer = writing.Writer(directory, self._ranks, self._lock)
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._last: Saved | None = None
        """The last complete checkpoint of this process."""
        self._saving = self._displaced = False
        self._later: int | None = None
        """Step of a save that began within another one, and is made after it."""
        self.skipped: tuple[Skipped, ...] = ()
        """Checkpoints that the last ``restore`` skipped, newest first, with the reasons."""
        self._requested: dict[Path, int] = {}
        """Checkpoints that Cadenza requested from this process, with their steps."""
        self._session = process.prepare()
        self._units = Units(lambda: self._session.trained)
        self._trips = RoundTrips(parts)
        self._left_out = LeftOut()
        self._schedules = ScheduleOrder(part.thing for part in parts.values())
        modules = [part.thing for part in parts.values() if isinstance(part, ModelPart)]
        for part in parts.values():
            if isinstance(part, OptimizerPart):
                part.modules = modules
        self._stopped = ""
        """The reason why nothing is requested any more."""
        self._looked_for_workers = False
        self._seen: tuple[int, ...] = ()
        """Versions of the state's tensors at the last save."""
        self._at_boundary: tuple[int, ...] = self._versions()
        """Versions at the last boundary that had something to decide."""
        self._periodic: Periodic | None = None
        self._batches = self._handed_out
        self._loader_ends = LoaderEnds()
        groups = [group for part in parts.values() for group in getattr(part.thing, "param_groups", ())]
        params = (one for group in groups for one in group["params"] if one.requires_grad and not is_lazy(one))
        self._tracked = next(params, None) if sampler is None else None
        """A parameter whose changes tell one step from the next, where no sampler does."""
        self._form: dict[str, Any] | None = None
        """Names and shapes at ``restore()``, which the next start has there, too."""
        self._registration = self._session.add_saver(
            self._save_on_request, self._may_save, holds=self._watched, away=True, unready="its keeper is being made"
        )
        if isinstance(sampler, ResumableSampler):
            sampler.on_next = self._session.next_batch
        for one in (sampler, *(part.thing for part in parts.values())):
            if isinstance(one, ResumableSampler):
                one.kept = True
        self._tell()
        self._session.looks.append(self._look)
        self._session.save_points.on_sample.append(self._left_out.look)
        self._session.memory_step = 0

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
        """Save the state as that of a step: a number that grows from save to save, in a unit of the script's own.

        Returns when the checkpoint is complete on the disk; with ``background`` when the state is copied to host
        memory, and a thread does the rest. Call it between an optimizer step and the next batch. Signal handlers run
        after it; a save within a save is made after it, too. Raises SaveError when it could not be written (with
        ``background``, at the next ``save``, ``wait`` or ``close``), InUseError when another process saves there,
        OtherJobError when the directory is another job's, and UsageError for state that cannot be restored; the
        earlier checkpoints stay.
        """
        step = _number(step)
        if self._saving:
            self._later = step
            return
        with self._alone():
            self.wait()
            self._ranks.roll_call("save()")
            self._units.saved(step)
            self._try_parts()
            self._stopped = self._stopped or self._outgrown()
            self._tell()
            captured = self._capture(step, self._staging)
            facts = self._facts(ordered=False)
            if self._background:
                self._begin(step, captured, facts)
            else:
                self._write(step, captured, facts)
            if self._units.undecided:
                self._await_boundary()
        if self._units.unit == OWN or self._session.automatic:
            self._session.own_save(self._registration, self._complete)
        self._catch_up(step)

    def restore(self, *, adopt: bool = False) -> Restored | None:
        """Set everything to the newest intact checkpoint and return its step, or None when there is none.

        The step is an ``int``, as the script last gave it, that knows its ``epoch`` and more. Parameters, buffers and
        optimizer groups stay the same objects. Damaged and unfinished checkpoints are skipped, logged, and listed in
        ``skipped``. Raises OtherJobError for the checkpoint of another job, unless ``adopt`` (or CADENZA_ADOPT=1 in
        the environment) says that this one takes it over, and LostCheckpointError when the job was moved with another
        checkpoint than the one that is there. Raises MismatchError, with nothing changed, when a name, shape or
        dtype differs, DamagedError when none is intact, InUseError when another process saves in the directory, and
        VersionError for a later format.
        """
        self._session.await_state()  # its memory
        with self._alone(restoring=True):
            # 1. Keep other writers out, and find the newest checkpoint that is intact on all ranks.
            self.wait()
            self._ranks.roll_call("restore()")
            known = self._writer.hold(make=False)
            search = reading.newest(self._directory, self._ranks)
            self.skipped = tuple(search.skipped)
            loaded = search.loaded
            # 2. Check on all ranks that it is this job's, and fits it; nothing is changed before.
            self._ranks.all_ranks(lambda: self._admit(loaded, adopt=adopt, known=known))
            self._form = self._form_here()
            if loaded is None:
                return None
            targets = self._ranks.all_ranks(lambda: self._check(loaded))
            # 3. Read sharded tensors in place.
            if targets:
                from cadenza.sidecar.client.checkpoints import sharded  # noqa: PLC0415 - a second of imports

                sharded.load(loaded.place.path / writing.SHARDS, targets, self._ranks.group)
            # 4. Set the other state, random numbers last: the rest may draw some.
            self._ranks.all_ranks(lambda: self._restore(loaded, targets))
            facts, path = loaded.facts, loaded.place.path
            self._units.restored(loaded.place.step, facts.unit, facts.boundaries)
            self._batches = self._handed_out
            self._tell()
            self._session.memory_step = 0
        self._session.arrival.restored(path, loaded.place.step)
        position = loaded.own["sampler"] if self._sampler is not None else None
        epoch = position.get("epoch") if isinstance(position, dict) else None
        epoch = epoch if isinstance(epoch, int) else None
        step = loaded.place.step
        return Restored(step, epoch=epoch, ordered=facts.ordered, boundaries=facts.boundaries, path=path)

    @property
    def step(self) -> int | None:
        """Step of a checkpoint requested now, as the script counts; None while only the script could name it."""
        return self._units.step

    def at(self, step: int) -> None:
        """Name the step of the present state; called in each step, it tells Cadenza how this script counts.

        A checkpoint that Cadenza requests carries the number that was named last.
        """
        version = 0 if self._tracked is None else self._tracked._version  # noqa: SLF001
        if self._units.unchecked:
            self._await_boundary()
            trained = self._seen != self._at_boundary or not self._seen
            self._units.at(_number(step), trained=trained, version=version)
        else:
            self._units.at(_number(step), version=version)
        if self._registration.unready or not self._registration.away or self._units.misplaced:
            self._try_parts()
            self._tell()

    def every(self, *, minutes: float) -> None:
        """Save by itself every some minutes, at a boundary, so that a crash does not go back to the last move.

        The state is copied to host memory, and a thread writes it. Only a script whose steps are known (see ``at``)
        is saved like this; one with another unit of its own saves by itself. An error is logged, not raised.
        """
        if minutes <= 0:
            raise UsageError(f"every(minutes={minutes}) must be positive")
        self._periodic = Periodic(minutes * 60, self._ranks)
        self._session.memory_step = 0

    def wait(self) -> None:
        """Wait for the save in the background; raise SaveError when it failed."""
        while (thread := self._thread) is not None:
            thread.join()
            if self._thread is thread:
                self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait like ``wait``, let other writers in, and free the host memory of background saves."""
        self._leave()
        try:
            self.wait()
        finally:
            self._lock.release()
            self._staging = Staging(keep=self._background)

    # --- one at a time -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self, *, restoring: bool = False) -> Iterator[None]:
        """Do one save or restore; Python's signal handlers, which may save too, run after a save."""
        if self._displaced:
            raise InUseError(
                f"{self._directory}: a later keeper of this process has taken over this directory; use one keeper for "
                "all state, or a directory for each"
            )
        with contextlib.nullcontext() if restoring else HeldSignals():
            if self._saving:
                raise InUseError(f"{self._directory}: a save or restore is under way there")
            self._saving = True
            try:
                yield
            finally:
                self._saving = False
                if restoring and self._later is not None:
                    self._later = None
                    _log.warning("%s: a save that began during restore() was left out", self._directory)

    def _catch_up(self, step: int) -> None:
        """Make the save that was put off; without other ranks, not one whose state is on the disk already."""
        later, self._later = self._later, None
        if later is not None and (later > step or self._ranks.size > 1):
            self.save(later)

    def _displace(self) -> None:
        """Give the directory up for a later keeper of this process."""
        if self._saving:
            raise InUseError(f"{self._directory}: another keeper of this process is saving there")
        with contextlib.suppress(CheckpointError, UsageError):
            self.wait()
        self._displaced = True
        self._leave()

    def _leave(self) -> None:
        """Take no further part in the session."""
        self._registration.withdraw()
        self._schedules.close()
        if self._periodic is not None:
            self._periodic.over()
        with contextlib.suppress(ValueError):
            self._session.looks.remove(self._look)
            self._session.save_points.on_sample.remove(self._left_out.look)

    # --- what is known of the script -----------------------------------------------------------------------

    @property
    def _handed_out(self) -> int:
        """Batches that the sampler has handed out in this process."""
        return self._sampler.handed_out if isinstance(self._sampler, ResumableSampler) else 0

    def _watched(self) -> list[object]:
        """Return the optimizers and modules whose gradients must be used up where a checkpoint is requested."""
        return [part.thing for part in self._parts.values()]

    def _await_boundary(self) -> None:
        """Look at the next boundary whether something was trained before it, from here on."""
        self._seen = self._versions()
        self._session.memory_step = 0

    def _versions(self) -> tuple[int, ...]:
        """Return numbers that change when an optimizer steps, or its GradScaler skips a step.

        Without an optimizer they are those of all state.
        """
        things = [part.thing for part in self._parts.values()]
        groups = [group for thing in things for group in getattr(thing, "param_groups", ())]
        tensors = [param for group in groups for param in group["params"]]
        for thing in things:
            if isinstance(thing, torch.amp.GradScaler):
                # One that is disabled, as on a CPU, has neither.
                scale = [getattr(thing, name, None) for name in ("_scale", "_growth_tracker")]
                tensors += [one for one in scale if one is not None]
            elif not groups and isinstance(thing, torch.nn.Module):
                tensors += [*thing.parameters(), *thing.buffers()]
            elif not groups and isinstance(thing, (torch.Tensor, Mapping)):
                tensors += tensors_in(thing)
        # Autograd's own count of changes in place: to compare contents would wait for the GPU. Inference tensors have
        # no such count.
        return tuple(tensor._version for tensor in tensors if not (is_lazy(tensor) or tensor.is_inference()))  # noqa: SLF001

    def _look(self) -> None:
        """Learn, at a boundary outside the hot loop, what is known of the steps; save if a periodic save is due."""
        try:
            self._learn()
        except Exception as error:  # noqa: BLE001 - the objects' own code; the training goes on
            _log.warning("%s: the state could not be looked at: %s", self._directory, error)
        if self._periodic is not None:
            self._look_at_clock(self._periodic)

    def _learn(self) -> None:
        """Learn what the last save or name of a step meant, and whether what is saved can be restored."""
        if self._units.undecided:
            self._at_boundary = self._versions()
            self._units.decide(changed=self._seen != self._at_boundary)
        if isinstance(self._sampler, ResumableSampler) and self._sampler.gives_epochs:
            self._units.follow(self._handed_out - self._batches)
        self._left_out.look_at_buffers(part.thing for part in self._parts.values() if isinstance(part, ModelPart))
        at_end = isinstance(self._sampler, ResumableSampler) and self._sampler.position >= self._sampler.length
        if self._schedules.look(at_epoch_end=at_end):
            self._session.memory_step = 0
        self._try_parts()
        self._tell()

    def _try_parts(self) -> None:
        """Try whether what is saved can be restored, once for each kind of object, while its state is here."""
        if self._trips.left and not self._session.away:
            self._trips.run()

    def _tell(self) -> None:
        """Tell the session whether a checkpoint can be requested, and why not."""
        units = self._units
        reason = self._stopped or "; ".join(self._trips.failures) or units.unknown or units.misplaced
        reason = reason or self._schedules.late
        if isinstance(self._sampler, ResumableSampler):
            unused = UNUSED if units.since and not self._sampler.used else ""
            left_early = LEFT_EARLY if self._sampler.gives_epochs and self._sampler.left_early else ""
            reason = reason or unused or left_early
        other = latest()
        reason = reason or (UNKEPT if units.since and other is not None and not other.kept else "")
        if not reason and not self._looked_for_workers:
            self._looked_for_workers = True
            reason = self._stopped = living_workers()
        self._registration.tell(reason, away=units.unit != OWN)

    def _may_save(self, place: Place) -> int:
        """Return the obstacle to a requested checkpoint at a boundary, as ``PASSED_…``; 0 if there is none."""
        self._tell()
        if self._registration.unready:
            return 0  # the order is given back with the reason
        if self._units.unit == OWN:
            return place.own_save(self._registration)
        sampler = self._sampler if isinstance(self._sampler, ResumableSampler) else None
        answer = place.obstacle(
            at_epoch_end=sampler is not None and sampler.at_epoch_end,
            before_next_batch=sampler is not None and sampler.in_batches,
        )
        if answer > 0 or (place.own is not None and self._registration in place.own):
            return answer
        if self._units.outdated:
            return wire.PASSED_UNNAMED
        # A sampler that is restored at its end has the rest of that epoch done again; nothing else has.
        return wire.PASSED_EPOCH_END if sampler is None and self._loader_ends.here() else answer

    @property
    def _at_epoch_end(self) -> bool:
        """True at the last batch of an epoch, as far as is known."""
        if isinstance(self._sampler, ResumableSampler):
            return self._sampler.at_epoch_end
        return self._loader_ends.here()

    def _form_here(self) -> dict[str, Any]:
        """Return names and shapes of modules, groups of optimizers and length of the data, as they are now."""
        parts = {name: one for name, one in self._parts.items() if isinstance(one, (ModelPart, OptimizerPart))}
        found: dict[str, Any] = {name: one.form() for name, one in parts.items()}
        return {**found, **({"sampler": self._sampler.length} if isinstance(self._sampler, ResumableSampler) else {})}

    def _outgrown(self) -> str:
        """Return why the next start could not restore what is saved now; "" if it can."""
        now = self._form_here() if self._form is not None else {}
        changed = next((name for name in now if not fits((self._form or {})[name], now[name])), None)
        return "" if changed is None else (
            f"{changed} has grown or changed since restore(), so the next start could not restore it: make the layers, "
            "groups of parameters and data of all stages before restore()"
        )  # fmt: skip

    def _look_at_clock(self, periodic: Periodic) -> None:
        """Save if a periodic save is due and this boundary is a save point; set the step of the next look."""
        session = self._session
        boundaries = session.trained
        step_s = session.sum_ns / 1e9 / boundaries if boundaries else 0.0

        def may() -> bool:
            return self._units.step is not None and not self._saving and not self._at_epoch_end

        try:
            if periodic.saves(session.step, step_s, self._watched, may):
                self._save_periodically()
        except Exception as error:  # noqa: BLE001 - the training goes on
            _log.error("the periodic save failed: %s", error)
        session.memory_step = min(session.memory_step, periodic.next_look(session.step, step_s))

    def _save_periodically(self) -> None:
        """Save in the background at this boundary."""
        step = self._units.step
        if step is None:
            return
        with self._alone():
            self.wait()
            self._ranks.roll_call("a periodic save", series="periodic")
            if not self._staging.keeps:
                self._staging = Staging(keep=True)
            self._begin(step, self._capture(step, self._staging), self._facts(ordered=False), raises=False)

    # --- saving --------------------------------------------------------------------------------------------

    def _save_on_request(self) -> Saved:
        """Save for Cadenza, with all ranks at one boundary, in the foreground: it is complete when this returns.

        State that is away is written from where it is, because the host's memory may be short.
        """
        with self._alone():
            try:
                self._ranks.roll_call("the save that Cadenza requests", series="request")
            except CheckpointError as error:
                self._stopped = str(error)  # the missing rank may be in any other collective
                self._tell()
                raise
            self.wait()
            if self._units.by_batches:
                self._units.follow(self._handed_out - self._batches)
            step = self._units.step
            self._stopped = self._stopped or self._outgrown()
            if step is None or self._stopped:
                self._tell()
                raise CheckpointError(
                    self._stopped or self._units.unknown or "only the script itself can number its checkpoint"
                )
            staging = Staging(keep=False) if self._session.away else self._staging
            saved = self._write(step, self._capture(step, staging), self._facts(ordered=True))
            self._requested[Path(saved.path)] = step
        try:
            self._catch_up(step)
        except (CheckpointError, UsageError) as error:
            _log.error("%s", error)
        return saved

    def _complete(self) -> Saved:
        """Return the script's own last save, complete on the disk."""
        self.wait()
        if self._last is None:
            raise SaveError("nothing was saved")
        return self._last

    def _facts(self, *, ordered: bool) -> Facts:
        """Return the meaning of a checkpoint at this boundary."""
        units = self._units
        unit = NAMED if units.named is not None else units.unit
        return Facts(unit, ordered=ordered, boundaries=units.boundaries, owner=owner_here())

    def _capture(self, step: int, staging: Staging) -> writing.Captured:
        """Copy the state; raise UsageError on every rank if it cannot be saved or differs between ranks."""
        # A job that has yielded saves here, too, and its tensors have no memory then.
        with self._session.host_copies():
            captured = self._ranks.all_ranks(lambda: self._capture_own(step, staging))
        position = captured.own["sampler"] if isinstance(self._sampler, ResumableSampler) else None
        # Replicated state has the same names, shapes and dtypes on every rank.
        lines = "\n".join(_lines(captured.shared, ""))
        drawn = zlib.crc32(json.dumps(captured.own["generators"], sort_keys=True).encode())
        told = self._ranks.gather((step, zlib.crc32(lines.encode()), position, drawn))
        *descriptions, drawn_by = ([one[index] for one in told] for index in range(4))
        captured.own["alike"] = len(set(drawn_by)) == 1
        texts = ("saves another step", "keeps state of other names or shapes", "is at another sample")
        for text, values in zip_equal(texts, descriptions):
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise UsageError(f"rank {rank} {text} than rank 0: the checkpoint would not fit together")
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
        generators = {name: part.capture() for name, part in self._generators.items()}
        # Each rank draws its own random numbers, for dropout and augmentation: they are no part of the shared file.
        own = {"rng": rng_state.capture(), "sampler": state, "generators": generators}
        return writing.Captured({"parts": shared}, own, staging.sharded)

    def _write(self, step: int, captured: writing.Captured, facts: Facts) -> Saved:
        """Write a captured state; a requested checkpoint of a later step does not prevent it."""
        too_far = (path for path, requested in self._requested.items() if requested > step)
        rejected = frozenset((*(one.path for one in self.skipped), *too_far))
        written = self._writer.write(step, captured, facts, rejected)
        self._last = Saved(step, written.nbytes, str(written.path))
        return self._last

    def _begin(self, step: int, captured: writing.Captured, facts: Facts, *, raises: bool = True) -> None:
        """Write a captured state in a thread, which keeps an error for the next call if that ``raises``."""

        def write() -> None:
            failure: Exception | None = None
            try:
                self._write(step, captured, facts)
            except (CheckpointError, UsageError) as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - the next call raises it
                failure = SaveError(f"step {step} is not saved: {error}")
            if failure is not None:
                _log.error("%s", failure)
                self._failure = failure if raises else None

        # No daemon: the interpreter's end waits for a write that is under way.
        self._thread = threading.Thread(target=write, name="cadenza-checkpoint")
        self._thread.start()

    # --- restoring -----------------------------------------------------------------------------------------

    def _admit(self, loaded: Loaded | None, *, adopt: bool, known: bool) -> None:
        """Raise unless what was found is this job's, and what it was moved with."""
        if loaded is not None and not adopt:
            check_owner(loaded.place.path, loaded.facts.owner, owner_here())
        if adopt:
            self._writer.owner = None
        found = None if loaded is None else loaded.place.path
        if found is None and known and self._session.arrival.receipt() is None:
            return  # the start before looked in this directory, too, and nothing was saved
        self._session.arrival.check(self._directory, found, None if loaded is None else loaded.place.step)

    def _check(self, loaded: Loaded) -> dict[str, torch.Tensor]:
        """Check that everything fits; return the tensors to read sharded ones into."""
        saved = loaded.shared["parts"]
        targets: dict[str, torch.Tensor] = {}
        for name, part in self._parts.items():
            if name not in saved:
                raise MismatchError(f"{name}: is not in {loaded.place.path}, which has {', '.join(saved)}")
            part.check(saved[name])
            targets.update(part.targets(saved[name]))
        for name, generator in self._generators.items():
            generator.check(loaded.own["generators"].get(name))
        names = self._parts.keys() | self._generators.keys()
        if ignored := (saved.keys() | loaded.own["generators"].keys()) - names:
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
        mine = loaded.facts.owner.job and loaded.facts.owner.job == owner_here().job
        for name, part in self._parts.items():
            saved = loaded.shared["parts"][name]
            part.restore(saved, read)
            if mine and isinstance(part, ModelPart):  # another job may freeze others
                part.freeze(saved)
        rank, step = self._ranks.rank, loaded.place.step
        for name, generator in self._generators.items():
            if rank < loaded.world_size or loaded.own["alike"]:
                generator.restore(loaded.own["generators"][name])
            else:
                generator.seed(rng_state.seed_of(loaded.own["rng"], step, rank))

        def draw_on() -> None:
            if rank < loaded.world_size:
                rng_state.restore(loaded.own["rng"])
            else:
                rng_state.seed_new_rank(loaded.own["rng"], step, rank)

        draw_on()
        if isinstance(self._sampler, ResumableSampler):  # a script may seed anew at the beginning of each epoch
            self._sampler.resume = draw_on


def _number(step: int) -> int:
    """Return a step as a plain number; it may be NumPy's."""
    try:
        return int(operator.index(step))
    except TypeError:
        raise UsageError(f"step {step!r} is not a whole number") from None


def _lines(value: Any, name: str) -> Iterable[str]:
    """Yield a line for each tensor of a tree."""
    if isinstance(value, torch.Tensor):
        yield f"{name} {list(value.shape)} {value.dtype}"
    elif isinstance(value, Mapping) and SHARDED in value:
        yield f"{name} {value['size']} {value['dtype']} sharded"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _lines(item, f"{name}/{key}")
