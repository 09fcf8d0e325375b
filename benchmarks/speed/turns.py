#!/usr/bin/env python3
"""Hundreds of yields of real training jobs on a real Slurm in containers: boundary, copy and resume times.

Two jobs take turns on the GPUs of each of two hosts, one of them with two ranks. Printed are the time from the order to
the boundary of all ranks, beyond the job's own p99 iteration; the copy; the resume; and the lateness of a process that
only sleeps, which is the machine's. The losses must be those of the same jobs alone, bit for bit. Exit code 1 when a
limit is exceeded or a loss differs.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "container"))

from cluster import PYTHON, RESULTS, ROOT, Cluster, prepare, wait_for

SETTINGS = ROOT / "tests" / "cluster" / "fast.toml"
TURNS = "[sharing]\nslice_s = 0.25\n"
JOBS = {
    "turn-mlp": ("--model mlp --seed 1", 1),
    "turn-cnn": ("--model cnn --seed 2", 1),
    "turn-transformer": ("--model transformer --seed 3", 1),
    "turn-ddp": ("--model cnn --seed 4", 2),
}
ITERATION_S = 0.02
LATE_S, RESUME_S = 0.050, 0.5
"""Limits of the p99 of a boundary beyond the job's p99 iteration, and of the p99 resume."""
METRONOME = """
import sys, time
from pathlib import Path

late = []
while not Path(sys.argv[1]).exists():
    due = time.monotonic() + 0.02
    time.sleep(0.02)
    late.append(time.monotonic() - due)
Path(sys.argv[2]).write_text(str(sorted(late)[int(0.99 * len(late))]))
"""
"""Writes the p99 lateness of a process that only sleeps."""


def percentile(values: list[float], share: float) -> float:
    """Return the nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def submit(cluster: Cluster, name: str, prefix: str, iterations: int, *, managed: bool) -> int:
    """Submit one of the jobs, taking turns or alone."""
    arguments, ranks = JOBS[name]
    return cluster.train(
        f"{prefix}{name}", arguments, f"--iterations {iterations} --iteration-s {ITERATION_S if managed else 0}",
        options=("--gres=gpu:4", "--cadenza") if managed else ("--partition=plain", "--gres=gpu:1"), ranks=ranks,
    )  # fmt: skip


def play(cluster: Cluster, iterations: int) -> tuple[list[int], float]:
    """Run the jobs taking turns; return their ids and the p99 lateness of a process that only sleeps."""
    end, out = f"{RESULTS}/metronome.end", f"{RESULTS}/metronome.s"
    cluster.exec("ctl", "rm", "-f", end, out)
    metronome = cluster.sbatch(
        "--partition=plain", "--mem=100", command=f"exec {PYTHON} -c '{METRONOME}' {end} {out}"
    )  # fmt: skip
    jobs = [submit(cluster, name, "", iterations, managed=True) for name in JOBS]
    cluster.wait_done(*jobs, timeout=600)
    cluster.exec("ctl", "touch", end)
    cluster.wait_done(metronome)
    return jobs, float(cluster.ctl("cat", out))


def report(cluster: Cluster, jobs: list[int], machine_s: float) -> bool:
    """Print the figures; return True if they are within the limits."""
    ids = ",".join(map(str, jobs))
    yields = cluster.sql(
        f"select boundary_s - iteration_p99_s, boundary_s, copy_s from switches where kind = 'yield' and job in ({ids})"  # noqa: S608 (our numbers)
    )
    resumes = [
        seconds
        for (seconds,) in cluster.sql(f"select total_s from switches where kind = 'resume' and job in ({ids})")  # noqa: S608
    ]
    late, boundary, copy = (list(column) for column in zip(*yields, strict=True))
    late_s, resume_s = percentile(late, 0.99), percentile(resumes, 0.99)
    print(
        f"{len(yields)} yields: order to boundary p50 {percentile(boundary, 0.5) * 1e3:.1f} ms, "
        f"p99 beyond the job's own p99 iteration {late_s * 1e3:+.1f} ms (limit {LATE_S * 1e3:+.0f} ms; "
        f"a process that only sleeps was {machine_s * 1e3:.1f} ms late), copy p50 {percentile(copy, 0.5) * 1e3:.2f} ms"
    )
    print(
        f"{len(resumes)} resumes: p50 {percentile(resumes, 0.5) * 1e3:.1f} ms, p99 {resume_s * 1e3:.1f} ms "
        f"(limit {RESUME_S * 1e3:.0f} ms)"
    )
    return late_s <= LATE_S and resume_s <= RESUME_S


def same_losses(cluster: Cluster, iterations: int) -> bool:
    """Run the jobs alone and compare the digests of their losses."""
    cluster.wait_done(*(submit(cluster, name, "alone-", iterations, managed=False) for name in JOBS), timeout=600)
    same = True
    for name in JOBS:
        shared, alone = (cluster.result(f"{prefix}{name}")["losses_sha256"] for prefix in ("", "alone-"))
        print(f"{name}: losses {shared[:16]} with turns, {alone[:16]} alone")
        same &= shared == alone
    return same


def main() -> int:
    """Measure and print; return 1 when a limit is exceeded or a loss differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=3200, help="of each job, of 20 ms (default: 3200)")
    options = parser.parse_args()
    cluster = Cluster(f"turns{os.getpid()}")
    prepare()
    try:
        cluster.up(
            "--nodes", 2, "--gpus-per-node", 4, "--lanes", 2, "--unmanaged-nodes", 1, "--config", SETTINGS
        )  # fmt: skip
        cluster.configure(TURNS)
        wait_for("open lanes", lambda: cluster.ctl("sinfo", "-hN", "-p", "shared", "-o", "%T").count("idle") == 4, 90)  # noqa: PLR2004 (two lanes of two hosts)
        jobs, machine_s = play(cluster, options.iterations)
        kept = report(cluster, jobs, machine_s)
        return 0 if same_losses(cluster, options.iterations) and kept else 1
    finally:
        cluster.down()


if __name__ == "__main__":
    sys.exit(main())
