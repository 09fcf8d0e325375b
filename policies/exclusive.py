"""The policy without sharing: a GPU has one job, and order and allocation say which and with what.

No job is held. The round pins each job whose turn has come to its nodes. Jobs that it stops, and those that stand
before a pinned one in Slurm's queue without having their turn, get a SiteFactor far below all others: Slurm's main
scheduler goes by priority and stops at the first job that does not fit. The factor is lifted when its job's turn
comes. Slurm starts jobs by itself where GPUs are free; the next round sees them running.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cadenza.policies.allocation.problem import Allocate, Case, Plan, Server
from cadenza.policies.core.actions import Action, MakeWay, Migrate, Place, Release, SetFactor, Tune, Unpack
from cadenza.policies.core.decision import Decision, Memory, remembered
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Node, Placement
from cadenza.policies.ordering.backlog import Backlog
from cadenza.policies.ordering.ranking import Order, Queue, Ranking, arrival, starving_first
from cadenza.policies.policy_settings import PolicySettings
from cadenza.policies.registry import Entry
from cadenza.policies.sharing.board.node_room import lane0, left_beside
from cadenza.policies.sharing.placement.host_division import caches_mb
from cadenza.policies.sharing.preemption.standing import COST_S, QUANTUM_COSTS
from cadenza.policies.sharing.state.groups import standing
from cadenza.policies.sharing.state.pending import REQUEUED, awaits_place, our_pins, unpinned_for, waits_for_nodes
from cadenza.policies.sharing.state.settings import SharingSettings, exclusion_reason
from cadenza.policies.sharing.state.site_limits import Limits
from cadenza.policies.sharing.turns.lanes import lane_actions
from cadenza.policies.sharing.turns.slurm_sync import release_plan

FAR_BELOW = -(2**30)
"""SiteFactor of a job that waits for its turn behind one that has its own.

Slurm keeps a SiteFactor as an unsigned 32-bit number with the offset 2**31 (NICE_OFFSET in slurm.h), so it goes from
about -2**31 to 2**31. Half of that is below any sum of weights that a site uses, and Slurm cuts a priority off at 1.
"""


class Exclusive:
    """One job a GPU: the first jobs in order that fit run, with what the allocation gives them."""

    def __init__(
        self, order: Order, allocate: Allocate, settings: PolicySettings, allocation_entry: Entry, ordering_entry: Entry
    ) -> None:
        self.order = order
        self.allocate = allocate
        self.settings = settings
        self.profiled = allocation_entry.profiled
        self.steady = ordering_entry.steady
        self._ranked: tuple[ClusterSnapshot, Memory, _Ranked] | None = None
        self._backlog = Backlog(arrival, self._wanted)
        self._nodes: tuple[Node, ...] = ()
        self._servers: tuple[Server, ...] = ()

    def decide(self, snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        """Return the jobs to start, change and preempt, and a reason for each job."""
        if not self.settings.sharing.floor:
            return self._planned(snapshot, memory)
        # 1. Only jobs that we may start and requeue count as managed.
        rules = self.settings.effective_sharing
        seen = _only_steerable(snapshot, memory, rules)
        planned = self._planned(seen, memory)
        if not (snapshot.site.multifactor and snapshot.site.points):
            planned = _without_stops(planned)
        planned = _without_stops_in_quantum(planned, seen, memory)
        # 2. What an earlier sharing has left behind ends, and so do pins that the plan does not confirm.
        groups = standing(memory.sharing.packs, snapshot.by_key)
        ended = [Unpack(key, "runs alone again: sharing is off") for group in groups for key in group[:-1]]
        unpinned = _pins_over(planned, snapshot, memory, rules)
        undone = (_explained(a, unpinned) for a in release_plan(snapshot, memory, "sharing is off"))
        lanes = lane_actions(snapshot, memory, replace(rules, enforce=False))
        # 3. A placement keeps what Slurm's allocation promised to its job.
        actions = (
            _with_request_kept(action, snapshot) for action in planned.actions if not _is_placed(action, snapshot)
        )
        # 4. The reason of each job that is left alone.
        excluded = {
            job.key: reason
            for job, shown in zip(snapshot.jobs, seen.jobs, strict=True)
            if job.options is not None and (reason := exclusion_reason(job, rules) or shown.unmanageable)
        }
        return replace(
            planned,
            actions=(
                *ended,
                *(a for a in undone if a is not None),
                *lanes,
                *_behind(planned, seen, memory, rules),
                *actions,
            ),
            reasons={**planned.reasons, **excluded, **unpinned},
        )

    def _planned(self, snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        """Return the changes from what runs to what the order and the allocation want."""
        used = memory if self.steady else with_usage(memory, snapshot, self.settings.usage_half_life_s)
        ranked = self._rank(snapshot, used)
        case = Case(
            snapshot.time_s,
            ranked.servers,
            ranked.ranking.jobs,
            ranked.runnable,
            ranked.ranking.gpu_type,
            self.settings.costs,
            self.settings.margin,
            self.settings.evaluations,
        )
        plan = self.allocate(case if self.settings.backfill else replace(case, jobs=case.jobs[: case.runnable]))
        changes = _changes(case, plan, self._backlog.running, memory.factors)
        return Decision(changes, used, _reasons(snapshot, case, plan))

    def runnable(self, snapshot: ClusterSnapshot, memory: Memory) -> tuple[JobKey, ...]:
        """Return the ordered jobs that are to run."""
        ranked = self._rank(snapshot, memory)
        return tuple([job.key for job in ranked.ranking.jobs[: ranked.runnable]])

    def _rank(self, snapshot: ClusterSnapshot, memory: Memory) -> _Ranked:
        """Return the order of a snapshot's jobs; the last answer is kept, since a steady round asks twice."""
        if self._ranked is None or self._ranked[0] is not snapshot or self._ranked[1] is not memory:
            self._ranked = (snapshot, memory, self._rank_jobs(snapshot, memory))
        return self._ranked[2]

    def _rank_jobs(self, snapshot: ClusterSnapshot, memory: Memory) -> _Ranked:
        settings = self.settings
        jobs = self._backlog.ordered(snapshot.jobs)
        others: tuple[Job, ...] = ()
        if len(jobs) != len(snapshot.jobs):
            here = settings.partitions
            others = tuple([job for job in snapshot.jobs if job.nodes and not (job.partition in here and job.opted_in)])
        servers = usable(snapshot.nodes, others, settings.partitions) if others else self._empty_servers(snapshot.nodes)
        gpus: dict[str, int] = {}
        for server in servers:
            gpus[server.gpu_type] = gpus.get(server.gpu_type, 0) + server.gpus
        queue = Queue(snapshot.time_s, jobs, gpus, self.profiled, memory.usage, settings.shares, memory.ended)
        # The one order that never changes is the backlog's own: arrival.
        ranking = Ranking(jobs) if self.steady else starving_first(self.order(queue), queue, settings.starvation_s)
        return _Ranked(servers, ranking, _runnable_count(ranking.jobs, servers))

    def _empty_servers(self, nodes: tuple[Node, ...]) -> tuple[Server, ...]:
        """Return the servers where no unmanaged job is; the last answer is kept, since nodes rarely change."""
        if nodes is not self._nodes:
            self._nodes, self._servers = nodes, usable(nodes, (), self.settings.partitions)
        return self._servers

    def _wanted(self, job: Job) -> bool:
        return job.partition in self.settings.partitions and job.opted_in and job.state != "OTHER" and job.gpus > 0


@dataclass(frozen=True, slots=True)
class _Ranked:
    """A snapshot's usable servers, its jobs in order, and how many of these are to run."""

    servers: tuple[Server, ...]
    ranking: Ranking
    runnable: int


def with_usage(memory: Memory, snapshot: ClusterSnapshot, half_life_s: float) -> Memory:
    """Return the memory with the GPU time since the last round added, and all of it decayed."""
    now_s, since_s = snapshot.time_s, memory.usage_s
    passed_s = 0.0 if since_s is None else max(now_s - since_s, 0.0)
    fade = 0.5 ** (passed_s / half_life_s)
    usage = {name: value * fade for name, value in memory.usage.items()}
    people = defaultdict[tuple[str, str], int](int)  # whole GPUs, so that the order of the jobs changes no last digit
    movable = 0
    for job in snapshot.jobs:
        if job.state == "RUNNING":
            people[job.account, job.user] += job.gpus
            if (lease := job.lease) is not None and lease.checkpoints and job.requeueable:
                movable += job.gpus
    had: dict[str, int] = {}
    for (account, user), gpus in people.items():
        for name in (account, f"{account}/{user}"):
            had[name] = had.get(name, 0) + gpus
    for name in sorted(had):
        usage[name] = usage.get(name, 0.0) + had[name] * passed_s
    movable_usage = memory.movable_usage * fade + movable * passed_s
    return remembered(memory, usage=usage, usage_s=now_s, movable_usage=movable_usage)


def usable(nodes: tuple[Node, ...], others: tuple[Job, ...], partitions: frozenset[str]) -> tuple[Server, ...]:
    """Return the managed nodes that can run jobs, less what ``others`` (unmanaged jobs) have there, by name."""
    ours = [node for node in lane0(nodes) if not partitions.isdisjoint(node.partitions)]
    left = left_beside(others, ours)
    return tuple(sorted(Server(n.name, *left[n.name], n.gpu_type) for n in ours if min(left[n.name]) > 0))


def _runnable_count(jobs: tuple[Job, ...], servers: tuple[Server, ...]) -> int:
    """Return how many of the first jobs fit by their GPUs alone: CPUs and memory never gate (Synergy §3)."""
    free = sum([server.gpus for server in servers])
    for count, job in enumerate(jobs):
        free -= job.gpus
        if free < 0:
            return count
    return len(jobs)


def _changes(case: Case, plan: Plan, running: Iterable[Job], factors: Mapping[int, int]) -> tuple[Action, ...]:
    """Return the actions that turn what runs into the plan: first what frees, then what changes, then starts.

    ``factors``: SiteFactors of ours, by job id.
    """
    stopped: list[Job] = []
    changes: list[Action] = []
    starts: list[Place] = []
    lifted: list[Action] = []
    placements = plan.placements
    for job in _concerned(case, placements, running):
        wanted, has = placements.get(job.key), job.placement
        if has:
            if wanted is None:
                stopped.append(job)
            elif wanted != has:
                changes.append(_change(job, wanted))
        elif wanted is not None:
            nodes = tuple([share.node for share in wanted])
            starts.append(Place(job.key, nodes, TURN, shares=wanted))
            if factors.get(job.key.id):
                # Slurm starts a pinned job in its place of the queue only, which by the factor would be the last one.
                lifted.append(SetFactor(job.key, 0, TURN))
    return (*_ways(stopped, starts), *changes, *lifted, *starts)


def _without_stops_in_quantum(planned: Decision, snapshot: ClusterSnapshot, memory: Memory) -> Decision:
    """Return a plan in which a job keeps the GPUs that it got for ten times what its last move cost."""
    # Synergy preempts in rounds of five minutes (OSDI'22, §3). By attained service two jobs of equal rank would change
    # places in every round of a service that looks each few seconds.
    costs_s = {move.job.id: move.cost_s for move in memory.moves}
    young: dict[JobKey, str] = {}
    for way in (action for action in planned.actions if isinstance(action, MakeWay)):
        job = snapshot.job(way.job)
        if job is not None and job.start_s is not None:
            left_s = QUANTUM_COSTS * (costs_s.get(job.key.id) or COST_S) - (snapshot.time_s - job.start_s)
            if left_s > 0:
                young[way.job] = f"keeps its GPUs for {left_s:.0f} s yet: ten times what a move costs"
    if not young:
        return planned
    actions = tuple(one for one in planned.actions if not (isinstance(one, MakeWay) and one.job in young))
    return replace(planned, actions=actions, reasons={**planned.reasons, **young})


def _ways(stopped: Iterable[Job], starts: Sequence[Place]) -> list[MakeWay]:
    """Return one action for each job that makes way, since each may or may not be able to save a checkpoint.

    It makes way for the first job that starts on its nodes, so that those that save leave together. One that cannot
    save leaves at once: for itself, that is for no job in particular, as where the plan only needs CPUs or memory.
    """
    first: dict[str, JobKey] = {}
    for place in starts:
        for name in place.nodes:
            first.setdefault(name, place.job)
    found = []
    for job in stopped:
        saves = job.lease is not None and job.lease.checkpoints
        there = (first[share.node] for share in job.placement if saves and share.node in first)
        found.append(MakeWay((job.key,), (FAR_BELOW,), next(there, job.key), STOPS))
    return found


def _concerned(case: Case, placements: Mapping[JobKey, Placement], running: Iterable[Job]) -> list[Job]:
    """Return the jobs that run or are to, few of a long queue: the runnable ones in order, then the others."""
    first = case.jobs[: case.runnable]
    listed = {job.key for job in first}
    chosen = [] if placements.keys() <= listed else [job for job in case.jobs[case.runnable :] if job.key in placements]
    listed.update(job.key for job in chosen)
    return [*first, *chosen, *sorted((job for job in running if job.key not in listed), key=arrival)]


def _change(job: Job, wanted: Placement) -> Action:
    key, has = job.key, job.placement
    if len(has) == len(wanted) and all(a.node == b.node and a.gpus == b.gpus for a, b in zip(has, wanted, strict=True)):
        reason = "its CPUs and memory follow its profile and its neighbors"
        return Tune(key, wanted, reason, caches_mb(job, wanted))
    return Migrate(key, wanted, "other nodes give more throughput in all")


TURN = "its turn by the order"
STOPS = "makes room: jobs before it in the order need its GPUs"
NO_WEIGHTS = (
    "runs on although jobs before it in the order wait: Slurm's priorities have no weights (see `cadenza doctor`)"
)
RUNS = "runs with what the allocation gives it"
WAITS = "waits: the jobs before it in the order take all GPUs that it would need"


def _reasons(snapshot: ClusterSnapshot, case: Case, plan: Plan) -> Mapping[JobKey, str]:
    every = len(case.jobs) == len(snapshot.jobs)
    reasons = dict.fromkeys(snapshot.by_key if every else [job.key for job in case.jobs], WAITS)
    reasons.update(dict.fromkeys(plan.placements, RUNS))
    reasons.update(plan.reasons)
    return reasons


# --- Jobs that may not be steered, and promises to those that may ---------------------------------------


def _only_steerable(snapshot: ClusterSnapshot, memory: Memory, rules: SharingSettings) -> ClusterSnapshot:
    """Return the snapshot in which only jobs that we may start and requeue count as managed."""
    first = {node.host: node.name for node in snapshot.nodes if node.lane == 0}
    lanes = {node.name: first.get(node.host, node.name) for node in snapshot.nodes if node.lane}
    pinned = {job.key for job in our_pins(snapshot, memory)} & memory.placed
    limits = Limits(job for job in snapshot.jobs if job.state == "PENDING")

    def shown(job: Job) -> Job:
        reason = _wait_reason(job, limits, snapshot.time_s, pinned=job.key in pinned) if job.state == "PENDING" else ""
        return replace(job, unmanageable=reason) if reason else _if_steerable(job, lanes)

    jobs = (shown(job) if rules.manages(job) else job for job in snapshot.jobs)
    return replace(snapshot, jobs=tuple(jobs))


def _wait_reason(job: Job, limits: Limits, now_s: float, *, pinned: bool) -> str:
    """Return why a pending job waits for something else than its turn, "" if it is ours to place.

    No job is stopped for it: Slurm would not start it on what becomes free. ``pinned``: by us.
    """
    if job.held:
        return "is held"
    if pinned:
        return "" if waits_for_nodes(job, now_s) else f"waits in Slurm ({job.state_reason})"
    if limit := limits.reason(job):
        return f"waits in Slurm: a job before it has met a limit ({limit})"
    if awaits_place(job):
        return ""
    chosen = f"; it requires {','.join(job.required_nodes)}" if job.required_nodes else ""
    return f"waits in Slurm ({job.state_reason or 'no reason given'}{chosen})"


def _if_steerable(job: Job, lanes: Mapping[str, str]) -> Job:
    if any(name in lanes for name in job.nodes):  # it goes on there until it ends, and its GPUs are those of lane 0
        return replace(job, nodes=tuple(lanes.get(name, name) for name in job.nodes), unmanageable="on a further lane")
    if job.nodes and not job.requeueable:
        return replace(job, unmanageable="Slurm may not requeue it")
    return job


def _without_stops(planned: Decision) -> Decision:
    """Return a decision that stops no job: under priority/basic, and where all weights are 0, no SiteFactor counts."""
    # Every job has the same priority there, so one that is stopped would be the first to start again, for ever.
    stops = {action.job: NO_WEIGHTS for action in planned.actions if isinstance(action, MakeWay)}
    actions = tuple(action for action in planned.actions if not isinstance(action, MakeWay))
    return replace(planned, actions=actions, reasons={**planned.reasons, **stops})


def _pins_over(
    planned: Decision, snapshot: ClusterSnapshot, memory: Memory, rules: SharingSettings
) -> dict[JobKey, str]:
    """Return the pending jobs that the plan does not put where we have pinned them, each with the reason."""
    starting = {action.job for action in planned.actions if isinstance(action, Place)}
    found: dict[JobKey, str] = {}
    for job in our_pins(snapshot, memory):
        if job.key in memory.placed and not waits_for_nodes(job, snapshot.time_s):
            found[job.key] = unpinned_for(job)
        elif job.key not in memory.placed:
            found[job.key] = REQUEUED
        elif job.key not in starting:
            found[job.key] = exclusion_reason(job, rules) or planned.reasons.get(job.key, WAITS)
    return found


def _behind(planned: Decision, seen: ClusterSnapshot, memory: Memory, rules: SharingSettings) -> Iterator[SetFactor]:
    """Yield the factors of waiting jobs that stand before one whose turn has come, and have none of ours yet."""
    starting = {action.job for action in planned.actions if isinstance(action, Place)}
    least = min((job.slurm_priority for job in seen.jobs if job.key in starting), default=0)
    for job in seen.jobs if starting else ():
        waits = job.state == "PENDING" and rules.manages(job) and job.key not in starting
        # Slurm's main scheduler goes by priority: a job behind those whose turn has come keeps no GPUs from them.
        if waits and job.slurm_priority >= least and not memory.factors.get(job.key.id):
            yield SetFactor(job.key, FAR_BELOW, planned.reasons.get(job.key, WAITS))


def _explained(action: Action, unpinned: Mapping[JobKey, str]) -> Action | None:
    """Return an action that undoes something with its reason; None for the end of a pin that the plan confirms."""
    if isinstance(action, Release) and action.unpin:
        return replace(action, reason=unpinned[action.job]) if action.job in unpinned else None
    return action


def _is_placed(action: Action, snapshot: ClusterSnapshot) -> bool:
    """Return True if a job has been placed there already and Slurm only has to start it."""
    job = snapshot.job(action.job) if isinstance(action, Place) else None
    return job is not None and isinstance(action, Place) and not job.held and job.required_nodes == action.nodes


def _with_request_kept(action: Action, snapshot: ClusterSnapshot) -> Action:
    """Return a placement with at least the memory that its job asked for, and the CPUs if its profile is unknown."""
    job = snapshot.job(action.job) if isinstance(action, Place | Migrate) else None
    if job is None or not isinstance(action, Place | Migrate) or not action.shares:
        return action
    parts = len(action.shares)
    cpus, memory_mb = 0 if job.profile is not None else -(-job.cpus // parts), -(-job.memory_mb // parts)
    nodes = {node.name: node for node in snapshot.nodes}
    shares: Placement = tuple(
        share._replace(
            # What it asks for may be what it had on several nodes: no node has more than all of its own.
            cpus=max(share.cpus, min(cpus, nodes[share.node].cpus)),
            memory_mb=max(share.memory_mb, min(memory_mb, nodes[share.node].memory_mb)),
        )
        for share in action.shares
    )
    return replace(action, shares=shares)
