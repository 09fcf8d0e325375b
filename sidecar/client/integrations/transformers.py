"""``CadenzaTrainerCallback`` for ``transformers.Trainer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cadenza.sidecar.client.integrations import MissingFrameworkError
from cadenza.sidecar.client.integrations.participation import Participation, containers, warn_of_other_owner, wrapper

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise MissingFrameworkError("transformers", error) from error

__all__ = ["CadenzaTrainerCallback"]


class CadenzaTrainerCallback(TrainerCallback):  # type: ignore[misc]  # untyped where the extra is not installed
    """Lets a Trainer's job take turns on its GPU: ``Trainer(..., callbacks=[CadenzaTrainerCallback()])``.

    A boundary follows each optimizer step, when its gradients are gone. ``every_batch`` adds one after each batch of
    an accumulation, where gradients move as well. ``evaluation`` makes each batch of an evaluation or prediction a
    boundary; with several ranks each must evaluate the same number of batches, as they do by default. Set
    ``checkpoints`` if the script resumes from the Trainer's last checkpoint whenever there is one: the Trainer then
    saves one when Cadenza wants to move or resize the job.
    """

    def __init__(self, *, every_batch: bool = False, evaluation: bool = True, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.every_batch = every_batch
        self.evaluation = evaluation
        self._run: dict[str, object] = {}
        self._training = False
        self._part = Participation(self._state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **run: Any) -> None:  # noqa: ARG002
        """Attach with the model, the optimizer, its scaler and the schedule."""
        self._training = True
        self._join(run)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """End a step; its number of samples is that of full batches."""
        batches = 1 if self.every_batch else args.gradient_accumulation_steps
        self._part.boundary(args.train_batch_size * batches)
        control.should_save |= self._part.checkpoint_due

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Report a checkpoint that Cadenza requested, once the Trainer has saved it on every rank."""
        self._part.saved(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", state.global_step)

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
        control.should_save |= self._part.checkpoint_due
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
            self._part.join(warn_of_other_owner(), saves=self.checkpoints and self._training)

    def _leave(self) -> None:
        """Leave the session and drop all references to this run."""
        self._part.leave()
        self._run = {}

    def _state(self) -> dict[str, object]:
        """Return the state of this run; the scaler is in Accelerate's optimizer."""
        model: Any = self._run["model"]
        schedule = self._run["schedule"]
        return {**self._run, "schedule": vars(schedule) if schedule else None, "gathered": containers(model)}
