#!/usr/bin/env python3
"""Time the service's rounds on a site of any size, step by step, and the growth of a round with the site.

The loop, the gateway over Slurm's JSON, the shipped policy and the store on disk are the real ones. Slurm's commands
are programs that print the JSON of a made-up site: 8 GPUs a host, two lanes, jobs of 1 to 16 GPUs of which 70 % are
managed, lane 0 full, a part of lane 1 suspended, the rest waiting. Each round 0.3 % of the running jobs end, as many
arrive, and Slurm starts what fits. Actions change that site at once, so Slurm's own time for them is not in the
figures; the agents' reports are in memory. ``--hub`` has real connections instead, each with a key of its own, and
nothing else; ``--list`` a real slurmctld in a container and as many jobs that wait.

CPU time is that of the service's process, without Slurm's commands and without the process that reads their output.
"read" is the time until Slurm's answer is there and translated, the rest of a round follows it. The exponent is that of
CPU time besides reading over the number of jobs, by least squares over a twentieth, a fifth and the whole of the site.
A loop of ten million additions is timed beside it, since a machine that is shared is slower. The exit code is 1 when a
limit is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import logging
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import zmq
import zmq.auth

from cadenza.policies.core.actions import (
    Action,
    DrainNode,
    MakeWay,
    OpenNode,
    Outcome,
    Requeue,
    SetFactor,
    Suspend,
    Unsuspend,
)
from cadenza.policies.core.model import JobKey
from cadenza.policies.gc_pause import uncollected
from cadenza.policies.guard import GuardOptions
from cadenza.sidecar import clock as module
from cadenza.sidecar.agent_settings import AgentSettings, ExpertTable
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import VERSION, Facts, JobFacts, JobTelemetry, LeaseReport, Receipt, Report
from cadenza.slurm_plugin.gateway.json_source import JsonSource
from cadenza.slurm_plugin.gateway.source_gateway import SlurmGateway
from cadenza.slurm_plugin.service.agents.agent_registry import Agent
from cadenza.slurm_plugin.service.agents.curve_keys import make_keys
from cadenza.slurm_plugin.service.agents.hub import FactSheet, Hub, HubSettings
from cadenza.slurm_plugin.service.loop import Loop, Parts
from cadenza.slurm_plugin.service.settings import ServiceTable, Settings
from cadenza.slurm_plugin.service.store.writer import DAY_S, FRAME_S, SLOT_S, TOLD_S, SqliteStore

GPUS, CPUS, MEMORY_MB, GPU_MB, LANES = 8, 96, 1_000_000, 32 * 1024, 2
LANE_GPUS = (GPUS, 3)
"""GPUs that each lane has memory for."""
PARTITIONS = 4
WIDTHS, WIDTH_WEIGHTS = (1, 2, 4, 8, 16), (50, 15, 12, 15, 8)
MANAGED, MOVABLE, ENDS, SUSPENDED = 0.7, 0.6, 0.003, 0.8
USERS, ACCOUNTS = 400, 40
UNREAD_FIELDS = 28
"""Fields of a job that Slurm prints and nothing reads: a job is 3.9 kB as squeue prints it."""
ROUND_S = 15.0
STEPS = ("read", "merge", "decide", "record", "apply", "rest")
LIMITS = {(5000, 60_000): (6.0, 15.0, 1200.0, 1.5), (1000, 10_000): (1.2, 15.0, 1200.0, 1.5)}
"""By hosts and jobs: seconds of CPU besides reading and of the whole round (p99), MB of memory, GB of rounds kept."""
KEPT_FRAMES = DAY_S / FRAME_S + 13 * DAY_S / SLOT_S
EXPONENT = 1.1
LEAST_NAP_S = 0.002
PARTS = (20, 5, 1)


@dataclass(slots=True)
class Task:
    """A job of the site, as Slurm and the agents have it."""

    number: int
    gpus: int
    user: int
    partition: str
    managed: bool
    movable: bool
    submit_s: float
    limit_min: int
    priority: int
    restart: int = 0
    state: str = "PENDING"
    reason: str = "Priority"
    factor: int = 0
    start_s: float = 0.0
    nodes: tuple[str, ...] = ()
    gpus_on: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By host."""
    lease: str = "waiting"
    since_s: float = 0.0
    had_s: float = 0.0
    step: int = 0
    saved: bool = False

    @property
    def key(self) -> JobKey:
        """Return its incarnation."""
        return JobKey(self.number, self.restart)


class Site:
    """Slurm and the agents of a made-up site."""

    def __init__(self, hosts: int, jobs: int, folder: Path, now_s: float, seed: int = 1) -> None:
        self.draw, self.folder, self.now_s = Random(seed), folder, now_s
        self.hosts = [f"n{number:05}" for number in range(hosts)]
        self.partitions = [f"gpu{number}" for number in range(PARTITIONS)]
        self.partition_of = {host: self.partitions[at % len(self.partitions)] for at, host in enumerate(self.hosts)}
        self.free = {
            (host, lane): sorted(self.draw.sample(range(GPUS), LANE_GPUS[lane]))
            for host in self.hosts
            for lane in range(LANES)
        }
        """GPUs that memory is left for."""
        self.open = {
            (name, lane): [h for h in self.hosts if self.partition_of[h] == name]
            for name in self.partitions
            for lane in range(LANES)
        }
        self.holder: dict[tuple[str, int], int] = {}
        self.closed: dict[str, str] = {}
        self.jobs: dict[int, Task] = {}
        self.on_host: defaultdict[str, dict[int, Task]] = defaultdict(dict)
        self.made = 0
        recorded = json.loads((Path(__file__).parents[2] / "tests/gateway/data/release-26.05.json").read_text())
        self.job_like = {**recorded["jobs"][0], **{f"unread_{at}": _number(at) for at in range(UNREAD_FIELDS)}}
        self.node_like = recorded["nodes"][0]
        self._commands()
        while len(self.jobs) < jobs:
            self._arrive()
            self._start(list(self.jobs.values())[-1:])
        self._turn()
        for task in self.jobs.values():
            if task.lease == "waiting" and task.nodes and self.draw.random() < SUSPENDED:
                task.state, task.lease = "SUSPENDED", "yielded"

    # --- its life ---------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        draw = self.draw
        self.made += 1
        managed = draw.random() < MANAGED
        self.jobs[self.made] = Task(
            self.made, draw.choices(WIDTHS, WIDTH_WEIGHTS)[0], draw.randrange(USERS), draw.choice(self.partitions),
            managed, managed and draw.random() < MOVABLE, self.now_s - draw.uniform(0, 3 * 86400),
            draw.choice((60, 240, 720, 1440, 2880)), draw.randrange(1, 100_000),
            reason=draw.choices(("Priority", "Resources", "Dependency", "QOSMaxJobsPerUserLimit"), (88, 4, 5, 3))[0],
        )  # fmt: skip

    def _start(self, tasks: Iterable[Task]) -> None:
        """Start what fits: on lane 0, or on lane 1 above managed jobs as long as its part is not used up."""
        full: set[tuple[str, int, int]] = set()
        for task in tasks:
            if task.reason not in ("Priority", "Resources"):
                continue
            for lane in range(LANES if task.managed else 1):
                if (task.partition, lane, task.gpus) in full:
                    continue
                each, count = min(task.gpus, GPUS), -(-task.gpus // GPUS)
                names = self.open[task.partition, lane]
                names[:] = [host for host in names if self.free[host, lane]]
                found = []
                for host in names:
                    if len(self.free[host, lane]) >= each and _node(host, lane) not in self.closed:
                        found.append(host)
                        if len(found) == count:
                            break
                if len(found) < count:
                    full.add((task.partition, lane, task.gpus))
                    continue
                self._place(task, found, lane, each)
                break

    def _place(self, task: Task, hosts: list[str], lane: int, each: int) -> None:
        for host in hosts:
            task.gpus_on[host] = tuple(self.free[host, lane][:each])
            del self.free[host, lane][:each]
            self.on_host[host][task.number] = task
        task.nodes = tuple(_node(host, lane) for host in hosts)
        task.state, task.reason, task.lease = "RUNNING", "None", "waiting"
        task.start_s = task.since_s = self.now_s - self.draw.uniform(0, 86400) * (self.made < len(self.jobs) + 1)
        task.had_s = self.now_s - task.start_s

    def _leave(self, task: Task) -> None:
        for host, indexes in task.gpus_on.items():
            lane = 1 if task.nodes[0].endswith("-l1") else 0
            names = self.open[task.partition, lane]
            if not self.free[host, lane]:
                names.append(host)
            self.free[host, lane] = sorted([*self.free[host, lane], *indexes])
            self.on_host[host].pop(task.number, None)
            for index in indexes:
                if self.holder.get((host, index)) == task.number:
                    del self.holder[host, index]
        task.nodes, task.gpus_on, task.lease, task.saved = (), {}, "waiting", False

    def _turn(self) -> None:
        """Let jobs that stop have stopped, and give GPUs that nobody holds to a job that may run."""
        for task in self.jobs.values():
            if task.lease == "stopping" and not task.saved:
                self._change(task, "yielded")
        for task in self.jobs.values():
            if task.nodes and task.lease in ("waiting", "yielded") and task.state == "RUNNING":
                gpus = [(host, index) for host, indexes in task.gpus_on.items() for index in indexes]
                if not any(gpu in self.holder for gpu in gpus):
                    self._change(task, "held")
                    self.holder |= dict.fromkeys(gpus, task.number)

    def _change(self, task: Task, state: str) -> None:
        if state == "yielded":
            for host, indexes in task.gpus_on.items():
                for index in indexes:
                    self.holder.pop((host, index), None)
        task.lease, task.since_s = state, self.now_s

    def advance(self, now_s: float) -> None:
        """Let a round's time pass."""
        passed_s, self.now_s = now_s - self.now_s, now_s
        running = [task for task in self.jobs.values() if task.nodes]
        for task in self.draw.sample(running, round(ENDS * len(running))):
            self._leave(task)
            del self.jobs[task.number]
            self._arrive()
        for task in running:
            if task.lease == "held":
                task.had_s += passed_s
                task.step += int(passed_s)
        waiting = (task for task in self.jobs.values() if task.state == "PENDING")
        self._start(sorted(waiting, key=lambda task: -task.priority - task.factor))
        self._turn()

    # --- Slurm ------------------------------------------------------------------------------------------

    def _commands(self) -> None:
        programs = {
            "squeue": 'cat "$D/jobs.json"',
            "scontrol": 'case "$*" in *ping*) echo data_parser/v0.0.42;; *nodes*) cat "$D/nodes.json";; '
            '*reserv*) cat "$D/reservations.json";; *config*) cat "$D/config";; '
            '*partition*) cat "$D/partitions";; esac',
            "sacctmgr": "printf 'normal|0\\nhigh|100\\n'",
            "sshare": 'cat "$D/shares"',
        }
        (self.folder / "bin").mkdir()
        for name, text in programs.items():
            path = self.folder / "bin" / name
            path.write_text(f"#!/bin/sh\nD={self.folder}\n{text}\n")
            path.chmod(0o755)
        os.environ["PATH"] = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        texts = {
            "config": "PriorityType = priority/multifactor\nPriorityWeightAge = 5000\nPriorityWeightFairshare = 10000\n"
            f"AccountingStorageType = accounting_storage/slurmdbd\nBOOT_TIME = {int(self.now_s - 86400)}\n",
            "partitions": "".join(f"PartitionName={name} AllowGroups=ALL PriorityTier=1\n" for name in self.partitions),
            "shares": "Account|User|NormShares|EffectvUsage|LevelFS\n"
            + "".join(f"team{one}||0.025|{self.draw.random() / 20}|{self.draw.uniform(0.2, 5)}\n"
                      for one in range(ACCOUNTS))
            + "".join(f"team{one % ACCOUNTS}|user{one}|0.1|{self.draw.random() / 5}|{self.draw.uniform(0.2, 5)}\n"
                      for one in range(USERS)),
            "reservations.json": json.dumps({"reservations": []}),
        }  # fmt: skip
        for name, text in texts.items():
            (self.folder / name).write_text(text)

    def write(self) -> None:
        """Write down what Slurm's commands print."""
        jobs = msgspec.json.encode({"jobs": [self._job(task) for task in self.jobs.values()]})
        (self.folder / "jobs.json").write_bytes(jobs)
        nodes = [self._node(host, lane) for host in self.hosts for lane in range(LANES)]
        (self.folder / "nodes.json").write_bytes(msgspec.json.encode({"nodes": nodes}))

    def _job(self, task: Task) -> dict[str, Any]:
        started = bool(task.nodes)
        count = len(task.nodes) or -(-task.gpus // GPUS)
        tres = f"cpu={8 * task.gpus},mem={32 * task.gpus}G,node={count},billing=8,gres/gpu={task.gpus}"
        options = {"cadenza": {"v": 1, "share": True} | ({"checkpoints": True} if task.movable else {})}
        return {
            **self.job_like, "job_id": task.number, "restart_cnt": task.restart, "job_state": [task.state],
            "name": f"train-{task.number % 997}", "user_name": f"user{task.user}",
            "account": f"team{task.user % ACCOUNTS}", "partition": task.partition, "qos": "normal",
            "state_reason": task.reason, "priority": _number(max(task.priority + task.factor, 1)),
            "cpus": _number(8 * task.gpus), "node_count": _number(count), "tasks": _number(count),
            "memory_per_node": _number(GPU_MB * task.gpus // count), "memory_per_cpu": _number(None),
            "submit_time": _number(int(task.submit_s)), "eligible_time": _number(int(task.submit_s)),
            "start_time": _number(int(task.start_s) if started else None), "end_time": _number(None),
            "suspend_time": _number(int(task.since_s) if task.state == "SUSPENDED" else None),
            "pre_sus_time": _number(int(task.had_s) if task.state == "SUSPENDED" else None),
            "time_limit": _number(task.limit_min), "comment": json.dumps(options) if task.managed else "",
            "nodes": ",".join(task.nodes), "required_nodes": "", "excluded_nodes": "", "features": "",
            "tres_req_str": tres, "tres_alloc_str": tres if started else "",
            "tres_per_node": f"gres/gpu:{task.gpus // count}", "tres_per_job": "", "tres_per_task": "",
            "gres_detail": [f"gpu:{len(one)}" for one in task.gpus_on.values()], "requeue": True, "batch_flag": True,
            "array_job_id": _number(None), "array_task_id": _number(None), "array_task_string": "",
            "command": f"/home/user{task.user}/train.sh", "shared": [],
        }  # fmt: skip

    def _node(self, host: str, lane: int) -> dict[str, Any]:
        name, used = _node(host, lane), LANE_GPUS[lane] - len(self.free[host, lane])
        return {
            **self.node_like, "name": name, "hostname": host, "partitions": [self.partition_of[host]],
            "features": [f"lane{lane}"] if lane else [], "weight": 1 + lane, "cpus": CPUS, "effective_cpus": CPUS,
            "real_memory": GPU_MB * LANE_GPUS[lane], "alloc_cpus": 8 * used, "alloc_memory": GPU_MB * used,
            "gres": f"gpu:a100:{GPUS}", "gres_used": f"gpu:a100:{used}",
            "tres_used": f"cpu={8 * used},mem={32 * used}G,gres/gpu={used}",
            "state": [("MIXED" if used else "IDLE"), *(["DRAIN"] if name in self.closed else [])],
            "reason": self.closed.get(name, ""),
        }  # fmt: skip

    def apply(self, action: Action) -> Outcome:
        """Change the site as Slurm would."""
        if isinstance(action, DrainNode):
            self.closed[action.node] = action.reason
        elif isinstance(action, OpenNode):
            self.closed.pop(action.node, None)
        else:
            keys = action.jobs if isinstance(action, MakeWay) else (action.job,)
            tasks = [self.jobs[key.id] for key in keys if key.id in self.jobs and self.jobs[key.id].key == key]
            if not tasks:
                return Outcome(ok=False, error="it is gone")
            self._act(action, tasks)
        return Outcome(ok=True)

    def _act(self, action: Action, tasks: list[Task]) -> None:
        match action:
            case Suspend():
                tasks[0].state = "SUSPENDED"
            case Unsuspend():
                tasks[0].state = "RUNNING"
            case SetFactor(factor=factor):
                tasks[0].factor = factor
            case MakeWay() | Requeue():
                for task in tasks:
                    self._leave(task)
                    task.restart, task.state, task.reason, task.submit_s = (
                        task.restart + 1,
                        "PENDING",
                        "Priority",
                        self.now_s,
                    )

    # --- Agents -----------------------------------------------------------------------------------------

    def reports(self) -> dict[str, Report]:
        """Return each host's report."""
        return {
            host: Report(
                VERSION, host, "1.0", MEMORY_MB, MEMORY_MB // 2, rotating=False, at_s=self.now_s,
                leases=tuple(self._lease(task, host) for task in self.on_host[host].values()),
            )
            for host in self.hosts
        }  # fmt: skip

    def _lease(self, task: Task, host: str) -> LeaseReport:
        held = task.lease in ("held", "stopping")
        state = "held" if not task.managed else task.lease
        return LeaseReport(
            task.number, task.restart, 1000 + task.user, next(n for n in task.nodes if n.startswith(host)),
            task.gpus_on[host], state, task.managed, task.had_s, self.now_s - task.since_s if held else 0.0,
            task.since_s, len(task.gpus_on[host]), task.gpus, len(task.gpus_on), ready=task.managed, step=task.step,
            iteration_s=1.0, checkpoints=task.movable, saved=task.saved, lost_s=60.0,
            shown="frozen" if task.state == "SUSPENDED" else "running",
            receipt=Receipt(task.restart + 1, task.step, ("/shared/ck",)) if task.saved else None,
            telemetry=JobTelemetry(
                window_s=30.0, memory_kind="gpu", gpu_percent=80 + task.step % 17 + task.step / 1e9, cpu_percent=640.1,
                rss_mb=31000.7 + task.step, gpu_memory_mb=38000.0, data_wait=0.01234567, iteration_p99_s=1.234,
                read_mb_s=12.3 + task.step % 13,
            ),
        )  # fmt: skip


def _node(host: str, lane: int) -> str:
    return f"{host}-l{lane}" if lane else host


def _number(value: int | None) -> dict[str, Any]:
    return {"set": value is not None, "infinite": False, "number": value or 0}


class Agents:
    """The hub as the loop uses it, over the site itself."""

    def __init__(self, site: Site) -> None:
        self.site, self.now = site, {}

    def renew(self) -> None:
        """Let all agents report."""
        self.now = {host: Agent(report, alive=True, silent_s=1.0) for host, report in self.site.reports().items()}

    def agents(self, hosts: Iterable[str] | None = None) -> Mapping[str, Agent]:
        """Return their last reports."""
        return dict(self.now) if hosts is None else {host: self.now[host] for host in hosts}

    def yield_job(self, key: JobKey, _hosts: tuple[str, ...]) -> Outcome:
        """Let a job stop."""
        return self._set(key, "stopping")

    def checkpoint_job(self, key: JobKey, _hosts: tuple[str, ...], **_: Any) -> Outcome:
        """Let a job save and wait for its requeue."""
        return self._set(key, "stopping", saved=True)

    def resume_job(self, _key: JobKey, _hosts: tuple[str, ...]) -> Outcome:
        """Do nothing: a job that may run takes free GPUs by itself."""
        return Outcome(ok=True)

    def _set(self, key: JobKey, state: str, *, saved: bool = False) -> Outcome:
        task = self.site.jobs.get(key.id)
        if task is None or task.lease != "held":
            return Outcome(ok=False, error="it holds nothing")
        task.lease, task.saved, task.since_s = state, saved, self.site.now_s
        return Outcome(ok=True)

    def drain(self) -> list[Any]:
        """Return no message for the record."""
        return []

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Do nothing for what only informs agents."""
        return lambda *_, **__: None


class Watch:
    """Times of calls, each without those that it calls itself."""

    def __init__(self) -> None:
        self.cpu: defaultdict[str, float] = defaultdict(float)
        self.wall: defaultdict[str, float] = defaultdict(float)
        self._open: list[list[float]] = []

    def over(self, owner: Any, name: str, step: str) -> None:
        """Count a method's time as a step's."""
        call = getattr(owner, name)

        def timed(*words: Any, **named: Any) -> Any:
            inner = [0.0, 0.0]
            self._open.append(inner)
            cpu, wall = time.process_time(), time.perf_counter()
            try:
                return call(*words, **named)
            finally:
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                self._open.pop()
                self.cpu[step] += cpu - inner[0]
                self.wall[step] += wall - inner[1]
                if self._open:
                    self._open[-1][0] += cpu
                    self._open[-1][1] += wall

        setattr(owner, name, timed)

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the times since the last call."""
        found = dict(self.cpu), dict(self.wall)
        self.cpu.clear()
        self.wall.clear()
        return found


class Clock(SystemClock):
    """A clock on which rounds are as far apart as at a site, however fast they follow each other here."""

    ahead_s = 0.0

    def now(self) -> float:
        """Return seconds since the epoch."""
        return super().now() + self.ahead_s


def measure(
    hosts: int, jobs: int, rounds: int, folder: Path, profile: Path | None = None,
    before: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Run rounds and return the times of each, without the first; call ``before`` before each."""
    clock = Clock()
    module.now = clock.now  # the gateway reads its time there
    site = Site(hosts, jobs, folder, clock.now())
    hub, source = Agents(site), JsonSource(apart=True)
    slurm = SlurmGateway(source)
    slurm.apply = site.apply  # type: ignore[method-assign]
    settings = Settings(
        service=ServiceTable(mode="apply"),
        guard=GuardOptions(partitions=frozenset(site.partitions)),
        expert=ExpertTable(kill_switch=str(folder / "STOP")),
    )
    store = SqliteStore(folder / "cadenza.db", clock)
    loop = Loop(settings, Parts(slurm, hub, store), clock, Random(1))  # type: ignore[arg-type]
    watch = Watch()

    def whole_round(loop: Loop) -> bool:
        """Run a round as ``Loop.run`` does."""
        with uncollected():
            good = loop.round()
        loop._collect()  # noqa: SLF001
        return good

    gateway = loop._gateway  # noqa: SLF001
    for owner, name, step in (
        (loop, "round", "rest"), (loop, "_collect", "rest"), (slurm, "read", "read"), (gateway, "read", "merge"),
        (loop, "_decide", "decide"), (gateway, "apply", "apply"), (store, "check", "record"),
        (store, "begin", "record"), (store, "finish", "record"), (store, "amend", "record"),
        (store, "record", "record"),
    ):  # fmt: skip
        watch.over(owner, name, step)
    found, kinds = [], defaultdict(int)
    for number in range(rounds + 1):
        hub.renew()
        if (child := os.fork()) == 0:  # so that its memory is not counted
            site.write()
            os._exit(0)
        os.waitpid(child, 0)
        before(number)
        watch.take()
        if profile is not None and number == rounds:
            with cProfile.Profile() as profiler:
                good = whole_round(loop)
            profiler.dump_stats(profile)
        else:
            good = whole_round(loop)
        if not good:
            raise SystemExit("a round failed")
        cpu, wall = watch.take()
        found.append({"cpu": cpu, "wall": wall})
        report = loop.last
        if report is None:
            raise SystemExit("no round")
        for action, outcome in report.outcomes:
            kinds[type(action).__name__ + ("" if outcome.ok else " failed")] += 1
        blocked = sum(not item.allowed for item in report.guarded)
        print(
            f"  round {number}: " + ", ".join(f"{step} {cpu.get(step, 0):.2f}" for step in STEPS)
            + f" s CPU; {len(report.outcomes)} actions, {blocked} kept in",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        clock.ahead_s += ROUND_S
        site.advance(clock.now())
    sizes = "sum(length(snapshot) + length(before) + length(decision) + length(memory)) / count(*) / 1e6"
    whole_mb, told_mb = (
        store._link.execute(f"SELECT {sizes} FROM rounds WHERE base IS {kind} NULL").fetchone()[0] or 0.0  # noqa: S608, SLF001
        for kind in ("", "NOT")
    )
    store.close()
    slurm.close()
    return {
        "hosts": hosts, "jobs": jobs, "rounds": found[1:], "first": found[0], "actions": dict(kinds),
        "running": sum(task.state == "RUNNING" for task in site.jobs.values()),
        "suspended": sum(task.state == "SUSPENDED" for task in site.jobs.values()),
        "list_mb": (folder / "jobs.json").stat().st_size / 1e6,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "whole_mb": whole_mb,
        "told_mb": told_mb,
    }  # fmt: skip


# --- 5,000 connections ---------------------------------------------------------------------------------------


def agents_of(address: str, keys: Path, hosts: list[str], seconds: float, busy_s: float) -> int:
    """Be the agents of these hosts: each has its own key and reports at the shipped interval. Return the reports."""
    context, heartbeat_s = zmq.Context(), AgentSettings().expert.heartbeat_s
    context.set(zmq.MAX_SOCKETS, len(hosts) + 64)
    server, _ = zmq.auth.load_certificate(keys / "service.key")
    links = []
    for host in hosts:
        link = context.socket(zmq.DEALER)
        link.curve_publickey, link.curve_secretkey = zmq.auth.load_certificate(keys / "agents" / f"{host}.key_secret")
        link.curve_serverkey = server
        link.connect(address)
        links.append(link)
    lease = LeaseReport(
        1,
        0,
        1000,
        "",
        (0, 1),
        "held",
        managed=True,
        vtime_s=5.0,
        held_s=5.0,
        since_s=5.0,
        ranks=2,
        world_size=2,
        hosts=1,
        ready=True,
        checkpoints=True,
        telemetry=JobTelemetry(window_s=30.0, gpu_percent=81.25, cpu_percent=640.1, rss_mb=31000.7),
    )
    sent, began_s = 0, time.monotonic()
    turn = 0
    while time.monotonic() < began_s + seconds:
        for at, link in enumerate(links):
            now_s = time.time()
            leases = tuple(msgspec.structs.replace(lease, job=3 * at + one + 1, node=hosts[at]) for one in range(3))
            report = Report(VERSION, hosts[at], "1.0", MEMORY_MB, 9, rotating=False, at_s=now_s, leases=leases)
            link.send(msgspec.json.encode(report))
            sent += 1
            with contextlib.suppress(zmq.Again):
                while True:
                    link.recv(zmq.NOBLOCK)
            due_s = began_s + heartbeat_s * (turn + (at + 1) / len(links))
            if (left_s := due_s - time.monotonic()) > LEAST_NAP_S:
                time.sleep(left_s)
        turn += 1
    time.sleep(busy_s)
    context.destroy(linger=20_000)
    return sent


def measure_hub(count: int, seconds: float, *, busy: bool) -> bool:
    """Print what the service's end of the link takes for so many agents; return whether a report is lost."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory(prefix="scale") as folder:
        keys, hosts = Path(folder) / "keys", [f"n{number:05}" for number in range(count)]
        make_keys(keys, hosts)
        hub = Hub(HubSettings("tcp://127.0.0.1:*", keys, AgentSettings().expert.heartbeat_s), SystemClock())
        hub.start()
        told = Path(folder) / "sent"
        if (child := os.fork()) == 0:
            told.write_text(str(agents_of(hub.address, keys, hosts, seconds, 5.0)))
            os._exit(0)
        job = JobFacts(1, 0, managed=True, weight=1.0, priority=0, user="user", hosts=1)
        facts = {
            host: Facts(
                VERSION,
                tuple(msgspec.structs.replace(job, job=3 * at + one + 1) for one in range(3)),
                30.0,
                share_between_users=False,
                enforce=True,
            )
            for at, host in enumerate(hosts)
        }
        cpu, began_s, all_s, asked_s, least = time.process_time(), time.monotonic(), 0.0, [], count
        burned, files = 0.0, 0
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            now_s = time.monotonic()
            agents = hub.agents()
            asked_s.append(time.monotonic() - now_s)
            files = max(files, len(list(Path("/proc/self/fd").iterdir())))
            alive = sum(agent.alive for agent in agents.values())
            if alive == count and not all_s:
                all_s = now_s - began_s
            if all_s and now_s < began_s + seconds - 2:
                least = min(least, alive)
            hub.send_facts(FactSheet(facts, time.time(), 60.0))
            hub.drain()
            until_s, burn = time.monotonic() + 2.0, time.thread_time()
            while time.monotonic() < until_s:
                if busy:
                    sum(range(10_000))
                else:
                    time.sleep(0.1)
            burned += time.thread_time() - burn
        took_s = time.monotonic() - began_s
        used = (time.process_time() - cpu - burned) / took_s
        sent = int(told.read_text())
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{count:,} agents{', a busy thread beside' if busy else ''}: {sent:,} reports sent, "
            f"{sent - hub.reports:,} lost, {sum(hub.refused.values())} refused; all connected after {all_s:.0f} s, "
            f"then {least:,} alive at least; {used:.2f} cores; agents() {max(asked_s):.2f} s at most; {rss:.0f} MB; "
            f"{files:,} files"
        )
        lost = sent != hub.reports
        hub.close()
        return lost


# --- A real slurmctld ----------------------------------------------------------------------------------------

LISTED = """
TIMEFORMAT='squeue %R s, its own %U s'
sdiag --reset >/dev/null
for one in 1 2 3 4 5; do time squeue --all --states=all --json >/tmp/jobs.json; done
stat -c 'text: %s bytes' /tmp/jobs.json
echo "jobs: $(grep -c '"restart_cnt":' /tmp/jobs.json)"
sdiag | grep -m1 JOB_INFO
"""


def measure_list(count: int) -> None:
    """Print the time of slurmctld and of squeue for a list of so many jobs, on a cluster in containers."""
    here = Path(__file__).parents[2] / "container"
    name = ("--name", "scale")

    def inside(user: str, text: str) -> str:
        words = [here / "exec", *name, "--user", user, "ctl", "bash", "-c", text]
        return subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout

    subprocess.run([here / "up", *name, "--nodes", "2", "--lanes", "1", "--no-cadenza"], check=True)
    try:
        # Tasks of an array are one record until some of them are changed by themselves.
        array, comment = 1000, json.dumps({"cadenza": {"v": 1, "share": True}})
        inside("alice", f"for one in $(seq {count // array}); do sbatch --array=0-{array - 1} --gres=gpu:1 --mem=500"
               f" --time=60 --comment='{comment}' --wrap 'sleep 3600' >/dev/null; done")  # fmt: skip
        inside("root", f"for one in $(squeue -h -o %F | sort -u); do scontrol update JobId=${{one}}_[0-{array - 2}]"
               " Nice=1; done")  # fmt: skip
        print(inside("root", LISTED))
    finally:
        subprocess.run([here / "down", *name], check=True)


def quantile(values: list[float], part: float) -> float:
    """Return the least value that so large a part does not exceed."""
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


def figures(one: Mapping[str, Any]) -> dict[str, float]:
    """Return what is compared with the limits."""
    besides = [sum(cpu for step, cpu in row["cpu"].items() if step != "read") for row in one["rounds"]]
    whole = [sum(row["wall"].values()) for row in one["rounds"]]
    return {"cpu_p50": statistics.median(besides), "cpu_p99": quantile(besides, 0.99),
            "wall_p99": quantile(whole, 0.99), "rss_mb": one["rss_mb"],
            "kept_gb": (TOLD_S / ROUND_S * one["told_mb"] + KEPT_FRAMES * one["whole_mb"]) / 1e3}  # fmt: skip


def show(results: list[dict[str, Any]]) -> bool:
    """Print the table; return whether a limit is missed."""
    print(
        "| hosts / jobs (running, suspended) | "
        + " | ".join(STEPS)
        + " | besides read: median, p99 | whole round, wall p99 | memory | on record: a round, a key frame, 14 days |"
    )
    print("|---" * (len(STEPS) + 5) + "|")
    missed = []
    for one in results:
        row = figures(one)
        steps = " | ".join(f"{statistics.median(r['cpu'].get(step, 0.0) for r in one['rounds']):.2f}" for step in STEPS)
        print(
            f"| {one['hosts']:,} / {one['jobs']:,} ({one['running']:,}, {one['suspended']:,}) | {steps} | "
            f"{row['cpu_p50']:.2f}, {row['cpu_p99']:.2f} s | {row['wall_p99']:.1f} s | {row['rss_mb']:.0f} MB | "
            f"{one['told_mb']:.2f} MB, {one['whole_mb']:.1f} MB, {row['kept_gb']:.2f} GB |"
        )
        limits = LIMITS.get((one["hosts"], one["jobs"]), ())
        for name, limit in zip(("cpu_p99", "wall_p99", "rss_mb", "kept_gb"), limits, strict=False):
            if row[name] > limit:
                missed.append(f"{one['hosts']:,} hosts: {name} {row[name]:.2f} > {limit}")
    began_s = time.process_time()
    for _ in range(10_000_000):
        pass
    print(f"a loop of 10,000,000: {time.process_time() - began_s:.2f} s CPU")
    if len(results) > 1:
        xs = [math.log(one["jobs"]) for one in results]
        ys = [math.log(figures(one)["cpu_p50"]) for one in results]
        exponent = statistics.linear_regression(xs, ys).slope
        print(f"exponent of growth: {exponent:.2f}")
        if exponent > EXPONENT:
            missed.append(f"exponent {exponent:.2f} > {EXPONENT}")
    print("\n".join(missed))
    return bool(missed)


def main() -> int:
    """Measure each size in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--jobs", type=int, help="default: ten a host")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--alone", action="store_true", help="this size alone, without the growth")
    parser.add_argument("--profile", type=Path, help="with --alone: write a profile of the last round")
    parser.add_argument("--hub", type=int, metavar="AGENTS", help="measure the agents' link instead, for a minute")
    parser.add_argument("--list", type=int, metavar="JOBS", help="measure a list of so many jobs on a real slurmctld")
    parser.add_argument("--busy", action="store_true", help="with --hub: a thread computes meanwhile, as a round does")
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    jobs = asked.jobs or 10 * asked.hosts
    if asked.list:
        measure_list(asked.list)
        return 0
    if asked.hub:
        return int(measure_hub(asked.hub, 60.0, busy=asked.busy))
    if asked.json or asked.alone:
        with tempfile.TemporaryDirectory(prefix="scale") as folder:
            one = measure(asked.hosts, jobs, asked.rounds, Path(folder), asked.profile)
        if asked.json:
            asked.json.write_text(json.dumps(one))
            return 0
        print(one["actions"], f"list of jobs {one['list_mb']:.0f} MB")
        return int(show([one]))
    results = []
    for part in PARTS:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            size = (f"--hosts={asked.hosts // part}", f"--jobs={jobs // part}", f"--rounds={asked.rounds}")
            subprocess.run([sys.executable, __file__, *size, f"--json={file.name}"], check=True)
            results.append(json.loads(Path(file.name).read_text()))
    return int(show(results))


if __name__ == "__main__":
    sys.exit(main())
