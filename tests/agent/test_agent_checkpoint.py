"""Checkpoints by the service's order: saved by all ranks at one step, held for a requeue, and every way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from agent_rig import Agent, Child, until
from test_agent_link import Service, fact, service  # noqa: F401 (a fixture)

from cadenza.sidecar import orders

pytestmark = pytest.mark.slow

TERMS = {"timeout_s": 30.0, "save_s": 5.0, "hold_s": 30.0}


@pytest.fixture
def host(new_agent: Callable[..., Agent], service: Service, tmp_path: Path) -> Agent:  # noqa: F811
    return new_agent(service=f"tcp://127.0.0.1:{service.port}", keys=str(tmp_path / "keys")).up()


def job(host: Agent, service: Service, *flags: str) -> Child:  # noqa: F811
    """Start job 1 and wait until the service knows what it can do."""
    child = host.rank(1, "--gpus", "[0]", "--copy-s", "0.05", *flags)
    child.wait_for("run")
    service.facts(fact(1))
    service.lease(1, lambda lease: lease.ready and lease.step > 0 and lease.checkpoints == ("--saves" in flags))
    return child


def test_a_job_stands_after_its_checkpoint_until_it_is_let_go(host: Agent, service: Service) -> None:  # noqa: F811
    child = job(host, service, "--saves")
    service.order(orders.CheckpointOrder, 1, **TERMS)
    lease = service.lease(1, lambda lease: lease.saved)
    assert lease.state == "stopping"
    step = child.wait_for("saving")["step"]
    assert lease.note == f"checkpoint of step {step}: /shared/{step}"
    done = service.wait_for(orders.Switched, lambda one: one.kind != "resume")
    assert (done.kind, done.copy_s, done.bytes, done.note) == ("checkpoint", 0.5, 9, lease.note)
    assert not child.said("sent on")
    service.order(orders.ResumeOrder, 1)
    assert child.wait_for("sent on")["step"] == step
    service.lease(1, lambda lease: lease.state == "held" and not lease.saved and lease.step > step)


def test_a_job_that_nobody_requeues_goes_on(host: Agent, service: Service) -> None:  # noqa: F811
    child = job(host, service, "--saves")
    service.order(orders.CheckpointOrder, 1, **{**TERMS, "hold_s": 0.2})
    assert "not requeued within 0.2 s" in child.wait_for("sent on")["reason"]
    service.lease(1, lambda lease: lease.state == "held" and not lease.saved)


@pytest.mark.parametrize(
    ("flags", "terms", "why"),
    [
        ((), {}, "not all its ranks can save a checkpoint"),
        (("--saves", "--fail-copy"), {}, "rank 0 could not save a checkpoint: No space left on device"),
        (("--saves", "--copy-s", "5"), {"save_s": 0.2}, "its checkpoint was not complete after 0.2 s"),
        (("--saves", "--deaf"), {"timeout_s": 0.3}, "had not arrived after"),
    ],
    ids=["cannot", "disk full", "slow", "deaf"],
)
def test_without_a_checkpoint_the_job_keeps_its_lease_and_the_service_hears_why(
    host: Agent, service: Service, flags: tuple[str, ...], terms: dict[str, float], why: str,  # noqa: F811
) -> None:  # fmt: skip
    job(host, service, *flags)
    service.order(orders.CheckpointOrder, 1, **{**TERMS, **terms})
    done = service.wait_for(orders.Switched, lambda one: one.kind != "resume")
    assert done.kind in {"refused", "timeout"}
    assert why in done.note
    assert not service.lease(1, lambda lease: lease.state == "held").saved


def test_two_ranks_save_at_one_step_and_a_failure_of_one_sends_both_on(
    host: Agent, service: Service, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    shared = tmp_path / "steps"
    shared.write_bytes(bytes(4096))
    flags = ("--gpus", "[0]", "--world", "2", "--shared", str(shared), "--saves")
    ranks = [host.rank(1, *flags, "--rank", "0"), host.rank(1, *flags, "--rank", "1", "--fail-copy")]
    for rank in ranks:
        rank.wait_for("run")
    service.facts(fact(1))
    service.lease(1, lambda lease: lease.ready and lease.step > 0 and lease.checkpoints)
    service.order(orders.CheckpointOrder, 1, **TERMS)
    steps = {rank.wait_for("saving")["step"] for rank in ranks}
    assert len(steps) == 1
    ranks[0].wait_for("sent on")
    assert "rank 1 could not save" in service.wait_for(orders.Switched, lambda one: one.kind != "resume").note
    service.lease(1, lambda lease: lease.state == "held" and lease.step > max(steps))


def test_a_rank_that_dies_while_the_others_stand_ends_the_job_as_ever(host: Agent, service: Service) -> None:  # noqa: F811
    child = job(host, service, "--saves")
    service.order(orders.CheckpointOrder, 1, **TERMS)
    service.lease(1, lambda lease: lease.saved)
    child.kill()  # as Slurm's requeue does
    until(lambda: not host.leases()[1]["processes"], "its process struck off")
    other = host.rank(2, "--gpus", "[0]")
    other.wait_for("run")


# --- of a job that has yielded --------------------------------------------------------------------------------


@pytest.fixture
def pair(host: Agent, service: Service) -> Callable[..., tuple[Child, Child]]:  # noqa: F811
    """Jobs 1, which has yielded, and 2, which has their GPU."""

    def start(*flags: str) -> tuple[Child, Child]:
        first = host.rank(1, "--gpus", "[0]", *flags)
        first.wait_for("run")
        second = host.rank(2, "--gpus", "[0]")
        service.facts(fact(1), fact(2))
        service.lease(2, lambda lease: lease.ready)
        service.lease(1, lambda lease: lease.step > 0 and lease.saves_away == ("--saves-away" in flags))
        service.order(orders.ResumeOrder, 2)
        service.order(orders.YieldOrder, 1, timeout_s=5.0)
        second.wait_for("run")
        service.lease(1, lambda lease: lease.state == "yielded")
        return first, second

    return start


def test_a_yielded_job_saves_without_its_gpus_while_another_job_trains(
    pair: Callable[..., tuple[Child, Child]], service: Service  # noqa: F811
) -> None:  # fmt: skip
    first, second = pair("--saves-away")
    service.order(orders.CheckpointOrder, 1, **TERMS, away=True)
    step = first.wait_for("saving away")["step"]
    lease = service.lease(1, lambda lease: lease.saved)
    assert (lease.state, lease.saving, lease.note) == ("yielded", True, f"checkpoint of step {step}: /shared/{step}")
    done = service.wait_for(orders.Switched, lambda one: one.kind == "checkpoint")
    assert (done.job, done.bytes) == (1, 9)
    trained = service.lease(2, lambda lease: lease.state == "held").step
    service.lease(2, lambda lease: lease.step > trained)
    second.kill()  # its GPU is free, and the job that stands for its requeue does not take it
    service.lease(1, lambda lease: lease.saved and lease.state == "yielded")
    service.order(orders.ResumeOrder, 1)
    assert first.wait_for("sent on")["step"] == step
    first.wait_for("run")
    service.lease(1, lambda lease: lease.state == "held" and not lease.saving and lease.step > step)


@pytest.mark.parametrize(
    ("flags", "terms", "why"),
    [
        (("--saves",), {}, "not all its ranks can save a checkpoint from host memory"),
        (("--saves-away", "--copy-s", "3"), {"save_s": 0.2}, "its checkpoint was not complete after 0.2 s"),
    ],
    ids=["only at a boundary", "slow"],
)
def test_a_yielded_job_that_saves_nothing_goes_on_waiting_for_its_turn(
    pair: Callable[..., tuple[Child, Child]], service: Service,  # noqa: F811
    flags: tuple[str, ...], terms: dict[str, float], why: str,
) -> None:  # fmt: skip
    _, second = pair(*flags)
    service.order(orders.CheckpointOrder, 1, **{**TERMS, **terms}, away=True)
    assert why in service.wait_for(orders.Switched, lambda one: one.kind == "refused").note
    second.kill()
    service.lease(1, lambda lease: lease.state == "held" and not lease.saved)


def test_an_order_to_save_away_does_not_stop_a_job_that_has_its_gpus_again(host: Agent, service: Service) -> None:  # noqa: F811
    child = job(host, service, "--saves")
    service.order(orders.CheckpointOrder, 1, **TERMS, away=True)
    assert "its lease is held" in service.wait_for(orders.Switched, lambda one: one.kind != "resume").note
    assert not child.said("saving")
