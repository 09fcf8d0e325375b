"""``CadenzaTrainerCallback`` for ``transformers.Trainer``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cadenza.sidecar.client.errors import SaveError, UsageError
from cadenza.sidecar.client.integrations import MissingFrameworkError
from cadenza.sidecar.client.integrations.framework_checkpoints import newest_of_trainer
from cadenza.sidecar.client.integrations.participation import Participation, containers, warn_of_other_owner, wrapper
from cadenza.sidecar.client.loader_workers import accelerate_at_end

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length
except ImportError as error:
    raise MissingFrameworkError("transformers", error) from error

__all__ = ["CadenzaTrainerCallback"]

STREAM = "its training data have no length, and the Trainer would not find its place in them after their first pass"


class CadenzaTrainerCallback(TrainerCallback):  # type: ignore[misc]  # untyped where the extra is not installed
    """Lets a Trainer's job take turns on its GPU: ``Trainer(..., callbacks=[CadenzaTrainerCallback()])``.

    A boundary follows each optimizer step, when its gradients are gone. ``every_batch`` adds one after each batch of
    an accumulation, where gradients move as well. ``evaluation`` makes each batch of an evaluation or prediction a
    boundary; with several ranks each must evaluate the same number of batches, as they do by default. Set
    ``checkpoints``, to True or to the Trainer's output directory, if the script resumes by
    ``trainer.train(resume_from_checkpoint=CadenzaTrainerCallback.newest(directory))``: the Trainer then saves there
    when Cadenza wants to move or resize the job, after a step that is not the last of its epoch, or after its epoch.
    """

    def __init__(
        self,
        *,
        every_batch: bool = False,
        evaluation: bool = True,
        checkpoints: bool | str | os.PathLike[str] | None = False,
    ) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.every_batch = every_batch
        self.evaluation = evaluation
        self._run: dict[str, object] = {}
        self._training = False
        self._at_end = False
        self._passes = 0
        """Passes over the data that this run has begun."""
        self._part = Participation(self._state)

    @staticmethod
    def newest(directory: str | os.PathLike[str]) -> str | None:
        """Return the newest whole checkpoint in a Trainer's output directory, or None; it skips unfinished ones."""
        found = newest_of_trainer(Path(directory).absolute())
        return None if found is None else str(found)

    def on_train_begin(self, args: Any, state: Any, control: Any, **run: Any) -> None:  # noqa: ARG002
        """Attach with the model, the optimizer, its scaler and the schedule."""
        named = None if isinstance(self.checkpoints, (bool, type(None))) else Path(self.checkpoints).absolute()
        if named is not None and named != Path(args.output_dir).absolute():
            raise UsageError(f"checkpoints={str(named)!r}: the Trainer saves in its output_dir, {args.output_dir!r}")
        self._training, self._passes = True, 0
        self._join(run)
        if state.global_step:
            self._part.restored(_place(args, state.global_step), state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a step; its number of samples is that of full batches."""
        batches = 1 if self.every_batch else args.gradient_accumulation_steps
        self._at_end = float(state.epoch).is_integer() or bool(accelerate_at_end())
        self._part.boundary(args.train_batch_size * batches)
        if not self._at_end:  # else the evaluation of the epoch is still to come
            control.should_save |= self._part.checkpoint_due

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Refuse requests from the second pass over data without a length on."""
        self._passes += 1
        if self._passes > 1 and not has_length(train_dataloader):
            self._part.refuse(STREAM)

    def on_epoch_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Have the Trainer save what Cadenza requested at an epoch's last step; it evaluates before it saves."""
        if self._part.checkpoint_due and not has_length(train_dataloader):
            self._part.not_saved(SaveError(STREAM))
        control.should_save |= self._part.checkpoint_due

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Report a checkpoint that Cadenza requested, once the Trainer has saved it on every rank."""
        self._part.saved(_place(args, state.global_step), state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Let the job stop within an accumulation, with ``every_batch``."""
        if self.every_batch:
            self._part.boundary(args.train_batch_size)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **run: Any) -> None:  # noqa: ARG002
        """Let the job stop between batches of an evaluation; attach if no training has."""
        if self.evaluation:
            self._join(run)
            self._part.boundary(training=False)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Leave after a separate evaluation; within a training, exclude it from the next step's time."""
        self._part.restart_clock()
        if not self._training:
            self._leave()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:  # noqa: ARG002
        """Leave after a separate prediction."""
        if not self._training:
            self._leave()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Leave the process as it was."""
        self._training = False
        self._leave()

    def _join(self, run: dict[str, Any]) -> None:
        """Attach once, with the objects that the Trainer passes to its callbacks."""
        if not self._part.joined:
            model = run["model"]
            state = {"model": model, "optimizer": run.get("optimizer"), "schedule": run.get("lr_scheduler")}
            self._run = {**state, "wrapper": wrapper(model)}
            saves = bool(self.checkpoints) and self._training
            self._part.join(warn_of_other_owner(), saves=saves, at_epoch_end=lambda: self._at_end)

    def _leave(self) -> None:
        """Leave the session and drop all references to this run."""
        self._part.leave()
        self._run = {}

    def _state(self) -> dict[str, object]:
        """Return the state of this run; the scaler is in Accelerate's optimizer."""
        model: Any = self._run["model"]
        schedule = self._run["schedule"]
        return {**self._run, "schedule": vars(schedule) if schedule else None, "gathered": containers(model)}


def _place(args: Any, step: int) -> Path:
    """Return where a Trainer keeps its checkpoint of a step."""
    return Path(args.output_dir).absolute() / f"{PREFIX_CHECKPOINT_DIR}-{step}"
