"""Level of each job, and which running jobs may make way for which waiting ones (pure).

The level is that of the attained GPU time (Tiresias, NSDI'19, §3, in seven thresholds), or the eighth of the jobs in
which another ordering puts it. Least attained service lets a newcomer go first because it can be stopped once it has
had more than others. A job that nothing can stop counts with the GPU time up to its limit instead, and one level more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property

from cadenza.policies.core.model import Job, JobKey, Lease, SiteRules
from cadenza.policies.core.move import Move
from cadenza.policies.ordering.levels import THRESHOLDS, level_of, levels
from cadenza.policies.ordering.ranking import attained_service, first_submit_s, progress_of
from cadenza.policies.sharing.state.round_state import RoundState

LAST_LEVEL = len(THRESHOLDS)
STAYS_LEVELS = 1
"""Levels that a waiting job which cannot leave its GPUs counts worse: once it has them, no job gets them back."""
MOST_SERVED_S = 64 * 3600.0
"""GPU seconds that such a job counts with at most: longer limits say little of run times."""
NO_LIMIT_S = 366 * 86400.0
"""A job without a time limit counts as one with this: the longest that Slurm knows, in seconds."""
COST_S = 60.0
"""Assumed cost of a move until the job's own is known, in seconds."""
QUANTUM_COSTS = 10.0
"""A job keeps the GPUs that it got for so many times the cost of its last move, what it repeated since its checkpoint
included: moving costs it a tenth at most."""
DISPLACED_PART = 0.2
"""Part of its time with GPUs that a job may wait for jobs that cannot leave."""
FIRST_MOVES, MOVES_A_DAY = 6.0, 1.5
"""Bound on the restarts of a job: so many, and so many more for each day since its submission."""
FEW, NEARLY_ALL = 0.3, 0.95
"""Parts of all GPU time that jobs which can leave have, between which the level of one that made way comes to count."""
STARVING_S = 86400.0
"""Wait after which a job that made way stands in the queue as if it had never had GPUs, in seconds."""
BELIEVED_S = 14 * 86400.0
"""Time for which a user's job name counts as one that keeps checkpoints since one of its jobs was seen with some."""
NEWS_S = 3600.0
"""Age from which on that is noted anew."""
MAX_BELIEVED = 4096


def limit_s(job: Job) -> float:
    """Return a job's time limit in seconds."""
    return NO_LIMIT_S if job.time_limit_s is None else job.time_limit_s


def checkpoint_name(job: Job) -> str:
    """Return the name under which a job is known to keep checkpoints: its user's, and its own."""
    return f"{job.user}/{job.name}"


class Standings:
    """The levels of a round's jobs, and the rules for making way."""

    def __init__(self, state: RoundState) -> None:
        self.state = state
        self.now_s = state.now_s
        self.site: SiteRules = state.snapshot.site
        self.moves: Mapping[int, Move] = state.last_moves
        self._levels: dict[JobKey, int] = {}
        self._claims: dict[JobKey, tuple[Job, int]] = {}
        self._stays_because: dict[JobKey, str | None] = {}

    # --- Levels --------------------------------------------------------------------------------------------

    def level(self, job: Job) -> int:
        """Return the level of a job by its attained GPU time, or by another ordering; 0 goes first.

        A job that made way and has waited for a day since has level 0 while it waits.
        """
        found = self._levels.get(job.key)
        if found is None:
            found = self._levels[job.key] = self._level(job)
        return found

    def _level(self, job: Job) -> int:
        state = self.state
        if job.state == "PENDING" and self.starves(job):
            return 0
        if state.jobs.order is levels:
            return level_of(attained_service(job, self.now_s))
        last = len(state.ranks)
        return state.ranks.get(job.key, last) * (LAST_LEVEL + 1) // (last + 1)

    def starves(self, job: Job) -> bool:
        """Return True if a waiting job made way a day ago and has not come back since."""
        # A requeue submits a job anew, so this is the time since it made way.
        if self.now_s < job.submit_s + STARVING_S:
            return False
        move = self.moves.get(job.key.id)
        return move is not None and move.successor == job.key and not move.shares

    def claim(self, job: Job) -> int:
        """Return the level with which a waiting job asks others to make way."""
        known = self._claims.get(job.key)
        if known is not None and known[0] is job:
            return known[1]
        if self.can_leave_later(job):
            claim = self.level(job)
        else:
            served_s = min(limit_s(job) * job.gpus, MOST_SERVED_S)
            claim = min(level_of(served_s), LAST_LEVEL) + STAYS_LEVELS
        self._claims[job.key] = job, claim
        return claim

    def can_leave_later(self, job: Job) -> bool:
        """Return True if a waiting job will be able to make way once it runs, as far as is known.

        Its user's word alone does not count: a job that says so and never attaches would start at once and keep its
        GPUs for good. Jobs of the same user and name must have been seen with checkpoints.
        """
        if not self.state.settings.manages(job) or not job.requeueable or job.key.id in self.state.memory.unrestored:
            return False
        move = self.moves.get(job.key.id)
        if move is not None and move.successor == job.key:
            return True  # it has left its GPUs for others, whatever it said
        denies = job.options is not None and job.options.checkpoints is False
        return not denies and checkpoint_name(job) in self._believed

    @cached_property
    def _believed(self) -> frozenset[str]:
        now_s, known = self.now_s, self.state.memory.keep_checkpoints
        return frozenset(name for name, at_s in known.items() if now_s - at_s <= BELIEVED_S)

    def running_on(self, names: Iterable[str]) -> list[Job]:
        """Return the jobs with GPUs on some nodes."""
        found = {job.key: job for name in names for job in self._on_node.get(name, ())}
        return [found[key] for key in sorted(found)]

    @cached_property
    def _on_node(self) -> Mapping[str, list[Job]]:
        found: dict[str, list[Job]] = {}
        for job in self.state.jobs.started:
            if job.gpus:
                for name in job.nodes:
                    found.setdefault(name, []).append(job)
        return found

    # --- Making way ----------------------------------------------------------------------------------------

    def can_leave(self, job: Job) -> bool:
        """Return True if a running job can save a checkpoint and be requeued now."""
        if job.lease is None or not job.lease.checkpoints:
            return False  # as most say, and without the sentence
        return self._reason_to_stay(job) is None  # asked once for each job

    def stays_because(self, job: Job) -> str | None:
        """Return why a running job keeps its GPUs whoever waits, as a predicate; None if it could make way."""
        if job.key not in self._stays_because:
            self._stays_because[job.key] = self._reason_to_stay(job)
        return self._stays_because[job.key]

    def _reason_to_stay(self, job: Job) -> str | None:  # noqa: PLR0911 (one for each reason)
        state, lease = self.state, job.lease
        if not state.settings.manages(job):
            return "did not opt in" if not job.opted_in else "is in a partition that is not managed"
        if not job.requeueable:
            return "may not be requeued (no batch job, or --no-requeue)"
        if lease is None:
            return "is known to no agent"
        if not lease.ready:
            return f"cannot be stopped yet{': ' + lease.why_not_ready if lease.why_not_ready else ''}"
        if reason := self._saves_not_because(job, lease):
            return reason
        leaves = job.key in state.who.giving_back or job.key in state.who.leaving
        if lease.state != "held" or job.state != "RUNNING" or leaves:
            return "does not hold its GPUs, or leaves them"
        if job.relocating is not None or job.key.id in state.where.relocating:
            return "is on its way"
        move = self.moves.get(job.key.id)
        if move is not None and move.over and move.job == job.key:
            return "could not be moved a while ago"
        if not self.moves_left(job):
            return "has been requeued often enough for its age"
        return None

    def _saves_not_because(self, job: Job, lease: Lease) -> str | None:
        """Return why a job that can be stopped saves no checkpoint now, as a predicate; None if it does."""
        if lease.unrestored or job.key.id in self.state.memory.unrestored:
            return "went on without its checkpoint after its last move, so it is not moved again"
        if not lease.checkpoints:
            return f"can save no checkpoint yet: {lease.unready}" if lease.unready else "keeps no checkpoints"
        if lease.stalls:
            return "has a checkpoint that is overdue, or was a moment ago"
        if len(self.state.memory.stalled.get(lease.file_system, ())) > 1:
            return f"saves on {lease.file_system}, where checkpoints of several users are or were overdue"
        return None

    def quantum_left_s(self, job: Job) -> float:
        """Return for how long a running job keeps its GPUs in any case, in seconds; 0 or less: it may make way."""
        move = self.moves.get(job.key.id)
        cost_s = COST_S if move is None else (move.cost_s or COST_S) + move.lost_s
        return QUANTUM_COSTS * cost_s - self.had_s(job)

    def had_s(self, job: Job) -> float:
        """Return for how long a running job has had its GPUs since it started last, in seconds."""
        if job.run_s is not None:
            return job.run_s
        if job.start_s is not None:
            return self.now_s - job.start_s
        return job.lease.held_s if job.lease is not None else 0.0

    def overdue(self, job: Job) -> bool:
        """Return True if a job has waited too long for others already: it makes way no more for jobs that never do.

        Jobs that can leave make way for each other. For those that cannot a job waits a fifth of the time that it has
        had its GPUs at most, or else the few that can leave would pay for all others.
        """
        return self.displaced_s(job) > DISPLACED_PART * progress_of(job).attained(self.now_s)

    def displaced_s(self, job: Job) -> float:
        """Return for how long a job has waited in the queue after it made way, all its moves together, in seconds."""
        move = self.moves.get(job.key.id)
        if move is None or not move.over:
            return move.displaced_s if move is not None else 0.0
        until_s = self.now_s if job.state == "PENDING" else job.start_s or self.now_s
        return move.displaced_s + (max(until_s - move.phase.since_s, 0.0) if move.successor == job.key else 0.0)

    def moves_left(self, job: Job) -> bool:
        """Return True if a job may be requeued once more: the number of its restarts is bounded over its life."""
        days = (self.now_s - first_submit_s(job)) / 86400.0
        return job.key.restart + 1 <= FIRST_MOVES + MOVES_A_DAY * days

    @cached_property
    def widest(self) -> int:
        """Return the most GPUs that a node has."""
        return max((node.gpus for node in self.state.snapshot.nodes), default=0)

    @cached_property
    def movable_part(self) -> float:
        """Return how much of the GPU time belongs to jobs that can leave: 0 below 0.3 of it, 1 from 0.95 on."""
        memory = self.state.memory
        whole = sum(used for name, used in memory.usage.items() if "/" not in name)
        part = memory.movable_usage / whole if whole > 0 else 0.0
        return min(max((part - FEW) / (NEARLY_ALL - FEW), 0.0), 1.0)

    def outranks(self, job: Job, other: Job) -> bool:
        """Return True if the site's own rules put a running job above a waiting one, so that it does not make way.

        It is of a higher class (PriorityTier of its partition, priority of its QOS), or its account or user has had
        less than their share and the waiting job's more (LevelFS below 1).
        """
        site, fair = self.site, self.site.fair_share
        # Slurm sorts its queue by PriorityTier before it looks at any priority.
        if job.partition != other.partition and site.tier(job.partition) > site.tier(other.partition):
            return True
        if job.qos != other.qos and site.qos_priority.get(job.qos, 0) > site.qos_priority.get(other.qos, 0):
            return True
        # Slurm's fair tree compares accounts first, and users within one account only.
        same = job.account == other.account
        # The share does not count against a job that made way a day ago: in Slurm alone it would have kept its GPUs,
        # and where each host has a job of such an account it would come back only when one of these ends.
        if fair.get(f"{other.account}/{other.user}" if same else other.account, 1.0) >= 1.0 or self.starves(other):
            return False
        return fair.get(f"{job.account}/{job.user}" if same else job.account, 1.0) >= 1.0


def note_checkpoints(state: RoundState) -> None:
    """Remember which users' job names keep checkpoints: jobs that are ready say so, whatever their options say."""
    now_s, known = state.now_s, state.memory.keep_checkpoints
    seen: dict[str, float] = {}
    for job in state.jobs.ours.values():
        if job.lease is not None and job.lease.ready and job.lease.checkpoints:
            name = checkpoint_name(job)
            if now_s - known.get(name, -BELIEVED_S) >= NEWS_S:
                seen[name] = now_s
    if seen or (known and now_s - min(known.values()) > BELIEVED_S):
        kept = {name: at_s for name, at_s in known.items() if now_s - at_s <= BELIEVED_S} | seen
        newest = sorted(kept, key=lambda name: (-kept[name], name))[:MAX_BELIEVED]
        state.memory = replace(state.memory, keep_checkpoints={name: kept[name] for name in sorted(newest)})
