"""The cache that never evicts: its contents, its counts, its sharing between processes, and its removal."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import resource
import signal
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from client_peer import PATIENCE_S
from data_sets import Bulky, Squares, Together, equal, generator
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.distributed import DistributedSampler

from cadenza.sidecar.client.data import CachedDataset, ElasticDataLoader, item_codec, remove, shm_dirs
from cadenza.sidecar.client.data.item_store import HEAD, HEADER_WORDS, WORD
from cadenza.sidecar.client.errors import CacheUnsafeError, DataUsageError, NotStorableError

FORK = multiprocessing.get_context("fork")


def record_bytes(item: object) -> int:
    """Return the size of an item in the cache."""
    return HEAD.size + sum(len(part) for part in item_codec.encode(item))


def on_disk(folder: Path) -> int:
    """Return the bytes of all items of the one cache below a folder."""
    (items,) = folder.glob("*/*/items")
    return items.stat().st_size


def in_process(function: Callable[[], object]) -> int:
    """Run a function in a separate process, like a rank; return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not go on as pytest
            traceback.print_exc()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("share", [0.0, 0.35, 1.0])
def test_the_hit_rate_is_the_budgets_share(tmp_path: Path, workers: int, share: float) -> None:
    dataset = Bulky(400)
    nbytes = record_bytes(dataset[0])
    cache = CachedDataset(dataset, int(share * 400 * nbytes), tmp_path)
    loader: ElasticDataLoader[Any] = ElasticDataLoader(
        cache, 16, shuffle=True, generator=generator(), num_workers=workers, collate_fn=list
    )
    plain: ElasticDataLoader[Any] = ElasticDataLoader(dataset, 16, shuffle=True, generator=generator(), collate_fn=list)
    assert list(loader) == list(plain)
    seen = cache.stats()
    assert (seen.hits, seen.misses) == (0, 400)
    for _ in range(2):
        assert list(loader) == list(plain)
        now = cache.stats()
        assert now.since(seen).hit_rate == pytest.approx(share, abs=0.01)
        seen = now
    assert seen.used == on_disk(tmp_path) == seen.items * nbytes <= seen.budget


def test_lowering_drops_the_last_and_raising_admits_again(tmp_path: Path) -> None:
    dataset = Bulky(40)
    nbytes = record_bytes(dataset[0])
    cache = CachedDataset(dataset, 40 * nbytes, tmp_path)
    order = [*range(39, -1, -1)]
    assert cache.__getitems__(order) == [dataset[index] for index in order]
    cache.resize(10 * nbytes + 5)
    assert (cache.stats().items, cache.stats().used, on_disk(tmp_path)) == (10, 10 * nbytes, 10 * nbytes)
    seen = cache.stats()
    assert cache.__getitems__(order[:10]) == [dataset[index] for index in order[:10]]
    assert cache.stats().since(seen).hits == 10  # what came first has stayed
    cache.resize(20 * nbytes)
    assert [cache[index] for index in order] == [dataset[index] for index in order]
    assert (cache.stats().items, on_disk(tmp_path)) == (20, 20 * nbytes)
    cache.resize(0)
    assert (cache.stats().items, on_disk(tmp_path)) == (0, 0)


def test_two_ranks_share_one_copy_and_its_counts(tmp_path: Path) -> None:
    dataset = Bulky(30)
    cache = CachedDataset(dataset, 2**20, tmp_path, job="job5")
    cache.__getitems__(range(15))

    def rank() -> None:
        mine = CachedDataset(dataset, 2**20, tmp_path, job="job5")
        loader: ElasticDataLoader[Any] = ElasticDataLoader(mine, 5, num_workers=1, collate_fn=list)
        assert [item for batch in loader for item in batch] == [dataset[index] for index in range(30)]
        mine.resize(2**19)

    assert in_process(rank) == 0
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.items, stats.budget) == (15, 30, 30, 2**19)
    assert stats.used == on_disk(tmp_path) == 30 * record_bytes(dataset[0])
    cache.close()
    assert list(tmp_path.iterdir()) == []
    assert cache[3] == dataset[3]


def test_the_hit_rate_holds_for_ranks_that_deal_the_dataset_anew_each_epoch(tmp_path: Path) -> None:
    dataset = Bulky(400, 200)
    budget = 120 * record_bytes(dataset[0])
    cache = CachedDataset(dataset, budget, tmp_path, job="job5")

    def epoch(rank: int, number: int) -> None:
        mine = CachedDataset(dataset, budget, tmp_path, job="job5")
        sampler = DistributedSampler(mine, num_replicas=2, rank=rank, seed=3)  # type: ignore[arg-type]
        sampler.set_epoch(number)
        loader: ElasticDataLoader[Any] = ElasticDataLoader(mine, 8, sampler=sampler, collate_fn=list)
        assert [item for batch in loader for item in batch] == [dataset[index] for index in sampler]

    rates = []
    for number in range(3):
        before = cache.stats()
        ranks = [FORK.Process(target=epoch, args=(rank, number)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(PATIENCE_S)
        assert [process.exitcode for process in ranks] == [0, 0]
        rates.append(cache.stats().since(before).hit_rate)
    assert rates[0] == 0
    assert rates[1:] == pytest.approx([0.3, 0.3], abs=0.01)


def test_ranks_that_write_at_once_store_each_item_once(tmp_path: Path) -> None:
    dataset = Bulky(200, 400)
    cache = CachedDataset(dataset, 2**20, tmp_path, job="job5")

    def rank(turn: int) -> None:
        for index in range(200):
            assert cache[(index * 7 + turn) % 200] == dataset[(index * 7 + turn) % 200]

    ranks = [FORK.Process(target=rank, args=(turn,)) for turn in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in ranks] == [0, 0, 0]
    stats = cache.stats()
    assert stats.items == 200
    assert stats.hits + stats.misses == 600
    assert stats.used == on_disk(tmp_path) == 200 * record_bytes(dataset[0])


@pytest.mark.parametrize("at", [HEAD.size + 40, 2, 13])
def test_a_changed_byte_is_found_and_the_item_read_again(tmp_path: Path, at: int) -> None:
    dataset = Bulky(3)
    cache = CachedDataset(dataset, 10_000, tmp_path)
    cache.__getitems__(range(3))
    (items,) = tmp_path.glob("*/*/items")
    with items.open("r+b") as file:
        file.seek(record_bytes(dataset[0]) + at)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    before = cache.stats()
    for _ in range(2):
        assert cache.__getitems__(range(3)) == [dataset[index] for index in range(3)]
    assert cache.stats().since(before).misses == 1


def test_what_a_killed_writer_left_is_never_served(tmp_path: Path) -> None:
    dataset = Bulky(4)
    nbytes = record_bytes(dataset[0])
    cache = CachedDataset(dataset, 4 * nbytes, tmp_path)
    cache.__getitems__(range(2))
    (items,) = tmp_path.glob("*/*/items")
    with items.open("ab") as file:  # killed after it wrote, before it counted
        file.write(b"half a record")
    assert cache[2] == dataset[2]
    assert cache.stats().used == on_disk(tmp_path) == 3 * nbytes
    (index,) = tmp_path.glob("*/*/index")
    with index.open("r+b") as file:  # an entry that leads beyond the end
        file.seek(WORD * (HEADER_WORDS + 2 * 3))
        file.write(struct.pack("=QQ", 2**40, nbytes))
    assert cache[3] == dataset[3]
    assert cache[3] == dataset[3]
    assert cache.stats().items == 3


def test_when_memory_is_short_it_stops_admitting_and_goes_on(tmp_path: Path) -> None:
    """A limit on file sizes stands for a full file system: both make the same call fail."""
    dataset = Bulky(20)
    nbytes = record_bytes(dataset[0])

    def rank() -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        cache = CachedDataset(dataset, 2**20, tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 * nbytes + 100, limits[1]))
        for _ in range(2):
            assert cache.__getitems__(range(20)) == [dataset[index] for index in range(20)]
        stats = cache.stats()
        assert (stats.items, stats.hits, stats.short) == (5, 5, True)
        assert stats.used == on_disk(tmp_path) == 5 * nbytes
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        cache.resize(2**20)
        cache.__getitems__(range(20))
        assert (cache.stats().items, cache.stats().short) == (20, False)

    assert in_process(rank) == 0


def test_a_place_that_cannot_be_used_costs_the_cache_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = CachedDataset(Bulky(3), 10_000, tmp_path / "file")
    assert cache[1] == Bulky(3)[1]
    assert cache.stats().short
    assert "nothing is cached" in caplog.text


def test_a_killed_rank_leaves_nothing_behind(tmp_path: Path) -> None:
    dataset = Bulky(20)

    def rank() -> None:
        cache = CachedDataset(dataset, 2**20, tmp_path, job="job9")
        batches = iter(ElasticDataLoader(cache, num_workers=1, collate_fn=list))
        next(batches)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_process(rank) == -signal.SIGKILL
    assert on_disk(tmp_path) > 0
    assert remove("job9", tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not remove("job9", tmp_path)

    assert in_process(rank) == -signal.SIGKILL
    cache = CachedDataset(dataset, 2**20, tmp_path, job="job9")  # the requeued job begins with an empty one
    assert (cache.stats().items, on_disk(tmp_path)) == (0, 0)
    del cache
    assert list(tmp_path.iterdir()) == []


def test_the_last_rank_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    cache = CachedDataset(Bulky(20), 2**20, tmp_path, job="job9")

    def rank() -> None:
        CachedDataset(Bulky(20), 2**20, tmp_path, job="job9").__getitems__(range(20))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_process(rank) == -signal.SIGKILL
    assert cache.stats().items == 20
    assert cache.__getitems__(range(20)) == [Bulky(20)[index] for index in range(20)]
    cache.close()
    assert list(tmp_path.iterdir()) == []


def test_after_a_removal_new_workers_read_the_dataset(tmp_path: Path) -> None:
    dataset = Bulky(8)
    cache = CachedDataset(dataset, 2**20, tmp_path, job="job9")
    remove("job9", tmp_path)
    loader: ElasticDataLoader[Any] = ElasticDataLoader(cache, num_workers=1, collate_fn=list)
    assert [item for (item,) in loader] == [dataset[index] for index in range(8)]


def test_only_the_users_own_private_directory_will_do(tmp_path: Path) -> None:
    path = shm_dirs.job_directory("job1", tmp_path)
    path.mkdir(mode=0o755)
    with pytest.raises(CacheUnsafeError, match="mode 0700"):
        CachedDataset(Bulky(), 100, tmp_path, job="job1")
    path.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheUnsafeError):
        CachedDataset(Bulky(), 100, tmp_path, job="job1")
    assert not remove("job1", tmp_path)
    path.unlink()
    cache = CachedDataset(Bulky(), 100, tmp_path, job="job1")
    assert [file.stat().st_mode & 0o077 for file in path.rglob("*")] == [0] * 4
    for bad in ("", "..", "a/b"):
        with pytest.raises(DataUsageError):
            remove(bad, tmp_path)
    cache.close()


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shm_dirs.job_directory("job1", tmp_path, uid=os.geteuid() + 1).mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # becoming another user takes root
    with pytest.raises(CacheUnsafeError):
        CachedDataset(Bulky(), 100, tmp_path, job="job1")


def test_another_dataset_of_the_job_needs_another_name(tmp_path: Path) -> None:
    first = CachedDataset(Bulky(5), 1000, tmp_path)
    for other in (Bulky(6), Squares(5)):
        with pytest.raises(DataUsageError, match="another dataset"):
            CachedDataset(other, 1000, tmp_path)
    CachedDataset(Squares(5), 1000, tmp_path, name="more").close()
    with pytest.raises(DataUsageError, match="budget"):
        CachedDataset(Bulky(5), -1, tmp_path)
    assert len(first) == 5


def test_jobs_are_distinguished_by_slurm_torchrun_or_process() -> None:
    assert shm_dirs.job_key({"SLURM_JOB_ID": "17", "TORCHELASTIC_RUN_ID": "x"}) == "job17"
    assert shm_dirs.job_key({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "4"}) == "runnone-4"
    assert shm_dirs.job_key({}) == f"pid{os.getpid()}"


def test_datasets_that_read_batches_and_a_transform_behind_the_cache(tmp_path: Path) -> None:
    cache = CachedDataset(Together(9), 2**20, tmp_path, transform=lambda item: item[1].item())
    for _ in range(2):
        assert cache.__getitems__([3, 1, 3]) == [-3, -1, -3]
    assert cache.stats().hits == 3
    assert cache[torch.tensor(4)] == -4
    assert pickle.loads(pickle.dumps(CachedDataset(Squares(3), 100, tmp_path, name="b")))[2][0] == 2  # noqa: S301


def test_items_outside_the_format_are_served_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Squares):
        def __getitem__(self, index: int) -> Any:
            return {index} if index % 2 else index

    caplog.set_level(logging.WARNING)
    cache = CachedDataset(Odd(6), 2**20, tmp_path)
    for _ in range(2):
        assert cache.__getitems__(range(6)) == [0, {1}, 2, {3}, 4, {5}]
    assert (cache.stats().items, cache.stats().unfit, cache.stats().hits) == (3, 6, 3)
    assert [record.getMessage() for record in caplog.records] == [
        "item 1, and others like it, are not cached: they contain builtins.set"
    ]


TENSORS = [
    torch.arange(6.0).view(2, 3).t(),
    torch.tensor(3),
    torch.zeros(0, 4),
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]),
]
ARRAYS = [
    np.arange(9)[::2],
    np.zeros((0, 3), np.int8),
    np.array(["a", "béé"]),
    np.float64(2.5),
    np.arange(3, dtype=">i4"),
]


def trees() -> st.SearchStrategy[Any]:
    """Return trees of all types that the format can store."""
    leaves = (
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
        | st.sampled_from(TENSORS) | st.sampled_from(ARRAYS)
    )  # fmt: skip
    keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
    return st.recursive(
        leaves, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner), max_leaves=8
    )


@given(trees())
def test_the_format_gives_back_what_it_took(tree: Any) -> None:
    payload = memoryview(bytearray(b"".join(item_codec.encode(tree))))
    assert equal(item_codec.decode(payload), tree)


def test_the_format_refuses_what_it_cannot_give_back() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    odd = [
        {1, 2},
        object(),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2).to_sparse(),
        torch.empty(2, device="meta"),
        np.array([object()]),
        10**5000,
        deep,
        type("Mine", (dict,), {})(),
    ]
    for thing in odd:
        with pytest.raises(NotStorableError):
            item_codec.encode((1, thing))
    tensor = item_codec.decode(memoryview(bytearray(b"".join(item_codec.encode(torch.ones(3))))))
    tensor += 1
    assert tensor.tolist() == [2, 2, 2]
