"""Decisions of every way of sharing on drawn and simulated rounds are those of the file, with reasons and memory.

A change that moves code leaves the file as it is. One that changes a rule writes it anew in the same commit, and says
in its message which decisions change and why::

    .venv/bin/python tests/policies/test_golden_decisions.py

It prints the cases that differ. ``... test_golden_decisions.py CASE NUMBER`` prints the decisions of one chain of
rounds as JSON, one a line, to be compared with those of another commit.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
from test_preemption_invariants import snapshot_of

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.actions import Action, Migrate, Pack, Place, Resize, Resume, Suspend, Unsuspend, Yield
from cadenza.policies.core.decision import Alone, Decision, Memory, SharingMemory
from cadenza.policies.core.model import (
    ClusterSnapshot,
    Gpu,
    Host,
    Job,
    JobKey,
    JobUsage,
    Lease,
    Node,
    Options,
    Progress,
    Share,
    SiteRules,
    StepRate,
)
from cadenza.policies.core.move import Move, Ordered, Over, Placed, Requeued
from cadenza.policies.core.profile import Profile, linked
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.queue_rules import USUAL_WEIGHTS, QueueRules, Weights
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.ledger import remember
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.simulation import simulate
from cadenza.slurm_plugin.service.store.record_codec import encode_decision

FILE = Path(__file__).parent / "golden" / "decisions.json"
NOW, HOUR = 1_000_000.0, 3600.0
CHAINS, ROUNDS = 32, 5
"""Drawn worlds of each case, and rounds of each."""
JOBS, SIMULATED_ROUNDS = 40, 80
MODELS = ("net", "bert", "gan")
ALL = GandivaSettings()
PLACED = SharingSettings(enforce=True, place=True, share_between_users=True, max_priority=10)
FLOOR, IN_ORDER = replace(PLACED, floor=True), replace(PLACED, turns="order", suspend=False)
SHIPPED = SharingSettings(enforce=True, floor=True, min_run_s=0.0)


@dataclass(frozen=True)
class Case:
    """A policy, and the lanes of the hosts that it decides on."""

    order: str
    allocate: str
    share: str = "none"
    sharing: SharingSettings = PLACED
    gandiva: GandivaSettings = ALL
    lanes: int = 2
    more: tuple[tuple[str, Any], ...] = ()

    def decide(self, partitions: frozenset[str]) -> Callable[[ClusterSnapshot, Memory], Decision]:
        rules = PolicySettings(partitions, sharing=self.sharing, gandiva=self.gandiva, **dict(self.more))
        return build(self.order, self.allocate, self.share, rules).decide


def only(**on: bool) -> GandivaSettings:
    return GandivaSettings(
        **({"pack": False, "migrate": False, "defrag": False, "elastic": False, "relieve": False} | on)
    )


PHASED = (("phased_moves", True),)
CASES = {
    "none": Case("fifo", "none", sharing=replace(SHIPPED, enforce=False)),
    "none, tuned": Case("las", "cadenza", sharing=SHIPPED, lanes=1),
    "none, placed": Case("srtf", "tune", lanes=1),
    "none, placed through Slurm": Case("fifo", "cadenza", sharing=FLOOR, more=PHASED),
    "preemption": Case("levels", "none", "preemption", SHIPPED, lanes=1, more=PHASED),
    "preemption, tuned, in lanes": Case("las", "cadenza", "preemption", replace(SHIPPED, share_between_users=True)),
    "time slices": Case("fifo", "none", "timeslice", replace(SHIPPED, share_between_users=True), lanes=3),
    "time slices in order": Case("fairshare", "proportional", "timeslice", IN_ORDER),
    "packing": Case("fifo", "proportional", "gandiva", gandiva=only(pack=True)),
    "migration": Case("fifo", "proportional", "gandiva", gandiva=only(migrate=True, defrag=True, relieve=True)),
    "elastic": Case("las", "none", "gandiva", gandiva=only(elastic=True, migrate=True)),
    "gandiva": Case("fifo", "cadenza", "gandiva", FLOOR, lanes=3, more=(*PHASED, ("size_pending", True))),
}  # fmt: skip


# --- Drawn rounds --------------------------------------------------------------------------------------


def profiles() -> list[Profile]:
    """Return some profiles; those of the last model are known on two types of GPU."""
    found = []
    for at, model in enumerate(MODELS):
        rows = tuple(tuple(min(1.0, (0.4 + at / 5) * (1 + i) * (2 + j) / 4) for j in range(3)) for i in range(3))
        plain = Profile(
            model, 0.1 + at / 10, (1.0, 3.0, 6.0), (4.0, 16.0, 31.25), rows, gpu_utilization=0.2 + at / 4,
            gpu_memory_peak_gb=4.0 + 5 * at, gpu_memory_low_gb=1.0 + at,
        )  # fmt: skip
        found.append(plain)
    types = linked({"a100": replace(found[-1], gpu="a100"), "v100": replace(found[-1], gpu="v100", iteration_s=0.5)})
    return [*found[:-1], types["a100"]]


class World:
    """A site that is drawn from a seed, and how it goes on after a decision."""

    def __init__(self, seed: str, lanes: int) -> None:
        self.rng = Random(seed)  # noqa: S311
        self.odd = 1.0 if self.chance(0.4) else 0.0
        """Part of the rare states that are drawn: none in most worlds, where more is done."""
        full = self.chance(0.6)
        self.profiles = profiles()
        self.number = 0
        self.used: set[Gpu] = set()
        """GPUs with a holder, each with one where nothing is odd."""
        self.nodes: list[Node] = []
        self.jobs: list[Job] = []
        for name in [f"h{at}" for at in range(self.rng.randint(1, 5))]:
            self._host(name, self.rng.randint(1, lanes))
        self.hosts = tuple(
            Host(name, agent_alive=not self.rare(0.1), memory_mb=500_000)
            for name in sorted({node.host for node in self.nodes})
        )
        busy = {host.name: 0.99 if full else self.rng.choice((0.2, 0.7, 0.9)) for host in self.hosts}
        for node in self.nodes:
            self._fill(node, busy[node.host] if node.lane == 0 else 0.7 * busy[node.host])
        self._span()
        for _ in range(self.rng.randint(*((3, 12) if full else (0, 4)))):
            self._submit()
        self.site = SiteRules(
            multifactor=not self.rare(0.1),
            weights={"age": 5_000, "fairshare": 10_000},
            qos_priority={"low": 0, "normal": 10},
            fair_share={"x": self.rng.choice((0.5, 2.0)), "y": 1.5} if self.rng.random() < 0.5 else {},
        )

    def chance(self, part: float) -> bool:
        return self.rng.random() < part

    def rare(self, part: float) -> bool:
        return self.chance(part * self.odd)

    def _host(self, name: str, lanes: int) -> None:
        gpus = self.rng.choice((2, 4, 4, 8))
        gpu_type = self.rng.choice(("", "a100", "a100", "v100"))
        for lane in range(lanes):
            drained = self.chance(0.2) if lane else self.rare(0.1)
            self.nodes.append(Node(
                name if lane == 0 else f"{name}-l{lane}", name, lane, gpus * 6, gpus * 32_000, gpus, gpu_type,
                ("gpu", "side") if self.chance(0.3) else ("gpu",), up=not self.rare(0.05), drained=drained,
                drain_reason="cadenza: idle lane" if drained else "", weight=1 + lane, gpu_memory_gb=32.0,
                ending_s=60.0 if self.rare(0.1) else 0.0, empty_from_s=0.0 if self.chance(0.04) else None,
            ))  # fmt: skip

    def _fill(self, node: Node, part: float) -> None:
        """Start jobs on the lowest GPUs of a lane, as Slurm does."""
        first = 0
        while first < node.gpus and self.chance(part):
            gpus = min(self.rng.choice((1, 1, 1, 2, 2, 4)), node.gpus - first)
            self._start([node], range(first, first + gpus))
            first += gpus

    def _span(self) -> None:
        """Start a job on the last GPUs of two hosts, where a lane has them free."""
        free = [node for node in self.nodes if node.gpus_used + 1 <= node.gpus and node.lane == 0 and node.up]
        free = [next(one for one in self.nodes if one.name == node.name) for node in free]
        if len({node.host for node in free}) > 1 and self.chance(0.7):
            self._start(free[:2], None)

    def _start(self, nodes: list[Node], indices: range | None) -> None:
        rng = self.rng
        each = len(indices) if indices is not None else 1
        gpus = tuple(Gpu(n.host, i) for n in nodes for i in (indices if indices is not None else (n.gpus - 1,)))
        shares = tuple(
            Share(node.name, each, rng.choice((3, 6)) * each, rng.choice((8_000, 24_000)) * each) for node in nodes
        )
        run_s = rng.choice((10.0, 500.0, 4000.0, 90_000.0))
        state = rng.choice(("held", "held", "held", "yielded", "waiting", "stopping" if self.odd else "held"))
        if not self.odd and not self.used.isdisjoint(gpus):
            state = rng.choice(("yielded", "waiting"))
        self.used.update(gpus if state == "held" else ())
        managed = self.chance(0.95)
        job = self._job(
            gpus=each * len(nodes), num_nodes=len(nodes), nodes=tuple(node.name for node in nodes),
            placement=() if self.rare(0.2) else shares, cpus=sum(share.cpus for share in shares),
            memory_mb=sum(share.memory_mb for share in shares), managed=managed, run_s=run_s, start_s=NOW - run_s,
            state="SUSPENDED" if state == "yielded" and self.chance(0.3) else "OTHER" if self.rare(0.08) else "RUNNING",
            time_limit_s=rng.choice((HOUR, 48 * HOUR)), requeueable=not self.rare(0.2), absent=self.rare(0.06),
            progress=Progress(
                NOW, rng.choice((None, 2e4, 2e5)), done_s=run_s, attained_s=run_s, running=state == "held"
            ),
        )  # fmt: skip
        if managed and not self.rare(0.1):
            job = replace(job, lease=self._lease(state, gpus, run_s))
        elif not managed and self.chance(0.5):
            job = replace(job, lease=Lease("held", gpus, exclusive=True, held_s=run_s))
        self.jobs.append(job)
        for share in shares if job.state != "SUSPENDED" else ():
            at = next(at for at, one in enumerate(self.nodes) if one.name == share.node)
            one = self.nodes[at]
            self.nodes[at] = replace(
                one, gpus_used=one.gpus_used + share.gpus, cpus_used=one.cpus_used + share.cpus,
                memory_used_mb=one.memory_used_mb + share.memory_mb,
            )  # fmt: skip

    def _lease(self, state: str, gpus: tuple[Gpu, ...], run_s: float) -> Lease:
        rng, holds = self.rng, state in ("held", "stopping")
        iteration_s = rng.choice((0.1, 0.2, 0.5))
        checkpoints = self.chance(0.7)
        return Lease(
            state, gpus, vtime_s=rng.choice((0.0, 60.0, 300.0)), held_s=min(run_s, 200.0) if holds else 0.0,
            waited_s=0.0 if holds else rng.choice((5.0, 100.0, 900.0)), ready=not self.rare(0.3),
            iteration_s=iteration_s,
            weight=rng.choice((1.0, 1.0, 2.0)), step=int(run_s) if state != "waiting" else 0, checkpoints=checkpoints,
            saves_away=checkpoints and self.chance(0.5), lost="its GPU is gone" if self.rare(0.05) else "",
            lost_s=rng.choice((0.0, 0.0, 30.0)), refusals=3 if self.rare(0.2) else 0,
            late=state == "waiting" and self.rare(0.2),
            use=JobUsage(gpu_percent=rng.choice((20.0, 90.0)), cpu_percent=2e2, gpu_memory_mb=4e3, memory_peak_mb=5e3),
            pace=StepRate(iteration_s * rng.choice((1.0, 1.0, 1.3)), 1000, 100.0, 0.001, rng.choice((0.0, 0.3))),
            shown="frozen" if self.rare(0.3) else "running", cpus_per_gpu=rng.choice((None, 3.0)),
            file_system=rng.choice(("/home", "")), stalls=self.rare(0.1),
        )  # fmt: skip

    def _submit(self) -> None:
        rng = self.rng
        gpus = rng.choice((1, 1, 2, 2, 4, 8, 16))
        nodes = [node.name for node in self.nodes if node.gpus >= gpus]
        reasons = ("Resources", "Priority", "") + (
            ("None", "Dependency", "AssocGrpGRES", "BeginTime") if self.odd else ()
        )
        self.jobs.append(self._job(
            gpus=gpus, num_nodes=-(-gpus // 8) if self.chance(0.8) else min(2, gpus), cpus=3 * gpus,
            memory_mb=8_000 * gpus,
            managed=self.chance(0.8), state="PENDING", slurm_priority=0 if self.rare(0.4) else rng.randint(1, 20_000),
            state_reason=rng.choice(reasons), required_nodes=(rng.choice(nodes),) if nodes and self.rare(0.4) else (),
            barred=frozenset(rng.sample(nodes, 1)) if nodes and self.chance(0.1) else frozenset(),
            gpu_type=rng.choice(("", "", "", "a100")), time_limit_s=rng.choice((60.0, HOUR, 48 * HOUR)),
            eligible_s=NOW + rng.choice((-60, 500)) if self.rare(0.4) else None,
            progress=Progress(NOW, rng.choice((None, 2e4))),
        ))  # fmt: skip

    def _job(self, *, managed: bool, **facts: Any) -> Job:
        self.number += 1
        rng, gpus = self.rng, facts["gpus"]
        account = rng.choice("xy")
        low, high = (1, 2 * gpus) if self.chance(0.3) else (None, None)
        options = Options(
            min_gpus=low, max_gpus=high, priority=rng.choice((0, 0, 5)), checkpoints=rng.choice((None, True, False))
        )
        plain = {
            "key": JobKey(self.number, rng.choice((0, 0, 1))), "user": account + rng.choice("12"), "account": account,
            "partition": "side" if self.rare(0.1) else "gpu", "qos": rng.choice(("low", "normal")), "slurm_priority": 1,
            "submit_s": NOW - rng.choice((20.0, 1000.0, 100_000.0)), "name": rng.choice(MODELS),
            "profile": rng.choice((None, *self.profiles)), "options": options if managed else None,
        }  # fmt: skip
        return Job(**(plain | facts))

    def memory(self) -> Memory:
        """Return what earlier rounds may have left behind."""
        rng, live = self.rng, [job for job in self.jobs if job.options is not None]
        running = [job for job in live if job.state == "RUNNING" and job.lease is not None]
        suspended = [job.key for job in live if job.state == "SUSPENDED" and self.chance(0.8)]
        pinned = [job.key for job in live if job.required_nodes and self.chance(0.7)]
        moves = []
        for job in running:
            if self.chance(0.3):
                phase = Over(NOW - rng.choice((100.0, 5000.0)), "was moved", rng.choice((0.0, 9.0)))
                former = JobKey(job.key.id, job.key.restart - (1 if self.chance(0.8) else 0))
                moves.append(
                    Move(former, (), "", phase, cost_s=rng.choice((0.0, 40.0)), lost_s=rng.choice((0.0, 20.0)))
                )
            elif self.chance(0.1):
                phase = rng.choice(
                    (Ordered(NOW - 5), Requeued(NOW - 5, NOW - 20, job.nodes), Placed(NOW - 5, NOW - 20, job.nodes))
                )
                shares = (
                    ()
                    if self.chance(0.5)
                    else tuple(share._replace(node=rng.choice(self.nodes).name) for share in job.placement[:1])
                )
                moves.append(Move(job.key, shares, "goes elsewhere", phase))
        packs = {}
        for job in running:
            if len(job.nodes) == 1:
                packs.setdefault(frozenset(job.lease.gpus), []).append(job.key)
        packs = [tuple(keys[:2]) for keys in packs.values() if len(keys) > 1 and self.chance(0.3)]
        sharing = SharingMemory(
            packs=tuple(sorted(packs, key=min)),
            spare_s=tuple((host.name, NOW - 500) for host in self.hosts if self.chance(0.5)),
            moved_s=tuple((job.key.id, NOW - rng.choice((50.0, 900.0))) for job in running if self.chance(0.1)),
            alone=tuple(
                Alone(job.key, 0.1, rng.choice((0.1, 0.3, None)), cpus=1.0, gpu_memory_gb=4.0)
                for job in running if self.chance(0.5)
            ),
            asked_gpus=tuple((job.key.id, max(job.gpus // 2, 1)) for job in running if self.chance(0.1)),
        )  # fmt: skip
        return Memory(
            suspended=frozenset(suspended), placed=frozenset(pinned), sharing=sharing, moves=tuple(moves),
            drained=frozenset(node.name for node in self.nodes if node.drained and self.chance(0.8)),
            usage={"x": 4e5, "x/x1": 4e5, "y": 1e5, "y/y1": 1e5}, usage_s=NOW - 60,
            movable_usage=rng.choice((0.0, 3e5)),
            keep_checkpoints={f"{user}/{name}": NOW for user in ("x1", "x2", "y1") for name in MODELS[:2]},
            factors={job.key.id: -500 for job in live if job.state == "PENDING" and self.chance(0.1)},
        )  # fmt: skip

    def snapshot(self, time_s: float) -> ClusterSnapshot:
        return ClusterSnapshot(time_s, tuple(self.nodes), tuple(self.jobs), self.hosts, self.site)

    def go_on(self, actions: tuple[Action, ...]) -> None:
        """Let jobs do what they were told, in part; some end, and new ones come."""
        self.jobs = [job for job in self.jobs if self.chance(0.97)]
        for action in actions:
            keys = action.jobs if isinstance(action, Pack) else (getattr(action, "job", None),)
            for at, job in enumerate(self.jobs):
                if job.key in keys and self.chance(0.9):
                    self.jobs[at] = self._after(job, action)
        if self.chance(0.7):
            self._submit()

    def _after(self, job: Job, action: Action) -> Job:
        lease = job.lease
        match action:
            case Yield() if lease is not None:
                return replace(job, lease=replace(lease, state=self.rng.choice(("stopping", "yielded")), held_s=0.0))
            case Resume() | Pack() if lease is not None:
                return replace(job, lease=replace(lease, state="held", waited_s=0.0, held_s=30.0))
            case Suspend() | Unsuspend():
                return replace(job, state="SUSPENDED" if isinstance(action, Suspend) else "RUNNING")
            case Place(nodes=nodes):
                return replace(job, required_nodes=nodes, slurm_priority=max(job.slurm_priority, 1))
            case Migrate(shares=shares) | Resize(shares=shares) if lease is not None:
                host_of = {node.name: node.host for node in self.nodes}
                gpus = tuple(Gpu(host_of[share.node], index) for share in shares for index in range(share.gpus))
                total = sum(share.gpus for share in shares)
                nodes = tuple(share.node for share in shares)
                lease = replace(lease, gpus=gpus)
                return replace(job, nodes=nodes, placement=shares, gpus=total, num_nodes=len(nodes), lease=lease)
        return job


def drawn(name: str, number: int) -> Iterator[Decision]:
    """Yield the decisions of the rounds of one drawn world."""
    case = CASES[name]
    world = World(f"{name} {number}", case.lanes)
    decide, memory, time_s = case.decide(frozenset({"gpu"})), world.memory(), NOW
    if case.share == "preemption" and number % 2:  # sites that are full of jobs that can move
        snapshot, memory = snapshot_of(world.rng)
        world.nodes, world.jobs, world.hosts = list(snapshot.nodes), list(snapshot.jobs), snapshot.hosts
        world.site, time_s = snapshot.site, snapshot.time_s
    for _ in range(ROUNDS):
        snapshot = world.snapshot(time_s)
        decision = decide(snapshot, memory)
        yield decision
        memory = remember(decision.memory, decision.actions, snapshot)
        time_s += world.rng.choice((10.0, 60.0, 600.0))
        world.go_on(decision.actions)


# --- Simulated rounds ----------------------------------------------------------------------------------


def simulated(name: str) -> Iterator[Decision]:
    """Yield the decisions of a simulated run: of whole moves, packs, measurements and leases that follow each other."""
    case, rng, decisions = CASES[name], Random(name), []  # noqa: S311
    models = profiles()
    jobs = [
        TraceJob(
            at + 1, float(rng.randrange(2000)), rng.choice((1, 1, 1, 2, 4, 8)), float(rng.randrange(300, 9000)),
            profile=(profile := rng.choice(models)), model=profile.model, user=rng.choice(("ann", "bob")),
            account=rng.choice("xy"), checkpoints=at % 4 > 0, time_limit_s=9000.0, min_gpus=1 if at % 5 == 0 else None,
        )
        for at in range(JOBS)
    ]  # fmt: skip
    policy = build(case.order, case.allocate, case.share, PolicySettings(
        frozenset({PARTITION}), sharing=case.sharing, gandiva=case.gandiva, **dict(case.more)
    ))  # fmt: skip

    def decide(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        decisions.append(policy.decide(snapshot, memory))
        return decisions[-1]

    phased = bool(case.more) or case.share == "preemption"
    setup = Setup(
        round_s=60.0, lanes=case.lanes, horizon_s=SIMULATED_ROUNDS * 60.0, skip=False, phased_moves=phased,
        place=case.sharing.place, queue=QueueRules(Weights(**USUAL_WEIGHTS)),
    )  # fmt: skip
    nodes = tuple(replace(node, gpu_memory_gb=32.0) for node in read_cluster("2x4:24:250,1x8:24:500", case.lanes))
    simulate(jobs, nodes, replace(policy, decide=decide, runnable=None), setup)
    yield from decisions


# --- The file ------------------------------------------------------------------------------------------


def rounded(found: re.Match[bytes]) -> bytes:
    return b"%.9g" % float(found[0])


def text(decision: Decision) -> bytes:
    """Return a decision with numbers of nine digits: the last ones are the C library's."""
    quiet = b" quiet until %.9g" % decision.quiet_until_s
    return re.sub(rb"-?\d+\.\d+(e[+-]?\d+)?", rounded, encode_decision(decision)) + quiet


def digest(decisions: Iterator[Decision]) -> str:
    return sha256(b"\n".join(text(one) for one in decisions)).hexdigest()[:8]


def digests(name: str) -> list[str]:
    return [*(digest(drawn(name, number)) for number in range(CHAINS)), digest(simulated(name))]


@pytest.mark.parametrize("name", CASES)
def test_decisions_are_those_of_the_file(name):
    golden = json.loads(FILE.read_text())[name].split()
    found = digests(name)
    different = [at for at, pair in enumerate(zip(golden, found, strict=True)) if pair[0] != pair[1]]
    assert not different, (
        f"chains of {name!r} with other decisions ({CHAINS}: the simulation): see this file's docstring"
    )


def main() -> None:
    if len(sys.argv) > 1:
        name, number = sys.argv[1], int(sys.argv[2])
        for decision in simulated(name) if number == CHAINS else drawn(name, number):
            print(text(decision).decode())
        return
    former = json.loads(FILE.read_text()) if FILE.exists() else {}
    golden = {name: " ".join(digests(name)) for name in CASES}
    FILE.write_text(json.dumps(golden, indent=1) + "\n")
    print("different:", ", ".join(name for name in golden if golden[name] != former.get(name)) or "none")


if __name__ == "__main__":
    main()
