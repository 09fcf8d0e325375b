"""The callback for Lightning under both of its package names; imports neither."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from cadenza.sidecar.client.integrations.participation import (
    Participation,
    containers,
    samples_in,
    warn_of_other_owner,
)

CHECKPOINTS_KEPT = 2
"""Number of checkpoints kept of those that Cadenza requested."""


class LightningHooks:
    """Hooks that take part in turns while a Trainer fits, validates, tests or predicts.

    A boundary follows each optimizer step, that is, each accumulated batch. ``every_batch`` adds one after each
    batch in between, where stopping is safe too but gradients move as well. ``evaluation`` makes each batch of
    validation, test and prediction a boundary. With several ranks this needs the same number of batches on each rank,
    so prediction, whose sampler does not pad, is then left out. ``checkpoints`` is a directory that all nodes see: the
    Trainer saves there when Cadenza wants to move or resize the job, and the script continues from it by
    ``trainer.fit(..., ckpt_path=callback.newest())``.
    """

    def __init__(
        self, *, every_batch: bool = False, evaluation: bool = True, checkpoints: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__()
        self._directory = None if checkpoints is None else Path(checkpoints)
        self.every_batch = every_batch
        self.evaluation = evaluation
        self._trainer: Any = None
        self._part = Participation(self._state)
        self._optimizer_steps = 0
        self._samples = 0

    def newest(self) -> str | None:
        """Return the newest checkpoint that Cadenza requested, or None, for ``trainer.fit(ckpt_path=…)``."""
        checkpoints = self._saved()
        return str(checkpoints[-1]) if checkpoints else None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 (Lightning's signature)
        """Attach before the model is moved to the device, so that a job without the lease does not touch it."""
        self._trainer = trainer
        self._optimizer_steps = trainer.global_step
        self._samples = 0
        owner = warn_of_other_owner(trainer._accelerator_connector.cluster_environment)  # noqa: SLF001 (no public way)
        self._part.join(owner, saves=self._directory is not None and stage == "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Leave the process as it was."""
        self._part.leave()
        self._trainer = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave after an error too: Lightning calls no teardown then."""
        self.teardown(trainer, pl_module, type(exception).__name__)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Refuse a checkpoint from a signal handler while the state is away: it would have no content."""
        self._part.refuse_while_away("save_checkpoint()")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int  # noqa: ARG002
    ) -> None:  # fmt: skip
        """End a step when an optimizer has stepped."""
        self._samples += samples_in(batch)
        steps = trainer.global_step
        if self.every_batch or steps != self._optimizer_steps:
            stepped = steps != self._optimizer_steps
            self._optimizer_steps = steps
            samples, self._samples = self._samples, 0
            self._part.boundary(samples, passing=[outputs, batch])
            if stepped and self._part.checkpoint_due:  # within an accumulation the gradients would be missing
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
        try:
            trainer.save_checkpoint(part)
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
        trainer.strategy.barrier("cadenza")
        self._part.saved(path, trainer.global_step)

    def _saved(self) -> list[Path]:
        """Return the checkpoints that Cadenza requested, oldest first."""
        return sorted(self._directory.glob("step-*.ckpt")) if self._directory is not None else []

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
