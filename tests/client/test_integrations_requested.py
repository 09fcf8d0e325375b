"""Checkpoints that Cadenza requests, saved and restored by the frameworks themselves, bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_peer import Peer, Script
from test_checkpoint_requested import requested_by, send_on
from test_integrations_callbacks import example
from transformers.trainer_utils import get_last_checkpoint

from cadenza.sidecar import wire
from cadenza.sidecar.client.bootstrap.process import current
from cadenza.sidecar.client.data import ElasticDataLoader
from cadenza.sidecar.client.integrations.lightning import CadenzaCallback
from cadenza.sidecar.client.integrations.participation import Participation
from cadenza.sidecar.client.integrations.transformers import CadenzaTrainerCallback

pytestmark = pytest.mark.slow


@pytest.fixture
def lightning(job: Peer) -> Callable[..., Any]:
    """Return a fit of the Lightning example: six steps of two batches, without random numbers after the first."""
    del job
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = example("lightning_train")

    def fit(*callbacks: Any, ckpt_path: str | None = None, **options: Any) -> Any:
        module.seed_everything(1, verbose=False)
        net = module.Net()
        net.body[3].p = 0.0
        data = module.loader(96, shuffle=False).dataset
        trainer = module.Trainer(
            max_epochs=1, accumulate_grad_batches=2, callbacks=[module.EMAWeightAveraging(decay=0.9), *callbacks],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            devices=1, accelerator="cpu", num_sanity_val_steps=0, **options,
        )  # fmt: skip
        loader = ElasticDataLoader(data, batch_size=8, num_workers=0)
        trainer.fit(net, loader, module.loader(16, shuffle=False), ckpt_path=ckpt_path)
        return trainer.global_step, net.losses, module.digest(net)

    return fit


def test_lightning_saves_on_order_and_goes_on_from_there(
    lightning: Callable[..., Any], job: Peer, tmp_path: Path
) -> None:
    finish = requested_by(job, 3, then=send_on)
    steps, losses, digest = lightning(CadenzaCallback(checkpoints=tmp_path / "kept"))
    said = finish()
    assert (said["step"], said["error"], said["path"]) == (3, "", str(tmp_path / "kept/step-00000003.ckpt"))
    assert current() is None
    newest = CadenzaCallback(checkpoints=tmp_path / "kept").newest()
    assert newest == said["path"]
    again = lightning(ckpt_path=newest)
    assert again == (steps, losses[6:], digest)


def test_lightning_saves_after_the_accumulation_in_which_it_was_asked(
    lightning: Callable[..., Any], job: Peer, tmp_path: Path
) -> None:
    finish = requested_by(job, 5, then=send_on)  # the first of the two batches of step 3
    steps, losses, digest = lightning(CadenzaCallback(checkpoints=tmp_path, every_batch=True))
    assert finish()["step"] == 3
    assert lightning(ckpt_path=CadenzaCallback(checkpoints=tmp_path).newest()) == (steps, losses[6:], digest)


def test_a_lightning_checkpoint_that_fails_is_reported_and_the_fit_ends_well(
    lightning: Callable[..., Any], job: Peer, tmp_path: Path
) -> None:
    (tmp_path / "kept").touch()  # no directory can be made of it
    finish = requested_by(job, 2, then=lambda rank: None)
    steps, _, _ = lightning(CadenzaCallback(checkpoints=tmp_path / "kept"))
    assert "kept" in finish()["error"]
    assert steps == 6


def test_transformers_saves_on_order_and_resumes_from_there(
    job: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)  # see test_integrations_callbacks
    module = example("hf_trainer")

    def train(*callbacks: Any, resume: str | None = None) -> tuple[int, list[float], str]:
        module.set_seed(1)
        losses = module.Losses()
        model = module.GPT2LMHeadModel(module.GPT2Config(
            vocab_size=24, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        ))  # fmt: skip
        arguments = module.TrainingArguments(
            str(tmp_path), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, logging_steps=1,
            eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4, seed=1,
        )  # fmt: skip
        trainer = module.Trainer(
            model, arguments, train_dataset=module.Texts(32), eval_dataset=module.Texts(8),
            callbacks=[losses, *callbacks],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state.global_step, losses.seen, module.digest(model)

    finish = requested_by(job, 4, then=send_on)  # the second batch of the evaluation after step 2
    steps, losses, digest = train(CadenzaTrainerCallback(checkpoints=True))
    said = finish()
    assert (said["step"], said["error"], said["path"]) == (2, "", str(tmp_path / "checkpoint-2"))
    assert said["path"] == get_last_checkpoint(str(tmp_path))
    assert train(resume=said["path"]) == (steps, losses[3:], digest)


@pytest.mark.parametrize(("owner", "saves"), [("lightning", 0), ("", 1)])
def test_where_another_owner_requeues_no_checkpoint_is_offered(job: Peer, owner: str, saves: int) -> None:
    taken = Script(job.rank, job)
    part = Participation(lambda: None)
    part.join(owner, saves=True)
    rank = taken.finish()
    assert (rank.hello.get("requeue_owner", ""), rank.page[wire.PAGE_SAVES]) == (owner, saves)
    part.leave()
