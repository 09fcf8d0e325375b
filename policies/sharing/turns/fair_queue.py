"""Fair queue of the jobs that share GPUs: turns by least virtual time, the same for the service and an agent alone.

Gandiva slices time by weighted round robin among the jobs that share a server's GPUs (Gandiva, OSDI'18, page 601).
Here the jobs are *contenders*, each with one fixed set of GPUs (a gang: all of them or none, on one host or several),
and the next turn is that of the least virtual time.

Order
    Unmanaged (exclusive) jobs, then by priority, then jobs whose resume the service ordered, then overdue jobs by how
    much, then preferred jobs, then the least virtual time, then the job's key. It is total: the
    input's order changes nothing.
Displacement
    Exclusive jobs and higher priorities displace at once. Equal priorities displace a holder when its slice
    is over (less half an iteration), it has run ``min_run_s`` and the waiting job comes first. A gang takes
    all its GPUs at one moment: until the last of its blockers is over, the others go on.
Preference
    Where turns follow the ordering (``turns.contender``), a preferred job comes before the others of its priority
    whatever their virtual times: it displaces them when their slice is over, and keeps its GPUs from them until
    they are overdue. Among themselves preferred jobs take turns as all others do.
Claims
    A gang whose last blocker is over within ``fill_s = max(min_run_s, slice_s / 4)`` claims its GPUs: no job
    behind it may take them any more. Before that, jobs behind it may *fill* in; a filler keeps the GPUs only
    until the gang can have all of them, but at least ``min_run_s``.
Overdue
    A job is overdue when it has waited ``MAX_FAIR_WAITS`` times one slice of each of its priority that it meets, itself
    included (with weights: one slice times max(1, other weight / own weight)). That happens when virtual
    times do not compare, as of jobs that never met, and behind a stream of short newcomers. It comes before
    all that are not overdue, claims at once, and starts again with the least virtual time of those it meets.
    A job that is not preferred and meets a preferred one has to wait ``MAX_FAIR_WAITS_BEHIND`` times these slices.
Bounds
    They hold among jobs of one priority that can be stopped, of one user or with sharing allowed. T is one
    turn: the slice, ``min_run_s``, one iteration, and the stop and start.
    Starvation: a job waits at most ``3 n T`` where it meets n equal-weight jobs at a time, itself among them,
    and ``(n - 1) T`` when all n want the same GPUs and their virtual times are within a slice. With weights,
    n is the sum of max(1, other weight / own weight). Behind a preferred job it is ``2 MAX_FAIR_WAITS_BEHIND n T``.
    Idleness: a free GPU that a waiting job could use at once stays idle only for a claim, that is for at most
    ``fill_s`` and one stop, or T before an overdue job; before an unmanaged job, until that has started.
    There is no bound behind a holder that cannot be stopped, nor between users that may not share.
Packs
    Jobs that are packed have their GPUs at once and take their turn together; see ``turns.contender``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from cadenza.policies.core.model import Gpu, JobKey
from cadenza.policies.core.text import gpu_names, job_names
from cadenza.policies.sharing.turns.contender import Contender, together

__all__ = ["MAX_FAIR_WAITS", "MAX_FAIR_WAITS_BEHIND", "Contender", "Turn", "arrival_vtime", "groups", "next_turn"]

MAX_FAIR_WAITS = 1.5
"""Wait limit of a job, in fair waits: after it the job is overdue. Switches must fit into the half."""
MAX_FAIR_WAITS_BEHIND = 4.0
"""Wait limit, in fair waits, for a job that shares GPUs with a preferred job. With two jobs the other one gets 1/9 of
the GPU time."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Orders of one turn."""

    holders: frozenset[JobKey]
    """Jobs that have the GPUs once all of this is done; two share a GPU only if packed (or if they did already)."""
    yields: tuple[JobKey, ...]
    """Holders to be asked to stop now, first come first."""
    resumes: tuple[JobKey, ...]
    """Jobs whose GPUs are free and theirs now."""
    upcoming: tuple[JobKey, ...]
    """Jobs that get their GPUs when ``yields`` and those already stopping have stopped."""
    vtimes: Mapping[JobKey, float]
    """The virtual time that each of ``resumes`` and ``upcoming`` starts with."""
    reasons: Mapping[JobKey, str]
    """One sentence, without its subject, for every contender."""


def next_turn(
    contenders: Iterable[Contender],
    *,
    slice_s: float,
    share_between_users: bool,
    min_run_s: float,
    displace: bool = True,
) -> Turn:
    """Return the jobs that yield and the jobs that get GPUs now; the module's text has the rules and bounds.

    With ``displace`` False only free GPUs are given out, and only an exclusive job makes a holder yield: the
    agent's work conservation while the service decides on displacement. Keys must be unique. Without
    ``share_between_users`` a job does not start while a started job of another user shares a GPU with it.
    """
    turn = _Pass(contenders, _Rules(slice_s, min_run_s, share_between_users, displace))
    for standing in turn.waiting:
        turn.consider(standing.job)
    return turn.result()


def arrival_vtime(gpus: Iterable[Gpu], contenders: Iterable[Contender]) -> float:
    """Return the virtual time that a new job on these GPUs starts with: the least of those it meets there."""
    wanted = frozenset(gpus)
    return min((c.vtime_s for c in contenders if not c.exclusive and c.gpus & wanted), default=0.0)


def groups(contenders: Iterable[Contender]) -> tuple[tuple[Contender, ...], ...]:
    """Return the contenders in groups that share GPUs, directly or through others; in order of keys.

    Turns of one group do not depend on any other group.
    """
    roots: dict[JobKey, JobKey] = {}
    owner: dict[Gpu, JobKey] = {}
    ordered = sorted(contenders, key=attrgetter("key"))
    for contender in ordered:
        root = roots[contender.key] = contender.key
        for gpu in contender.gpus:
            other = _root(roots, owner.setdefault(gpu, root))
            root, later = min(root, other), max(root, other)
            roots[later] = root
    members: dict[JobKey, list[Contender]] = {}
    for contender in ordered:
        members.setdefault(_root(roots, contender.key), []).append(contender)
    return tuple(map(tuple, members.values()))


def _root(roots: dict[JobKey, JobKey], key: JobKey) -> JobKey:
    """Return the least key of a group, and remember the shorter way to it."""
    root = key
    while (above := roots[root]) != root:
        root = above
    roots[key] = root
    return root


@dataclass(frozen=True, slots=True)
class _Standing:
    """A waiting job among those of its priority that it meets."""

    job: Contender
    overdue_s: float
    least_s: float
    """The least virtual time among them, its own included."""

    def rank(self) -> tuple[bool, int, bool, float, bool, float, JobKey]:
        """Return the sort key."""
        job = self.job
        by_turns = -self.overdue_s, not job.preferred, job.vtime_s, job.key
        return (not job.exclusive, -job.priority, not job.resume_ordered, *by_turns)

    @property
    def start_vtime_s(self) -> float:
        """Return the virtual time to start with."""
        return self.least_s if self.overdue_s else self.job.vtime_s


@dataclass(frozen=True, slots=True)
class _Rules:
    slice_s: float
    min_run_s: float
    share_between_users: bool
    displace: bool

    @property
    def fill_s(self) -> float:
        """Below this a filler is not worth its switch; below ``min_run_s`` fillers could follow fillers."""
        return max(self.min_run_s, self.slice_s / 4)

    def standing(self, waiting: Contender, met: Callable[[Contender], list[Contender]]) -> _Standing:
        """Return where a job stands among all those it meets, itself among them."""
        if waiting.waited_s <= MAX_FAIR_WAITS * self.slice_s:  # not even among itself alone
            return _Standing(waiting, 0.0, waiting.vtime_s)
        peers = [o for o in met(waiting) if o.priority == waiting.priority and not o.exclusive]
        fair_s = self.slice_s * sum(max(1.0, o.weight / waiting.weight) for o in peers)
        least_s = min((o.vtime_s for o in peers), default=waiting.vtime_s)
        late = MAX_FAIR_WAITS_BEHIND if not waiting.preferred and any(o.preferred for o in peers) else MAX_FAIR_WAITS
        return _Standing(waiting, max(0.0, waiting.waited_s - late * fair_s), least_s)

    def claims(self, standing: _Standing, left_s: float) -> bool:
        """Return True if no job behind may take the GPUs of a job that has to wait this long."""
        return left_s < inf if standing.overdue_s else left_s <= self.fill_s

    def left_s(self, holder: Contender, standing: _Standing) -> float:
        """Return the time until ``holder`` makes way for a waiting job; inf when it never has to."""
        waiting = standing.job
        if holder.state == "stopping":
            return 0.0
        if holder.exclusive or not holder.ready:
            return inf
        if waiting.exclusive or waiting.priority > holder.priority:
            return 0.0
        # Gandiva never suspends a job for one of lower priority (OSDI'18, page 602).
        if waiting.priority < holder.priority or self.keeps_by_order(holder, standing):
            return inf
        return max(0.0, self._slice_left_s(holder, standing))

    @staticmethod
    def keeps_by_order(holder: Contender, standing: _Standing) -> bool:
        """Return True if a holder keeps its GPUs by the ordering, until the waiting job is overdue."""
        waiting = standing.job
        equal = holder.priority == waiting.priority and not waiting.exclusive
        return equal and holder.preferred and not waiting.preferred and not standing.overdue_s

    def _slice_left_s(self, holder: Contender, standing: _Standing) -> float:
        least = self.min_run_s - holder.held_s
        if self._fills_in(holder, standing.job):
            return least
        # A holder stops at the end of an iteration only, which is half an iteration away on average.
        over = self.slice_s - (holder.iteration_s or 0.0) / 2 - holder.stretch_s
        first = standing.overdue_s or (standing.job.preferred and not holder.preferred)
        ahead = 0.0 if first else (standing.job.vtime_s - holder.vtime_s) * holder.weight
        return max(least, over, ahead)

    def _fills_in(self, holder: Contender, waiting: Contender) -> bool:
        """Return True if the holder got its GPUs although the waiting job came before it even then.

        The margin is for clocks of several hosts.
        """
        behind_s = holder.vtime_s - holder.stretch_s / holder.weight - waiting.vtime_s
        return waiting.waited_s >= holder.stretch_s and behind_s > self.slice_s / 10


class _Pass:
    """One call's working state: the GPUs that are in use, promised and claimed so far, in rank order."""

    def __init__(self, contenders: Iterable[Contender], rules: _Rules) -> None:
        self.rules = rules
        ordered = together(sorted(contenders, key=attrgetter("key")))
        bits: dict[Gpu, int] = {}
        self._mask = {c.key: sum(1 << bits.setdefault(gpu, len(bits)) for gpu in c.gpus) for c in ordered}
        self._holders = [c for c in ordered if c.holding]
        self._started = [c for c in ordered if c.started and not c.exclusive]
        self._all = ordered
        self._standing = {c.key: rules.standing(c, self._meets) for c in ordered if not c.holding}
        self.waiting = sorted(self._standing.values(), key=_Standing.rank)
        self._promised: list[Contender] = []
        self._promised_mask = 0
        self._yields: dict[JobKey, str] = {}
        self._resumes: list[JobKey] = []
        self._upcoming: list[JobKey] = []
        self._reasons: dict[JobKey, str] = {}

    def consider(self, waiting: Contender) -> None:
        """Decide on one waiting job, after all that come before it."""
        mask = self._mask[waiting.key]
        other_user = self._other_user(waiting, mask)
        if not waiting.eligible:
            self._wait(waiting, "it may not run now")
        elif other_user is not None:
            self._wait(waiting, f"job {other_user.key} of another user is there, sharing between users is off")
        elif mask & self._promised_mask and (
            first := [c.key for c in self._promised if self._mask[c.key] & mask and c.key not in waiting.packed_with]
        ):
            self._wait(waiting, f"{job_names(first)} {'comes' if len(first) == 1 else 'come'} first")
        else:
            self._take(waiting, mask, self._blockers(waiting))

    def _meets(self, contender: Contender) -> list[Contender]:
        mask = self._mask[contender.key]
        return [other for other in self._all if self._mask[other.key] & mask]

    def _blockers(self, waiting: Contender) -> list[Contender]:
        mask = self._mask[waiting.key]
        apart = waiting.packed_with
        return [holder for holder in self._holders if self._mask[holder.key] & mask and holder.key not in apart]

    def _other_user(self, waiting: Contender, mask: int) -> Contender | None:
        if self.rules.share_between_users or waiting.started or waiting.exclusive:
            return None
        others = (c for c in self._started if c.user != waiting.user and self._mask[c.key] & mask)
        return next(others, None)

    def _take(self, waiting: Contender, mask: int, blockers: list[Contender]) -> None:
        if not blockers:
            self._promise(waiting, mask)
            self._resumes.append(waiting.key)
            self._reasons[waiting.key] = f"gets {gpu_names(waiting.gpus)}, free now"
            return
        standing = self._standing[waiting.key]
        left = {h.key: 0.0 if h.key in self._yields else self.rules.left_s(h, standing) for h in blockers}
        moving = all(h.state == "stopping" or h.key in self._yields for h in blockers)
        last = max(blockers, key=lambda h: (left[h.key], h.key))
        self._reasons[waiting.key] = self._behind(waiting, last, left[last.key])
        if waiting.exclusive or moving or (self.rules.displace and left[last.key] <= 0):
            self._displace(waiting, mask, [h for h in blockers if left[h.key] <= 0])
        elif self.rules.displace and self.rules.claims(standing, left[last.key]):
            self._claim(waiting, mask)

    def _displace(self, waiting: Contender, mask: int, makes_way: list[Contender]) -> None:
        self._promise(waiting, mask)
        for holder in makes_way:
            if holder.state == "held":
                self._yields.setdefault(holder.key, _yield_reason(holder, waiting, self.rules))
        if len(makes_way) == len(self._blockers(waiting)):
            self._upcoming.append(waiting.key)
            names = job_names(h.key for h in makes_way)
            self._reasons[waiting.key] = f"gets {gpu_names(waiting.gpus)} as soon as {names} made way"

    def _claim(self, waiting: Contender, mask: int) -> None:
        self._promised.append(waiting)
        self._promised_mask |= mask

    def _promise(self, waiting: Contender, mask: int) -> None:
        self._claim(waiting, mask)
        if not waiting.exclusive:
            self._started.append(waiting)

    def _wait(self, waiting: Contender, cause: str) -> None:
        self._reasons[waiting.key] = f"waits for {gpu_names(waiting.gpus)}: {cause}"

    def _behind(self, waiting: Contender, last: Contender, left_s: float) -> str:
        if left_s <= 0:
            cause = f"job {last.key} is to make way"
        elif left_s < inf:
            cause = f"job {last.key} may keep it for {left_s:.0f} s more"
        elif last.exclusive:
            cause = f"job {last.key} is not managed and keeps it until its end"
        elif not last.ready:
            cause = f"job {last.key} cannot be stopped"
        elif last.priority > waiting.priority:
            cause = f"job {last.key} has a higher priority"
        else:
            cause = f"job {last.key} comes first in the order"
        return f"waits for {gpu_names(waiting.gpus)}: {cause}"

    def result(self) -> Turn:
        """Return the turn after every waiting job was considered."""
        for holder in self._holders:
            self._reasons[holder.key] = self._yields.get(holder.key) or self._holds(holder)
        gone = {h.key for h in self._holders if h.state == "stopping"} | self._yields.keys()
        gpus_allocated = (*self._resumes, *self._upcoming)
        return Turn(
            holders=frozenset({h.key for h in self._holders} - gone | set(gpus_allocated)),
            yields=tuple(self._yields),
            resumes=tuple(self._resumes),
            upcoming=tuple(self._upcoming),
            vtimes={key: self._standing[key].start_vtime_s for key in gpus_allocated},
            reasons=self._reasons,
        )

    def _holds(self, holder: Contender) -> str:
        mask = self._mask[holder.key]
        after = next((s for s in self.waiting if self._mask[s.job.key] & mask), None)
        verb = "is stopping on" if holder.state == "stopping" else "holds"
        text = f"{verb} {gpu_names(holder.gpus)} for {holder.held_s:.0f} s"
        if after is None:
            return f"{text}; no job waits for it"
        if holder.exclusive or not holder.ready:
            kind = "is not managed" if holder.exclusive else "cannot be stopped"
            return f"{text} and {kind}; next: job {after.job.key}"
        if self.rules.keeps_by_order(holder, after):
            return f"{text} and comes first in the order; next: job {after.job.key}"
        return f"{text} of its {self.rules.slice_s:.0f} s slice; next: job {after.job.key}"


def _yield_reason(holder: Contender, waiting: Contender, rules: _Rules) -> str:
    cause = f"its {rules.slice_s:.0f} s slice is over"
    if waiting.exclusive:
        cause = f"job {waiting.key} is not managed"
    elif waiting.priority > holder.priority:
        cause = f"job {waiting.key} has a higher priority"
    return f"makes way on {gpu_names(holder.gpus)} for job {waiting.key}: {cause}"
