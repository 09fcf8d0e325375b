"""Gandiva in full (OSDI'18, §3, §4): slices, placement, packing, migration, defragmentation and grow-shrink.

One round: packs are judged and made, turns are taken, grown jobs shrink for those that wait, held jobs are placed
in the ordering's order, jobs move to where they are better off, and the holders of each host divide its CPUs and
memory by the allocation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cadenza.policies.allocation.problem import Allocate
from cadenza.policies.core.actions import Action, Migrate, Place, Resize, Suspend, Tune, Unpack, Yield
from cadenza.policies.core.decision import Decision, Memory, SharingMemory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Job, JobKey, Progress
from cadenza.policies.ordering.ranking import Order, Queue
from cadenza.policies.relocation.phases import pinned_by_owner
from cadenza.policies.sharing.elastic.cpu_loans import Judge, Lending
from cadenza.policies.sharing.elastic.feedback import Growths
from cadenza.policies.sharing.elastic.resize import grow, shrink, spare_since, undo_growth, why_its_size_stays
from cadenza.policies.sharing.migration.bottleneck import relieve
from cadenza.policies.sharing.migration.defragment import Rooms, empty_hosts
from cadenza.policies.sharing.migration.rebalance import migrate
from cadenza.policies.sharing.packing.groups import partners, standing, units
from cadenza.policies.sharing.packing.pair_search import Packing, Terms, packing
from cadenza.policies.sharing.placement.affinity import Placed, held_jobs, place_on
from cadenza.policies.sharing.placement.host_division import Sharing, startable, tunes, with_shares
from cadenza.policies.sharing.placement.reservations import book_starting, seated, startable_now
from cadenza.policies.sharing.state.budget import Moves
from cadenza.policies.sharing.state.host import HostBook, books
from cadenza.policies.sharing.state.measurement import Rule
from cadenza.policies.sharing.state.pending import book_moves, queued, under_way
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings
from cadenza.policies.sharing.turns.lanes import lane_actions
from cadenza.policies.sharing.turns.slurm_sync import View, turn_actions, view_reasons


def decide(
    snapshot: ClusterSnapshot,
    memory: Memory,
    settings: SharingSettings,
    gandiva: GandivaSettings,
    order: Order,
    allocate: Allocate,
) -> Decision:
    """Return one round's actions, memory, and a reason for every job that opted in.

    ``order`` ranks held jobs of one priority for placement; ``allocate`` divides each host among those that hold
    its GPUs. In observe-only the decision is what would be done, as with time slices alone.
    """
    managed = _managed(snapshot, memory, settings)
    lending, memory = _judged(managed, snapshot, memory, settings, gandiva)
    hosts = books(snapshot, settings, units(standing(memory.sharing.packs, managed)))
    moving = under_way(memory.moves)
    book_moves(hosts, snapshot, moving)
    book_starting(hosts, snapshot, memory, settings, moving)
    packed = packing(managed, memory.sharing, _terms(snapshot, settings, gandiva, hosts))
    ranks = _ranks(snapshot, memory, settings, order)
    first = ranks if settings.turns == "order" else None
    view = View.of(snapshot, memory, settings, partners(packed.packs), packed.leaving(managed), first)
    waiting = [job for job in held_jobs(snapshot, memory, settings, ranks) if job.key.id not in moving]
    queue = [*waiting, *(job for job in queued(snapshot, settings) if job.key.id not in moving)]
    moves = _moves(snapshot, memory, settings, gandiva, (managed, hosts, view, packed))
    moves.fixed |= {job.key for job in snapshot.jobs if job.key.id in moving}
    shrink(moves, queue)
    rooms = Rooms(moves, settled=all(move.phase == "placed" for move in moving.values()))
    placed = place_on(hosts, waiting, settings, by_gpu=True, otherwise=rooms.make_for)
    if moving or rooms.made:
        placed = startable_now(placed, snapshot, settings)
    rooms.make_for_queued(queue[len(waiting) :])
    spare = _rearrange(moves, rooms, alone=not queue)
    sharing = _Round(snapshot, managed, packed, view, moves, placed, lending)
    if not queue and not moves.actions:
        relieve(moves, sharing.division(ranks, allocate))
    tuned, moved, starts = sharing.shares(ranks, allocate)
    actions = (
        *lane_actions(snapshot, memory, settings),
        *packed.actions,
        *(action for action in turn_actions(view) if not _outdated(action, moves)),
        *moved,
        *tuned,
        *starts,
    )
    return Decision(actions, replace(memory, sharing=_learned(memory, packed, spare)), sharing.reasons())


def _rearrange(moves: Moves, rooms: Rooms, *, alone: bool) -> tuple[tuple[str, float], ...]:
    """Move who runs; return since when each host has had spare GPUs. ``alone``: nobody waits for any."""
    undo_growth(moves)
    migrate(moves)
    rooms.make_for_lanes()
    if alone:
        empty_hosts(moves)
    spare = spare_since(moves)
    if alone:
        grow(moves, spare)
    return spare


# --- What the functions see ----------------------------------------------------------------------------


def _managed(snapshot: ClusterSnapshot, memory: Memory, settings: SharingSettings) -> dict[JobKey, Job]:
    """Return the jobs with a lease that are ours to move, pack and tune, in order of keys."""
    found = {
        job.key: job
        for job in snapshot.jobs
        if job.lease is not None
        and (job.state == "RUNNING" or (job.state == "SUSPENDED" and job.key in memory.suspended))
        and settings.manages(job)
        and not job.lease.exclusive
    }
    return {key: found[key] for key in sorted(found)}


def _terms(
    snapshot: ClusterSnapshot, settings: SharingSettings, gandiva: GandivaSettings, hosts: Mapping[str, HostBook]
) -> Terms:
    sizes = {node.host: node.gpu_memory_gb for node in snapshot.nodes if node.gpu_memory_gb is not None}
    overloaded = any(host.height > 1 or host.wanted > host.gpus for host in hosts.values())
    return Terms(snapshot.time_s, settings, gandiva, hosts, sizes, overloaded=overloaded)


def _ranks(
    snapshot: ClusterSnapshot, memory: Memory, settings: SharingSettings, order: Order
) -> dict[JobKey, int]:
    """Return each managed job's place in the ordering; those without a record of progress have made none."""
    jobs = tuple(
        job if job.progress is not None else replace(job, progress=Progress(snapshot.time_s))
        for job in sorted(snapshot.jobs, key=_key)
        if job.state in ("PENDING", "RUNNING", "SUSPENDED") and settings.manages(job)
    )
    gpus: dict[str, int] = {}
    for node in sorted(snapshot.nodes, key=lambda node: node.name):
        if node.lane == 0 and node.up and not node.drained:
            gpus[node.gpu_type] = gpus.get(node.gpu_type, 0) + node.gpus
    ranking = order(Queue(snapshot.time_s, jobs, gpus, usage=memory.usage, shares=settings.shares))
    return {job.key: rank for rank, job in enumerate(ranking.jobs)}


def _key(job: Job) -> JobKey:
    return job.key


def _moves(
    snapshot: ClusterSnapshot,
    memory: Memory,
    settings: SharingSettings,
    gandiva: GandivaSettings,
    so_far: tuple[Mapping[JobKey, Job], Mapping[str, HostBook], View, Packing],
) -> Moves:
    managed, hosts, view, packed = so_far
    changed = {key for action in packed.actions for key in (getattr(action, "jobs", None) or (action.job,))}
    return Moves(
        snapshot.time_s,
        hosts,
        managed,
        settings,
        gandiva,
        memory.sharing,
        view.holders,
        units(packed.packs),
        fixed=changed | view.leaving | view.giving_back | _pinned(managed, memory),
    )


def _judged(
    managed: Mapping[JobKey, Job],
    snapshot: ClusterSnapshot,
    memory: Memory,
    settings: SharingSettings,
    gandiva: GandivaSettings,
) -> tuple[Lending, Memory]:
    """Return how loans of CPUs and growth have fared, and the memory with it.

    Without a floor jobs are promised their proportional shares only, so nobody lends.
    """
    rule = Rule.under(settings, gandiva)
    lending = Lending()
    if settings.floor and gandiva.introspective:
        types = {node.name: node.gpu_type for node in snapshot.nodes}
        lending = Judge(snapshot.time_s, rule.window_s, types).look(managed, memory.sharing.loans)
    growths = Growths(memory.sharing.growths, rule, snapshot.time_s, gandiva.pack_again_s).judged(managed)
    return lending, replace(memory, sharing=replace(memory.sharing, loans=lending.loans, growths=growths))


def _pinned(managed: Mapping[JobKey, Job], memory: Memory) -> set[JobKey]:
    """Return the jobs whose owners want them where they are."""
    return {key for key, job in managed.items() if pinned_by_owner(job, memory)}


# --- What comes of it ----------------------------------------------------------------------------------


def _outdated(action: Action, moves: Moves) -> bool:
    """Whether a turn's action is about a job that moves: it may get GPUs at once where it goes, or stops anyway."""
    if isinstance(action, Yield):
        return any(action.job == move.job for move in moves.actions if isinstance(move, Resize))
    return isinstance(action, Suspend) and any(action.job == move.job for move in moves.actions)


def _learned(memory: Memory, packed: Packing, spare: tuple[tuple[str, float], ...]) -> SharingMemory:
    """Return what to remember; packs and moves are added once they have left."""
    return replace(memory.sharing, packs=packed.before, lost=packed.lost, alone=packed.alone, spare_s=spare)


@dataclass(frozen=True, slots=True)
class _Round:
    """A round whose turns, placements and moves are made."""

    snapshot: ClusterSnapshot
    managed: Mapping[JobKey, Job]
    packed: Packing
    view: View
    moves: Moves
    placed: Placed
    lending: Lending

    def shares(
        self, ranks: Mapping[JobKey, int], allocate: Allocate
    ) -> tuple[tuple[Tune, ...], tuple[Migrate | Resize | Unpack, ...], tuple[Place, ...]]:
        """Return the tunes of running jobs, and the moves and placements with their shares."""
        division = self.division(ranks, allocate)
        wanted = division.divide(self.moves.hosts)
        moving = frozenset(action.job for action in self.moves.actions)
        floor = self.moves.sharing.floor
        staying = {key: placement for key, placement in wanted.items() if key not in moving}
        moved = tuple(
            replace(a, shares=startable(wanted[a.job], self.moves.hosts, a.job) if floor else wanted[a.job])
            if a.job in wanted and not isinstance(a, Unpack)
            else a
            for a in self.moves.actions
        )
        starts = with_shares(self.placed.actions, wanted, division)
        return tunes(self.managed, staying, self.lending.keeps), moved, starts

    def division(self, ranks: Mapping[JobKey, int], allocate: Allocate) -> Sharing:
        """Return how the hosts are divided among those that have GPUs once the moves so far are done."""
        starting = frozenset(action.job for action in self.placed.actions)
        there = Counter(key for host in self.moves.hosts.values() for key in host.tenants)
        return Sharing(
            self.snapshot.time_s,
            allocate,
            {**self.managed, **{job.key: job for job in self.snapshot.jobs if job.key in starting}},
            holders=self._holders(frozenset(action.job for action in self.moves.actions)),
            units=units(self.packed.packs),
            order=ranks,
            settings=self.moves.sharing,
            keeps=self.lending.keeps,
            wide=frozenset(key for key, count in there.items() if count > 1),
        )

    def _holders(self, moving: frozenset[JobKey]) -> frozenset[JobKey]:
        """Return who has GPUs once this round is done: by the turns, and who comes to GPUs that are free then.

        Agents give those to the first who comes: jobs that are placed start before jobs that move.
        """
        staying = self.view.holders - moving
        given = {
            Gpu(host.name, index)
            for host in self.moves.hosts.values()
            for key, tenant in host.tenants.items()
            if key in staying
            for index in tenant.gpus
        }
        found = set(staying)
        coming = tuple(dict.fromkeys(action.job for action in (*self.placed.actions, *self.moves.actions)))
        seats = seated(self.moves.hosts, coming)
        for key in coming:
            gpus = seats.get(key)
            if gpus and gpus.isdisjoint(given):
                found.add(key)
                given |= gpus
        return frozenset(found)

    def reasons(self) -> dict[JobKey, str]:
        """Return a sentence for every job that opted in; what is done to a job now says more than its turn."""
        found = view_reasons(self.view, self.placed.reasons)
        for key, job in self.managed.items():
            more = (why_its_size_stays(self.moves, job), self.lending.keeps.get(key))
            found[key] = "; ".join(filter(None, (found[key], *more)))
        said = [*self.packed.reasons.items(), *((action.job, action.reason) for action in self.moves.actions)]
        found.update((key, reason) for key, reason in said if key in found)
        return found
