"""slurmctld's scheduling in a simulation: its queue by priority, the limits, the main scheduler and backfill.

The same engine starts the jobs of a simulated policy and those of the baseline. Sources: Slurm 25.11, ``_schedule`` in
job_scheduler.c, sched/backfill and acct_policy.c; slurm.conf, ``SchedulerParameters``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from math import ceil, inf
from operator import attrgetter

from cadenza.policies.core.amounts import Amount
from cadenza.policies.core.model import Node, SiteRules
from cadenza.policies.inputs.queue_rules import Account, Qos, QueueRules
from cadenza.policies.simulator.priority import Facts, Multifactor, Person
from cadenza.policies.slurm.backfill import Backfill, Future, Pass, Shares, bits_of

BY_ORDER = attrgetter("order")


def _by_priority(job: QueuedJob) -> tuple[int, int]:
    return job.order[:2]


class QueuedJob:
    """One job as slurmctld has it, from its submission to its end. Times in seconds."""

    __slots__ = (
        "among", "array", "array_limit", "begin_s", "each", "eligible_s", "facts", "gpus", "id", "kind", "licenses",
        "limit_s",
        "looked", "order", "owner", "partition", "pins", "priority", "reason", "shown", "site_factor",
        "submit_s",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 (a job's request)
        self, number: int, submit_s: float, partition: str, facts: Facts, *, gpus: int, each: tuple[Amount, ...],
        among: int, limit_s: float, array: str = "", array_limit: int | None = None,
        licenses: tuple[tuple[str, int], ...] = (), owner: object = None,
    ) -> None:  # fmt: skip
        self.id, self.submit_s, self.partition, self.facts = number, submit_s, partition, facts
        self.gpus, self.each, self.among, self.limit_s = gpus, each, among, limit_s
        self.array, self.array_limit, self.licenses = array, array_limit, licenses
        self.owner = owner
        """Whatever the caller wants to find again."""
        self.pins: Shares = ()
        """Shares at the nodes that it has to have; empty: any of ``among``."""
        self.eligible_s = submit_s
        """From when on it has an age."""
        self.kind = 0
        """Jobs of one number may have the same nodes and ask for as much on each."""
        self.begin_s = submit_s
        """Slurm starts it no earlier."""
        self.site_factor = 0
        self.priority = 1
        self.order: tuple[int, int, float, int] = (0, 0, submit_s, number)
        """The first in order is the first in the queue: tier, then priority, then submission."""
        self.looked = False
        """True once the main scheduler has seen it, and so has given a reason why it waits."""
        self.reason = ""
        self.shown: tuple[object, ...] = ()
        """Priority and reason when they were last told."""


class Scheduler:
    """Slurm's queue and books on some nodes. Each start is told to the caller at once.

    The caller tells of submissions, ends and changes, and then calls ``settle``; between events it lets no more time
    pass than until ``next_event_s``.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        rules: QueueRules,
        backfill: Backfill,
        people: Iterable[Person],
        start: Callable[[QueuedJob, Shares], None],
    ) -> None:
        """``start`` books what it is told, as for any other start."""
        self.rules, self.backfill, self._start_told = rules, backfill, start
        self.nodes = sorted(nodes, key=lambda node: node.lane)
        """By lane, so that a lane's nodes are adjacent."""
        self.at = {node.name: at for at, node in enumerate(self.nodes)}
        self.free = [[node.gpus, node.cpus, node.memory_mb] for node in self.nodes]
        self.all_nodes = (1 << len(self.nodes)) - 1
        self.open = bits_of(at for at, node in enumerate(self.nodes) if node.takes_jobs)
        """Nodes on which Slurm starts jobs, as bits."""
        self.lanes = [
            bits_of(at for at, node in enumerate(self.nodes) if node.lane == lane)
            for lane in sorted({node.lane for node in self.nodes})
        ]
        names = {name for node in self.nodes for name in node.partitions}
        self.nodes_of = {
            name: bits_of(at for at, node in enumerate(self.nodes) if name in node.partitions) for name in names
        }
        """By partition: its nodes, as bits."""
        on_host: dict[str, list[int]] = {}
        for at, node in enumerate(self.nodes):
            on_host.setdefault(node.host, []).append(at)
        self._host_lanes = [on_host[node.host] for node in self.nodes]
        self.priorities = Multifactor(rules, people, [node for node in self.nodes if node.lane == 0])
        self.queue: list[QueuedJob] = []
        """Jobs that may start, in order of priority."""
        self.limited = any(one.gpus is not None or one.max_jobs is not None for one in rules.accounts.values()) or any(
            one.gpus_per_user is not None for one in rules.qos.values()
        )
        """True if an account or a QOS has a limit."""
        self._bounded = self.limited
        """True if some job may wait for a limit."""
        self._later: list[tuple[float, int, QueuedJob]] = []
        """Jobs that wait for their begin time."""
        self.running: dict[QueuedJob, tuple[float, Shares]] = {}
        """The end by its time limit, and what it has on which nodes, other lanes of their hosts included."""
        self._kinds: dict[tuple[int, tuple[Amount, ...], Shares], int] = {}
        self._unseen: list[QueuedJob] = []
        """Jobs of the queue, or that were in it, since the main scheduler looked last."""
        self._future: Future | None = None
        self._has: dict[QueuedJob, int] = {}
        """GPUs of each running job."""
        self._used: Counter[tuple[str, object]] = Counter()
        """GPUs, jobs and licenses that count for a limit."""
        self._new = self._freed = False
        self._looked_s = -inf
        self._head_s = self._pass_s = inf
        """When the main scheduler and backfill look next."""
        self._calculated_s = 0.0
        self._site: SiteRules | None = None
        self._stale = True
        """True if reasons are out of date."""

    def of_type(self, gpu_type: str) -> int:
        """Return the nodes with GPUs of a type, as bits."""
        return bits_of(at for at, node in enumerate(self.nodes) if node.gpu_type == gpu_type)

    def named(self, names: Collection[str]) -> int:
        """Return the nodes with these names, as bits."""
        return bits_of(at for at, node in enumerate(self.nodes) if node.name in names)

    # --- What happens to jobs ----------------------------------------------------------------------------

    def submit(self, job: QueuedJob, now_s: float, *, delay_s: float = 0.0) -> None:
        """Queue a job, from ``delay_s`` on; its age begins then."""
        self._bounded |= job.array_limit is not None or bool(job.licenses)
        # A requeue is a new submission: Slurm counts the age from there.
        job.begin_s = job.eligible_s = now_s + delay_s
        self._number(job)
        if delay_s > 0:
            job.reason = "BeginTime"
            self._prioritize(job, now_s)
            heappush(self._later, (job.begin_s, job.id, job))
        else:
            self._enter(job, now_s)

    def _enter(self, job: QueuedJob, now_s: float) -> None:
        """Put a job into the queue, where the main scheduler has not seen it yet."""
        job.reason, job.looked = "", False
        self._unseen.append(job)
        self._prioritize(job, now_s)
        insort(self.queue, job, key=BY_ORDER)
        self._new = self._stale = True

    def withdraw(self, job: QueuedJob) -> None:
        """Take a job out of the queue, or do nothing if it is not there."""
        if (place := self._place_of(job)) is not None:
            del self.queue[place]
            self._stale = True
        elif self._later:
            self._later = [entry for entry in self._later if entry[2] is not job]
            heapify(self._later)

    def waits(self, job: QueuedJob) -> bool:
        """Return True if a job is in the queue, or will be at its begin time."""
        return self._place_of(job) is not None or any(entry[2] is job for entry in self._later)

    def _place_of(self, job: QueuedJob) -> int | None:
        """Return a job's place in the queue; None if it is not there."""
        place = bisect_left(self.queue, job.order, key=BY_ORDER)
        return place if place < len(self.queue) and self.queue[place] is job else None

    def before(self, job: QueuedJob) -> int:
        """Return how many jobs of the queue have a higher priority than this one, or the same and a lower id."""
        first, last = (find(self.queue, job.order[:2], key=_by_priority) for find in (bisect_left, bisect_right))
        return first + sum(one.id < job.id for one in self.queue[first:last])

    def first(self, count: int) -> Iterator[QueuedJob]:
        """Yield the first jobs of the queue, and those with the priority of the last of them."""
        for number, job in enumerate(self.queue):
            if number >= count and job.order[:2] != self.queue[count - 1].order[:2]:
                return
            yield job

    def ask(self, job: QueuedJob, gpus: int, each: tuple[Amount, ...], pins: Shares) -> None:
        """Let a job ask for something else."""
        job.gpus, job.each, job.pins = gpus, each, pins
        self._number(job)
        self._change()

    def _number(self, job: QueuedJob) -> None:
        job.kind = self._kinds.setdefault((job.among, job.each, job.pins), len(self._kinds))

    def _change(self) -> None:
        """Note that a job's request or a node has changed: the main scheduler looks soon, as after a submission."""
        self._new = self._stale = True

    def set_factor(self, job: QueuedJob, factor: int, now_s: float) -> None:
        """Set a job's SiteFactor and its place in the queue."""
        job.site_factor = factor
        if (place := self._place_of(job)) is not None:
            del self.queue[place]
            self._prioritize(job, now_s)
            insort(self.queue, job, key=BY_ORDER)
            self._change()
        else:
            self._prioritize(job, now_s)

    def set_open(self, name: str, *, opened: bool) -> None:
        """Note whether a node takes jobs."""
        bit = 1 << self.at[name]
        self.open = self.open | bit if opened else self.open & ~bit
        self._change()

    def book(self, job: QueuedJob, shares: Shares, now_s: float) -> None:
        """Give a job what it has from now on, other than before; nothing: it is over, or out of its nodes."""
        before = self._leave(job) if job in self.running else None
        gpus = sum(amount[0] for _, amount in shares)
        self._count(job, gpus, now_s)
        if shares:
            self._run(job, now_s + job.limit_s if before is None else before[0], self._with_lanes(shares))
        self._freed = self._freed or before is not None
        self._stale = True

    def take_hosts(self, job: QueuedJob, shares: Shares, now_s: float) -> Shares:
        """Start a job without GPUs: all lanes of its hosts lack its CPUs; return what each lacks."""
        whole = tuple((lane, amount) for at, amount in shares for lane in self._host_lanes[at])
        self._run(job, now_s + job.limit_s, whole)
        self._stale = True
        return whole

    def free_hosts(self, job: QueuedJob) -> None:
        """End a job without GPUs."""
        self._leave(job)
        self._freed = self._stale = True

    def _run(self, job: QueuedJob, end_s: float, shares: Shares) -> None:
        self.running[job] = end_s, shares
        self._take(shares, 1)
        if self._future is not None:
            self._future.start(end_s, shares)

    def _leave(self, job: QueuedJob) -> tuple[float, Shares]:
        end_s, shares = self.running.pop(job)
        self._take(shares, -1)
        if self._future is not None:
            self._future.leave(end_s, shares)
        return end_s, shares

    def _with_lanes(self, shares: Shares) -> Shares:
        """Return shares with what they take of the other lanes: a host's memory is that of all its lanes."""
        if len(self.lanes) == 1:
            return shares
        others = ((lane, (0, 0, amount[2])) for at, amount in shares for lane in self._host_lanes[at] if lane != at)
        return (*shares, *others)

    def _take(self, shares: Shares, sign: int) -> None:
        for at, amount in shares:
            for kind, value in enumerate(amount):
                self.free[at][kind] -= sign * value

    def _count(self, job: QueuedJob, gpus: int, now_s: float) -> None:
        """Count a job's GPUs for its owner's usage and for the limits."""
        had = self._has.pop(job, None)
        if gpus:
            self._has[job] = gpus
        more, one = gpus - (had or 0), (1 if gpus else 0) - (0 if had is None else 1)
        person, qos = job.facts.person, job.facts.qos
        if more:
            self.priorities.use(person, more, now_s)
            self._used["gpus", person.account] += more
            self._used["gpus", (qos, person.user)] += more
        if one:
            self._used["jobs", person] += one
            if job.array:
                self._used["array", job.array] += one
            for name, number in job.licenses:
                self._used["license", name] += one * number

    # --- Time --------------------------------------------------------------------------------------------

    @property
    def next_event_s(self) -> float:
        """Return when the scheduler next has something to do by itself; infinite if never."""
        found = min(self._head_s, self._pass_s, self._later[0][0] if self._later else inf)
        # The order changes with time; where nothing runs, whatever has not been started can never be.
        if self.queue and self.running and self._weighs:
            found = min(found, self._calculated_s + self.rules.calc_s)
        return found

    @property
    def _weighs(self) -> bool:
        weights = self.rules.weights
        return weights.age > 0 or weights.fairshare > 0

    def tick(self, now_s: float) -> bool:
        """Calculate usage and priorities anew where a period has passed, before anything else of an event.

        Return True if that changed the order of the queue.
        """
        period_s = now_s // self.rules.calc_s * self.rules.calc_s
        if period_s <= self._calculated_s or not self._weighs:
            return False
        while self._calculated_s < period_s:  # each period decays the usage by itself
            self._calculated_s += self.rules.calc_s
            self.priorities.count(self._calculated_s)
        self._calculated_s = period_s
        self.priorities.calculate()
        self._site = None
        before = self.queue[:]
        for job in self.queue:
            self._prioritize(job, period_s)
        self.queue.sort(key=BY_ORDER)
        self._stale = True
        changed = before != self.queue
        if changed:
            self._head_s = min(self._head_s, following(now_s, self.backfill.full_interval_s))
            self._pass_s = min(self._pass_s, following(now_s, self.backfill.interval_s))
        return changed

    def settle(self, now_s: float) -> None:
        """Start what Slurm starts now, after all that has happened at this time."""
        rules = self.backfill
        self.tick(now_s)
        while self._later and self._later[0][0] <= now_s:
            self._enter(heappop(self._later)[2], now_s)
        new, freed = self._new, self._freed
        self._new = self._freed = False
        # 1. The main scheduler: after each end at once, and soon after a submission.
        if new:
            soon_s = min(self._looked_s + rules.batch_delay_s, following(now_s, rules.full_interval_s))
            self._head_s = min(self._head_s, max(now_s, soon_s))
        if self._head_s <= now_s:
            self._looked_s, self._head_s = now_s, inf
            self._start_head()
        elif freed:
            self._start_head()
        # 2. Backfill: at the next multiple of its interval after a change.
        if self._pass_s <= now_s:
            self._backfill(now_s)
            self._pass_s = inf
        elif freed or new:
            self._pass_s = min(self._pass_s, following(now_s, rules.interval_s)) if self.queue else inf

    def _prioritize(self, job: QueuedJob, now_s: float) -> None:
        job.priority = self.priorities.value(job.facts, job.eligible_s, now_s, job.site_factor)
        job.order = (-job.facts.tier, -job.priority, job.submit_s, job.id)

    # --- The main scheduler and backfill -------------------------------------------------------------------

    def limit(self, job: QueuedJob) -> str:
        """Return Slurm's reason where a limit keeps a job from starting whatever is free, else nothing."""
        if not self.limited and job.array_limit is None and not job.licenses:
            return ""
        person, qos = job.facts.person, job.facts.qos
        account = self.rules.accounts.get(person.account, Account())
        if account.max_jobs is not None and self._used["jobs", person] >= account.max_jobs:
            return "AssocMaxJobsLimit"
        if account.gpus is not None and self._used["gpus", person.account] + job.gpus > account.gpus:
            return "AssocGrpGRES"
        most = self.rules.qos.get(qos, Qos()).gpus_per_user
        if most is not None and self._used["gpus", (qos, person.user)] + job.gpus > most:
            return "QOSMaxGRESPerUser"
        if job.array_limit is not None and self._used["array", job.array] >= job.array_limit:
            return "JobArrayTaskLimit"
        lacks = any(self._used["license", name] + one > self.rules.licenses.get(name, 0) for name, one in job.licenses)
        return "Licenses" if lacks else ""

    def _start_head(self) -> None:
        """Start jobs in order; one that lacks nodes keeps all jobs behind it off the nodes of its partition.

        One that is pinned keeps them off its own nodes only, and one at a limit keeps none waiting.
        """
        left, blocked = self.open, set[str]()
        for job in self._heads():
            if not left:
                break
            if job.partition in blocked or (self._bounded and self.limit(job)):
                continue
            if spot := self._place(job, left):
                self._start(job, spot)
            elif job.pins:
                left &= ~bits_of(at for at, _ in job.pins)
            else:
                # As in slurmctld, jobs of other partitions that share its nodes may not take these either.
                blocked.add(job.partition)
                left &= ~self.nodes_of[job.partition]
        for job in self._unseen:
            job.looked = True
        self._unseen.clear()
        self._stale = True

    def _heads(self) -> Iterator[QueuedJob]:
        """Yield the queue; those that are started on the way are no longer in it."""
        at = 0
        while at < len(self.queue):
            job = self.queue[at]
            yield job
            at += at < len(self.queue) and self.queue[at] is job

    def _start(self, job: QueuedJob, spot: Sequence[int]) -> None:
        self.withdraw(job)
        self._start_told(job, job.pins or tuple(zip(spot, job.each, strict=True)))

    def _place(self, job: QueuedJob, among: int) -> list[int]:
        """Return the nodes of ``among`` that a job gets now, or nothing."""
        future = self._future or self._ends(self._looked_s)
        return future.spot(job, among & job.among, 0)

    def _backfill(self, now_s: float) -> None:
        """Look at the jobs in order of priority: each starts now, or gets a reservation for its earliest start.

        A job at a limit is not looked at.
        """
        plan = Pass(now_s, self.open, self.backfill)
        free = (job for job in self.queue if not self.limit(job)) if self._bounded else self.queue
        tested = list(islice(free, self.backfill.max_jobs))
        room = _RoomNow(plan, tested, self.running, self._place)
        # Jobs behind the last one that can start now are left out: nothing comes of their reservations.
        last = room.last_before(len(tested))
        reserved, most = 0, self.backfill.reservations
        for number, job in enumerate(tested):
            if number > last:
                break
            if most is not None and reserved >= most and not room.has(job):
                continue
            if self._bounded and self.limit(job):
                continue
            start_s, spot = plan.earliest(job, self._ends(now_s))
            if spot and start_s <= now_s:
                self._start(job, spot)
                last = room.last_before(last + 1)
            elif spot and (most is None or reserved < most):
                plan.reserve(start_s, start_s + job.limit_s, bits_of(spot))
                reserved += 1
                if not room.has(tested[last]):
                    last = room.last_before(last)

    def _ends(self, now_s: float) -> Future:
        """Return the ends of the running jobs by their limits; the same object as long as it can follow the jobs."""
        if self._future is None or not self._future.reaches(now_s):
            self._future = Future(now_s, self.free, self.running.values(), self.lanes)
        return self._future

    # --- What it shows -------------------------------------------------------------------------------------

    def site(self) -> SiteRules:
        """Return the site's rules and fair shares as of the last calculation."""
        if self._site is None:
            self._site = self.priorities.site()
        return self._site

    def tell(self) -> Iterator[QueuedJob]:
        """Yield the queued jobs whose priority or reason is another than at the last call."""
        if not self._stale:
            return
        self._stale = False
        first = dict.fromkeys(self.nodes_of, "Resources")
        for job in self.queue:
            reason = self.limit(job) if self._bounded else ""
            # The first job of a partition that lacks nodes has the reason Resources, those behind it Priority.
            if not reason and job.looked:
                reason = first[job.partition]
                if not job.pins:
                    first[job.partition] = "Priority"
            job.reason = reason
            if job.shown != (shown := (job.priority, reason)):
                job.shown = shown
                yield job


class _RoomNow:
    """The jobs of one pass that fit now on nodes without a reservation until their limit.

    A pass only takes room. So where a job has none, others of its kind have none for the rest of the pass, unless
    their limit is shorter.
    """

    def __init__(
        self,
        plan: Pass,
        tested: Sequence[QueuedJob],
        running: Container[QueuedJob],
        place: Callable[[QueuedJob, int], list[int]],
    ) -> None:
        self._plan, self._tested, self._running, self._place = plan, tested, running, place
        self._vain: dict[int, float] = {}
        """The shortest limit without room, by kind of job."""

    def has(self, job: QueuedJob) -> bool:
        """Return True if a job fits now."""
        if job.limit_s >= self._vain.get(job.kind, inf):
            return False
        if self._place(job, self._plan.unreserved(job.limit_s)):
            return True
        self._vain[job.kind] = job.limit_s
        return False

    def last_before(self, end: int) -> int:
        """Return the place of the last job before this place that waits and fits now, or -1."""
        for at in range(end - 1, -1, -1):
            job = self._tested[at]
            if job.limit_s < self._vain.get(job.kind, inf) and job not in self._running and self.has(job):
                return at
        return -1


def following(now_s: float, every_s: float) -> float:
    """Return the next multiple of an interval, from now on."""
    return ceil(now_s / every_s) * every_s
