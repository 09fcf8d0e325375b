"""The callbacks' boundaries, the state that moves at them, and their refusals."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from client_peer import Peer, Script, Turns
from framework_jobs import EXAMPLES
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from pytorch_lightning import LightningModule, Trainer

from cadenza.sidecar import client, wire
from cadenza.sidecar.client.bootstrap.process import current
from cadenza.sidecar.client.errors import ClientError, UsageError
from cadenza.sidecar.client.integrations import MissingFrameworkError
from cadenza.sidecar.client.integrations import pytorch_lightning as other_package
from cadenza.sidecar.client.integrations.lightning import CadenzaCallback
from cadenza.sidecar.client.integrations.participation import (
    LIGHTNING,
    SUBMITIT,
    Participation,
    containers,
    other_owner,
    samples_in,
    wrapper,
)
from cadenza.sidecar.client.integrations.transformers import CadenzaTrainerCallback

pytestmark = pytest.mark.slow

PACKAGE = "cadenza.sidecar.client.integrations"


def example(name: str) -> Any:
    """Import an example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("module", "framework", "install"),
    [
        ("lightning", "lightning.pytorch", "lightning"),
        ("pytorch_lightning", "pytorch_lightning", "pytorch-lightning"),
        ("transformers", "transformers", "transformers"),
    ],
)
def test_without_its_framework_a_callback_names_the_extra(
    module: str, framework: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, f"{PACKAGE}.{module}", raising=False)
    wanted = rf"pip install {install}, .*cadenza-client\[frameworks\]"
    with pytest.raises(MissingFrameworkError, match=wanted) as caught:
        importlib.import_module(f"{PACKAGE}.{module}")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, ClientError)


def test_one_owner_of_requeue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUBMITIT_EXECUTOR", raising=False)
    assert other_owner(SLURMEnvironment(auto_requeue=True)) == LIGHTNING
    assert other_owner(SLURMEnvironment(auto_requeue=False)) is None
    assert other_owner(LightningEnvironment()) is None
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    assert other_owner() == SUBMITIT


def test_containers_samples_and_wrappers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].outputs = [torch.ones(3)]
    assert list(containers(model)) == ["0.outputs"]
    assert wrapper(model) is None
    assert [samples_in(one) for one in (torch.zeros(4, 2), {"a": [torch.zeros(5)]}, torch.tensor(1), "text")] == [
        4, 5, 0, 0,
    ]  # fmt: skip


@pytest.fixture
def lightning(job: Peer) -> Iterator[Any]:
    """The Lightning example in a job, with a Trainer for it."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return example("lightning_train")


def fit(module: Any, callback: Any, epochs: int = 1, **options: Any) -> Any:
    """Fit two optimizer steps, of two batches each, with two batches of validation before and after."""
    trainer = module.Trainer(
        max_epochs=epochs, accumulate_grad_batches=2, callbacks=[module.EMAWeightAveraging(decay=0.9), callback],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, devices=1,
        accelerator="cpu", **options,
    )  # fmt: skip
    net = module.Net()
    trainer.fit(net, module.loader(32, shuffle=False), module.loader(16, shuffle=False))
    return trainer, net


@pytest.mark.parametrize(
    ("options", "steps", "trained"), [({}, 6, 2), ({"every_batch": True}, 8, 4), ({"evaluation": False}, 2, 2)]
)  # fmt: skip
def test_lightning_boundaries(lightning: Any, job: Peer, options: dict[str, bool], steps: int, trained: int) -> None:
    class Last(CadenzaCallback):
        def teardown(self, *hook: Any, **named: Any) -> None:
            assert current().step == steps
            assert sum(current().words[wire.PAGE_FINE :]) == trained, "evaluation is no training"
            assert current().words[wire.PAGE_SAMPLES] == 32
            assert current().active
            super().teardown(*hook, **named)

    ways = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]
    turns = Turns(job, [1, 2])
    fit(lightning, Last(**options))
    turns.finish()
    assert current() is None
    assert ways == [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]


def test_a_script_that_only_keeps_checkpoints_has_not_attached(lightning: Any, job: Peer, tmp_path: Path) -> None:
    with client.checkpoint(tmp_path, own={"best": {"loss": 9.0}}):
        turns = Turns(job, [1])
        fit(lightning, CadenzaCallback())
        turns.finish()
        assert current() is None


def test_lightning_moves_the_averaged_copy_and_refuses_to_save_while_away(
    lightning: Any, job: Peer, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}
    kept: list[Any] = []

    class Seen(CadenzaCallback):
        def setup(self, trainer: Any, *hook: Any, **named: Any) -> None:
            kept.append(trainer)
            super().setup(trainer, *hook, **named)

    def look(_: int) -> None:
        trainer = kept[0]
        tensors = [*trainer.callbacks[0]._average_model.parameters(), *trainer.lightning_module.parameters()]
        seen["sizes"] = {tensor.untyped_storage().nbytes() for tensor in tensors}
        with pytest.raises(UsageError, match="save_checkpoint"):
            trainer.save_checkpoint(tmp_path / "never.ckpt")

    turns = Turns(job, [3], while_away=look)  # the first optimizer step: two batches of the sanity check come before
    fit(lightning, Seen())
    turns.finish()
    assert seen["sizes"] == {0}
    assert not (tmp_path / "never.ckpt").exists()


def test_an_error_in_a_fit_detaches(lightning: Any, job: Peer) -> None:
    class Broken(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 4)

        def training_step(self, *_: Any) -> None:
            assert current() is not None
            raise ZeroDivisionError

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        callbacks=[other_package.CadenzaCallback()], accelerator="cpu", enable_model_summary=False, **quiet
    )
    script = Script(job.rank, job)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Broken(), lightning.loader(16, shuffle=False))
    script.finish()
    assert current() is None


def test_a_scripts_own_session_stays_its_own() -> None:
    mine = client.attach()
    part = Participation(lambda: None)
    part.join()
    part.leave()
    assert current() is mine
    client.detach()


def test_transformers_boundaries(job: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # These tests have a module on their path with the name of a package that the Trainer uses where it is there.
    monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)
    module = example("hf_trainer")
    steps: list[int] = []

    class Seen(CadenzaTrainerCallback):
        def _leave(self) -> None:
            steps.append(current().step)
            super()._leave()

    config = module.GPT2Config(
        vocab_size=24, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    arguments = module.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, logging_strategy="no",
        eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4,
    )  # fmt: skip
    model = module.GPT2LMHeadModel(config)
    sizes: set[int] = set()

    def look(_: int) -> None:
        sizes.update(parameter.untyped_storage().nbytes() for parameter in model.parameters())

    turns = Turns(job, [2, 4], while_away=look)
    callbacks = [Seen()]
    trainer = module.Trainer(
        model, arguments, train_dataset=module.Texts(32), eval_dataset=module.Texts(8), callbacks=callbacks
    )
    trainer.train()
    turns.finish()
    assert steps == [5]  # three optimizer steps and two batches of evaluation
    assert sizes == {0}
    assert [message["resident"] for message in turns.yielded] == [[], []]
    assert current() is None
