"""Two users on one host: whatever the processes of one send, the other's GPUs are theirs, also through restarts.

User A's jobs are honest. User B's job computes from its first lease on until Slurm has frozen it, whatever it says, and
its processes send any message. Root registers jobs, the service takes turns, and Slurm suspends. The agent is killed
between any two messages, and jobs end and start while it is away.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from host_rig import ROOT, HostInMemory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import orders, wire
from cadenza.sidecar.agent.ipc.processes import start_ticks
from cadenza.sidecar.agent.ipc.slurm_steps import Shown, Step
from cadenza.sidecar.agent.ipc.transport import Session
from cadenza.sidecar.agent.leases import book, membership
from cadenza.sidecar.agent.leases.handover import Handover
from cadenza.sidecar.agent.leases.lease_table import Lease, LeaseTable
from cadenza.sidecar.agent_settings import AgentSettings, AgentTable

A, B = 1000, 2000
HONEST, HOSTILE, APART, UNMANAGED = 1, 2, 3, 4
SUSPEND_AFTER_S = 1.0


@dataclass
class Job:
    """One job as Slurm has it, and the truth about its processes."""

    uid: int
    gpus: tuple[int, ...]
    lane: int = 0
    managed: bool = True
    alive: bool = True
    computing: bool = False
    frozen: bool = False
    off_since: float | None = None

    def shown(self) -> Shown:
        return "frozen" if self.alive and self.frozen else "running" if self.alive else "gone"


@dataclass
class Rank:
    """An honest rank's connection, and how many of the agent's messages it has followed."""

    session: Session
    followed: int = 0
    out: bool = False


@pytest.fixture(scope="module", autouse=True)
def sleepers() -> Any:
    """Processes that stand for the jobs' own: the agent asks the kernel if they live."""
    made = [subprocess.Popen(["sleep", "600"]) for _ in range(5)]
    PIDS[:] = [one.pid for one in made]
    yield
    for one in made:
        one.kill()
        one.wait()


PIDS: list[int] = []


@dataclass
class World:
    jobs: dict[int, Job] = field(
        default_factory=lambda: {
            HONEST: Job(A, (0,)),
            HOSTILE: Job(B, (0,), lane=1),
            APART: Job(A, (1,)),
            UNMANAGED: Job(A, (0,), managed=False, alive=False),
        }
    )

    def pids(self, lease: Lease) -> frozenset[int]:
        job = self.jobs.get(lease.job)
        return frozenset({PIDS[lease.job]}) if job is not None and job.alive else frozenset()

    def belongs(self, pid: int, lease: Lease) -> bool:
        return pid in self.pids(lease)

    def look(self, lease: Lease) -> Shown:
        return self.jobs[lease.job].shown()


class Neighbors(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.patches = [
            patch.object(membership, "belongs", self.world.belongs),
            patch.object(membership, "pids_of", self.world.pids),
            patch.object(book, "pids_of", self.world.pids),
            patch.object(book, "look_at", self.world.look),
        ]
        for one in self.patches:
            one.start()
        self.folder = tempfile.TemporaryDirectory()
        self.ranks: dict[int, Rank] = {}
        self.hostile: Session | None = None
        self.rig = self.agent()

    def teardown(self) -> None:
        for run in self.rig.host.jobs.values():
            for rank in run.ranks.values():
                rank.page.close()
        for one in self.patches:
            one.stop()
        self.folder.cleanup()

    def agent(self) -> HostInMemory:
        rig = HostInMemory(Path(self.folder.name))
        rig.host.settings = AgentSettings(agent=AgentTable(service="tcp://ctl:6820"))
        rig.host.look = self.world.look
        return rig

    # --- Slurm and the service ---

    @initialize()
    def begin(self) -> None:
        for job in (APART, HONEST, HOSTILE):
            self.register(job)
        self.passes(0.1)
        for job in (APART, HONEST):
            self.attach(job)
        self.passes(0.1)

    def register(self, number: int) -> None:
        job = self.world.jobs[number]
        session = self.rig.session(ROOT, PIDS[number])
        known = {"uid": job.uid, "user": str(job.uid), "node": "n1", "hosts": 1, "managed": job.managed}
        packet = wire.encode("start", job=number, gpus=list(job.gpus), lane=job.lane, **known)
        self.rig.jobs.handle(session, packet)

    def facts(self) -> None:
        jobs = tuple(
            orders.JobFacts(number, 0, job.managed, 1.0, 0, str(job.uid), 1, suspended=job.frozen)
            for number, job in self.world.jobs.items()
            if job.alive
        )
        told = orders.Facts(orders.VERSION, jobs, 60.0, True, True, min_run_s=0.0, suspends=True)
        self.rig.service.obey(told)

    def lease(self, number: int) -> Lease | None:
        return self.rig.host.leases.get(JobKey(number, 0))

    @rule(b_follows=st.booleans(), passes=st.sampled_from([1, 8]))
    def service_takes_turns(self, b_follows: bool, passes: int) -> None:
        """Ask the holder of GPU 0 to yield, and resume the other one in Slurm and by an order."""
        if b_follows:
            self.b_says_that_it_yields()
        for holder, other in ((HONEST, HOSTILE), (HOSTILE, HONEST)):
            mine, theirs = self.lease(holder), self.lease(other)
            if mine is not None and theirs is not None and mine.state == "held" and not theirs.occupying:
                self.world.jobs[other].frozen = False
                self.rig.service.obey(orders.YieldOrder(orders.VERSION, holder, 0, timeout_s=5.0))
                self.rig.service.obey(orders.ResumeOrder(orders.VERSION, other, 0))
                break
        for _ in range(passes):
            if b_follows:
                self.b_says_that_it_yields()
            self.passes(0.7)

    @rule(seconds=st.sampled_from([0.05, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.passes(seconds)

    def passes(self, seconds: float) -> None:
        """Make a pass of the event loop; a lease that it gives goes to a GPU on which no other job computes."""
        self.suspend_jobs_that_are_off()
        before = {lease.job for lease in self.rig.host.leases if lease.occupying}
        self.facts()
        self.rig.run_once(seconds)
        for lease in self.rig.host.leases:
            if lease.occupying and lease.job not in before:
                self.granted(lease)
        self.honest_ranks_follow()

    def suspend_jobs_that_are_off(self) -> None:
        """Freeze jobs that have yielded for a while, as Slurm does by the service's order."""
        now = self.rig.time.passed
        for number, job in self.world.jobs.items():
            lease = self.lease(number)
            off = lease is not None and lease.state == "yielded" and now >= self.rig.host.run(lease.key).preferred_until
            job.off_since = (job.off_since if job.off_since is not None else now) if off else None
            if job.off_since is not None and now - job.off_since > SUSPEND_AFTER_S:
                job.frozen = True
            elif not off and lease is not None and lease.occupying:
                job.frozen = False

    def granted(self, lease: Lease) -> None:
        for number, other in self.world.jobs.items():
            if number != lease.job and other.alive and not set(other.gpus).isdisjoint(lease.gpus):
                assert not other.computing or other.frozen, f"job {lease.job} got the GPU on which {number} computes"
        job = self.world.jobs[lease.job]
        rank = self.ranks.get(lease.job)
        job.computing = rank is None or not rank.out

    # --- user A ---

    def attach(self, number: int) -> None:
        known = self.ranks.get(number)
        state = "yielded" if known is not None and known.out else "running"
        session = self.rig.session(A, PIDS[number])
        again = known is not None
        self.rig.jobs.handle(session, wire.encode("attach", job=number, restart=0, state=state, again=again))
        self.ranks[number] = Rank(session, 0, out=state == "yielded")

    def honest_ranks_follow(self) -> None:
        for number, rank in self.ranks.items():
            job, sent = self.world.jobs[number], self.rig.said(rank.session)
            while job.alive and not job.frozen and rank.followed < len(sent):
                message = sent[rank.followed]
                rank.followed += 1
                self.follow(number, job, rank, message)

    def follow(self, number: int, job: Job, rank: Rank, message: dict[str, Any]) -> None:
        handle, session = self.rig.jobs.handle, rank.session
        kind = message["type"]
        if kind == "stop":
            handle(session, wire.encode("arrived", order=message["order"], step=message["step"], bytes=1))
        elif kind == "commit" or (kind == "attached" and message["state"] == "yielded" and not rank.out):
            job.computing, rank.out = False, True
            handle(session, wire.encode("yielded", order=message.get("order", 0)))
        elif kind == "resume":
            lease = self.lease(number)
            assert lease is not None
            assert lease.occupying, "resumed without a lease"
            job.computing, rank.out = True, False
            handle(session, wire.encode("resumed", order=message["order"]))

    # --- user B ---

    @rule(
        job=st.sampled_from([1, 2, 3, 4, 9]),
        restart=st.sampled_from([0, 0, 0, 1, 7]),
        rank=st.integers(0, 1),
        world=st.integers(1, 2),
        state=st.sampled_from(["running", "yielded", "arrived"]),
        own=st.sampled_from([True, True, False]),
    )
    def b_attaches(self, job: int, restart: int, rank: int, world: int, state: str, own: bool) -> None:
        session = self.rig.session(B, PIDS[HOSTILE] if own else PIDS[0])
        fields = {"gpus": [0, 1, 2], "hosts": 3, "node": "n9", "rank": rank, "world_size": world, "state": state}
        self.rig.jobs.handle(session, wire.encode("attach", job=job, restart=restart, **fields))
        if own and job == HOSTILE and restart == 0:
            self.hostile = session

    @precondition(lambda self: self.hostile is not None)
    @rule(
        kind=st.sampled_from(["yielded", "arrived", "resumed", "detach", "checkpointed", "start", "end"]),
        current=st.booleans(),
        step=st.integers(0, 3),
        error=st.sampled_from(["", "", "no"]),
    )
    def b_sends(self, kind: str, current: bool, step: int, error: str) -> None:
        assert self.hostile is not None
        run = self.rig.host.jobs.get(JobKey(HOSTILE, 0))
        stop = run.stop if run is not None else None
        order = stop.order if stop is not None and current else step
        fields: dict[str, dict[str, Any]] = {
            "yielded": {"order": order, "error": error},
            "arrived": {"order": order, "step": stop.step if stop is not None and current else step, "refused": error},
            "resumed": {"order": order},
            "checkpointed": {"order": order, "step": step, "error": error},
            "start": {"job": HONEST, "uid": B, "user": "b", "node": "n1", "gpus": [0, 1], "managed": False},
            "end": {"job": HONEST},
        }
        self.rig.jobs.handle(self.hostile, wire.encode(kind, **fields.get(kind, {})))

    def b_says_that_it_yields(self) -> None:
        """Let B's rank answer as a good one does, while its process computes on."""
        lease = self.lease(HOSTILE)
        if lease is None:
            return
        run = self.rig.host.run(lease.key)
        if not (run.ranks and self.hostile) or run.unattached_reason(lease):
            for rank in run.ranks.values():
                rank.page.close()
            run.ranks.clear()
            run.detached = None
            self.b_attaches(HOSTILE, 0, 0, 1, "running", own=True)
        assert self.hostile is not None
        if run.resume is not None:
            self.rig.jobs.handle(self.hostile, wire.encode("resumed", order=0))
        if run.stop is None:
            return
        kind = "yielded" if run.stop.committed else "arrived"
        self.rig.jobs.handle(self.hostile, wire.encode(kind, order=run.stop.order, step=run.stop.step))

    # --- faults, starts and ends ---

    @rule(away=st.lists(st.sampled_from(["end honest", "end hostile", "start unmanaged"]), max_size=2, unique=True))
    def agent_is_killed(self, away: list[str]) -> None:
        passed, facts = self.rig.time.passed, self.rig.host.facts
        for run in self.rig.host.jobs.values():
            for rank in run.ranks.values():
                rank.page.close()
        for event in away:
            self.happens(event)
        self.rig, self.hostile = self.agent(), None
        self.rig.time.passed = passed + 0.5
        self.rig.host.facts = facts
        alive = {number: job for number, job in self.world.jobs.items() if job.alive}
        found = book.Book(
            "n1",
            self.rig.file.read().leases,
            tuple(Handover(number, 0, "n1", 1, job.managed, job.gpus, job.uid) for number, job in alive.items()),
            tuple(Step(number, "n1", PIDS[number], start_ticks(PIDS[number]) or 0, "") for number in alive),
            dict,
            self.rig.time.now(),
        )
        found.rebuild()
        for lease in found.leases:
            if not self.world.jobs[lease.job].alive:  # its stand-in lives on
                found.leases.remove(lease)
        self.rig.host.leases, self.rig.host.taken = LeaseTable(found.leases), found.taken
        for number in self.ranks:
            if self.world.jobs[number].alive:
                self.attach(number)
        self.passes(0.1)

    def happens(self, event: str) -> None:
        """Let a job end, or start on lane 0 without an agent."""
        jobs = self.world.jobs
        if event == "start unmanaged":
            if not jobs[HONEST].alive and not jobs[UNMANAGED].alive:
                jobs[UNMANAGED] = Job(A, (0,), managed=False, computing=True)
        else:
            number = HONEST if event == "end honest" else HOSTILE
            jobs[number].alive = jobs[number].computing = False
            self.ranks.pop(number, None)

    @rule(number=st.sampled_from([HONEST, HOSTILE, UNMANAGED]))
    def job_ends(self, number: int) -> None:
        job = self.world.jobs[number]
        if job.alive:
            job.alive = job.computing = False
            self.ranks.pop(number, None)
            self.rig.jobs.handle(self.rig.session(ROOT), wire.encode("end", job=number))
            self.passes(0.1)

    @precondition(lambda self: not self.world.jobs[HONEST].alive and not self.world.jobs[UNMANAGED].alive)
    @rule()
    def unmanaged_job_starts(self) -> None:
        self.world.jobs[UNMANAGED] = Job(A, (0,), managed=False)
        self.register(UNMANAGED)
        self.passes(0.1)

    # --- what must hold ---

    @invariant()
    def leases_are_root_s_word(self) -> None:
        for lease in self.rig.host.leases:
            job = self.world.jobs[lease.job]
            assert (lease.uid, lease.gpus, lease.restart) == (job.uid, job.gpus, 0)

    @invariant()
    def gpus_that_b_was_not_granted_are_out_of_its_reach(self) -> None:
        lease = self.lease(APART)
        if lease is not None:  # before the first pass there is none
            assert lease.state == "held" or not self.ranks
            assert not self.rig.host.supervisor.faults

    @invariant()
    def no_two_leases_meet(self) -> None:
        self.rig.host.leases._check()


TestNeighbors = Neighbors.TestCase
TestNeighbors.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_the_stand_ins_live() -> None:
    assert all(start_ticks(pid) is not None for pid in PIDS)
    assert os.getpid() not in PIDS
