"""Loaders and caches follow the agent's values in the page, and the CPUs that the process may run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from client_peer import Peer, Rank, Script
from data_sets import Bulky, Squares, equal

from cadenza.sidecar import client, wire
from cadenza.sidecar.client.data import CachedDataset, ElasticDataLoader, workers_for
from cadenza.sidecar.client.errors import DataUsageError
from cadenza.sidecar.client.session import job_session, resources
from cadenza.sidecar.client.session.job_session import Session
from cadenza.sidecar.client.session.step_page import MEMORY_EVERY

MIB = 1 << 20

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def tune(rank: Rank, cpus: float, cache_mb: int | None = None) -> None:
    """Write values like the agent."""
    rank.page[wire.PAGE_CPUS_CENTI] = round(100 * cpus)
    rank.page[wire.PAGE_CACHE_MB] = wire.UNSAID if cache_mb is None else cache_mb
    rank.page[wire.PAGE_TUNE_COUNT] += 1


@pytest.fixture
def attached(job: Peer, monkeypatch: pytest.MonkeyPatch) -> tuple[Session, Rank]:
    """This process as one of two local ranks."""
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    script = Script(job.rank, job)
    session = client.attach()
    return session, script.finish()


def numbers(batches: list[Any]) -> list[int]:
    """Return the numbers of all items."""
    found: list[int] = torch.cat([number for number, _ in batches]).tolist()
    return found


def test_workers_follow_the_jobs_cpus_in_mid_epoch(attached: tuple[Session, Rank]) -> None:
    session, rank = attached
    loader: ElasticDataLoader[Any] = ElasticDataLoader(Squares(60), 2, num_workers=1)
    seen, taken = [], []
    for batch in loader:
        taken.append(batch)
        seen.append(loader.num_workers)
        if len(taken) in {5, 15}:
            tune(rank, {5: 10.0, 15: 6.5}[len(taken)])
        session.boundary(2)
    assert numbers(taken) == list(range(60))
    assert seen == [1] * 5 + [4] * 10 + [2] * 15
    assert session.tuning() == (6.5, None)


def test_rules_of_ones_own(attached: tuple[Session, Rank]) -> None:
    _, rank = attached
    tune(rank, 8.0)
    data = Squares(4)
    auto, own = ElasticDataLoader(data, workers="auto"), ElasticDataLoader(data, workers=lambda cpus: int(2 * cpus))
    fixed, here = ElasticDataLoader(data, workers=2), ElasticDataLoader(data)
    given = ElasticDataLoader(data, num_workers=6)
    loaders = [auto, own, fixed, here, given]
    assert [loader.num_workers for loader in loaders] == [3, 8, 2, 0, 3]
    tune(rank, 4.0)
    resources.update_all()
    assert [loader.num_workers for loader in loaders] == [1, 4, 2, 0, 1]
    given.resize(5)
    resources.update_all()
    assert given.num_workers == 5, "until the CPUs change again"
    for wrong in ({"workers": 2, "num_workers": 2}, {"workers": "many"}):
        with pytest.raises(DataUsageError):
            ElasticDataLoader(data, **wrong)
    assert equal(list(here), list(ElasticDataLoader(data)))


def test_a_new_agent_begins_to_count_anew_and_is_followed(attached: tuple[Session, Rank], job: Peer) -> None:
    session, rank = attached
    tune(rank, 8.0)
    loader: ElasticDataLoader[Any] = ElasticDataLoader(Squares(4), num_workers=1)
    assert loader.num_workers == 3
    job.die()
    back = job.come_back()
    script = Script(back.rank, back)
    again = script.finish()
    while session.words[wire.PAGE_MAGIC] and session.tuning() is not None:
        session.boundary()
    resources.update_all()
    assert loader.num_workers == 3, "what it has stays until the new agent says something"
    tune(again, 4.0)
    resources.update_all()
    assert loader.num_workers == 1
    back.die()


def test_caches_share_what_the_agent_gives_them(attached: tuple[Session, Rank], tmp_path: Path) -> None:
    session, rank = attached
    train = CachedDataset(Bulky(40, 100_000), 3 * MIB, tmp_path, name="train")
    assert len([train[index] for index in range(40)]) == 40
    assert train.stats().items == 31
    tune(rank, 4.0, 1)
    for _ in range(MEMORY_EVERY + 1):  # no elastic loader looks here
        session.boundary()
    assert (train.stats().budget, train.stats().items) == (MIB, 10)
    held_out = CachedDataset(Bulky(10), MIB, tmp_path, name="held out")
    assert (train.stats().budget, held_out.stats().budget) == (3 * MIB // 4, MIB // 4)
    held_out.close()
    tune(rank, 4.0, 4)
    resources.update_all()
    assert train.stats().budget == 4 * MIB
    tune(rank, 2.0)
    resources.update_all()
    assert train.stats().budget == 3 * MIB, "what it asked for, once nobody says any more"
    train.resize(2 * MIB)
    tune(rank, 3.0)
    resources.update_all()
    assert train.stats().budget == 2 * MIB
    tune(rank, 2.0, 0)
    resources.update_all()
    assert (train.stats().budget, train.stats().items) == (0, 0)


def test_without_an_agent_auto_follows_the_affinity_between_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = [3]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cpus[0]))
    auto, begun = ElasticDataLoader(Squares(6), workers="auto"), ElasticDataLoader(Squares(6), num_workers=1)
    assert auto.num_workers == 2
    batches = iter(auto)
    next(batches)
    cpus[0] = 2
    next(batches)
    assert auto.num_workers == 2
    del batches
    assert len(list(auto)) == 6
    assert (auto.num_workers, begun.num_workers) == (1, 1)


@pytest.mark.parametrize(
    ("bound", "environ", "expected"),
    [
        (8, {}, 8),
        (8, {"LOCAL_WORLD_SIZE": "4"}, 2),  # torchrun: all may run everywhere
        (2, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "0",
             "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_CPUS_ON_NODE": "8"}, 2),  # srun binds each to its own
        (12, {"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_ON_NODE": "8"}, 3),  # more than it began with
    ],
)  # fmt: skip
def test_a_ranks_own_cpus(
    bound: int, environ: dict[str, str], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(bound))
    assert resources.own_cpus(environ) == expected


def test_one_cpu_is_the_training_threads() -> None:
    assert [workers_for(cpus) for cpus in (0, 0.5, 1, 2, 2.9, 3, 24)] == [1, 1, 1, 1, 1, 2, 23]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_torch_threads_follow_the_ranks_cpus_until_the_script_sets_them(
    attached: tuple[Session, Rank], two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, rank = attached
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    threads = resources.TorchThreads(default=2, environ={})
    resources.register(threads)
    seen = []
    monkeypatch.setattr(job_session, "LOOK_NS", 0)  # as with steps that take longer
    session.memory_step = 0
    session.boundary()
    for cpus in (4.0, 1.0, 6.0):  # of two ranks; it began with 2 CPUs for itself
        tune(rank, cpus)
        session.boundary()
        seen.append(torch.get_num_threads())
    assert seen == [2, 1, 3]
    torch.set_num_threads(5)
    tune(rank, 4.0)
    session.boundary()
    assert torch.get_num_threads() == 5


@pytest.mark.parametrize(
    ("default", "environ", "follows"),
    [(2, {}, True), (0, {}, True), (8, {}, False), (2, {"OMP_NUM_THREADS": "2"}, False),
     (2, {"MKL_NUM_THREADS": "2"}, False)],
)  # fmt: skip
def test_threads_that_a_user_or_script_set_stay(
    default: int, environ: dict[str, str], follows: bool, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    threads = resources.TorchThreads(default, environ)
    threads.tuned(resources.Tuning(1.0, None), 1)
    assert torch.get_num_threads() == (1 if follows else 2)
