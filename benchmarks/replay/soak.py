#!/usr/bin/env python3
"""Run thousands of short jobs on a real Slurm for as long as asked, and see whether any daemon grows.

    benchmarks/replay/soak.py --minutes 45 --hosts 16

Real slurmctld, slurmdbd and slurmds in containers: hosts of 8 (fake) GPUs in two lanes, under soak.toml. Each job is
the replay's loop of the standard library, which attaches and takes turns as a training does. No job may be lost, and
after the first quarter the proportional memory (PSS) of cadenzad, its worker, its watchdog and each agent may not grow
by more than 5 %, nor their open files. Exit code 1 where one of these fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

from replay_cluster import PLACE, Cluster, Size, commands
from replay_figures import Figures, figures
from replay_sample import ITERATION_S, Submission

from cluster import ROOT, prepare

SETTINGS = Path(__file__).with_name("soak.toml")
GPUS, LANES = 8, 2
CPUS, MEMORY_MB = 24, 500_000
"""Hardware that each host claims to have."""
WIDTHS, WEIGHTS = (1, 2, 4, 8), (50, 25, 15, 10)
"""GPUs of a job, and how many of a hundred jobs ask for them."""
SHORTEST, LONGEST = 0.5, 1.5
"""Lengths of the jobs over their mean."""
LIMIT_MIN = 15
SETTLE_S = 600.0
LOOKS = 90
"""Looks at the daemons in a run."""
MOST_GROWTH = 0.05
SPARE_FILES = 1
"""Open files that a daemon may have more besides: cadenzad starts its worker at the first round."""
EMPTY_S = 20.0
"""Time after the last job until the agents have let go of it."""
JUDGED = {"cadenzad": "ctl", "gateway.worker": "ctl", "failover.watchdog": "ctl", "cadenza-agent": "node"}
"""Daemons that may not grow, with the containers that they run in; the others are printed for information."""
PSS, FILES = 3, 4

Look = Mapping[str, Sequence[float]]
"""Output of replay_probe.py in one container."""


# --- Jobs ----------------------------------------------------------------------------------------------


def plan_jobs(count: int, minutes: float, gpus: int, load: float, seed: int) -> tuple[Submission, ...]:
    """Return jobs that arrive at random in ``minutes`` and offer ``load`` times ``gpus``."""
    dice = Random(seed)
    seconds = 60 * minutes
    width = sum(map(int.__mul__, WIDTHS, WEIGHTS)) / sum(WEIGHTS)
    mean_s = load * gpus * seconds / (count * width)
    return tuple(
        Submission(
            f"soak{number}", at_s, dice.choices(WIDTHS, WEIGHTS)[0],
            max(1, round(mean_s * dice.uniform(SHORTEST, LONGEST) / ITERATION_S)), LIMIT_MIN,
        )
        for number, at_s in enumerate(sorted(dice.uniform(0, seconds) for _ in range(count)))
    )  # fmt: skip


# --- Looks ---------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """Looks at all daemons, from a thread of its own: (seconds since the beginning, looks)."""

    cluster: Cluster
    period_s: float

    def __post_init__(self) -> None:
        self.seen: list[tuple[float, dict[str, Look]]] = []

    def look(self) -> dict[str, Look]:
        """Return what each container's daemons have; those of the controller that are not root's as their user."""
        probe = ("python3", f"{PLACE}/replay_probe.py")
        nodes = [f"node{number + 1}" for number in range(self.cluster.size.nodes)]
        found = {node: json.loads(self.cluster.run(node, *probe)) for node in nodes}
        services, system = (json.loads(self.cluster.run("ctl", *probe, user=user)) for user in ("cadenza", None))
        found["ctl"] = system | {name: entry for name, entry in services.items() if entry[FILES]}
        return found

    @contextmanager
    def watching(self, path: Path) -> Iterator[None]:
        """Look at equal distances until the end of the block and once after it, and put each look down in a file."""
        over, began = threading.Event(), time.monotonic()

        def watch() -> None:
            with path.open("w") as file:
                while True:
                    last = over.wait(max(0.0, began + len(self.seen) * self.period_s - time.monotonic()))
                    time.sleep(EMPTY_S if last else 0)
                    self.seen.append((time.monotonic() - began, self.look()))
                    file.write(json.dumps(self.seen[-1]) + "\n")
                    file.flush()
                    if last:
                        return

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


# --- Verdict -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Course:
    """Memory of one daemon in each quarter of a run, MB, by the median, and its open files without a job."""

    daemon: str
    host: str
    memory_mb: tuple[float, ...]
    files: tuple[int, int]
    """The fewest of the first quarter, and those after the last job: jobs have files of their own in the agents."""

    @property
    def growth(self) -> float:
        """Growth of the memory over that of the second quarter; the first one is the start."""
        return max(self.memory_mb[2:]) / max(self.memory_mb[1], 1e-9) - 1

    @property
    def grows(self) -> bool:
        """Return whether it grew by more than a daemon may."""
        return self.growth > MOST_GROWTH or self.files[1] > (1 + MOST_GROWTH) * self.files[0] + SPARE_FILES


def courses(seen: Sequence[tuple[float, Mapping[str, Look]]], seconds: float) -> list[Course]:
    """Return the course of each daemon of each container in the ``seconds`` in which jobs arrived.

    The last look is the one after all jobs. Raise ValueError where a quarter has no look, or a daemon that is judged
    could not be read in one.
    """
    quarters = [[look for at_s, look in seen if k <= 4 * at_s / seconds < k + 1] for k in range(4)]
    if not all(quarters):
        raise ValueError("too few looks: a quarter of the run has none")
    found = []
    for host in quarters[0][0]:
        kind = host.rstrip("0123456789")
        names = set(seen[-1][1][host]) | {name for name, where in JUDGED.items() if where == kind}
        for name in sorted(names):
            entries = [[look[host][name] for look in quarter if name in look[host]] for quarter in quarters]
            if all(any(entry[PSS] for entry in quarter) for quarter in entries):
                memory = tuple(median(entry[PSS] for entry in quarter) for quarter in entries)
                files = int(min(entry[FILES] for entry in entries[0])), int(seen[-1][1][host][name][FILES])
                found.append(Course(name, host, memory, files))
            elif JUDGED.get(name) == kind:
                raise ValueError(f"{name} on {host} was not there, or could not be read, in a quarter of the run")
    return found


def table(found: Sequence[Course]) -> str:
    """Return a table in Markdown: of the daemons of all hosts those that grew least and most."""
    lines = [
        "| daemon | host | PSS by quarter (MB) | growth | open files before and after the jobs | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys([*JUDGED, "slurmctld", "slurmd"]):
        same = sorted((course for course in found if course.daemon == name), key=lambda course: course.growth)
        for one in dict.fromkeys((same[0], same[-1])) if same else ():
            verdict = ("grows" if one.grows else "flat") if name in JUDGED else "for information"
            memory = ", ".join(f"{value:.1f}" for value in one.memory_mb)
            files = ", ".join(map(str, one.files))
            lines.append(f"| {name} | {one.host} | {memory} | {one.growth:+.1%} | {files} | {verdict} |")
    return "\n".join(lines)


# --- Run -----------------------------------------------------------------------------------------------


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=45, help="minutes in which jobs arrive (default: 45)")
    parser.add_argument("--hours", type=float, help="the same in hours")
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--jobs", type=int, help="default: 4.4 for each host and minute, 3,168 in the default run")
    parser.add_argument("--load", type=float, default=0.8, help="GPUs asked for over the GPUs there are (default: 0.8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--settings", type=Path, default=SETTINGS, help="Cadenza's (default: soak.toml)")
    parser.add_argument("--name", default="soak", help="name of the container cluster (default: soak)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "soak", help="folder of all looks and figures")
    options = parser.parse_args(words)
    options.minutes = 60 * options.hours if options.hours else options.minutes
    options.jobs = options.jobs or round(4.4 * options.hosts * options.minutes)
    return options


def run(options: argparse.Namespace) -> tuple[Figures, Sequence[tuple[float, Mapping[str, Look]]], float]:
    """Run the jobs on a fresh cluster; return the replay's figures, the looks, and the seconds that it took."""
    jobs = plan_jobs(options.jobs, options.minutes, GPUS * options.hosts, options.load, options.seed)
    size = Size(options.hosts, GPUS, CPUS, MEMORY_MB)
    cluster = Cluster(options.name, size, LANES, options.settings)
    watch = Watch(Cluster(options.name, size, LANES, options.settings), max(2.0, 60 * options.minutes / LOOKS))
    try:
        up_s = cluster.start({})
        print(f"{size.nodes} hosts of {GPUS} GPUs in {LANES} lanes up in {up_s:.0f} s; {len(jobs)} jobs", flush=True)
        cluster.hand_over(commands(jobs, size, managed=True))
        started = time.monotonic()
        with watch.watching(options.out / "looks.jsonl"):
            began = cluster.replay(patience_s=60 * options.minutes + SETTLE_S)
        found = figures([job.name for job in jobs], cluster.accounts(), cluster.events(), began)
        return found, watch.seen, time.monotonic() - started
    finally:
        cluster.down()


def main() -> int:
    """Run the soak, print the table, and return the exit code."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    prepare()
    found, seen, seconds = run(options)
    print(
        f"{' '.join(sys.argv)}\n{found.jobs} jobs in {seconds:.0f} s, {len(found.lost)} lost; {found.yields} "
        f"turns given up, {found.restarts} requeues"
    )
    daemons = courses(seen, 60 * options.minutes)
    growing = [course for course in daemons if course.daemon in JUDGED and course.grows]
    print(f"{table(daemons)}\n{len(growing)} of {sum(one.daemon in JUDGED for one in daemons)} daemons grow")
    for course in growing:
        print(f"grows: {course}")
    if found.lost:
        print(f"lost: {' '.join(found.lost)}")
    return 1 if found.lost or growing else 0


if __name__ == "__main__":
    sys.exit(main())
