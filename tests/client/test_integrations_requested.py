"""Checkpoints that Cadenza requests, saved and restored by the frameworks themselves, bit for bit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from client_peer import Peer, Script
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from test_checkpoint_requested import requested_by, send_on
from test_integrations_callbacks import example
from torch.utils.data import DataLoader, IterableDataset

from cadenza.sidecar import wire
from cadenza.sidecar.client.bootstrap.process import current
from cadenza.sidecar.client.data import ElasticDataLoader
from cadenza.sidecar.client.errors import UsageError
from cadenza.sidecar.client.integrations import transformers as callbacks
from cadenza.sidecar.client.integrations.framework_checkpoints import lightning_step
from cadenza.sidecar.client.integrations.lightning import CadenzaCallback
from cadenza.sidecar.client.integrations.participation import Participation
from cadenza.sidecar.client.integrations.transformers import CadenzaTrainerCallback
from cadenza.sidecar.client.loader_workers import LIVING

pytestmark = pytest.mark.slow


@pytest.fixture
def lightning(job: Peer) -> Callable[..., Any]:
    """Return a fit of the Lightning example: six steps of two batches, without random numbers after the first."""
    del job
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = example("lightning_train")

    def fit(*callbacks: Any, ckpt_path: str | None = None, workers: int | None = None, **options: Any) -> Any:
        module.seed_everything(1, verbose=False)
        net = module.Net()
        if workers is None:
            net.body[3].p = 0.0
        data = module.loader(96, shuffle=False).dataset
        trainer = module.Trainer(
            accumulate_grad_batches=2, callbacks=[module.EMAWeightAveraging(decay=0.9), *callbacks],
            logger=False, enable_progress_bar=False, enable_model_summary=False,
            devices=1, accelerator="cpu", num_sanity_val_steps=0,
            **{"max_epochs": 1, "enable_checkpointing": False, **options},
        )  # fmt: skip
        loader: Any = ElasticDataLoader(data, batch_size=8, num_workers=0)
        if workers is not None:
            loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=workers)
        trainer.fit(net, loader, module.loader(16, shuffle=False), ckpt_path=ckpt_path)
        return trainer.global_step, net.losses, module.digest(net)

    return fit


def test_lightning_saves_on_order_and_goes_on_from_there(
    lightning: Callable[..., Any], job: Peer, tmp_path: Path
) -> None:
    finish = requested_by(job, 3, then=send_on)
    steps, losses, digest = lightning(CadenzaCallback(checkpoints=tmp_path / "kept"))
    said = finish()
    path = str(tmp_path / "kept/step-00000004.ckpt")  # at step 3 nothing is known of its gradients yet
    assert (said["step"], said["error"], said["paths"]) == (4, "", [path])
    assert current() is None
    newest = CadenzaCallback(checkpoints=tmp_path / "kept").newest()
    assert newest == path
    again = lightning(ckpt_path=newest)
    assert again == (steps, losses[8:], digest)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("order_at", [3, 8, 0], ids=["first epoch", "second epoch", "epoch end"])
def test_lightning_goes_on_in_the_data_of_a_shuffled_loader_and_with_its_random_numbers(
    lightning: Callable[..., Any],
    job: Peer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    order_at: int,
    workers: int,
) -> None:
    def callbacks() -> tuple[CadenzaCallback, ModelCheckpoint]:
        return CadenzaCallback(checkpoints=tmp_path / "kept"), ModelCheckpoint(str(tmp_path / "own"), save_top_k=-1)

    options = {"workers": workers, "max_epochs": 2, "enable_checkpointing": True}
    finish = requested_by(job, order_at, then=send_on) if order_at else Script(job.rank, job).finish
    steps, losses, digest = lightning(*callbacks(), **options)
    finish()
    for path in (tmp_path / "own").iterdir():
        if order_at or lightning_step(path) != 6:
            path.unlink()
    monkeypatch.delenv("SLURM_JOB_ID")
    again, saver = callbacks()
    newest = again.newest()
    assert newest is not None
    left = lightning(again, saver, ckpt_path=newest, **options)
    assert left == (steps, losses[-len(left[1]) :], digest)


def test_lightning_is_not_moved_while_a_loader_keeps_its_workers(
    lightning: Callable[..., Any], job: Peer, tmp_path: Path
) -> None:
    kept = DataLoader(range(4), num_workers=1, persistent_workers=True)
    finish = requested_by(job, 3, then=lambda rank: None)
    lightning(CadenzaCallback(checkpoints=tmp_path))
    assert finish()["error"] == LIVING
    del kept


def test_lightning_saves_after_the_accumulation_in_which_it_was_asked(
    lightning: Callable[..., Any], job: Peer, tmp_path: Path
) -> None:
    finish = requested_by(job, 4, then=send_on)  # the second of the two batches of step 2
    steps, losses, digest = lightning(CadenzaCallback(checkpoints=tmp_path, every_batch=True))
    assert finish()["step"] == 3
    assert lightning(ckpt_path=CadenzaCallback(checkpoints=tmp_path).newest()) == (steps, losses[6:], digest)


@pytest.mark.parametrize("epoch", [2, 1], ids=["mid-epoch", "one step each"])
def test_lightning_saves_at_no_step_that_work_of_its_own_follows(
    lightning: Callable[..., Any], job: Peer, tmp_path: Path, epoch: int
) -> None:
    """A validation follows each second step, or each one: then there is no place, and the reason is given."""
    finish = requested_by(job, 1, then=send_on if epoch == 2 else lambda rank: None)
    lightning(CadenzaCallback(checkpoints=tmp_path), val_check_interval=2 * epoch)
    said = finish()
    if epoch == 2:
        assert (said["step"], said["error"]) == (3, "")
    else:
        assert "a validation follows it" in said["error"]


@pytest.mark.parametrize("kind", ["executor", "unknown"])
def test_lightning_waits_for_a_plugin_that_writes_by_itself_or_refuses_it(
    lightning: Callable[..., Any], job: Peer, tmp_path: Path, kind: str
) -> None:
    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *what: Any, **how: Any) -> None:
            written.wait(0.2)
            super().save_checkpoint(*what, **how)

    class MyAsyncIO(TorchCheckpointIO):
        pass

    written = threading.Event()
    known = kind == "executor"
    finish = requested_by(job, 3, then=send_on if known else lambda rank: None)
    plugin = AsyncCheckpointIO(Slow()) if known else MyAsyncIO()
    lightning(CadenzaCallback(checkpoints=tmp_path), plugins=[plugin])
    said = finish()
    assert said["error"] == ("" if known else said["error"])
    assert ("MyAsyncIO does not say" in said["error"]) != known
    assert [path.suffix for path in tmp_path.iterdir() if path.is_file() and path.suffix != ".json"] == [
        ".ckpt"
    ] * known


def test_the_newest_of_lightning_is_the_newest_whole_one_of_all_callbacks(
    lightning: Callable[..., Any], job: Peer, tmp_path: Path
) -> None:
    """In an order before fit(): the directories of the other callbacks are those of the run before."""
    own, other = tmp_path / "own", tmp_path / "other"
    assert CadenzaCallback(checkpoints=own).newest() is None
    taken = Script(job.rank, job)
    kept = ModelCheckpoint(str(other), every_n_train_steps=2, save_top_k=-1, save_last=True)
    lightning(kept, CadenzaCallback(checkpoints=own), enable_checkpointing=True)
    taken.finish()
    newest = Path(CadenzaCallback(checkpoints=own).newest() or "")
    assert newest.parent == other
    assert lightning_step(newest) == 6
    for path in other.iterdir():
        if lightning_step(path) == 6:
            path.write_bytes(path.read_bytes()[:-100])  # not whole
    (other / "epoch=9-step=900.ckpt").touch()
    found = Path(CadenzaCallback(checkpoints=own).newest() or "")
    assert lightning_step(found) == 4
    weights = torch.load(found, weights_only=False)
    del weights["optimizer_states"]
    torch.save(weights, other / "epoch=9-step=901.ckpt")
    assert CadenzaCallback(checkpoints=own).newest() == str(found)


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
    steps, losses, digest = train(CadenzaTrainerCallback(checkpoints=tmp_path))
    said = finish()
    assert (said["step"], said["error"], said["paths"]) == (3, "", [str(tmp_path / "checkpoint-3")])
    assert CadenzaTrainerCallback.newest(tmp_path) == said["paths"][0]
    (tmp_path / "checkpoint-5").mkdir()  # never finished
    (tmp_path / "checkpoint-5/model.safetensors").touch()
    assert CadenzaTrainerCallback.newest(tmp_path) == said["paths"][0]
    assert train(resume=said["paths"][0]) == (steps, losses[-5:], digest)
    with pytest.raises(UsageError, match="the Trainer saves in its output_dir"):
        train(CadenzaTrainerCallback(checkpoints="/elsewhere"))


@pytest.mark.parametrize("samples", [32, 8], ids=["epochs of 4 steps", "epochs of one step"])
def test_transformers_does_an_epochs_own_work_before_or_after_a_move(
    job: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)
    module = example("hf_trainer")

    def train(*callbacks: Any, resume: str | None = None) -> tuple[list[int], str]:
        module.set_seed(1)
        model = module.GPT2LMHeadModel(module.GPT2Config(
            vocab_size=24, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        ))  # fmt: skip
        arguments = module.TrainingArguments(
            str(tmp_path), max_steps=8, per_device_train_batch_size=8, report_to=[], save_strategy="no",
            disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, eval_strategy="epoch", seed=1,
        )  # fmt: skip
        trainer = module.Trainer(
            model, arguments, train_dataset=module.Texts(samples), eval_dataset=module.Texts(8), callbacks=[*callbacks]
        )
        trainer.train(resume_from_checkpoint=resume)
        evaluated = [one["step"] for one in trainer.state.log_history if "eval_loss" in one]
        return evaluated, module.digest(model)

    whole = train()
    finish = requested_by(job, 3 if samples == 32 else 5, then=send_on)
    train(CadenzaTrainerCallback(checkpoints=True, evaluation=samples == 8))
    said = finish()
    assert (said["step"], said["error"]) == (5, "")
    assert train(resume=CadenzaTrainerCallback.newest(tmp_path)) == whole


@pytest.mark.parametrize("streams", [True, False])
def test_transformers_finds_its_place_in_the_first_pass_over_a_stream_only(
    monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """Its counts take such data for one epoch, and it skips batches until there are none."""
    refused: list[str] = []
    part = SimpleNamespace(checkpoint_due=False, boundary=lambda _: None, refuse=refused.append)
    part.not_saved = lambda error: (refused.append(str(error)), setattr(part, "checkpoint_due", False))
    callback = CadenzaTrainerCallback(checkpoints=True)
    monkeypatch.setattr(callback, "_part", part)
    ends = iter([False, True])
    monkeypatch.setattr(callbacks, "accelerate_at_end", lambda: next(ends))
    data = DataLoader(type("Stream", (IterableDataset,), {"__iter__": lambda _: iter(())})() if streams else range(4))  # type: ignore[arg-type]
    arguments = SimpleNamespace(gradient_accumulation_steps=1, train_batch_size=8)
    control = SimpleNamespace(should_save=False)
    callback.on_epoch_begin(None, None, control, train_dataloader=data)
    saved = []
    for _ in range(2):
        part.checkpoint_due = True
        callback.on_step_end(arguments, SimpleNamespace(epoch=0.3), control)
        saved.append(control.should_save)
        control.should_save = False
    callback.on_epoch_end(None, None, control, train_dataloader=data)
    assert (saved, control.should_save) == ([True, False], not streams)
    callback.on_epoch_begin(None, None, control, train_dataloader=data)
    assert refused == [callbacks.STREAM] * (2 if streams else 0)


@pytest.mark.parametrize(("owner", "saves"), [("lightning", 0), ("", 1)])
def test_where_another_owner_requeues_no_checkpoint_is_offered(job: Peer, owner: str, saves: int) -> None:
    taken = Script(job.rank, job)
    part = Participation(lambda: None)
    part.join(owner, saves=True)
    rank = taken.finish()
    assert (rank.hello.get("requeue_owner", ""), rank.page[wire.PAGE_SAVES]) == (owner, saves)
    part.leave()
