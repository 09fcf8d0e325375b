"""One decision behind two front doors: a ``cadenza.toml`` for the service and an option line for ``cadenza simulate``.

Both are parsed as their commands parse them. Under the same names they must give the same actions of one whole round,
decided and guarded, for recorded and for generated snapshots. The quick profile takes 60 combinations of names, the
thorough one all of them.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import profiles

from cadenza.policies.core.decision import Memory, SharingMemory
from cadenza.policies.core.model import (
    ClusterSnapshot,
    Gpu,
    Host,
    Job,
    JobKey,
    Lease,
    Node,
    Options,
    Placement,
    Progress,
    Share,
)
from cadenza.policies.core.move import Move, Ordered, Over, Placed, Requeued, Wanted
from cadenza.policies.core.profile import Profile
from cadenza.policies.guard import Guarded, GuardSettings, guard
from cadenza.policies.inputs.cluster import PARTITION
from cadenza.policies.inputs.published import default_costs
from cadenza.policies.registry import ENTRIES
from cadenza.policies.round import Decide
from cadenza.policies.sharing import pipeline
from cadenza.policies.sharing.turns.slurm_sync import sync_slurm
from cadenza.slurm_plugin.cli.simulate.command import command
from cadenza.slurm_plugin.gateway.translate import snapshot as translated
from cadenza.slurm_plugin.service.settings import guard_settings, load_settings, policy
from cadenza.slurm_plugin.simulations.request import read_request

RECORDING = Path(__file__).parents[1] / "gateway" / "data" / "slurm-26.05.jsonl"
NOW = 1_800_000_000.0
ROUND_S = 60
FEW = 60
THOROUGH = settings.default is not None and settings.default.max_examples > 20


HUNGRY = Profile("hungry", 0.2, (1.0, 3.0, 8.0), (4.0, 62.5), ((0.2, 0.3), (0.8, 1.0), (1.6, 2.0)))
"""A profile of a job that uses more CPUs than its proportional share."""


class Names(NamedTuple):
    """Names that both front doors take."""

    order: str
    allocate: str
    share: str
    place: bool
    turns: str


def names(kind: str) -> list[str]:
    return [entry.name for entry in ENTRIES if entry.kind == kind]


ALL = [
    Names(*row)
    for row in product(names("ordering"), names("allocation"), names("sharing"), (False, True), ("fair", "order"))
    if row[2] != "none" or row[4] == "fair"
]
CHOSEN = ALL if THOROUGH else Random(17).sample(ALL, FEW)  # noqa: S311 - a repeatable draw


class Door(NamedTuple):
    """A policy and the guard's settings, as one front door makes them."""

    decide: Decide
    limits: GuardSettings

    def actions(self, snapshot: ClusterSnapshot, memory: Memory) -> tuple[Guarded, ...]:
        """One whole round as far as it is decided: the actions, and whether each may leave."""
        return guard(self.decide(snapshot, memory).actions, snapshot, memory, self.limits)


def service(folder: Path, chosen: Names) -> Door:
    file = folder / "cadenza.toml"
    file.write_text(
        f"expert.move_s = {default_costs().migrate_s}\n[service]\nmode = 'apply'\npoll_s = {ROUND_S}\n"
        f"[guard]\npartitions = ['{PARTITION}']\n[sharing]\nturns = '{chosen.turns}'\n"
        f"[policy]\norder = '{chosen.order}'\nallocate = '{chosen.allocate}'\nshare = '{chosen.share}'\n"
        f"place = {str(chosen.place).lower()}\n",
        encoding="utf-8",
    )
    found = load_settings(file)
    return Door(policy(found), guard_settings(found))


def simulator(folder: Path, chosen: Names) -> Door:
    trace = folder / "trace.csv"
    trace.write_text("job,submit_s,gpus,duration_s\n1,0,1,600\n", encoding="utf-8")
    line = (
        f"--trace {trace} --nodes 2x4:24:256 --set round={ROUND_S} --set through-slurm=yes "
        f"--set place={'yes' if chosen.place else 'no'} --order {chosen.order} "
        f"--allocate {chosen.allocate} --share {chosen.share}"
    ) + (f" --set turns={chosen.turns}" if chosen.share != "none" else "")
    words = command.make_context("simulate", line.split()).params
    request = read_request(words, tuple(line.split()))
    return Door(request.policy.decide, request.setup.guard)


@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda chosen: "-".join(map(str, chosen)))
def test_both_front_doors_give_the_same_actions(tmp_path: Path, chosen: Names) -> None:
    ours, theirs = service(tmp_path, chosen), simulator(tmp_path, chosen)
    for snapshot in recorded():
        assert ours.actions(snapshot, Memory()) == theirs.actions(snapshot, Memory())

    @settings(max_examples=6, deadline=None, database=None)
    @given(rounds())
    def same(case: tuple[ClusterSnapshot, Memory]) -> None:
        assert ours.actions(*case) == theirs.actions(*case)

    same()


def test_every_name_is_taken_at_least_twice() -> None:
    for kind in zip(*CHOSEN, strict=True):
        assert min(Counter(kind).values()) >= 2
    assert {name for chosen in CHOSEN for name in chosen} >= {entry.name for entry in ENTRIES}


@pytest.mark.parametrize("share", ["timeslice", "gandiva"])
def test_a_stage_that_one_side_lacks_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str) -> None:
    chosen = Names("fifo", "none", share, False, "fair")
    ours, before = service(tmp_path, chosen), simulator(tmp_path, chosen)
    case = snapshot_of(runs(1, "n0", 0, held_s=70.0), runs(2, "n0-l1", 0, state="yielded")), Memory()
    assert ours.actions(*case) == before.actions(*case) != ()
    monkeypatch.setattr(pipeline, "STAGES", tuple(one for one in pipeline.STAGES if one.run is not sync_slurm))
    assert simulator(tmp_path, chosen).actions(*case) != ours.actions(*case)


# --- Snapshots -------------------------------------------------------------------------------------------


def recorded() -> list[ClusterSnapshot]:
    """Recorded answers of Slurm in the simulator's partition, with profiles and leases as agents would report them."""
    snapshot = translated(json.loads(RECORDING.read_text().splitlines()[0]))
    host = {node.name: node.host for node in snapshot.nodes}
    nodes = tuple(replace(node, partitions=(PARTITION,)) for node in snapshot.nodes)
    jobs = tuple(
        replace(job, partition=PARTITION, profile=HUNGRY, lease=_lease_of(job, host), placement=_placement_of(job))
        if job.partition == "shared"
        else job
        for job in snapshot.jobs
    )
    hosts = tuple(Host(name, agent_alive=True) for name in sorted(set(host.values())))
    return [replace(snapshot, nodes=nodes, jobs=jobs, hosts=hosts)]


def _lease_of(job: Job, host: dict[str, str]) -> Lease | None:
    if job.state != "RUNNING" or job.num_nodes != 1:
        return None
    return Lease("held", tuple(Gpu(host[job.nodes[0]], index) for index in range(job.gpus)), ready=True, held_s=90.0)


def _placement_of(job: Job) -> Placement:
    parts = [total // max(len(job.nodes), 1) for total in (job.gpus, job.cpus, job.memory_mb)]
    return tuple(Share(name, *parts) for name in sorted(job.nodes))


def snapshot_of(*jobs: Job, hosts: int = 2) -> ClusterSnapshot:
    """A cluster of hosts with 4 GPUs and two lanes; the lanes' use is that of the jobs."""
    lanes = [(f"n{host}", lane, f"n{host}-l{lane}" if lane else f"n{host}") for host in range(hosts) for lane in (0, 1)]
    nodes = []
    for host, lane, name in lanes:
        shares = [share for job in jobs for share in job.placement if share.node == name]
        used = [sum(values) for values in zip(*(share[1:] for share in shares), strict=True)] or [0, 0, 0]
        node = Node(name, host, lane, 24, 262_144, 4, "a100", (PARTITION,), gpu_memory_gb=40.0)
        nodes.append(replace(node, gpus_used=used[0], cpus_used=used[1], memory_used_mb=used[2]))
    alive = tuple(Host(f"n{host}", agent_alive=True) for host in range(hosts))
    return ClusterSnapshot(NOW, tuple(nodes), jobs, alive)


def one(number: int, gpus: int = 1, **facts: object) -> Job:
    plain: dict[str, object] = {
        "account": "lab", "qos": "normal", "cpus": 6 * gpus, "memory_mb": 16_000 * gpus, "num_nodes": 1,
        "submit_s": NOW - 900 + number, "options": Options(), "slurm_priority": 1, "progress": Progress(NOW, 7200.0),
    }  # fmt: skip
    plain |= {"user": "ann", "state": "PENDING", "partition": PARTITION, "gpus": gpus}
    return Job(JobKey(number, 0), **{**plain, **facts})  # type: ignore[arg-type]


def runs(number: int, node: str, *gpus: int, state: str = "held", held_s: float = 0.0, **facts: object) -> Job:
    host, count = node.partition("-")[0], len(gpus)
    lease = Lease(
        state,  # type: ignore[arg-type]
        tuple(Gpu(host, index) for index in gpus),
        held_s=held_s,
        vtime_s=held_s,
        waited_s=0.0 if state == "held" else 80.0,
        ready=True,
        iteration_s=0.2,
        checkpoints=number % 3 > 0,
        step=100,
    )
    share = Share(node, count, 6 * count, 16_000 * count)
    here = {"state": "RUNNING", "nodes": (node,), "start_s": NOW - 800, "placement": (share,), "lease": lease}
    return one(number, count, **{**here, **facts})


@st.composite
def rounds(draw: st.DrawFn) -> tuple[ClusterSnapshot, Memory]:
    """A cluster in the middle of its work: jobs in turns, in packs, on their way, pending and held."""
    hosts = draw(st.integers(1, 2))
    pool = draw(st.lists(profiles(noisy=False), min_size=1, max_size=2))
    jobs: list[Job] = []
    for number in range(1, draw(st.integers(0, 8)) + 1):
        facts: dict[str, object] = {
            "user": draw(st.sampled_from(("ann", "ann", "bob"))),
            "profile": draw(st.none() | st.sampled_from(pool)),
            "options": draw(st.sampled_from((Options(), Options(min_gpus=1, max_gpus=4), Options(priority=1), None))),
        }
        kind = draw(st.sampled_from(("runs", "runs", "suspended", "held", "queued")))
        if kind in ("runs", "suspended"):
            size = draw(st.sampled_from((1, 1, 2, 4)))
            first = draw(st.just(0) | st.integers(0, 4 - size))
            node = f"n{draw(st.integers(0, hosts - 1))}{draw(st.sampled_from(('', '-l1')))}"
            state = draw(st.sampled_from(("held", "waiting", "yielded", "stopping")))
            held_s = draw(st.sampled_from((3.0, 50.0, 500.0))) if state in ("held", "stopping") else 0.0
            there = runs(number, node, *range(first, first + size), state=state, held_s=held_s, **facts)
            jobs.append(replace(there, state="SUSPENDED") if kind == "suspended" else there)
        elif kind == "held":
            why = draw(st.sampled_from(("JobHeldUser", "JobHeldAdmin")))
            jobs.append(one(number, draw(st.sampled_from((1, 2, 4))), **facts, slurm_priority=0, state_reason=why))
        else:
            reason = draw(st.sampled_from(("Resources", "Priority", "Dependency", "QOSMaxCpuPerUserLimit")))
            jobs.append(one(number, draw(st.sampled_from((1, 4))), **facts, state_reason=reason))
    snapshot = snapshot_of(*jobs, hosts=hosts)
    closed = draw(st.sampled_from(("", "", "", "", "cadenza: observe-only", "broken fan")))
    lanes = (replace(node, drained=bool(closed), drain_reason=closed) if node.lane else node for node in snapshot.nodes)
    alive = (replace(host, agent_alive=draw(st.integers(0, 9)) > 0) for host in snapshot.hosts)
    return replace(snapshot, nodes=tuple(lanes), hosts=tuple(alive)), _memory(draw, jobs)


def _memory(draw: st.DrawFn, jobs: list[Job]) -> Memory:
    keys = [job.key for job in jobs]
    moving = draw(st.sampled_from(keys)) if keys and draw(st.booleans()) else None
    phase = draw(
        st.sampled_from(
            (Wanted(NOW - 5), Ordered(NOW - 5), Requeued(NOW - 5, NOW - 9), Placed(NOW - 2, NOW - 9), Over(NOW, "done"))
        )
    )
    moves = () if moving is None else (Move(moving, (Share("n0", 1, 6, 16_000),), "idle GPUs", phase),)
    there = [job.key for job in jobs if job.lease is not None][:2]
    packs = (tuple(there),) if len(there) > 1 and draw(st.booleans()) else ()
    suspended = frozenset(job.key for job in jobs if job.state == "SUSPENDED" and draw(st.booleans()))
    placed = frozenset(key for key in keys if draw(st.integers(0, 4)) == 0)
    return Memory(suspended=suspended, placed=placed, moves=moves, sharing=SharingMemory(packs=packs))
