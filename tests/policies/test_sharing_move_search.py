"""Room for a waiting job: never more migrations than an exhaustive search finds, on states of several node shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from random import Random

import pytest
from gandiva_rig import NOTHING, SHARING, after, decided, held, key, of, on, profile, world
from snapshots import NOW, cluster, node

from cadenza.policies.core.actions import Migrate, Place
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import JobKey, Options, Progress, Share
from cadenza.policies.core.move import Move, Ordered, Placed, Requeued
from cadenza.policies.core.profile import linked
from cadenza.policies.sharing.migration import defragment as defrag
from cadenza.policies.sharing.migration import move_search

DEFRAG = replace(NOTHING, defrag=True)
FLOOR = replace(SHARING, floor=True)
STATE_MB = 1024
"""GPU state that the rig's profiles leave in host memory, for each GPU."""
BOTH = linked({"a100": profile(gpu="a100"), "v100": profile(gpu="v100", iteration_s=0.2)})
WAITS = 99


# --- States and the exhaustive search: totals of hosts, no books, no seats ------------------------------------


@dataclass(frozen=True)
class Box:
    """A host."""

    name: str
    gpus: int
    memory_mb: int
    kind: str


@dataclass(frozen=True)
class Piece:
    """A job on a host; ``kinds``: GPU types to which it may go from there."""

    number: int
    home: str
    gpus: int
    memory_mb: int
    movable: bool
    kinds: frozenset[str]
    two_profiles: bool


@dataclass(frozen=True)
class State:
    boxes: tuple[Box, ...]
    pieces: tuple[Piece, ...]
    wanted: int
    wanted_mb: int


def fits(box: Box, loads: list[tuple[int, int]]) -> bool:
    return sum(gpus for gpus, _ in loads) <= box.gpus and sum(m + g * STATE_MB for g, m in loads) <= box.memory_mb


def random_state(rng: Random) -> State:
    boxes = tuple(
        Box(name, rng.choice((4, 4, 4, 3)), rng.choice((100_000, 60_000)), rng.choice(("a100", "a100", "v100")))
        for name in "abcd"[: rng.choice((3, 4, 4))]
    )
    pieces: list[Piece] = []
    for number in range(1, rng.randint(6, 14)):
        box, gpus, memory_mb = rng.choice(boxes), rng.choice((1, 1, 1, 2, 3)), rng.choice((4000, 8000, 30_000))
        here = [(p.gpus, p.memory_mb) for p in pieces if p.home == box.name]
        if fits(box, [*here, (gpus, memory_mb)]):
            both = rng.random() < 0.5
            kinds = {"a100", box.kind} if both else {box.kind}
            pieces.append(Piece(number, box.name, gpus, memory_mb, rng.random() < 0.85, frozenset(kinds), both))
    return State(boxes, tuple(pieces), rng.choice((3, 4, 4)), rng.choice((8000, 40_000)))


def minimum(state: State, most: int) -> int | None:
    """Return the fewest jobs that must move, by trying every set of jobs and every place for each."""
    movable = [piece for piece in state.pieces if piece.movable]
    for count in range(min(most, len(movable)) + 1):
        for chosen in combinations(movable, count):
            stay = [piece for piece in state.pieces if piece not in chosen]
            if any(placeable(state, chosen, loads(state, stay, target)) for target in state.boxes):
                return count
    return None


def loads(state: State, stay: list[Piece], target: Box) -> dict[str, list[tuple[int, int]]]:
    found = {box.name: [(p.gpus, p.memory_mb) for p in stay if p.home == box.name] for box in state.boxes}
    found[target.name].append((state.wanted, state.wanted_mb))
    return found


def placeable(state: State, chosen: tuple[Piece, ...], there: dict[str, list[tuple[int, int]]]) -> bool:
    if not all(fits(box, there[box.name]) for box in state.boxes):
        return False
    if not chosen:
        return True
    first, rest = chosen[0], chosen[1:]
    return any(
        placeable(state, rest, {**there, box.name: [*there[box.name], (first.gpus, first.memory_mb)]})
        for box in state.boxes
        if box.name != first.home and box.kind in first.kinds
    )


def snapshot_of(state: State):
    """Return the same state as the policies see it."""
    free = {box.name: list(range(box.gpus)) for box in state.boxes}
    jobs = []
    for piece in state.pieces:
        gpus = [free[piece.home].pop(0) for _ in range(piece.gpus)]
        kind = next(box.kind for box in state.boxes if box.name == piece.home)
        share = Share(piece.home, piece.gpus, piece.gpus, piece.memory_mb)
        facts = {"cpus": piece.gpus, "memory_mb": piece.memory_mb, "placement": (share,)}
        facts["profile"] = BOTH[kind] if piece.two_profiles else profile()
        jobs.append(on(piece.number, piece.home, *gpus, checkpoints=piece.movable, **facts))
    nodes = tuple(
        node(
            box.name, gpus=box.gpus, memory_mb=box.memory_mb, gpu_type=box.kind,
            gpus_used=sum(p.gpus for p in state.pieces if p.home == box.name),
            cpus_used=sum(p.gpus for p in state.pieces if p.home == box.name),
            memory_used_mb=sum(p.memory_mb for p in state.pieces if p.home == box.name),
        )
        for box in state.boxes
    )  # fmt: skip
    waits = held(WAITS, state.wanted, cpus=state.wanted, memory_mb=state.wanted_mb)
    return cluster(*jobs, waits, nodes=nodes)


def applied(state: State, decision) -> State:
    """Return the state after a decision's moves."""
    goes = {action.job.id: action.shares[0].node for action in of(Migrate, decision)}
    return replace(
        state, pieces=tuple(replace(piece, home=goes.get(piece.number, piece.home)) for piece in state.pieces)
    )


def states(seed: int, count: int) -> Iterator[State]:
    rng = Random(seed)  # noqa: S311 - reproducible states
    while count:
        state = random_state(rng)
        if minimum(state, 0) is None:  # it does wait
            count -= 1
            yield state


@pytest.mark.slow
def test_never_more_moves_than_an_exhaustive_search_finds():
    found = Counter()
    for state in states(1, 300):
        least = minimum(state, DEFRAG.moves_per_round)
        decision = decided(snapshot_of(state), gandiva=DEFRAG, sharing=FLOOR)
        assert len(of(Migrate, decision)) == (least or 0), state
        assert of(Place, decision) == []
        if least is not None:
            assert minimum(applied(state, decision), 0) == 0, state
            assert decision.reasons[key(WAITS)].startswith("waits until room is made for it on ")
        found[least] += 1
    assert all(found[least] for least in (None, 1, 2, 3)), found


def test_beyond_its_evaluations_it_is_greedy(monkeypatch):
    """The plans are still good; the fewest moves are no longer promised, and the same state gives the same plan."""
    monkeypatch.setattr(defrag, "room", lambda *about: move_search.room(*about, evaluations=0))
    made = 0
    for state in states(1, 60):
        decision = decided(snapshot_of(state), gandiva=DEFRAG, sharing=FLOOR)
        least = minimum(state, DEFRAG.moves_per_round)
        if of(Migrate, decision):
            made += 1
            assert least is not None
            assert len(of(Migrate, decision)) >= least
            assert minimum(applied(state, decision), 0) == 0
            assert decided(snapshot_of(state), gandiva=DEFRAG, sharing=FLOOR) == decision
    assert made > 5


# --- Who waits, and who may move -------------------------------------------------------------------------------


def fragmented(*more, **facts):
    """Two hosts: a has one job, b has two of one GPU; a job of four GPUs needs all of a."""
    jobs = [on(1, "a", 0, **facts), on(2, "b", 0), on(3, "b", 1)]
    return world(*jobs, *more, hosts=("a", "b"), lanes=1)


def going_from(job, shares):
    return Memory(moves=(Move(job, shares, "why", Ordered(NOW)),))


def moves_of(snapshot, memory=None):
    return {a.job.id: a.shares[0].node for a in of(Migrate, decided(snapshot, memory, DEFRAG))}


def test_jobs_in_slurms_queue_get_room_too():
    """Where the service places no jobs, Slurm starts them itself, as soon as the GPUs are free."""

    def queued(**facts):
        return replace(held(WAITS, 4), slurm_priority=7, options=Options(), **facts)

    assert moves_of(fragmented(queued(state_reason="Resources"))) == {1: "b"}
    (other,) = of(Migrate, decided(fragmented(queued(state_reason="Dependency")), gandiva=DEFRAG))
    assert "larger jobs" in other.reason
    assert moves_of(fragmented(queued(state_reason="Resources", required_nodes=("b",)))) == {2: "a", 3: "a"}


def test_a_job_on_a_further_lane_gets_the_gpus_that_it_waits_for():
    wide = on(WAITS, "a", 0, 1, 2, 3, state="waiting", lane=1, ready=False, step=0)
    jobs = [on(1, "a", 0), on(4, "a", 3), wide, on(2, "b", 0)]
    assert moves_of(world(*jobs, hosts=("a", "b"))) == {1: "b", 4: "b"}
    full = [*jobs, *(on(10 + gpu, "b", gpu) for gpu in (1, 2))]
    assert moves_of(world(*full, hosts=("a", "b"))) == {}, "room for one of the two is no use"


def test_nothing_is_searched_where_fewer_gpus_are_free_than_jobs_would_arrive(monkeypatch):
    """Who makes way for another needs as many GPUs as it gives back: no chain of moves helps."""
    planned = []
    monkeypatch.setattr(move_search._Search, "plan", lambda search: planned.append(search.wish.job.key))
    wide = on(WAITS, "a", 0, 1, 2, 3, state="waiting", lane=1, ready=False, step=0)
    jobs = [on(1, "a", 0), on(4, "a", 3), wide, on(2, "b", 0), on(10, "b", 1)]
    moves_of(world(*jobs, hosts=("a", "b")))
    assert planned == [key(WAITS)]
    moves_of(world(*jobs, on(11, "b", 2), hosts=("a", "b")))
    assert planned == [key(WAITS)], "one GPU for two jobs"


def test_a_job_that_has_a_whole_host_makes_way_for_none_where_all_hosts_are_alike(monkeypatch):
    """It would need another whole host, where the waiting job can go instead."""
    movers = []
    monkeypatch.setattr(move_search._Search, "plan", lambda search: movers.append({one.size for one in search.movers}))
    snapshot = world(
        *(on(1, "a", 0), on(2, "b", 0), on(3, "c", 0, 1, 2, 3)), held(WAITS, 4), hosts=("a", "b", "c"), lanes=1
    )
    moves_of(snapshot)
    first, *others = snapshot.nodes
    moves_of(replace(snapshot, nodes=(replace(first, cpus=first.cpus + 1), *others)))
    assert movers == [{1}, {1, 4}]


def test_those_who_lose_by_it_or_may_not_move_stay():
    waits = held(WAITS, 4)
    assert moves_of(fragmented(waits)) == {1: "b"}
    assert moves_of(fragmented(waits, progress=Progress(NOW, 1600.0, 600.0))) == {2: "a", 3: "a"}
    assert moves_of(fragmented(waits, requeueable=False)) == {2: "a", 3: "a"}
    assert moves_of(fragmented(waits, required_nodes=("a",))) == {2: "a", 3: "a"}, "its owner wants it there"
    ours = Memory(placed=frozenset({key(1)}))
    assert moves_of(fragmented(waits, required_nodes=("a",)), ours) == {1: "b"}, "we placed it there"


def test_nobody_takes_what_is_being_made_free():
    """While the job leaves, one that came later gets other GPUs, no other job moves, and the first starts at last."""
    snapshot = fragmented(held(WAITS, 4), held(WAITS + 1, 2), held(WAITS + 2, 1))
    first = decided(snapshot, gandiva=DEFRAG)
    assert [a.job.id for a in of(Migrate, first)] == [1], "although job 100 would fit where it goes"
    assert [(a.job.id, a.nodes) for a in of(Place, first)] == [(WAITS + 2, ("b",))]
    share, left = of(Migrate, first)[0].shares, replace(held(1), key=JobKey(1, 1))
    for phase, mover in (
        (Ordered(NOW), on(1, "a", 0, state="stopping")),
        (Requeued(NOW, NOW), left),
        (Placed(NOW, NOW), replace(left, slurm_priority=5, required_nodes=("b",))),
    ):
        going = replace(after(snapshot, first), moves=(Move(key(1), share, "why", phase),))
        rest = (on(2, "b", 0), on(3, "b", 1), held(WAITS, 4), held(WAITS + 3, 1))
        decision = decided(world(mover, *rest, hosts=("a", "b"), lanes=1), going, DEFRAG)
        assert of(Migrate, decision) == []
        goes = {WAITS + 3: ("b",)} if isinstance(phase, Ordered) else {WAITS: ("a",), WAITS + 3: ("b",)}
        assert {a.job.id: a.nodes for a in of(Place, decision)} == goes, phase
    assert "promised" in decided(fragmented(held(WAITS, 4)), going_from(key(1), share), DEFRAG).reasons[key(WAITS)]
    gone = world(*(on(n, "b", n - 1) for n in (1, 2, 3)), held(WAITS, 4), held(WAITS + 2, 1), hosts=("a", "b"), lanes=1)
    placed = {a.job.id: a.nodes for a in of(Place, decided(gone, gandiva=DEFRAG))}
    assert placed == {WAITS: ("a",), WAITS + 2: ("b",)}
    starting = replace(held(WAITS, 4), slurm_priority=3, required_nodes=("a",))
    released = world(*(on(n, "b", n - 1) for n in (1, 2, 3)), starting, held(WAITS + 2, 1), hosts=("a", "b"), lanes=1)
    memory = Memory(placed=frozenset({key(WAITS)}))
    assert [a.nodes for a in of(Place, decided(released, memory, DEFRAG))] == [("b",)], "Slurm is about to start it"


def test_hosts_are_not_emptied_while_somebody_waits_in_vain():
    lonely = [on(1, "a", 0, checkpoints=False), on(2, "b", 0), on(3, "c", 0), on(4, "c", 1)]
    snapshot = world(*lonely, hosts=("a", "b", "c"), lanes=1)
    assert moves_of(snapshot) == {2: "c"}
    crowded = world(*lonely, on(5, "b", 1, checkpoints=False), on(6, "c", 2, checkpoints=False), held(WAITS, 4),
                    hosts=("a", "b", "c"), lanes=1)  # fmt: skip
    assert moves_of(crowded) == {}


# --- Several types of GPU --------------------------------------------------------------------------------------


def mixed(*jobs):
    """Two hosts: a has V100s, b has A100s."""
    plain = world(*jobs, hosts=("a", "b"), lanes=1)
    kinds = {"a": "v100", "b": "a100"}
    return replace(plain, nodes=tuple(replace(lane, gpu_type=kinds[lane.host]) for lane in plain.nodes))


def test_a_job_starts_on_the_type_that_serves_it_best():
    def starts(job, *others):
        return [a.nodes for a in of(Place, decided(mixed(job, *others), gandiva=NOTHING))]

    assert starts(held(WAITS)) == [("a",)], "its profile says nothing of types"
    assert starts(held(WAITS, profile=BOTH["v100"])) == [("b",)]
    assert starts(held(WAITS, profile=BOTH["v100"]), *(on(n, "b", n) for n in range(4))) == [("a",)]
    assert starts(replace(held(WAITS, profile=BOTH["v100"]), gpu_type="v100")) == [("a",)], "it asked for it"


def test_a_job_moves_to_another_type_only_if_that_is_no_slower():
    def goes(profile, where, **facts):
        at, other = ("a", "b") if where == "a" else ("b", "a")
        return moves_of(mixed(on(1, at, 0, profile=profile, **facts), on(2, other, 0), on(3, other, 1), held(WAITS, 4)))

    assert goes(BOTH["v100"], "a") == {1: "b"}
    assert goes(BOTH["a100"], "b") == {}
    assert goes(profile(), "a") == {}
    assert goes(BOTH["v100"], "a", gpu_type="v100") == {}
