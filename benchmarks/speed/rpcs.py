#!/usr/bin/env python3
"""Count the RPCs of slurmctld by type: the same jobs on plain Slurm and under Cadenza's default.

Two hosts of 8 (fake) GPUs in containers, once without Cadenza and once with Cadenza as it ships; the jobs are those of
soak.py, and the default's times are divided as in replay.py. It prints sdiag's counts by type and by user, from the
first submission to the end of the last job.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "replay"))

from compressed_times import compress
from replay import settings_text
from replay_cluster import Cluster, Size, commands
from replay_figures import Figures, Rpcs, figures, read_sdiag
from replay_sample import MOST_FACTOR, Submission
from soak import plan_jobs

from cluster import ClusterError, prepare

SIZE = Size(2, 8, 24, 500_000)
SETTLE_S = 900.0
MOVE_S = 4.0
BY_USER = re.compile(r"\s+(\S+)\s+\(\s*\d+\)\s+count:(\d+)")


@dataclass(frozen=True)
class Count:
    """RPCs of one side by type and by user, and what became of its jobs."""

    rpcs: Rpcs
    users: dict[str, int]
    figures: Figures


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=4, help="minutes in which the jobs arrive (default: 4)")
    parser.add_argument("--load", type=float, default=1.2, help="GPUs asked for over the GPUs there are (default: 1.2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("plain", "cadenza"), help="run one side")
    parser.add_argument("--name", default="rpcs", help="name of the container cluster (default: rpcs)")
    return parser.parse_args(words)


def count(cluster: Cluster, jobs: tuple[Submission, ...], minutes: float) -> Count:
    """Run the jobs on a fresh cluster, and remove it."""
    managed = cluster.settings is not None
    try:
        cluster.start({})
        if managed:
            compress(cluster, MOST_FACTOR)
        cluster.hand_over(commands(jobs, SIZE, managed=managed))
        cluster.run("ctl", "sdiag", "--reset")
        began = cluster.replay(patience_s=60 * minutes + SETTLE_S)
        text = cluster.run("ctl", "sdiag")
        by_user = text.partition("by user")[2].partition("Pending RPC")[0].splitlines()
        users = {match[1]: int(match[2]) for line in by_user if (match := BY_USER.match(line))}
        found = figures([job.name for job in jobs], cluster.accounts(), cluster.events(), began)
        return Count(read_sdiag(text), users, found)
    finally:
        cluster.down()


def table(sides: dict[str, Count]) -> str:
    """Return the counts side by side."""
    kinds = sorted({kind for side in sides.values() for kind in side.rpcs.count})
    kinds.sort(key=lambda kind: -max(side.rpcs.count.get(kind, 0) for side in sides.values()))
    rows = [(kind, [side.rpcs.count.get(kind, 0) for side in sides.values()]) for kind in kinds]
    rows.append(("all", [side.rpcs.total for side in sides.values()]))
    users = sorted({user for side in sides.values() for user in side.users})
    rows += [(f"of {user}", [side.users.get(user, 0) for side in sides.values()]) for user in users]
    rows.append(("makespan (s)", [round(side.figures.makespan_s) for side in sides.values()]))
    rows.append(("turns given up", [side.figures.yields for side in sides.values()]))
    rows.append(("requeues", [side.figures.restarts for side in sides.values()]))
    rows.append(("lost jobs", [len(side.figures.lost) for side in sides.values()]))
    head = f"{'':36s}" + "".join(f"{name:>12s}" for name in sides)
    return "\n".join([head, *(f"{label:36s}" + "".join(f"{one:12d}" for one in counts) for label, counts in rows)])


def main() -> int:
    """Count and print; 1 when a job was lost."""
    options = arguments()
    jobs = plan_jobs(options.jobs, options.minutes, SIZE.nodes * SIZE.gpus, options.load, options.seed)
    try:
        prepare()
        with tempfile.TemporaryDirectory() as folder:
            settings = Path(folder) / "rpcs.toml"
            settings.write_text(settings_text(MOST_FACTOR, MOVE_S))
            clusters = {
                "plain": Cluster(f"{options.name}-plain", SIZE),
                "cadenza": Cluster(f"{options.name}-cadenza", SIZE, settings=settings),
            }
            chosen = [name for name in clusters if options.only in (None, name)]
            sides = {name: count(clusters[name], jobs, options.minutes) for name in chosen}
    except ClusterError as error:
        print(f"rpcs: {error}", file=sys.stderr)
        return 1
    print(f"{' '.join(sys.argv)}\n{table(sides)}")
    totals = [side.rpcs.total for side in sides.values()]
    if len(totals) > 1:
        print(f"cadenza/plain {totals[1] / totals[0]:.2f}")
    return 1 if any(side.figures.lost for side in sides.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
