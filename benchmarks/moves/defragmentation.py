#!/usr/bin/env python3
"""Random fragmented states of a real Slurm cluster: a waiting job gets a free node by the fewest migrations.

A container cluster of 4 nodes with 4 GPUs each, real slurmctld, light jobs that attach and keep checkpoints. For each
state, jobs of 1 to 3 GPUs are started on the nodes that it names, and a job of 4 GPUs is submitted, for which no node
is free. Counted are the migrations that the service orders before it places that job, and the requeues that Slurm
counts. An exhaustive search over all sets of jobs and all places says how many are needed. Exit code 1 when a state
took another number than that.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "replay"))

from replay_cluster import USER, Cluster, Size

from cluster import PYTHON, ROOT, ClusterError, prepare, wait_for

SETTINGS = Path(__file__).with_name("defragmentation.toml")
JOB = Path(__file__).with_name("defragmentation_job.py")
SIZE = Size(nodes=4, gpus=4, cpus=24, memory_mb=64_000)
PLACE = "/home/shared/defragmentation"
NODES = tuple(f"node{number}" for number in range(1, SIZE.nodes + 1))
WANTED = SIZE.gpus
ROUND = 8
"""Most migrations of one round, as the service's settings have it."""
PATIENCE_S = 120.0
POLL_S = 0.3

State = tuple[tuple[int, ...], ...]
"""For each node the GPUs of its jobs."""


# --- States ----------------------------------------------------------------------------------------------------


def fewest(state: State, wanted: int = WANTED, most: int = ROUND) -> int | None:
    """Return the fewest jobs that must move so that a node has ``wanted`` free GPUs, by trying everything."""
    jobs = [(node, index) for node, sizes in enumerate(state) for index in range(len(sizes))]
    for count in range(min(most, len(jobs)) + 1):
        if any(_makes_room(state, set(chosen), wanted) for chosen in combinations(jobs, count)):
            return count
    return None


def _makes_room(state: State, chosen: set[tuple[int, int]], wanted: int) -> bool:
    """Return whether a node can have the free GPUs, with a place on another node for each chosen job."""
    free = [
        SIZE.gpus - sum(size for index, size in enumerate(sizes) if (node, index) not in chosen)
        for node, sizes in enumerate(state)
    ]
    movers = [(node, state[node][index]) for node, index in sorted(chosen)]
    return any(
        _placeable(movers, [gpus - wanted * (node == target) for node, gpus in enumerate(free)])
        for target in range(len(free))
        if free[target] >= wanted
    )


def _placeable(movers: Sequence[tuple[int, int]], free: list[int]) -> bool:
    if not movers:
        return True
    (home, size), rest = movers[0], movers[1:]
    return any(
        _placeable(rest, [gpus - size * (other == node) for other, gpus in enumerate(free)])
        for node in range(len(free))
        if node != home and free[node] >= size
    )


def states(seed: int) -> Iterator[State]:
    """Return random states in which the job has to wait and room can be made."""
    rng = Random(seed)
    while True:
        state = tuple(tuple(_parts(rng, rng.choice((2, 2, 3, 3, 4)))) for _ in NODES)
        if fewest(state):
            yield state


def _parts(rng: Random, gpus: int) -> Iterator[int]:
    while gpus:
        size = rng.choice([size for size in (1, 1, 2, 3) if size <= gpus])
        gpus -= size
        yield size


# --- The cluster -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Outcome of one state."""

    state: State
    fewest: int
    migrations: int
    requeues: int
    wait_s: float

    @property
    def kept(self) -> bool:
        """Return whether it took as few migrations as possible, and nothing else was requeued."""
        return self.migrations == self.requeues == self.fewest


def play(cluster: Cluster, state: State) -> Outcome:
    """Set a state up, submit the job that waits, and count what happens until it runs."""
    switch(cluster, on=False)
    jobs = [job for number, node in enumerate(NODES) for job in fill(cluster, node, state[number])]
    resume(cluster, NODES)
    wait("jobs that keep checkpoints", lambda: movable(cluster, jobs))
    began = time.monotonic()
    waiting = submit(cluster, [WANTED])[0]
    switch(cluster, on=True)
    wait("the waiting job", lambda: queue(cluster).get(waiting, ("",))[0] == "RUNNING")
    waited_s = time.monotonic() - began
    requeues = sum(int(restarts) for job, (_, restarts) in queue(cluster).items() if job in jobs)
    migrations = ordered(cluster, jobs, waiting)
    cluster.run("ctl", "scancel", f"--user={USER}")
    wait("an empty queue", lambda: not queue(cluster))
    least = fewest(state)
    return Outcome(state, least if least is not None else -1, migrations, requeues, waited_s)


def fill(cluster: Cluster, node: str, sizes: Sequence[int]) -> list[int]:
    """Start jobs on one node and return their ids: no other node takes jobs until then, so that none is pinned."""
    if not sizes:
        return []
    others = ",".join(name for name in NODES if name != node)
    cluster.run("ctl", "scontrol", "update", f"NodeName={others}", "State=DRAIN", "Reason=set-up")
    resume(cluster, [node])
    jobs = submit(cluster, sizes)
    wait(f"jobs on {node}", lambda: all(queue(cluster).get(job, ("",))[0] == "RUNNING" for job in jobs))
    return jobs


def resume(cluster: Cluster, nodes: Sequence[str]) -> None:
    """Let nodes take jobs again; those that never stopped are left as they are."""
    drained = cluster.run("ctl", "sinfo", "-hN", "-t", "drain", "-o", "%N").split()
    names = sorted(set(drained) & set(nodes))
    if names:
        cluster.run("ctl", "scontrol", "update", f"NodeName={','.join(names)}", "State=RESUME")


def submit(cluster: Cluster, sizes: Sequence[int]) -> list[int]:
    """Submit a job of each size and return their ids."""
    script = f"exec {PYTHON} {PLACE}/job.py {PLACE}"
    words = f"sbatch --parsable --requeue --cadenza --mem=500 --output={PLACE}/%j.log --open-mode=append"
    lines = [f"{words} --gres=gpu:{size} --wrap='{script}'" for size in sizes]
    return [int(line) for line in cluster.run("ctl", "sh", "-c", " && ".join(lines), user=USER).split()]


def queue(cluster: Cluster) -> dict[int, tuple[str, str]]:
    """Return each job's state and how often Slurm has restarted it."""
    text = cluster.run("ctl", "squeue", "-h", "-O", "JobID:12,State:14,RestartCnt:6")
    rows = (line.split() for line in text.splitlines())
    return {int(job): (state, restarts) for job, state, restarts in rows}


LOOK = """
import json, sys
from pathlib import Path
from cadenza.slurm_plugin.service.store.reader import StoreReader
last = StoreReader(Path("/var/lib/cadenzad/cadenza.db")).round()
jobs = last.snapshot.jobs if last else ()
usable = all(node.up and not node.drained for node in last.snapshot.nodes) if last else False
print(json.dumps([usable, [j.key.id for j in jobs if j.lease and j.lease.checkpoints and j.lease.state == "held"]]))
"""


def movable(cluster: Cluster, jobs: Sequence[int]) -> bool:
    """Return whether the service saw, in its last round, that all of them can be moved and all nodes take jobs."""
    usable, found = json.loads(cluster.run("ctl", PYTHON, "-c", LOOK))
    return bool(usable) and set(jobs) <= set(found)


def ordered(cluster: Cluster, jobs: Sequence[int], waiting: int) -> int:
    """Return how many migrations of these jobs left before the waiting job was placed."""
    actions = cluster.sql("select round, kind, job from actions where allowed = 1 and ok = 1")
    placed = min(number for number, kind, job in actions if (kind, job) == ("Place", waiting))
    return sum(kind == "Migrate" and job in jobs and number <= placed for number, kind, job in actions)


def switch(cluster: Cluster, *, on: bool) -> None:
    """Switch defragmentation on or off."""
    cluster.put("/etc/cadenza/conf.d/zz-defrag.toml", f"[gandiva]\nmoves = {str(on).lower()}\n")
    cluster.run("ctl", "supervisorctl", "signal", "HUP", "cadenzad")


def wait(goal: str, probe: Callable[[], bool]) -> None:
    """Wait as long as a state may take."""
    wait_for(goal, probe, PATIENCE_S, POLL_S)


def set_up(cluster: Cluster) -> None:
    """Hand the job's script over."""
    script = 'mkdir -m 1777 -p "$2" && printf %s "$1" > "$2/job.py"'
    cluster.run("ctl", "sh", "-c", script, "sh", JOB.read_text(), PLACE)


# --- What comes of it ------------------------------------------------------------------------------------------


def row(number: int, outcome: Outcome) -> str:
    """Return a line of the table."""
    shape = " ".join("+".join(map(str, sizes)) or "-" for sizes in outcome.state)
    cells = f"{outcome.fewest:>8d}{outcome.migrations:>8d}{outcome.requeues:>10d}{outcome.wait_s:>9.1f}"
    return f"{number:>3d}  {shape:32s}{cells}  {'ok' if outcome.kept else 'MISSED'}"


def report(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return everything, for JSON."""
    moved, needed = (sum(getattr(one, name) for one in outcomes) for name in ("migrations", "fewest"))
    return {
        "command": sys.argv, "states": [asdict(one) | {"kept": one.kept} for one in outcomes], "seconds": seconds,
        "kept": sum(one.kept for one in outcomes), "migrations": moved, "fewest": needed, "ratio": moved / needed,
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--seed", type=int, default=2, help="of the states (default: 2)")
    parser.add_argument("--name", default="defragmentation", help="the cluster's name (default: defragmentation)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "defragmentation.json")
    return parser.parse_args()


def main() -> int:
    """Play all states and return the exit code."""
    options = arguments()
    cluster, outcomes, began = Cluster(options.name, SIZE, 1, SETTINGS), [], time.monotonic()
    try:
        prepare()
        cluster.start({})
        set_up(cluster)
        print("     GPUs of each node's jobs         fewest   moved  requeues   wait s")
        for number, state in zip(range(1, options.states + 1), states(options.seed), strict=False):
            outcomes.append(play(cluster, state))
            print(row(number, outcomes[-1]), flush=True)
    except ClusterError as error:
        print(f"defragmentation: {error}", file=sys.stderr)
        return 1
    finally:
        cluster.down()
    found = report(outcomes, time.monotonic() - began)
    print(f"{found['kept']} of {len(outcomes)} states by the fewest migrations; in all {found['migrations']} over "
          f"{found['fewest']}, ratio {found['ratio']:.2f}; {found['seconds']:.0f} s")  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(one.kept for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
