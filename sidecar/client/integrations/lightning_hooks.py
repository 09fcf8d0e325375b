"""The callback for Lightning under both of its package names; imports neither."""

from __future__ import annotations

from typing import Any

from cadenza.sidecar.client.integrations.contents import containers, samples_in
from cadenza.sidecar.client.integrations.participation import Participation
from cadenza.sidecar.client.integrations.requeue import warn_of_other_owner


class LightningHooks:
    """Takes part in turns while a Trainer fits, validates, tests or predicts.

    A boundary follows each optimizer step, that is each accumulated batch; ``every_batch`` adds one after each
    batch in between, where stopping is safe too, but gradients move as well. ``evaluation`` makes each batch of
    validation, test and prediction one, so that the job can stop there; with several ranks it needs the same
    number of batches on each of them, so prediction, whose sampler does not pad, is left out then.
    """

    def __init__(self, *, every_batch: bool = False, evaluation: bool = True) -> None:
        super().__init__()
        self.every_batch = every_batch
        self.evaluation = evaluation
        self._trainer: Any = None
        self._part = Participation(self._state)
        self._optimizer_steps = 0
        self._samples = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 (Lightning's signature)
        """Attach before the model is moved to the device, so that a job without the lease does not touch it."""
        self._trainer = trainer
        self._optimizer_steps = trainer.global_step
        self._samples = 0
        warn_of_other_owner(trainer._accelerator_connector.cluster_environment)  # noqa: SLF001 (no public way)
        self._part.join()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Leave the process as it was."""
        self._part.leave()
        self._trainer = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave after an error too: Lightning calls no teardown then."""
        self.teardown(trainer, pl_module, type(exception).__name__)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Refuse a checkpoint from a signal handler while the state is away, which would hold no content."""
        self._part.refuse_while_away("save_checkpoint()")

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

    def on_validation_batch_end(self, *hook: Any, **named: Any) -> None:
        """Let the job stop between batches of the validation."""
        self._evaluated(*hook, **named)

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
            self._part.boundary(samples_in(batch), passing=[outputs, batch])

    def _state(self) -> dict[str, object]:
        """Return all that this run has on its device now."""
        trainer = self._trainer
        module = trainer.lightning_module
        others = {f"{index}:{type(one).__name__}": vars(one) for index, one in enumerate(trainer.callbacks)}
        return {
            "model": trainer.strategy.model,
            "module": module,
            "optimizers": list(trainer.optimizers),
            "scaler": getattr(trainer.precision_plugin, "scaler", None),
            "gathered": containers(module),
            "callbacks": {name: kept for name, kept in others.items() if kept is not vars(self)},
        }
