"""Schedule of a fault run: the jobs, what their owners do to them, and the kills, from a seed alone (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from random import Random

VICTIMS = ("slurmctld", "slurmdbd", "slurmd", "cadenzad", "agent", "client")
KILL_SPACING_S = 2.4
SLURMCTLD_SPACING_S = 25.0
"""Least time between two kills of slurmctld: it forgets what it has not saved, and starts jobs twice more often."""
ITERATION_S = 0.05
LOAD = 0.7
"""GPU seconds of all jobs over those that the hosts have until the last kill."""
SIZES = (((1, 1), 7), ((1, 2), 6), ((1, 3), 2), ((1, 4), 4), ((2, 1), 2), ((2, 4), 2))
"""(hosts, GPUs on each) and its weight; a job of two hosts with four GPUs each has eight."""
USERS = ("alice", "bob")
FATES = (("", 13), ("cancel", 2), ("requeue", 4), ("move", 5))
LEAST_S, MOST_S = 8.0, 40.0
"""Bounds of a job's time with its GPUs."""
FATE_S = (4.0, 25.0)
"""Bounds of the time from a job's submission until its owner cancels, requeues or moves it."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One job of the workload; ``gpus`` are those on each of its ``hosts``."""

    name: str
    user: str
    hosts: int
    gpus: int
    iterations: int
    fate: str


@dataclass(frozen=True, slots=True)
class Event:
    """One event, seconds after the start: ``kind`` is kill, submit, cancel, requeue or move.

    ``target`` is a job's name, or the victim as CONTAINER:PROGRAM (a client as HOST:client). ``draw`` in [0, 1) picks
    among what is there only at run time: one of a host's processes, the host that a job goes to.
    """

    at_s: float
    kind: str
    target: str
    draw: float = 0.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """All events in order of time, and the jobs by name."""

    jobs: dict[str, PlannedJob]
    events: tuple[Event, ...]
    kills_until_s: float


def plan(seed: int, kills: int, hosts: int, gpus: int, lanes: int, victims: Collection[str] = VICTIMS) -> Schedule:
    """Return the schedule of ``kills`` kills on ``hosts`` hosts of ``gpus`` GPUs in ``lanes`` lanes.

    Equal arguments give equal schedules; the jobs do not depend on ``victims``.
    """
    until_s = kills * KILL_SPACING_S
    jobs, owners = workload(Random(f"{seed} jobs"), until_s, hosts, gpus)
    deaths = _kills(Random(f"{seed} kills"), kills, hosts, lanes, victims)
    events = sorted((*owners, *deaths), key=lambda event: (event.at_s, event.kind, event.target))
    return Schedule(jobs, tuple(events), until_s)


def workload(
    rng: Random, until_s: float, hosts: int, gpus: int, load: float = LOAD
) -> tuple[dict[str, PlannedJob], list[Event]]:
    """Return jobs for ``load`` of the GPUs until ``until_s``, and what their owners do."""
    sizes = [(size, weight) for size, weight in SIZES if size[0] <= hosts and size[1] <= gpus]
    jobs: dict[str, PlannedJob] = {}
    events: list[Event] = []
    left_s = load * until_s * hosts * gpus
    while left_s > 0:
        spread, each = rng.choices([size for size, _ in sizes], [weight for _, weight in sizes])[0]
        run_s = rng.uniform(LEAST_S, MOST_S)
        fate = rng.choices([name for name, _ in FATES], [weight for _, weight in FATES])[0]
        name = f"fault-{len(jobs):03d}"
        jobs[name] = PlannedJob(name, rng.choice(USERS), spread, each, round(run_s / ITERATION_S), fate)
        at_s = rng.uniform(0.0, until_s)
        events.append(Event(at_s, "submit", name))
        if fate:
            events.append(Event(at_s + rng.uniform(*FATE_S), fate, name, rng.random()))
        left_s -= run_s * spread * each
    return jobs, events


def _kills(rng: Random, kills: int, hosts: int, lanes: int, victims: Collection[str]) -> Iterable[Event]:
    last_s = float("-inf")
    for number in range(kills):
        at_s = (number + rng.random()) * KILL_SPACING_S
        allowed = [name for name in VICTIMS if name in victims]
        if at_s - last_s < SLURMCTLD_SPACING_S and len(allowed) > 1:
            allowed = [name for name in allowed if name != "slurmctld"]
        victim = rng.choice(allowed)
        if victim == "slurmctld":
            last_s = at_s
        yield Event(at_s, "kill", _target(rng, victim, hosts, lanes), rng.random())


def _target(rng: Random, victim: str, hosts: int, lanes: int) -> str:
    host, lane = rng.randint(1, hosts), rng.randrange(lanes)
    match victim:
        case "slurmctld" | "slurmdbd" | "cadenzad":
            return f"ctl:{victim}"
        case "slurmd":
            return f"node{host}:slurmd-lane{lane}"
        case "agent":
            return f"node{host}:cadenza-agent"
        case _:
            return f"node{host}:client"
