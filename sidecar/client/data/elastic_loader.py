"""ElasticDataLoader: torch's DataLoader, whose number of workers changes between two batches of an epoch."""

from __future__ import annotations

import contextlib
import itertools
import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from cadenza.sidecar.client import rng_state
from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.data import seeds
from cadenza.sidecar.client.data.loader_worker import Reader, Task
from cadenza.sidecar.client.data.worker_pool import WorkerPool
from cadenza.sidecar.client.errors import DataUsageError, WorkerDiedError
from cadenza.sidecar.client.session import resources
from cadenza.sidecar.client.zip_equal import zip_equal

STATE_VERSION = 1
DYING_S = 0.2
"""Longest time between the loss of a worker's connection and its end."""

_log = logging.getLogger("cadenza.client")

Rule = Callable[[float], int]
"""Returns the workers for the CPUs that one rank has."""
T_co = TypeVar("T_co", covariant=True)


@dataclass
class EpochState:
    """Start and progress of an epoch; ``position`` counts the batches handed out."""

    base: int | None
    round: int
    generators: list[torch.Tensor]
    randoms: dict[str, Any]
    position: int = 0
    over: bool = False


@dataclass
class NextEpoch:
    """Seed of the next epoch; ``begun`` if it was begun elsewhere and continues here."""

    base: int | None = None
    round: int = 0
    begun: EpochState | None = None


def workers_for(cpus: float) -> int:
    """Return the workers for one rank's CPUs: all but one, which the training thread has; at least one.

    >>> [workers_for(cpus) for cpus in (0.5, 2, 3.9, 8)]
    [1, 1, 2, 7]
    """
    return max(1, int(cpus) - 1)


class ElasticDataLoader(DataLoader[T_co]):
    """A DataLoader for map-style datasets whose workers follow the job's CPUs; it takes the same arguments.

    ``workers`` is the rule: "auto" means :func:`workers_for` of this rank's CPUs, a function of the CPUs returns
    its own number, and a number stays. Without a rule the loader begins with ``num_workers`` and then follows
    :func:`workers_for`, unless it begins with 0: then the training process reads. The CPUs are the agent's for the
    job, divided by its local ranks. Without an agent, "auto" and functions take the CPUs that the process may run
    on (sched_getaffinity(2)) at the beginning of each epoch. ``resize()`` changes the workers by hand, until the
    job's CPUs change again.

    Order and content are DataLoader's with any number of workers. Random numbers drawn while a batch is read
    follow from the loader's generator and the batch's number alone (:class:`.seeds.BatchKey`), so they are the
    same with any number of workers, with none, and through resizes. ``wait_s`` is the time spent waiting for
    batches so far, in seconds, and ``batches`` their number; an attached session counts the waits too.

    Raises DataUsageError for an IterableDataset, which has no order to keep, and for ``in_order=False``, and
    DataLoader's own ValueError for arguments that it refuses.
    """

    reports_waits = True
    """The loader counts its waits itself, so ``Session.timed`` does not."""

    def __init__(
        self, dataset: Any, *args: Any, workers: int | Literal["auto"] | Rule | None = None, **options: Any
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise DataUsageError("ElasticDataLoader needs a map-style dataset: use DataLoader for an IterableDataset")
        if not options.get("in_order", True):
            raise DataUsageError("ElasticDataLoader keeps the order of batches: leave in_order=False out")
        if workers is not None and "num_workers" in options:
            raise DataUsageError("num_workers and workers mean the same: give one of them")
        self._rule, self._without_agent = _rule(workers)
        self._cpus = resources.own_cpus() if self._without_agent else 0.0
        if workers is not None:
            options["num_workers"] = self._rule(self._cpus) if self._rule else workers
        super().__init__(dataset, *args, **options)
        self.wait_s = 0.0
        self.batches = 0
        self._next = NextEpoch()
        self._epoch: EpochState | None = None
        self._kept: WorkerPool | None = None
        if self._rule is not None and self.num_workers:
            resources.register(self)

    def tuned(self, tuning: resources.Tuning, ranks: int) -> None:
        """Follow the CPUs that the whole job has on this node, by this loader's rule."""
        if self._rule is not None:
            self.resize(self._rule(tuning.cpus / ranks))

    def resize(self, num_workers: int) -> None:
        """Read with another number of workers from the next batch on; any thread may call this.

        The old workers finish the batches at hand, the new ones continue after them, and batches come in order.
        When the new ones cannot be started, the old ones stay and a warning gives the reason.
        """
        if num_workers < 0 or int(num_workers) != num_workers:
            raise DataUsageError(f"num_workers must be a whole number from 0 on, not {num_workers!r}")
        self.num_workers = int(num_workers)

    def __iter__(self) -> Epoch:  # type: ignore[override]
        """Return an iterator over one epoch, or over the rest of the one from load_state_dict()."""
        # 1. Without an agent, follow the CPUs that this process may run on.
        if self._without_agent and self._rule is not None and (cpus := resources.own_cpus()) != self._cpus:
            self._cpus = cpus
            self.resize(self._rule(cpus))
        # 2. Take the epoch's indices and seed, from the random state of its beginning.
        coming = self._next
        state = coming.begun or self._begin(coming)
        self._next = NextEpoch()
        with _at(state, self._generators()) if coming.begun else contextlib.nullcontext():
            indices = iter(self._index_sampler)
            base = state.base
            if base is None:  # drawn as DataLoader draws it, at the same moment
                base = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
            tasks = _tasks(indices, base, state.round)
            # Skip earlier batches, and draw the next one now: a sampler draws random numbers with its first index.
            tasks = itertools.chain(list(itertools.islice(tasks, state.position, state.position + 1)), tasks)
        if self.persistent_workers:
            self._next = NextEpoch(base, state.round + 1)
        # 3. Begin with the workers kept from the last epoch if their number is right, else with new ones.
        self._epoch = state
        former, self._kept = self._kept, None
        if former is not None and former.size == self.num_workers:
            former.restart(tasks)
            self._kept = former
            return Epoch(self, state, former, tasks)
        if former is not None:
            former.close()
        return Epoch(self, state, self.start_workers(tasks), tasks)

    def _begin(self, coming: NextEpoch) -> EpochState:
        """Return a new epoch with the state of all random numbers."""
        generators = [generator.get_state() for generator in self._generators()]
        return EpochState(coming.base, coming.round, generators, rng_state.capture(devices=False))

    def _generators(self) -> list[torch.Generator]:
        """Return the loader's generator and the samplers' own, each once."""
        holders = (self, self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        generators = [getattr(holder, "generator", None) for holder in holders]
        return list({id(one): one for one in generators if isinstance(one, torch.Generator)}.values())

    def start_workers(self, tasks: Iterator[Task]) -> WorkerPool:
        """Start ``num_workers`` workers on a source; persistent ones are kept for the next epoch."""
        reader = Reader(self.dataset, self.collate_fn, batched=self._auto_collation)
        pool = WorkerPool(self, reader, tasks)
        self._kept = pool if self.persistent_workers and pool.size else None
        return pool

    def waited(self, seconds: float) -> None:
        """Count time spent waiting for a batch."""
        self.wait_s += seconds
        session = resources.source()
        if session is not None:
            session.waited(seconds)

    # --- position ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position: numbers, tensors and lists, fit for a weights-only checkpoint.

        In mid-epoch the position is behind the last batch handed out; batches read ahead do not count.
        """
        begun = self._next.begun or (self._epoch if self._epoch and not self._epoch.over else None)
        state = begun or self._begin(self._next)
        return {
            "version": STATE_VERSION,
            "length": len(self),
            "base": state.base,
            "round": state.round,
            "position": state.position,
            "generators": state.generators,
            "randoms": state.randoms if begun else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next ``iter()`` continue at the position of ``state_dict()``, without reading earlier batches.

        The sampler draws its indices again from the same random state, which the global generators have only for
        that time. A sampler with a state of its own (``set_epoch``) must have it back before that. Raises
        DataUsageError for a state of another version or of a loader of another length.
        """
        if (version := state.get("version")) != STATE_VERSION:
            raise DataUsageError(f"a loader's state of version {version!r}, this one reads {STATE_VERSION}")
        if state["length"] != len(self):
            raise DataUsageError(
                f"the state is of a loader with {state['length']} batches an epoch, this one has {len(self)}: use the"
                " same dataset, batch size and number of ranks, or a sampler that keeps its position itself"
            )
        self._epoch = None
        if state["randoms"]:
            values = (state["base"], state["round"], state["generators"], state["randoms"], state["position"])
            self._next = NextEpoch(begun=EpochState(*values))
        else:
            self._next = NextEpoch(state["base"], state["round"])
            _set(self._generators(), state["generators"])


class Epoch(Iterator[Any]):
    """One pass over the dataset: the present workers, and before them former ones that still hand out batches."""

    def __init__(
        self, loader: ElasticDataLoader[Any], state: EpochState, pool: WorkerPool, tasks: Iterator[Task]
    ) -> None:
        self._loader = loader
        self._state = state
        self._tasks = tasks
        self._pools = deque([pool])
        self._failed: WorkerDiedError | None = None

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def _num_yielded(self) -> int:
        """Number of batches of this epoch that were handed out, as DataLoader's own iterators name it."""
        return self._state.position

    def __next__(self) -> Any:
        """Return the next batch; raise WorkerDiedError when a worker has ended, and the dataset's own errors."""
        resources.update_all()
        began = monotonic_ns()
        try:
            number, batch = self._take()
        finally:
            self._loader.waited((monotonic_ns() - began) / 1e9)
        self._state.position = number + 1
        self._loader.batches += 1
        return batch

    def _take(self) -> tuple[int, Any]:
        """Return the next batch with its number, from the oldest pool that has one."""
        if self._failed is not None:
            raise self._failed
        if self._state.over:
            raise StopIteration
        self._follow()
        while True:
            pool = self._pools[0]
            try:
                return next(pool)
            except StopIteration:
                if len(self._pools) == 1:  # the epoch is over; persistent workers wait for the next one
                    self._state.over = True
                    if not (self._loader.persistent_workers and pool.size):
                        pool.close()
                    raise
                self._pools.popleft().close()
            except Exception as error:  # the user's dataset may raise anything
                self._check(error)
                raise

    def _follow(self) -> None:
        """Start another pool behind the last one when the loader's number of workers has changed."""
        last, wanted = self._pools[-1], self._loader.num_workers
        if wanted == last.size:
            return
        try:
            pool = self._loader.start_workers(self._tasks)
        except OSError as error:
            _log.warning("%d loader workers cannot be started, %d stay: %s", wanted, last.size, error)
            self._loader.num_workers = last.size
            return
        last.retire()
        self._pools.append(pool)

    def _check(self, error: Exception) -> None:
        """Raise WorkerDiedError if a worker's end is the cause of an error; no other worker is left then."""
        if self._pools[0].size:
            # DataLoader's frame holds the error, which holds the frame: workers would live until that is collected.
            traceback.clear_frames(error.__traceback__)
        # A connection to a worker breaks a moment before its end can be seen.
        patience_s = DYING_S if isinstance(error, (OSError, EOFError)) else 0.0
        dead = self._pools[0].dead(patience_s)
        if not dead:
            return
        for pool in self._pools:
            pool.close()
        self._failed = WorkerDiedError(
            f"loader worker {', '.join(dead)} ended before batch {self._state.position} was read. Killed by SIGKILL is"
            " mostly the job's memory limit: use fewer workers, a smaller prefetch_factor or more memory"
        )
        raise self._failed from error


def _tasks(indices: Iterator[Any], base: int, round_: int) -> Iterator[Task]:
    """Yield the epoch's batches to read, numbered."""
    for number, batch in enumerate(indices):
        yield seeds.BatchKey(base, round_, number), batch


@contextlib.contextmanager
def _at(state: EpochState, generators: list[torch.Generator]) -> Iterator[None]:
    """Set the random numbers to the beginning of an epoch; the global ones only within this context."""
    _set(generators, state.generators)
    with seeds.generators_preserved():
        rng_state.restore(state.randoms)
        yield


def _set(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    for generator, state in zip_equal(generators, states):
        generator.set_state(state.cpu())


def _rule(workers: int | Literal["auto"] | Rule | None) -> tuple[Rule | None, bool]:
    """Return the rule that ``workers`` means, if any, and whether it also holds without an agent."""
    if callable(workers):
        return workers, True
    if workers == "auto":
        return workers_for, True
    if workers is None:
        return workers_for, False
    if isinstance(workers, int):
        return None, False
    raise DataUsageError(f'workers must be a number, "auto" or a function of CPUs, not {workers!r}')
