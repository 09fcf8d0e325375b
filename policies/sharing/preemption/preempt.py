"""Stage of preemption: the jobs and hosts of a round as a turn takes them, and its plan as actions."""

from __future__ import annotations

from math import inf

from cadenza.policies.core.actions import Migrate, Place, Resume, Yield
from cadenza.policies.core.model import Job, JobKey, Lease
from cadenza.policies.core.text import gpu_names
from cadenza.policies.ordering.levels import THRESHOLDS, level_of, levels
from cadenza.policies.ordering.ranking import arrival, attained_service
from cadenza.policies.relocation.phases import refusal_reason
from cadenza.policies.sharing.preemption.host_emptying import ROOM_SLICES, empty_for_waiting
from cadenza.policies.sharing.preemption.preemptive_turn import Candidate, Plan, Turn
from cadenza.policies.sharing.preemption.reservation import (
    attained_by_limit_s,
    can_leave,
    latest_end_s,
    longest_waiting,
)
from cadenza.policies.sharing.preemption.seat_map import HostSeats, Occupant, Seat, lowest
from cadenza.policies.sharing.preemption.starvation import owed_turns
from cadenza.policies.sharing.state.host import ResourceRequest, lacks
from cadenza.policies.sharing.state.host import Seat as HostSeat
from cadenza.policies.sharing.state.sharing_state import SharingState, share_of
from cadenza.policies.sharing.turns.slurm_sync import list_departures


def preempt(state: SharingState) -> None:
    """Decide which jobs have GPUs in this turn: yields, resumes, moves, seats that are given up, and placements."""
    # 1. Jobs that leave their hosts anyway.
    list_departures(state)
    # 2. The hosts with all that is on them, and the GPUs that no turn can give to another job.
    board = _Board(state)
    # 3. In order of rank the jobs claim GPUs.
    turn = Turn(
        board.hosts,
        board.candidates(),
        share_between_users=state.settings.share_between_users,
        places=state.settings.places,
    )
    for key, seats in board.fixed.items():
        turn.claim(key, seats)
    turn.lasting.update(board.lasting())
    turn.run()
    # 4. Jobs that run make room for wider ones that wait.
    empty_for_waiting(turn, board.may_empty)
    # 5. The plan in actions.
    _carry_out(state, board, turn)


class _Board:
    """The hosts of a round, who has which GPUs, and who wants some."""

    def __init__(self, state: SharingState) -> None:
        self.state = state
        self.hosts = [HostSeats.of(host, position) for position, host in enumerate(state.hosts.values())]
        self.by_node = {lane.node.name: (host, at) for host in self.hosts for at, lane in enumerate(host.lanes)}
        self.fixed: dict[JobKey, list[tuple[HostSeats, int]]] = {}
        """GPUs of jobs that keep them in this turn whatever comes: nothing can stop these, or they are on their way."""
        self.seats: dict[JobKey, list[tuple[HostSeats, int]]] = {}
        self._moves = {move.job.id: move for move in state.memory.moves}
        self._moved_s = dict(state.memory.sharing.moved_s)
        self._alive = {host.name for host in state.snapshot.hosts if host.agent_alive}
        for host in self.hosts:
            self._settle(host)
        self._note_departures()
        self.awaited = self._await_gpus()
        """GPUs that a job waits for which is not ours to order, starts, or has its part on other hosts."""

    def _settle(self, host: HostSeats) -> None:
        """Note the occupants of a host; GPUs that no agent has named yet are the lowest free ones of the lane."""
        known = sorted(host.state.residents.items(), key=lambda row: (not row[1].gpus, row[0]))
        for key, resident in known:
            at = self.by_node[resident.lane][1]
            mask = sum(1 << index for index in resident.gpus)
            mask = mask or lowest(host.every & ~host.lanes[at].taken, resident.request.gpus)
            host.settle(Occupant(key, resident.job.user, mask, at, resident.request))
            role = self._role(resident.job)
            if role == "leaves":
                host.vacate(key)
            elif role == "stays" and not self._has_no_task(resident.job, host):
                self.fixed.setdefault(key, []).append((host, mask))
            elif role == "turns":
                self.seats.setdefault(key, []).append((host, mask))

    def _has_no_task(self, job: Job, host: HostSeats) -> bool:
        """Return True if a job uses no GPU of one of its hosts: the agent there knows none of its processes.

        They have ended, or its batch script has not started them yet; while Slurm starts the job they may just come.
        """
        lease, launched = job.lease, self.state.now_s - (job.start_s or self.state.now_s)
        known = lease is None or any(gpu.host == host.state.name for gpu in lease.gpus)
        return not known and host.state.name in self._alive and launched > self.state.settings.min_run_s

    def _role(self, job: Job) -> str:
        """Return a job's part in this turn: *leaves*, *stays*, takes *turns*, or is *absent* and uses no GPU."""
        state, lease = self.state, job.lease
        if job.key.id in state.relocating:
            return "stays"
        if job.relocating is not None or job.state == "OTHER" or job.key in state.giving_back:
            return "leaves"
        if job.starts_unleased:
            return "absent"
        if job.key not in state.jobs or lease is None:
            return "absent" if lease is not None and lease.state == "yielded" else "stays"
        return "stays" if lease.state == "held" and not (lease.ready and can_leave(job)) else "turns"

    def _await_gpus(self) -> dict[tuple[int, int], JobKey]:
        """Return the GPUs that jobs which keep them do not have yet, with the job."""
        found: dict[tuple[int, int], JobKey] = {}
        for key, seats in self.fixed.items():
            job = self.state.snapshot.by_key[key]
            lease = job.lease
            half = lease is not None and lease.state == "held" and not lease.ready and job.num_nodes > 1
            holds = lease is not None and lease.state in ("held", "stopping") and not half
            if not holds and key.id not in self.state.relocating:
                found.update(dict.fromkeys(_gpus(seats), key))
        return found

    def _note_departures(self) -> None:
        """Note the GPUs of jobs that are still where they move from."""
        for job in self.state.all_jobs:
            destination = self.state.relocating.get(job.key.id)
            if destination is None or not job.nodes or (destination.arriving and job.state != "PENDING"):
                continue
            request = ResourceRequest.of(job)
            for name in job.nodes:
                if name in self.by_node:
                    host, at = self.by_node[name]
                    gpus = job.lease.gpus if job.lease is not None else ()
                    mask = sum(1 << gpu.index for gpu in gpus if gpu.host == host.state.name)
                    host.stay_behind(at, mask, request)

    def candidates(self) -> list[Candidate]:
        """Return the jobs that want GPUs in this turn, by priority and rank.

        Those that are owed a turn come first, then the one that GPUs are reserved for.
        """
        state = self.state
        owed, ranks, reserved = owed_turns(state), state.ranks, longest_waiting(state)
        jobs = [state.jobs[key] for key in self.seats] + state.pending
        last, priority = len(ranks), state.settings.priority

        def place(job: Job) -> tuple[float | JobKey, ...]:
            standing = owed.get(job.key.id, inf), job.key != reserved, ranks.get(job.key, last)
            return -priority(job), *standing, *arrival(job)

        return [self._candidate(job, reserve=job.key == reserved) for job in sorted(jobs, key=place)]

    def lasting(self) -> dict[JobKey, float]:
        """Return the latest ends of the jobs that keep their GPUs until then."""
        by_key, ours = self.state.snapshot.by_key, self.state.settings.manages
        staying = [by_key[key] for key in self.fixed if not (ours(by_key[key]) and can_leave(by_key[key]))]
        return {job.key: latest_end_s(job, self.state.now_s) for job in staying}

    def _candidate(self, job: Job, *, reserve: bool) -> Candidate:
        seats = tuple(self.seats.get(job.key, ()))
        holding = job.lease is not None and job.lease.state == "held"
        return Candidate(
            job.key,
            job.gpus,
            ResourceRequest.under(job, self.state.settings),
            seats,
            holding,
            bool(seats) and self._movable(job),
            not can_leave(job),
            latest_end_s(job, self.state.now_s),
            reserve,
            self._barred(job),
        )

    def _barred(self, job: Job) -> JobKey | None:
        """Return a job for which the agents keep a job from its turn.

        One that keeps the GPU memory that it needs, or one of another user where users are apart.
        """
        lease, apart = job.lease, not self.state.settings.share_between_users
        if lease is None or not (lease.no_room or (apart and lease.state == "waiting")):
            return None
        by_key = self.state.snapshot.by_key
        there = (other for host, mask in self.seats.get(job.key, ()) for other in host.on(mask) if other.key != job.key)
        others = (other.key for other in there if lease.no_room or other.user != job.user)
        return next((key for key in others if (found := by_key[key].lease) and found.state != "waiting"), None)

    def _movable(self, job: Job) -> bool:
        """Return True if a job can save a checkpoint now, and be requeued or moved with it."""
        lease = job.lease
        if (
            lease is not None
            and lease.state == "held"
            and not self.awaited.keys().isdisjoint(_gpus(self.seats[job.key]))
        ):
            return False  # it yields at once, for a checkpoint takes its time
        return (
            lease is not None
            and lease.checkpoints
            and (lease.ready or lease.state == "yielded")
            and lease.state in ("held", "yielded")
            and job.key not in self.state.fixed
            and self.state.may_wake(job)
            and not refusal_reason(job, self._moves.get(job.key.id), placed=job.key in self.state.memory.placed)
        )

    def may_empty(self, key: JobKey) -> bool:
        """Return True if a running job has not moved lately, so that it may make room for a wider one."""
        return self.state.now_s >= self._moved_s.get(key.id, -inf) + ROOM_SLICES * self.state.settings.slice_s


# --- The plan in actions -----------------------------------------------------------------------------------------


def _carry_out(state: SharingState, board: _Board, turn: Turn) -> None:
    reasons, plan = state.turn_reasons, turn.plan
    # 1. Seats that are given up: a checkpoint, then a requeue into a hold.
    for key, other in plan.evicted.items():
        state.giving_back[key] = reasons[key] = f"gives its GPUs up for job {other}: a checkpoint, then it waits"
    # 2. Moves.
    for key, seats in plan.moves.items():
        cause = f"makes room for job {plan.emptied[key]}" if key in plan.emptied else "another job has its GPUs"
        _migrate(state, state.jobs[key], seats, f"moves to {_nodes(seats)}: {cause}")
    # 3. Jobs that have GPUs in this turn, where they sit or where they start now.
    state.holders = frozenset((*plan.runs, *board.fixed, *plan.moves))
    coming = board.awaited | _resume(state, board, plan) | _place(state, plan)
    reasons.update({key: _staying_reason(state.snapshot.by_key[key], state) for key in board.fixed})
    # 4. Jobs whose GPUs others get now make way; those of jobs that come later are used until then.
    for key, other in plan.blocked.items():
        lease = _lease(state.jobs[key])
        successor = next((coming[at] for at in _gpus(board.seats[key]) if at in coming), None)
        waits = f"waits on {gpu_names(lease.gpus)} for job {other}, which comes first"
        reasons[key] = f"{waits}: {_standing(state.jobs[key], state)}"
        if lease.state == "held" and successor is not None:
            reasons[key] = f"makes way on {gpu_names(lease.gpus)} for job {successor}, which comes first"
            state.yields.append(Yield(key, reasons[key]))
        elif lease.state == "held":
            state.holders |= {key}
    # 5. A sentence for each job that stays in the queue.
    idle = [(host.unclaimed.bit_count(), host.state) for host in board.hosts if host.unclaimed and host.state.usable]
    causes: dict[tuple[object, ...], str] = {}
    for job in state.pending:
        if job.key in state.placement_reasons:
            continue
        request = turn.candidates[job.key].request
        needs = request[1:]  # equal needs, equal lacks, whoever the user is
        if needs not in causes:
            enough = [host for gpus, host in idle if gpus >= request.gpus]
            lacking = lacks(enough, request) if len(enough) >= request.nodes else ""
            causes[needs] = lacking or "better-ranked jobs have the GPUs"
        waits = f"stays queued: {causes[needs]}; {_standing(job, state)}"
        if job.barred and all(
            node.name in job.barred for node in state.snapshot.nodes if job.partition in node.partitions
        ):
            waits = "stays queued: no node of its partition meets its constraint, its excluded nodes and reservations"
        state.placement_reasons[job.key] = waits


def _staying_reason(job: Job, state: SharingState) -> str:
    """Return why a job keeps its GPUs in this turn, or waits for them, whatever its rank."""
    lease = _lease(job)
    if job.key.id in state.relocating:
        return "moves to other GPUs"
    if lease.state == "waiting" or (lease.state == "held" and lease.waiting_on):
        return f"waits for {gpu_names(lease.gpus)}, which other jobs leave at once"
    if lease.ready and not can_leave(job):
        cause = "it keeps no checkpoints" if not lease.checkpoints else "Slurm may not requeue it"
        return f"holds {gpu_names(lease.gpus)} until it ends, because {cause}"
    return f"holds {gpu_names(lease.gpus)}: {_standing(job, state)}"


def _resume(state: SharingState, board: _Board, plan: Plan) -> dict[tuple[int, int], JobKey]:
    """Let the seated jobs of the turn have their GPUs; return the GPUs of those that come back, with the job."""
    coming: dict[tuple[int, int], JobKey] = {}
    for key in plan.runs:
        job, lease = state.jobs[key], _lease(state.jobs[key])
        verb = "holds" if lease.state == "held" else "gets"
        reason = state.turn_reasons[key] = f"{verb} {gpu_names(lease.gpus)}: {_standing(job, state)}"
        if lease.state in ("waiting", "yielded"):
            state.resumes.append(Resume(key, reason))
            coming.update(dict.fromkeys(_gpus(board.seats[key]), key))
    return coming


def _place(state: SharingState, plan: Plan) -> dict[tuple[int, int], JobKey]:
    """Place the jobs that Slurm can start now; return their GPUs, with the job."""
    coming: dict[tuple[int, int], JobKey] = {}
    placements: list[Place] = []
    for key, seats in plan.placed.items():
        if any(seat.waits for seat in seats):
            promised = f"waits until jobs have left {_nodes(seats)}: their GPUs are promised to it"
            state.placement_reasons[key] = promised
            continue
        reason = state.placement_reasons[key] = f"placed on {_nodes(seats)}: its turn by the order"
        placements.append(Place(key, tuple(sorted(seat.node for seat in seats)), reason))
        if not state.snapshot.by_key[key].starts_unleased:
            coming.update(dict.fromkeys(_gpus([(seat.host, seat.mask) for seat in seats]), key))
        _enter(state, key, seats)
    state.placements = tuple(placements)
    return coming


def _nodes(seats: tuple[Seat, ...]) -> str:
    return ", ".join(seat.node for seat in seats)


def _standing(job: Job, state: SharingState) -> str:
    """Return a job's level, or its GPU time under an order without levels."""
    limit_s = attained_by_limit_s(job)
    by = "" if limit_s is None else " by its time limit, because it keeps no checkpoints"
    service_s = max(attained_service(job, state.now_s), (limit_s or 0.0) * job.gpus)
    if state.order is not levels:
        return f"{service_s / 3600:.1f} GPU hours{by}"
    reached = level_of(service_s)
    return f"level {reached + 1} of {len(THRESHOLDS) + 1}{by}"


def _lease(job: Job) -> Lease:
    return job.lease if job.lease is not None else Lease("waiting", ())


def _gpus(seats: list[tuple[HostSeats, int]]) -> list[tuple[int, int]]:
    return [(host.position, index) for host, mask in seats for index in range(mask.bit_length()) if mask >> index & 1]


def _host_seat(seat: Seat) -> HostSeat:
    gpus = frozenset(index for index in range(seat.mask.bit_length()) if seat.mask >> index & 1)
    node = seat.host.lanes[seat.lane].node
    return HostSeat(0, node.lane, node, gpus)


def _enter(state: SharingState, key: JobKey, seats: tuple[Seat, ...]) -> None:
    """Have later stages see a job on its new hosts."""
    job = state.snapshot.by_key[key]
    request = ResourceRequest.under(job, state.settings)
    for seat in seats:
        seat.host.state.enter(job, request, _host_seat(seat))


def _migrate(state: SharingState, job: Job, seats: tuple[Seat, ...], reason: str) -> None:
    request = ResourceRequest.under(job, state.settings)
    state.moves.append(Migrate(job.key, tuple(sorted(share_of(seat.node, request) for seat in seats)), reason))
    state.turn_reasons[job.key] = reason
    for host in state.hosts.values():
        if job.key in host.residents:
            host.leave(host.residents[job.key])
    _enter(state, job.key, seats)
    state.fixed.add(job.key)
