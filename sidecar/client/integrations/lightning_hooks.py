"""The callback for Lightning under both of its package names; imports neither."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from cadenza.sidecar.client import rng_state
from cadenza.sidecar.client.errors import SaveError
from cadenza.sidecar.client.integrations.framework_checkpoints import newest_of_lightning
from cadenza.sidecar.client.integrations.participation import (
    Participation,
    containers,
    samples_in,
    warn_of_other_owner,
)

CHECKPOINTS_KEPT = 2
"""Number of checkpoints kept of those that Cadenza requested."""
OTHERS = "other_directories.json"
"""File with the directories in which the Trainer's own callbacks save."""
PLACES = "cadenza_places"
"""Key of a checkpoint: the place of each rank in the data, and its random numbers."""
EACH_LAST = (
    "each step of this run is the last one of its epoch, or a validation follows it: Lightning does that work only "
    "after its callbacks, and would not do it again"
)


class LightningHooks:
    """Hooks that take part in turns while a Trainer fits, validates, tests or predicts.

    A boundary follows each optimizer step, that is, each accumulated batch. ``every_batch`` adds one after each
    batch in between, where stopping is safe too but gradients move as well. ``evaluation`` makes each batch of
    validation, test and prediction a boundary. With several ranks this needs the same number of batches on each rank,
    so prediction, whose sampler does not pad, is then left out. ``checkpoints`` is a directory that all nodes see: the
    Trainer saves there when Cadenza wants to move or resize the job, at a step that no validation follows and that is
    not the last of its epoch. The script continues by ``trainer.fit(..., ckpt_path=callback.newest())``. What other
    callbacks do after a batch is in such a checkpoint, what the module itself does in ``on_train_batch_end`` is not.
    """

    def __init__(
        self, *, every_batch: bool = False, evaluation: bool = True, checkpoints: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__()
        self._directory = None if checkpoints is None else Path(checkpoints).absolute()
        self.every_batch = every_batch
        self.evaluation = evaluation
        self._trainer: Any = None
        self._part = Participation(self._state)
        self._optimizer_steps = 0
        self._samples = 0
        self._begin: dict[str, Any] = {}
        """Random numbers at the beginning of this epoch's data."""
        self._place: Mapping[str, Any] = {}
        """Place in the data, with the random numbers, of the checkpoint that is loaded."""

    def newest(self) -> str | None:
        """Return the newest whole checkpoint, or None, for ``trainer.fit(ckpt_path=…)``.

        It is one that Cadenza requested, or one of the Trainer's own callbacks, such as ModelCheckpoint, from this run
        of the job or an earlier one.
        """
        found = newest_of_lightning(self._saved(), self._others())
        return None if found is None else str(found)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 (Lightning's signature)
        """Attach before the model is moved to the device, so that a job without the lease does not touch it."""
        self._trainer = trainer
        self._optimizer_steps = trainer.global_step
        self._samples = 0
        owner = warn_of_other_owner(trainer._accelerator_connector.cluster_environment)  # noqa: SLF001 (no public way)
        # The other callbacks' work after a batch comes before the save; the list may be in use at this moment.
        trainer.callbacks = sorted(trainer.callbacks, key=lambda one: (hasattr(one, "dirpath"), one is self))
        saves = self._directory is not None and stage == "fit"
        self._part.join(owner, saves=saves, at_epoch_end=self._at_epoch_end)
        if saves:
            self._note_first_data(trainer.fit_loop)

    def _note_first_data(self, loop: Any) -> None:
        """Have the random numbers noted where Lightning makes the first iterator of the data; it has no hook there."""
        load = loop._load_combined_loader_states  # noqa: SLF001 - the last thing before the iterator

        def noting() -> None:
            load()
            self._begin = rng_state.capture()

        loop._load_combined_loader_states = noting  # noqa: SLF001

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Note where else checkpoints of this run will be, and tell Cadenza which one it goes on from."""
        if self._directory is not None and trainer.is_global_zero:
            folders = (getattr(one, "dirpath", None) for one in trainer.callbacks)
            known = {*map(str, self._others()), *(os.path.abspath(folder) for folder in folders if folder)}  # noqa: PTH100
            with contextlib.suppress(OSError):  # a save reports what is wrong with its directory
                self._directory.mkdir(parents=True, exist_ok=True)
                beside = self._directory / f".{OTHERS}.{os.getpid()}"
                beside.write_text(json.dumps(sorted(known)), encoding="utf-8")
                beside.replace(self._directory / OTHERS)
        if trainer.ckpt_path and trainer.global_step:
            self._go_on(trainer.fit_loop)
            self._part.restored(trainer.ckpt_path, trainer.global_step)

    def _go_on(self, loop: Any) -> None:
        """Go on in the data, and with the random numbers, where the checkpoint was saved.

        Its batches of the epoch are loaded once more, as the Trainer of transformers does; a loader with a state of its
        own has gone on already.
        """
        place, self._place = self._place, {}
        if not place:
            return
        fetcher, batches = loop._data_fetcher, int(place["batches"])  # noqa: SLF001
        if all(hasattr(one, "load_state_dict") for one in fetcher.combined_loader.flattened):
            rng_state.restore(place["now"])
            return
        self._begin = dict(place["begin"])
        rng_state.restore(self._begin)
        iter(fetcher)
        for _ in range(batches):
            next(fetcher)
        fetcher.fetched -= batches  # Lightning adds them
        if batches:
            rng_state.restore(place["now"])

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Note the random numbers at the beginning of an epoch, whose data Lightning begins after this."""
        if trainer.current_epoch and not trainer.fit_loop.is_resuming:
            self._begin = rng_state.capture()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Note the place in the data of a checkpoint that is loaded."""
        places = checkpoint.get(PLACES, ())
        self._place = places[trainer.global_rank] if len(places) == trainer.world_size else {}

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Leave the process as it was."""
        self._part.leave()
        self._trainer, self._begin = None, {}

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave after an error too: Lightning calls no teardown then."""
        self.teardown(trainer, pl_module, type(exception).__name__)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Add the place in the data, and refuse while the state is away: a signal handler's would have no content."""
        self._part.refuse_while_away("save_checkpoint()")
        if self._begin:
            progress, now = trainer.fit_loop.epoch_loop.batch_progress, rng_state.capture()
            begin, batches = (now, 0) if progress.is_last_batch else (self._begin, progress.current.ready)
            place = {"begin": begin, "now": now, "batches": batches}
            places = [place] * trainer.world_size
            if trainer.world_size > 1:
                torch.distributed.all_gather_object(places, place)
            checkpoint[PLACES] = places

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int  # noqa: ARG002
    ) -> None:  # fmt: skip
        """End a step when an optimizer has stepped."""
        self._samples += samples_in(batch)
        steps = trainer.global_step
        if self.every_batch or steps != self._optimizer_steps:
            self._optimizer_steps = steps
            samples, self._samples = self._samples, 0
            self._part.boundary(samples, passing=[outputs, batch])
            if self._part.checkpoint_due:
                self._save(trainer)

    def on_validation_batch_end(self, *hook: Any, **named: Any) -> None:
        """Let the job stop between batches of the validation."""
        self._evaluated(*hook, **named)

    def on_validation_end(self, *_: Any) -> None:
        """Exclude a validation from the next step's time."""
        self._part.restart_clock()

    def on_test_batch_end(self, *hook: Any, **named: Any) -> None:
        """Let the job stop between batches of a test."""
        self._evaluated(*hook, **named)

    def on_predict_batch_end(self, trainer: Any, *hook: Any, **named: Any) -> None:
        """Let the job stop between batches of a prediction of one rank."""
        if trainer.world_size == 1:
            self._evaluated(trainer, *hook, **named)

    def _evaluated(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any, **__: Any) -> None:
        """End a batch of an evaluation."""
        del trainer, pl_module
        if self.evaluation:
            self._part.boundary(passing=[outputs, batch], training=False)

    def _save(self, trainer: Any) -> None:
        """Save a checkpoint by Lightning, on all ranks; a restore does not see one that fails.

        With several ranks an error ends the run, as in Lightning's own saves: the other ranks wait in its barrier.
        """
        path = (self._directory or Path()) / f"step-{trainer.global_step:08d}.ckpt"
        part = path.with_suffix(".part")
        if self._at_epoch_end():
            self._part.not_saved(SaveError(EACH_LAST))
            return
        try:
            trainer.save_checkpoint(part)
            _wait_until_written(trainer.strategy.checkpoint_io)
            if trainer.is_global_zero:
                part.rename(path)
                for old in self._saved()[:-CHECKPOINTS_KEPT]:
                    if old.is_dir():  # some strategies make a directory of a checkpoint
                        shutil.rmtree(old)
                    else:
                        old.unlink()
        except Exception as error:
            if trainer.world_size > 1:
                raise
            with contextlib.suppress(OSError):
                part.unlink()
            self._part.not_saved(error)
            return
        # Rank 0 alone renames the file: no other rank may name it before.
        trainer.strategy.barrier("cadenza")
        self._part.saved(path, trainer.global_step)

    def _saved(self) -> list[Path]:
        """Return the checkpoints that Cadenza requested, oldest first."""
        return sorted(self._directory.glob("step-*.ckpt")) if self._directory is not None else []

    def _others(self) -> list[Path]:
        """Return the directories in which the Trainer's own callbacks save, as this run or an earlier one noted."""
        if self._directory is None:
            return []
        try:
            return [Path(one) for one in json.loads((self._directory / OTHERS).read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError):
            return []

    def _at_epoch_end(self) -> bool:
        """Return whether work of Lightning follows this step: the end of its epoch, or a validation."""
        loop, fetcher = self._trainer.fit_loop.epoch_loop, self._trainer.fit_loop._data_fetcher  # noqa: SLF001
        last = loop.batch_progress.is_last_batch or loop._num_ready_batches_reached()  # noqa: SLF001
        return bool(last or loop._should_check_val_fx(fetcher))  # noqa: SLF001

    def _state(self) -> dict[str, object]:
        """Return all state of this run that may be on its device."""
        trainer = self._trainer
        module = trainer.lightning_module
        others = {f"{index}:{type(one).__name__}": vars(one) for index, one in enumerate(trainer.callbacks)}
        return {
            "model": trainer.strategy.model,
            "module": module,
            "optimizers": list(trainer.optimizers),
            "scaler": getattr(trainer.precision_plugin, "scaler", None),
            "gathered": containers(module),
            "callbacks": {name: state for name, state in others.items() if state is not vars(self)},
        }


def _wait_until_written(io: Any) -> None:
    """Wait until a checkpoint plugin has written; raise SaveError for one of which that cannot be known.

    Lightning's AsyncCheckpointIO writes in a thread of its own, one checkpoint after the other.
    """
    for one in _layers(io):
        executor = getattr(one, "_executor", None)
        if executor is not None and hasattr(executor, "submit"):
            executor.submit(lambda: None).result()
        elif "async" in type(one).__name__.lower():
            name = type(one).__name__
            raise SaveError(f"{name} does not say when a checkpoint is on the disk: use AsyncCheckpointIO, or none")
        error = getattr(one, "_error", None)
        if isinstance(error, BaseException):
            raise SaveError(f"{type(one).__name__} could not write: {error}") from error


def _layers(io: Any) -> Iterator[Any]:
    """Yield a checkpoint plugin, and those that it wraps."""
    while io is not None:
        yield io
        io = getattr(io, "checkpoint_io", None)
