#!/usr/bin/env python3
"""Pause of a moved job beyond the start-up of its own process; on a real Slurm in containers.

A one-GPU job goes to another host and back, and from lane 1 of a host to lane 0, by ``cadenza move``. Of each move this
prints the pause (from the boundary at which the job stopped until its successor has restored), the start-up of the
process itself within it (from its exec, imports and restore included), the excess, and who spent that: the service,
Slurm leaving the old nodes, and Slurm starting it again until the process exists. The losses must be those of a run
without interruption, bit for bit.

The start-up alone is measured as well, on a host where the process's files were dropped from the page cache
(posix_fadvise DONTNEED), where they were dropped and then read by the agent's reader, and where they were just used.
The containers of this cluster share one kernel and one image, so that a job's files are always warm where it goes while
it runs: the effect of warming can only be shown like this, and the pauses printed are those of warm files.

    benchmarks/moves/migration.py [--cluster NAME] [--rounds 2] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "container"))

from cluster import PYTHON, RESULTS, ROOT, TRAIN, Cluster, prepare, wait_for

KEPT = "/home/shared/migration"
READER = "cadenza.sidecar.agent.prefetch.file_reader"
LISTS = (
    "from cadenza.sidecar.agent.prefetch import open_files; import sys; "
    "print('\\n'.join(open_files.files_of([int(sys.argv[1])])))"
)
DROP = """
import os, sys
for line in sys.stdin.buffer.read().split(b"\\n"):
    try:
        file = os.open(line, os.O_RDONLY)
    except OSError:
        continue
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
"""
SETTINGS = ROOT / "tests" / "cluster" / "fast.toml"
HOSTS, LANES = 2, 2
TARGET_S = 2.0


def main() -> int:
    """Measure, print, and return 1 when a loss differs."""
    options = arguments()
    cluster = Cluster(options.cluster or f"migration{os.getpid()}")
    try:
        if not options.cluster:
            start(cluster)
        found = measure(cluster, options.rounds)
    finally:
        if not options.cluster:
            cluster.down()
    report(found)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["losses_equal"] else 1


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", help="a running cluster of container/up; else one is started and removed")
    parser.add_argument("--rounds", type=int, default=2, help="how often each move is made")
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    return parser.parse_args()


def start(cluster: Cluster) -> None:
    """Start a cluster, and wait until the further lanes are open."""
    prepare()
    cluster.up("--nodes", HOSTS, "--gpus-per-node", 4, "--lanes", LANES, "--config", SETTINGS)
    lanes = ("sinfo", "-h", "-N", "-p", "shared", "-o", "%N %T")
    wait_for("open lanes", lambda: cluster.ctl(*lanes).count(" idle\n") == HOSTS * LANES, 90)


def measure(cluster: Cluster, rounds: int) -> dict[str, Any]:
    """Return all figures."""
    cluster.exec("ctl", "rm", "-rf", KEPT)
    cluster.exec("ctl", "mkdir", "-m", "777", KEPT)
    moves, digests, files = [], set(), ""
    for number in range(rounds):
        for kind, place, to in (("migration", "node1", "node2"), ("promotion", "node1-l1", "node1")):
            job = Moved(cluster, f"{kind}-{number}", place)
            files = files or job.files()
            moves.append({"kind": kind, **job.move(to)})
            digests.add(job.digest())
    starts = {"cold": [], "warmed": [], "warm": []}
    for _ in range(rounds):
        for state, seconds in start_ups(cluster, files).items():
            starts[state].append(seconds)
    digests.add(alone(cluster))
    return {"moves": moves, "start_up_s": starts, "files": files.count("\n"), "losses_equal": len(digests) == 1}


class Moved:
    """One training job that is moved once."""

    ITERATIONS = 300

    def __init__(self, cluster: Cluster, name: str, node: str) -> None:
        self.cluster, self.name = cluster, name
        self.job = cluster.train(
            name, f"--model transformer --iterations {self.ITERATIONS} --iteration-s 0.05",
            f"--checkpoint-dir {KEPT}/{name}", options=("--cadenza", "--gres=gpu:1", f"--nodelist={node}"),
        )  # fmt: skip
        wait_for("a job that can be moved", self._ready, 120)

    def _ready(self) -> bool:
        return bool(self.cluster.lease(self.job).get("checkpoints"))

    def files(self) -> str:
        """Return the files that its processes use, one a line, as the agent lists them."""
        pid = self.cluster.exec("node1", "pgrep", "-n", "-f", f"{TRAIN} --out {RESULTS}/{self.name}").stdout.split()[0]
        return self.cluster.exec("node1", PYTHON, "-c", LISTS, pid).stdout

    def move(self, to: str) -> dict[str, float]:
        """Move it and return where the time went, seconds."""
        self.cluster.cadenza("move", str(self.job), "--to", to)
        self.cluster.wait_done(self.job, timeout=180)
        found = self.cluster.result(self.name)
        if (found["node"], found["restart"]) != (to, 1):
            raise SystemExit(f"job {self.job} ran on {found['node']} after {found['restart']} restarts, not on {to}")
        return {"to": to, **parts(self._times(), found)}

    def _times(self) -> dict[str, float]:
        """Return when things happened, epoch seconds."""
        switches = self.cluster.sql("select job, at_s, copy_s from switches where kind = 'checkpoint'")
        saved, copy = next((at, copy) for job, at, copy in switches if job == self.job)
        actions = self.cluster.sql("select job, kind, at_s from actions where kind in ('Requeue', 'Place')")
        acted = {kind: at for job, kind, at in actions if job == self.job}
        return {"stopped": saved - copy, "saved": saved, **acted}

    def digest(self) -> str:
        """Return the digest of its losses."""
        return str(self.cluster.result(self.name)["losses_sha256"])


def parts(times: dict[str, float], found: dict[str, Any]) -> dict[str, float]:
    """Return a move's pause and its parts."""
    start_s, pause_s = found["restored_s"] - found["process_s"], found["restored_s"] - times["stopped"]
    return {
        "pause_s": pause_s,
        "start_up_s": start_s,
        "excess_s": pause_s - start_s,
        "saving_s": times["saved"] - times["stopped"],
        "service_s": times["Requeue"] - times["saved"],
        "leaving_s": times["Place"] - times["Requeue"],
        "starting_s": found["process_s"] - times["Place"],
    }


def start_ups(cluster: Cluster, files: str) -> dict[str, float]:
    """Return the start-up of the process alone on node2: its files dropped, dropped and then read, just used."""
    found = {}
    for state in ("cold", "warmed", "warm"):
        if state != "warm":
            piped(cluster, "root", files, f"{PYTHON} -c '{DROP}'")
        if state == "warmed":
            piped(cluster, "alice", files, f"{PYTHON} -m {READER} {8 << 30}")
        found[state] = start_up(cluster, state)
    return found


def piped(cluster: Cluster, user: str, files: str, command: str) -> None:
    """Run a command on node2 with the list of files as its input."""
    path = Path(KEPT) / "files"
    for first in range(0, len(files), 60_000):
        sign = ">>" if first else ">"
        cluster.exec("ctl", "sh", "-c", f'printf "%s" "$1" {sign} {path}', "sh", files[first : first + 60_000])
    cluster.exec("node2", "sh", "-c", f"{command} < {path}", user=user)


def start_up(cluster: Cluster, state: str) -> float:
    """Return the time from exec to the point at which a job without any checkpoint would begin to train."""
    out, kept = f"{RESULTS}/start-{state}.json", f"{KEPT}/start-{time.monotonic_ns()}"
    command = f"{TRAIN} --model transformer --iterations 1 --checkpoint-dir {kept} --out {out}"
    cluster.exec("node2", PYTHON, *command.split(), user="alice")
    found = cluster.result(f"start-{state}")
    return float(found["restored_s"] - found["process_s"])


def alone(cluster: Cluster) -> str:
    """Return the digest of the losses of a run without interruption."""
    command = f"{TRAIN} --model transformer --iterations {Moved.ITERATIONS} --no-attach --out {RESULTS}/alone.json"
    cluster.exec("node1", PYTHON, *command.split(), user="alice")
    return str(cluster.result("alone")["losses_sha256"])


def report(found: dict[str, Any]) -> None:
    """Print the figures."""
    columns = ("pause_s", "start_up_s", "excess_s", "saving_s", "service_s", "leaving_s", "starting_s")
    print(f"{'move':12}" + "".join(f"{name:>12}" for name in columns))
    for move in found["moves"]:
        print(f"{move['kind']:12}" + "".join(f"{move[name]:12.2f}" for name in columns))
    for kind in ("migration", "promotion"):
        excess = [move["excess_s"] for move in found["moves"] if move["kind"] == kind]
        worst, mean = max(excess), sum(excess) / len(excess)
        share = worst / TARGET_S
        print(f"{kind}: {mean:.2f} s beyond the start-up on average, at most {worst:.2f} s", end=", ")
        print(f"{share:.2f} of the {TARGET_S:g} s aimed at")
    starts = {state: min(times) for state, times in found["start_up_s"].items()}
    print("start-up alone: " + ", ".join(f"{state} {seconds:.2f} s" for state, seconds in starts.items()))
    ratio = starts["cold"] / starts["warmed"]
    print(f"warming makes a cold start-up {ratio:.2f} times as fast ({found['files']} files)")
    print(f"losses bit-identical to a run without interruption: {found['losses_equal']}")


if __name__ == "__main__":
    sys.exit(main())
