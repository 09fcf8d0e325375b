#!/usr/bin/env python3
"""Print how long ``cadenza whatif`` takes on four weeks of 20,000 jobs, with the shipped defaults.

The jobs are drawn by a seed from four weeks of Microsoft's Philly trace, or with --synthetic by its rough shape: 85 %
of one GPU, log-normal run times of 10 minutes in the median, and days of 24 hours with a peak. Neither has starts: in
the file jobs start when they are submitted, so that the column "as it was" says nothing here. Their limits are 2 x run
time + 300 s. The nodes are 53 of 8 GPUs, on which the trace's jobs offer a load of about 0.9. Exit code 1 if the CPU
time, evenly on the machine's CPUs, is above the limit.

    CADENZA_DATA=FOLDER benchmarks/speed/whatif_month.py
    benchmarks/speed/whatif_month.py --synthetic --jobs 2000 --nodes 5x8:24:500
    CADENZA_DATA=FOLDER benchmarks/speed/whatif_month.py --jobs 2000 --nodes 5x8:24:500 --write jobs.txt
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import log
from pathlib import Path
from random import Random

from cadenza.slurm_plugin.history.job_records import FIELDS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "replay"))

from philly_sample import DAY_S, MEMORY_GB, PhillyJob, read_philly
from published_data import needed

CADENZA = Path(sys.executable).with_name("cadenza")
LIMIT_S = 120.0
FIRST_DAY, DAYS = 14, 28
EPOCH_S = 1_504_483_200
"""Day 0 of the trace: 2017-09-04 00:00 UTC."""


def accounting(jobs: int, seed: int, *, synthetic: bool = False) -> str:
    """Return the table of ``sacct -P`` with this many jobs of the four weeks."""
    if synthetic:
        drawn = list(_synthetic(jobs, Random(seed)))
    else:
        trace = read_philly(needed("philly-2017-09-10.csv"))
        window = [job for job in trace if 0 <= job.submit_s / DAY_S - FIRST_DAY < DAYS]
        if jobs > len(window):
            raise SystemExit(f"the four weeks have {len(window)} jobs")
        drawn = Random(seed).sample(window, jobs)
    rows = (_row(job) for job in sorted(drawn, key=lambda job: job.submit_s))
    return "\n".join(("|".join(FIELDS), *rows)) + "\n"


def _synthetic(jobs: int, chance: Random) -> Iterator[PhillyJob]:
    for number in range(jobs):
        hour = chance.triangular(0, 24, 15)
        submit_s = (FIRST_DAY + chance.randrange(DAYS)) * DAY_S + 3600 * hour
        gpus = chance.choices((1, 2, 4, 8, 16), (85, 5, 4, 5, 1))[0]
        run_s = min(max(chance.lognormvariate(log(600), 2.2), 1), 20 * DAY_S)
        yield PhillyJob(number + 1, submit_s, gpus, run_s, f"user{chance.randrange(40)}")


def _row(job: PhillyJob) -> str:
    submit_s = EPOCH_S + int(job.submit_s)
    tres = f"cpu={3 * job.gpus},gres/gpu={job.gpus},mem={MEMORY_GB * job.gpus}G,node=1"
    limit_min = int(job.limit_s / 60) + 1
    times = f"{submit_s}|{submit_s}|{submit_s + int(job.run_s)}|{submit_s}"
    return f"{job.id}|{job.user}|gpu|{times}|{limit_min}|00:00:00|{tres}|{tres}"


def main() -> int:
    """Run the command, and print its time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--nodes", default="53x8:24:500")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--synthetic", action="store_true", help="draw the jobs, without the published trace")
    parser.add_argument("--write", type=Path, help="write the accounting here, and run nothing")
    parser.add_argument("whatif", nargs="*", help="after --: further options of cadenza whatif")
    options = parser.parse_args()
    text = accounting(options.jobs, options.seed, synthetic=options.synthetic)
    if options.write:
        options.write.write_text(text)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "jobs.txt"
        file.write_text(text)
        page = Path(folder) / "page.html"
        words = ["whatif", "--sacct", file, "--nodes", options.nodes, "--output", page, *options.whatif]
        began_s = time.monotonic()
        done = subprocess.run([CADENZA, *map(str, words)], check=False)
        took_s = time.monotonic() - began_s
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s, cpus = used.ru_utime + used.ru_stime, len(os.sched_getaffinity(0))
    each_s = cpu_s / cpus
    print(
        f"{options.jobs} jobs: {took_s:.0f} s; {cpu_s:.0f} s of CPU time, {each_s:.0f} s on each of {cpus} CPUs, "
        f"limit {LIMIT_S:.0f} s"
    )
    return done.returncode or int(each_s > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
