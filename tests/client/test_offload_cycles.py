"""The benchmark's jobs, with few cycles: training that yields is bit-identical, and a broken restore is noticed."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from client_peer import Peer, Turns

from cadenza.sidecar import client
from cadenza.sidecar.client.offload.engine import Offload
from cadenza.sidecar.client.offload.storages import survey

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
STEPS = 6
STOPS = sorted(random.Random(11).sample(range(1, STEPS), 3))  # noqa: S311


@pytest.fixture(scope="module")
def jobs() -> Iterator[Any]:
    """The benchmark's module of jobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import offload_jobs  # noqa: PLC0415

        yield offload_jobs
    sys.modules.pop("offload_jobs", None)


NAMES = [
    "MLP, SGD",
    "MLP, dropout",
    "ResNet-18, SGD momentum",
    "transformer, AdamW, AMP",
    "gradient accumulation",
    "tied, frozen, EMA",
    "2 loader workers",
]


def train(
    jobs: Any, name: str, stops: Turns | None = None, steps: int = STEPS, device: str = "cpu"
) -> tuple[list[str], str]:
    """Train from a fixed seed; as an attached job when there are stops."""
    torch.manual_seed(4)
    job = jobs.JOBS[name](jobs.Place(torch.device(device), 0.05))
    if stops:
        client.attach(*(thing for _, thing in job.sources))
    losses = []
    for _ in range(steps):
        losses.append(job.step().item().hex())
        client.boundary()
    return losses, jobs.digest(job)


def test_all_jobs_are_here(jobs: Any) -> None:
    assert list(jobs.JOBS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_yields_computes_the_same(jobs: Any, name: str, request: pytest.FixtureRequest) -> None:
    alone = train(jobs, name)
    turns = Turns(request.getfixturevalue("job"), STOPS)
    assert train(jobs, name, turns) == alone
    turns.finish()
    assert [message["step"] for message in turns.arrived] == STOPS
    assert all(message["bytes"] > 0 and not message["resident"] for message in turns.yielded)


def test_one_byte_that_comes_back_wrong_is_seen(jobs: Any) -> None:
    """A check of the proof itself: the digest of the state covers all bytes that a move could change."""
    torch.manual_seed(4)
    job = jobs.JOBS["tied, frozen, EMA"](jobs.Place(torch.device("cpu"), 0.05))
    job.step()
    before = jobs.digest(job)
    for segment in survey(job.sources).segments:
        offload = Offload()
        offload.offload([segment])
        offload._move._memory[0] ^= 1
        offload.restore()
        assert jobs.digest(job) != before, segment.name
        offload.offload([segment])
        offload._move._memory[0] ^= 1
        offload.restore()
        assert jobs.digest(job) == before


def test_the_agent_may_ask_again_at_once(jobs: Any, job: Peer) -> None:
    """A yield at every boundary: nothing accumulates, and what moves is the same each time."""
    turns = Turns(job, list(range(1, STEPS + 1)))
    train(jobs, "transformer, AdamW, AMP", turns)
    turns.finish()
    assert len({message["bytes"] for message in turns.yielded}) == 1
