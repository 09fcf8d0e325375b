"""ElasticDataLoader: torch's DataLoader, whose number of workers changes between two batches of an epoch."""

from __future__ import annotations

import contextlib
import itertools
import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.data import seeds
from cadenza.sidecar.client.data.errors import DataUsageError, WorkerDiedError
from cadenza.sidecar.client.data.loader_worker import Reader, Task
from cadenza.sidecar.client.data.worker_pool import Crew
from cadenza.sidecar.client.session import resources

STATE_VERSION = 1
DYING_S = 0.2
"""How long a worker whose connection is broken may take to be gone."""

_log = logging.getLogger("cadenza.client")

Rule: TypeAlias = Callable[[float], int]
"""Returns the workers for the CPUs that one rank has."""
T_co = TypeVar("T_co", covariant=True)


@dataclass
class Place:
    """Where an epoch began and how far it is; ``position`` counts the batches handed out."""

    base: int | None
    round: int
    generators: list[torch.Tensor]
    randoms: dict[str, Any]
    position: int = 0
    over: bool = False


@dataclass
class Start:
    """What the next epoch starts from; ``place`` when it was begun elsewhere and goes on here."""

    base: int | None = None
    round: int = 0
    place: Place | None = None


def workers_for(cpus: float) -> int:
    """Return the workers for one rank's CPUs: one for each but one, which the training thread has; at least one.

    >>> [workers_for(cpus) for cpus in (0.5, 2, 3.9, 8)]
    [1, 1, 2, 7]
    """
    return max(1, int(cpus) - 1)


class ElasticDataLoader(DataLoader[T_co]):
    """A DataLoader for map-style datasets whose workers follow the job's CPUs; it takes the same arguments.

    ``workers`` says how: "auto" has :func:`workers_for` of this rank's CPUs, a function of them says its own
    number, and a number stays. Without it ``num_workers`` is what it begins with, and :func:`workers_for` what it
    follows, unless that is 0: then the training process reads. The CPUs are those that the agent gives the job,
    over its local ranks; before it has, or without one, "auto" and functions take those that the process may run
    on (sched_getaffinity(2)) at the beginning of each epoch. ``resize()`` changes the workers by hand, until the
    job's CPUs change again.

    Order and content are DataLoader's with any number of workers. Random numbers drawn while a batch is read
    follow from the loader's generator and the batch's number alone (:class:`.seeds.BatchKey`), so that they are
    the same with any number of workers, also none, and through resizes. ``wait_s`` are the seconds that were
    spent waiting for batches so far, and ``batches`` how many came; an attached session counts the waits too.

    Raises DataUsageError for an IterableDataset, which has no order to keep, and for ``in_order=False``; what
    DataLoader itself refuses raises its ValueError.
    """

    reports_waits = True
    """``Session.timed`` leaves this loader's waits to it."""

    def __init__(
        self, dataset: Any, *args: Any, workers: int | Literal["auto"] | Rule | None = None, **options: Any
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise DataUsageError("ElasticDataLoader needs a map-style dataset: use DataLoader for an IterableDataset")
        if not options.get("in_order", True):
            raise DataUsageError("ElasticDataLoader keeps the order of batches: leave in_order=False out")
        if workers is not None and "num_workers" in options:
            raise DataUsageError("num_workers and workers say the same: give one of them")
        self._rule, self._alone = _rule(workers)
        self._cpus = resources.own_cpus() if self._alone else 0.0
        if workers is not None:
            options["num_workers"] = self._rule(self._cpus) if self._rule else workers
        super().__init__(dataset, *args, **options)
        self.wait_s = 0.0
        self.batches = 0
        self._next_start = Start()
        self._place: Place | None = None
        self._kept: Crew | None = None
        if self._rule is not None and self.num_workers:
            resources.register(self)

    def tuned(self, tuning: resources.Tuning, ranks: int) -> None:
        """Follow the CPUs that the whole job has on this node now, as this loader's rule says."""
        if self._rule is not None:
            self.resize(self._rule(tuning.cpus / ranks))

    def resize(self, num_workers: int) -> None:
        """Read with another number of workers from the next batch on; any thread may call this.

        The old workers finish what they have begun, the new ones go on behind it, and batches come in order.
        When they cannot be started, the old ones stay and a warning says why.
        """
        if num_workers < 0 or int(num_workers) != num_workers:
            raise DataUsageError(f"num_workers must be a whole number from 0 on, not {num_workers!r}")
        self.num_workers = int(num_workers)

    def __iter__(self) -> Epoch:  # type: ignore[override]
        """Return an iterator over one epoch, or over the rest of the one that load_state_dict() brought."""
        if self._alone and self._rule is not None:
            self._follow_affinity(self._rule)
        start = self._next_start
        place = start.place or self._begin(start)
        self._next_start = Start()
        with _at(place, self._generators()) if start.place else contextlib.nullcontext():
            indices = iter(self._index_sampler)
            base = self._base_seed(place.base)
            tasks = _skip(_tasks(indices, base, place.round), place.position)
        if self.persistent_workers:
            self._next_start = Start(base, place.round + 1)
        self._place = place
        return Epoch(self, place, self._first_crew(tasks), tasks)

    def _follow_affinity(self, rule: Rule) -> None:
        """Follow the CPUs that this process may run on, when those have changed since an epoch began."""
        cpus = resources.own_cpus()
        if cpus != self._cpus:
            self._cpus = cpus
            self.resize(rule(cpus))

    def _begin(self, start: Start) -> Place:
        """Note the state of all random numbers at the beginning of an epoch."""
        generators = [generator.get_state() for generator in self._generators()]
        return Place(start.base, start.round, generators, seeds.capture())

    def _generators(self) -> list[torch.Generator]:
        """Return the loader's generator and the samplers' own, each once."""
        holders = (self, self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        found = [getattr(holder, "generator", None) for holder in holders]
        return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())

    def _base_seed(self, known: int | None) -> int:
        """Return the known base seed, else draw one, as DataLoader does and at the same moment."""
        if known is not None:
            return known
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())

    def _first_crew(self, tasks: Iterator[Task]) -> Crew:
        """Return the workers that begin an epoch: those kept from the last one if they are as many."""
        kept, self._kept = self._kept, None
        if kept is not None and kept.size == self.num_workers:
            kept.restart(tasks)
            self._kept = kept
            return kept
        if kept is not None:
            kept.close()
        return self.crew(tasks)

    def crew(self, tasks: Iterator[Task]) -> Crew:
        """Start ``num_workers`` workers on a source; persistent ones are remembered for the next epoch."""
        reader = Reader(self.dataset, self.collate_fn, batched=self._auto_collation)
        crew = Crew(self, reader, tasks)
        self._kept = crew if self.persistent_workers and crew.size else None
        return crew

    def waited(self, seconds: float) -> None:
        """Count time that was spent waiting for a batch."""
        self.wait_s += seconds
        session = resources.source()
        if session is not None:
            session.waited(seconds)

    # --- position ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is: numbers, tensors and lists, fit for a weights-only checkpoint.

        In mid-epoch that is behind the last batch handed out, whatever was read ahead.
        """
        begun = self._next_start.place or (self._place if self._place and not self._place.over else None)
        place = begun or self._begin(self._next_start)
        return {
            "version": STATE_VERSION,
            "length": len(self),
            "base": place.base,
            "round": place.round,
            "position": place.position,
            "generators": place.generators,
            "randoms": place.randoms if begun else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next ``iter()`` go on where ``state_dict()`` was taken, without reading what came before.

        The sampler is asked for its indices again, from the same random state, which the global generators lend
        it meanwhile. A sampler with a state of its own (``set_epoch``) must have it back before that. Raises
        DataUsageError for a state of another version or of a loader of another length.
        """
        if (version := state.get("version")) != STATE_VERSION:
            raise DataUsageError(f"a loader's state of version {version!r}, this one reads {STATE_VERSION}")
        if state["length"] != len(self):
            raise DataUsageError(
                f"the state is of a loader with {state['length']} batches an epoch, this one has {len(self)}: use the"
                " same dataset, batch size and number of ranks, or a sampler that keeps its position itself"
            )
        self._place = None
        if state["randoms"]:
            place = Place(state["base"], state["round"], state["generators"], state["randoms"], state["position"])
            self._next_start = Start(place=place)
        else:
            self._next_start = Start(state["base"], state["round"])
            _set(self._generators(), state["generators"])


class Epoch(Iterator[Any]):
    """One pass over the dataset: the crew at hand, and before it those that still hand out what they have read."""

    def __init__(self, loader: ElasticDataLoader[Any], place: Place, crew: Crew, tasks: Iterator[Task]) -> None:
        self._loader = loader
        self._place = place
        self._tasks = tasks
        self._crews = deque([crew])
        self._failed: WorkerDiedError | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        """Return the next batch; raise WorkerDiedError when a worker has ended, and the dataset's own errors."""
        resources.update_all()
        asked = monotonic_ns()
        try:
            number, batch = self._take()
        finally:
            self._loader.waited((monotonic_ns() - asked) / 1e9)
        self._place.position = number + 1
        self._loader.batches += 1
        return batch

    def _take(self) -> tuple[int, Any]:
        """Return the next batch with its number, of the oldest crew that has one."""
        if self._failed is not None:
            raise self._failed
        if self._place.over:
            raise StopIteration
        self._follow()
        while True:
            try:
                return next(self._crews[0])
            except StopIteration:
                if len(self._crews) == 1:
                    self._end()
                    raise
                self._crews.popleft().close()
            except Exception as error:  # the user's dataset may raise anything
                self._check(error)
                raise

    def _follow(self) -> None:
        """Put another crew behind the last one when the loader's number of workers has changed."""
        last, wanted = self._crews[-1], self._loader.num_workers
        if wanted == last.size:
            return
        try:
            crew = self._loader.crew(self._tasks)
        except OSError as error:
            _log.warning("%d loader workers cannot be started, %d stay: %s", wanted, last.size, error)
            self._loader.num_workers = last.size
            return
        last.retire()
        self._crews.append(crew)

    def _end(self) -> None:
        """End the epoch: persistent workers wait for the next one, others end too."""
        self._place.over = True
        if not (self._loader.persistent_workers and self._crews[0].size):
            self._crews[0].close()

    def _check(self, error: Exception) -> None:
        """Say that a worker died, if that is behind an error; no other worker is left then."""
        if self._crews[0].size:
            # DataLoader's frame holds the error, which holds the frame: workers would live until that is collected.
            traceback.clear_frames(error.__traceback__)
        # A connection to a worker breaks a moment before its end can be seen.
        patience_s = DYING_S if isinstance(error, (OSError, EOFError)) else 0.0
        dead = self._crews[0].dead(patience_s)
        if not dead:
            return
        for crew in self._crews:
            crew.close()
        self._failed = WorkerDiedError(
            f"loader worker {', '.join(dead)} ended before batch {self._place.position} was read. Killed by SIGKILL is"
            " mostly the job's memory limit: use fewer workers, a smaller prefetch_factor or more memory"
        )
        raise self._failed from error


def _tasks(indices: Iterator[Any], base: int, round_: int) -> Iterator[Task]:
    """Yield the epoch's batches to read, numbered."""
    for number, batch in enumerate(indices):
        yield seeds.BatchKey(base, round_, number), batch


def _skip(tasks: Iterator[Task], count: int) -> Iterator[Task]:
    """Drop the first tasks, and draw the next one now: samplers take their random numbers with their first index."""
    head = list(itertools.islice(tasks, count, count + 1))
    return itertools.chain(head, tasks)


@contextlib.contextmanager
def _at(place: Place, generators: list[torch.Generator]) -> Iterator[None]:
    """Set the random numbers to where an epoch began; the global ones only for as long as this lasts."""
    _set(generators, place.generators)
    with seeds.borrowed():
        seeds.install(place.randoms)
        yield


def _set(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    """Set generators to their states."""
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state.cpu())


def _rule(workers: int | Literal["auto"] | Rule | None) -> tuple[Rule | None, bool]:
    """Return the rule that ``workers`` stands for, if any, and whether it also holds without an agent's word."""
    if callable(workers):
        return workers, True
    if workers == "auto":
        return workers_for, True
    if workers is None:
        return workers_for, False
    if isinstance(workers, int):
        return None, False
    raise DataUsageError(f'workers must be a number, "auto" or a function of CPUs, not {workers!r}')
