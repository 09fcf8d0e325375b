"""ElasticDataLoader compared with torch's DataLoader: the same batches, through resizes, deaths and resumptions."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from client_peer import PATIENCE_S, Peer, Script
from data_sets import Augmented, Broken, Deadly, Sockets, Squares, Together, Uneven, equal, generator
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, WeightedRandomSampler, get_worker_info

from cadenza.sidecar import client
from cadenza.sidecar.client.data import ElasticDataLoader
from cadenza.sidecar.client.errors import DataUsageError, WorkerDiedError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def settings() -> dict[str, dict[str, Any]]:
    """Return arguments of DataLoader, new objects each time."""
    return {
        "defaults": {},
        "batches": {"batch_size": 5},
        "drop_last": {"batch_size": 5, "drop_last": True},
        "shuffle": {"batch_size": 4, "shuffle": True, "generator": generator()},
        "global_shuffle": {"batch_size": 4, "shuffle": True},
        "unbatched": {"batch_size": None, "sampler": range(0, 53, 7)},
        "sampler": {"batch_size": 3, "sampler": SubsetRandomSampler(range(20), generator(7))},
        "weighted": {"batch_size": 6, "sampler": WeightedRandomSampler([1.0, 2.0] * 20, 31)},
        "batch_sampler": {"batch_sampler": Uneven()},
        "collate": {"batch_size": 9, "collate_fn": len},
    }


def both(name: str, dataset: Any, **more: Any) -> tuple[list[Any], list[Any]]:
    """Return three epochs of DataLoader's batches and of ours, from the same random state."""
    found: list[list[Any]] = []
    for kind in (DataLoader, ElasticDataLoader):
        torch.manual_seed(3)
        loader: DataLoader[Any] = kind(dataset, **settings()[name], **more)
        found.append([batch for _ in range(3) for batch in loader])
        found[-1].append(torch.rand(1))  # and the random state is the same afterwards
    return found[0], found[1]


@pytest.mark.parametrize("name", settings())
def test_batches_are_those_of_dataloader_without_workers(name: str) -> None:
    assert equal(*both(name, Squares()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("shuffle", {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}),
        ("global_shuffle", {"num_workers": 2}),
        ("unbatched", {"num_workers": 1}),
        ("batch_sampler", {"num_workers": 2, "multiprocessing_context": "fork", "timeout": PATIENCE_S}),
    ],
)
def test_batches_are_those_of_dataloader_with_workers(name: str, more: dict[str, Any]) -> None:
    assert equal(*both(name, Squares(), **more))


def test_a_dataset_that_reads_batches_does(tmp_path: Path) -> None:
    assert equal(*both("batches", Together()))


def epoch(loader: ElasticDataLoader[Any], plan: dict[int, int] | None = None) -> list[Any]:
    """Return an epoch's batches; the plan maps numbers of batches to numbers of workers."""
    taken: list[Any] = []
    for batch in loader:
        taken.append(batch)
        if plan and len(taken) in plan:
            loader.resize(plan[len(taken)])
    return taken


def augmented(workers: int = 0, **more: Any) -> ElasticDataLoader[Any]:
    """Return a loader of random items, shuffled, from one seed."""
    return ElasticDataLoader(Augmented(), 4, shuffle=True, generator=generator(), num_workers=workers, **more)


def test_resizing_in_mid_epoch_loses_and_repeats_nothing() -> None:
    loader = ElasticDataLoader(Squares(80), 2, num_workers=1)
    batches = epoch(loader, {5: 4, 20: 2})
    assert torch.cat([numbers for numbers, _ in batches]).tolist() == list(range(80))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("length", "options"),
    [(0, {}), (1, {"batch_size": 4}), (3, {"batch_size": 4, "drop_last": True}), (4, {"batch_size": 4}), (5, {})],
)
@pytest.mark.parametrize("plan", [{}, {0: [2]}, {0: [3, 1]}, {1: [0]}, {1: [4, 2, 1], 2: [0], 3: [2]}])
def test_small_epochs_and_resizes_at_their_ends(length: int, options: dict[str, Any], plan: dict[int, Any]) -> None:
    loader: ElasticDataLoader[Any] = ElasticDataLoader(Squares(length), num_workers=1, **options)
    batches, taken = iter(loader), []
    for number in range(length + 1):
        for workers in plan.get(number, ()):
            loader.resize(workers)
        taken += [batch for batch in (next(batches, None),) if batch is not None]
    assert equal(taken, list(DataLoader(Squares(length), **options)))
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_random_numbers_do_not_depend_on_workers_or_resizes() -> None:
    alone, resized = augmented(), augmented(1)
    assert equal(epoch(alone), epoch(resized, {2: 4, 5: 2, 6: 3, 8: 0, 11: 1}))
    assert equal(epoch(alone), epoch(resized))
    assert not equal(epoch(alone)[0], epoch(alone)[0])


def test_persistent_workers_are_kept_and_resized() -> None:
    alone, kept = augmented(1, persistent_workers=True), augmented(2, persistent_workers=True)
    assert equal(epoch(alone, {1: 0}), epoch(kept))
    before = {child.pid for child in multiprocessing.active_children()}
    assert equal(epoch(alone), epoch(kept))
    assert {child.pid for child in multiprocessing.active_children()} == before
    next(iter(kept))  # an epoch that is given up
    next(iter(alone))
    kept.resize(1)
    assert equal(epoch(alone), epoch(kept, {3: 2}))
    del alone, kept
    assert multiprocessing.active_children() == []


def test_reading_here_leaves_the_random_numbers_of_the_training_alone() -> None:
    def draw() -> tuple[Any, ...]:
        return torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002, S311

    drawn = []
    for read in (False, True):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
        batches = iter(ElasticDataLoader(Augmented(), generator=generator()))
        if read:
            next(batches), next(batches)
        drawn.append(draw())
    assert equal(*drawn)


@pytest.mark.parametrize("name", ["shuffle", "global_shuffle", "sampler", "batch_sampler"])
@pytest.mark.parametrize("done", [0, 3])
def test_it_goes_on_in_mid_epoch_where_it_was(name: str, done: int) -> None:
    def make() -> ElasticDataLoader[Any]:
        return ElasticDataLoader(Augmented(), **settings()[name])

    torch.manual_seed(8)
    loader = make()
    epoch(loader)
    batches = iter(loader)
    for _ in range(done):
        next(batches)
    saved = io.BytesIO()
    torch.save({"loader": loader.state_dict(), "torch": torch.get_rng_state()}, saved)
    rest = [*batches, *epoch(loader)]

    torch.manual_seed(99)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    other = make()
    other.load_state_dict(state["loader"])
    torch.set_rng_state(state["torch"])
    assert equal(other.state_dict(), state["loader"])
    again = [*epoch(other), *epoch(other)]
    assert equal(again, rest)


def test_it_goes_on_with_other_workers_and_between_epochs() -> None:
    loader = augmented(2, persistent_workers=True)
    epoch(loader)
    between = loader.state_dict()
    batches = iter(loader)
    next(batches)
    within = loader.state_dict()
    rest = list(batches)
    for state, wanted in ((between, rest), (within, rest)):
        other = augmented(1, persistent_workers=True)
        other.load_state_dict(state)
        assert equal(epoch(other, {2: 0})[-len(wanted) :], wanted)


def test_a_state_that_does_not_fit_is_refused() -> None:
    state = augmented().state_dict()
    with pytest.raises(DataUsageError, match="14 batches an epoch, this one has 53"):
        ElasticDataLoader(Squares()).load_state_dict(state)
    with pytest.raises(DataUsageError, match="version 9"):
        augmented().load_state_dict({**state, "version": 9})


def test_a_killed_worker_is_named_and_the_others_end() -> None:
    loader = ElasticDataLoader(Deadly(), num_workers=2)
    batches = iter(loader)
    with pytest.raises(WorkerDiedError, match=r"\d+ \(killed by SIGKILL\) ended before batch \d+ was read") as caught:
        list(batches)
    assert isinstance(caught.value, RuntimeError)
    assert multiprocessing.active_children() == []
    with pytest.raises(WorkerDiedError):
        next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_datasets_own_error_comes_through_and_the_next_batch_too(workers: int) -> None:
    loader = ElasticDataLoader(Broken(), num_workers=workers)
    batches = iter(loader)
    assert [int(next(batches)[0]) for _ in range(11)] == list(range(11))
    with pytest.raises(RuntimeError, match="item 11 is damaged"):
        next(batches)
    assert next(batches)[0].item() == 12
    assert loader.state_dict()["position"] == 13
    del batches
    assert multiprocessing.active_children() == []


def test_workers_ignore_the_signals_meant_for_the_training() -> None:
    batches = iter(ElasticDataLoader(Squares(), num_workers=2))
    next(batches)
    for child in multiprocessing.active_children():
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(child.pid or 0, number)
    assert len(list(batches)) == 52
    assert multiprocessing.active_children() == []


def test_an_iterator_that_is_dropped_takes_its_workers_along() -> None:
    loader = ElasticDataLoader(Squares(), num_workers=1)
    batches = iter(loader)
    next(batches)
    loader.resize(2)
    next(batches)
    assert len(multiprocessing.active_children()) == 3
    del batches
    assert multiprocessing.active_children() == []


def test_workers_have_no_part_in_the_clients_socket(job: Peer) -> None:
    attached = Script(job.rank, job)
    session = client.attach()
    attached.finish()
    link = session._link
    assert link is not None
    assert link._socket is not None
    ours = os.readlink(f"/proc/self/fd/{link._socket.fileno()}")
    loader: ElasticDataLoader[Any] = ElasticDataLoader(Sockets(1), num_workers=1, collate_fn=list)
    ((theirs,),) = list(loader)
    assert ours not in theirs
    assert loader.batches == 1
    assert session.waited_ns == pytest.approx(loader.wait_s * 1e9, abs=10)
    assert session.waited_ns > 0
    assert list(session.timed(loader))
    assert session.waited_ns == pytest.approx(loader.wait_s * 1e9, abs=20), "counted once"


def test_the_users_worker_init_sees_torchs_worker_info() -> None:
    dataset = Squares(2)

    def init(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.length = 100 + worker + info.num_workers

    def collate(samples: list[Any]) -> int:
        info = get_worker_info()
        assert info is not None
        return int(info.dataset.length)

    loader: ElasticDataLoader[Any] = ElasticDataLoader(dataset, num_workers=1, worker_init_fn=init, collate_fn=collate)
    assert list(loader) == [101, 101]


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(DataUsageError, match="map-style"):
        ElasticDataLoader(type("Stream", (IterableDataset,), {"__iter__": None})())
    with pytest.raises(DataUsageError, match="order"):
        ElasticDataLoader(Squares(), in_order=False)
    with pytest.raises(DataUsageError, match="-1"):
        ElasticDataLoader(Squares()).resize(-1)
    with pytest.raises(ValueError, match="num_workers"):
        ElasticDataLoader(Squares(), num_workers=-1)


def test_workers_that_cannot_be_started_leave_the_old_ones_at_work(caplog: pytest.LogCaptureFixture) -> None:
    class Unstartable(type(multiprocessing.get_context("fork"))):  # type: ignore[misc]
        """Context that starts no further process once it is shut."""

        shut = False

        def Process(self, *args: Any, **options: Any) -> Any:  # noqa: N802
            if self.shut:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return super().Process(*args, **options)

    context = Unstartable()
    loader = ElasticDataLoader(Squares(), num_workers=1, multiprocessing_context=context)
    batches = iter(loader)
    taken = [next(batches)]
    context.shut = True
    loader.resize(4)
    taken += list(batches)
    assert [number.item() for number, _ in taken] == list(range(53))
    assert "4 loader workers cannot be started, 1 stay" in caplog.text


def test_readers_go_to_spawned_workers_too() -> None:
    from cadenza.sidecar.client.data.loader_worker import Reader, WorkerStart, collated  # noqa: PLC0415

    for thing in (Reader(Squares(), len, batched=True), WorkerStart(None), collated):
        assert pickle.loads(pickle.dumps(thing))  # noqa: S301


SCRIPT = """
import signal, sys, threading
import torch
from data_sets import Bulky
from cadenza.sidecar.client.data import CachedDataset, ElasticDataLoader
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
cache = CachedDataset(Bulky(), 10_000, sys.argv[1])
loader = ElasticDataLoader(cache, num_workers=1, persistent_workers=True)
batches = iter(loader)
next(batches)
loader.resize(2)
next(batches)
assert cache.stats().items
assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
"""


def shared_memory() -> set[Path]:
    return {*Path("/dev/shm").glob("sem.*"), *Path("/dev/shm").glob("torch_*")}


@pytest.mark.slow
def test_a_script_that_ends_in_mid_epoch_leaves_nothing(tmp_path: Path) -> None:
    before = shared_memory()
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
    )
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert not re.search("Warning|Error|leaked", ended.stderr)
    assert list(tmp_path.iterdir()) == []
    added, deadline = shared_memory() - before, time.monotonic() + PATIENCE_S
    while added & shared_memory():  # other tests, in another process, remove theirs in a while
        assert time.monotonic() < deadline, added
        time.sleep(0.1)
