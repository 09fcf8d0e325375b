#!/usr/bin/env python3
"""Submit the replay's jobs at their times from one process on the controller, and wait until the queue is empty.

One JSON object a line goes to ``submitted.jsonl``: name, job id, when it was due and submitted, and the seconds that
sbatch took. Exit code 1: jobs were left at the deadline.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
POLL_S = 10.0
"""Each poll is one squeue: one RPC."""


def submit(job: dict[str, Any], due: float, record: IO[str]) -> None:
    """Submit one job, and put it on record; an error of sbatch is on record without an id."""
    began = time.time()
    done = subprocess.run(job["command"], capture_output=True, text=True, check=False)
    number = done.stdout.strip().split(";")[0]
    line = {"name": job["name"], "due": due, "at": began, "seconds": time.time() - began}
    line |= {"id": int(number)} if done.returncode == 0 else {"error": done.stderr.strip()}
    record.write(json.dumps(line) + "\n")
    record.flush()


def queued() -> int | None:
    """Return how many jobs are in the queue; None where slurmctld does not say."""
    done = subprocess.run(["squeue", "-h", "-o", "%i"], capture_output=True, text=True, check=False)
    return len(done.stdout.split()) if done.returncode == 0 else None


def replay(jobs: list[dict[str, Any]], began: float, deadline: float) -> int:
    """Submit all at their times, then wait; return the exit code."""
    with (HERE / "submitted.jsonl").open("w") as record:
        told = began
        for done, job in enumerate(jobs):
            while (wait := began + job["submit_s"] - time.time()) > 0:
                time.sleep(min(wait, POLL_S))
                if time.time() > told + POLL_S:
                    told = time.time()
                    tell(began, done, len(jobs))
            submit(job, began + job["submit_s"], record)
    while time.time() < deadline:
        if tell(began, len(jobs), len(jobs)) == 0:
            return 0
        time.sleep(POLL_S)
    return 1


def tell(began: float, submitted: int, jobs: int) -> int | None:
    """Print how far it is; return the jobs in the queue."""
    left = queued()
    print(f"{time.time() - began:.0f} s: {submitted} of {jobs} submitted, {left} in the queue", flush=True)
    return left


def main() -> int:
    """Replay ``plan.json`` of this folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patience-s", type=float, required=True, help="longest time that everything may take")
    options = parser.parse_args()
    began = time.time()
    (HERE / "began").write_text(str(began))
    return replay(json.loads((HERE / "plan.json").read_text()), began, began + options.patience_s)


if __name__ == "__main__":
    raise SystemExit(main())
