#!/usr/bin/env python3
"""Four real training jobs on one node: the CPUs that their profiles say they can use, against proportional shares.

In a container cluster of one node with four GPUs, two jobs of examples/profile/images.py (bound by CPU preprocessing)
and two of text.py (not) run at once, first with `allocate = "proportional"`, then with the configuration to compare.
The node claims 16 CPUs for two cores, so a job's proportional share is half a core, and all quotas together stay
within the machine. Profiles are measured first, by `cadenza profile run` on the node. The simulator predicts both runs
from these profiles, and start-up times from a shorter run of the same jobs. Exit code 1 when a limit is not kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "replay"))

from live_tuning_predict import SHARES, Kind, kinds, predicted
from replay_cluster import USER, Cluster, Size

from cluster import PYTHON, ROOT, ClusterError, prepare

SETTINGS = Path(__file__).with_name("live_tuning.toml")
SCRIPTS = "/opt/cadenza/examples/profile"
PLACE = "/home/shared/tuning"
JOBS = {"images-a": "images", "images-b": "images", "text-a": "text", "text-b": "text"}
SIZE = Size(nodes=1, gpus=4, cpus=16, memory_mb=64_000)
CORES = 2
POINTS = "0.125,0.25,0.375,0.5,0.75,1,1.25,1.5"
"""CPUs of the machine with which the profiles are measured."""
TEXT_MS = 200
"""Milliseconds of a step of text.py on the absent GPU, as of a language model, little of which is the CPU's."""
SHORT = 10
"""The run that measures start-up times has so many times fewer iterations."""
BETTER, SLOWEST, OFF = 1.3, 0.97, 0.10
PATIENCE_S = 1200.0
POLL_S = 2.0


@dataclass(frozen=True)
class Run:
    """The four jobs' seconds from submission to end, by name."""

    jct_s: Mapping[str, float]

    @property
    def mean_s(self) -> float:
        """Return their mean."""
        return fmean(self.jct_s.values())


def measure(cluster: Cluster, model: str, point_s: float) -> str:
    """Return one workload's profile, measured on the idle node; what it prints goes to a log in the same folder."""
    out = f"{PLACE}/{model}.json"
    words = ["cadenza", "profile", "run", "--cpus", POINTS, "--set", f"node={SIZE.gpus}:{CORES}:64", "--set", "gpus=1"]
    words += ["--model", model, "--set", f"point-s={point_s}", "-o", out, "--", *command(model)]
    cluster.run("node1", "sh", "-c", f"mkdir -p {PLACE} && chmod 1777 {PLACE} && cd {PLACE} && {' '.join(words)}")
    return cluster.run("node1", "cat", out)


def command(model: str, iterations: int | None = None) -> list[str]:
    """Return a workload's command line."""
    words = [PYTHON, f"{SCRIPTS}/{model}.py"]
    words += ["--data", f"{PLACE}/images"] if model == "images" else ["--device-ms", str(TEXT_MS)]
    return words + (["--iterations", str(iterations)] if iterations is not None else [])


def submit(cluster: Cluster, name: str, iterations: int) -> float:
    """Submit a job, and return when, in seconds since the epoch."""
    model, began = JOBS[name], time.time()
    # The end is written by the job itself: accounting knows whole seconds only.
    script = f"export OMP_NUM_THREADS=1; {' '.join(command(model, iterations))} && date +%s.%N > {PLACE}/{name}.end"
    cluster.run(
        "ctl", "sbatch", f"--job-name={name}", f"--output={PLACE}/{name}.log", "--nodes=1", "--ntasks=1",
        f"--cpus-per-task={SIZE.cpus // SIZE.gpus}", "--gres=gpu:1", "--mem=4000", "--time=60",
        f"--cadenza=model={model},iterations={iterations}", f"--wrap={script}", user=USER,
    )  # fmt: skip
    return began


def play(cluster: Cluster, allocate: str, iterations: Mapping[str, int]) -> Run:
    """Run the four jobs at once under one allocation; raise ClusterError when one does not end."""
    cluster.put("/etc/cadenza/conf.d/zz-allocate.toml", f'[policy]\nallocate = "{allocate}"\n')
    cluster.run("ctl", "supervisorctl", "signal", "HUP", "cadenzad")
    cluster.run("ctl", "sh", "-c", f"rm -f {PLACE}/*.end")
    began = {name: submit(cluster, name, iterations[model]) for name, model in JOBS.items()}
    until = time.monotonic() + PATIENCE_S
    while cluster.run("ctl", "squeue", "-h").strip():
        if time.monotonic() > until:
            raise ClusterError(f"{allocate}: jobs are left after {PATIENCE_S:.0f} s")
        time.sleep(POLL_S)
    return Run({name: ended(cluster, name) - at for name, at in began.items()})


def ended(cluster: Cluster, name: str) -> float:
    """Return when a job ended; raise ClusterError, with its output, when it did not end well."""
    text = cluster.run("ctl", "cat", f"{PLACE}/{name}.end", check=False)
    if not text:
        log = cluster.run("ctl", "tail", "-n", "20", f"{PLACE}/{name}.log", check=False)
        raise ClusterError(f"{name} did not end well; its output ends with\n{log}")
    return float(text)


def start_up(run: Run, short: Mapping[str, int], by_model: Mapping[str, Kind]) -> dict[str, float]:
    """Return each model's seconds until its first iteration, from a short run at the proportional share."""
    spent = {
        name: max(0.0, seconds - short[JOBS[name]] * by_model[JOBS[name]].share_s)
        for name, seconds in run.jct_s.items()
    }
    return {model: fmean(spent[name] for name in JOBS if JOBS[name] == model) for model in by_model}


@dataclass(frozen=True)
class Found:
    """Both runs and what was predicted of them."""

    allocate: str
    runs: Mapping[str, Run]
    expected: Mapping[str, Run]
    startup_s: Mapping[str, float]

    @property
    def better(self) -> float:
        """Mean completion time, proportional over the other."""
        return self.runs[SHARES].mean_s / self.runs[self.allocate].mean_s

    @property
    def expected_better(self) -> float:
        """Return the same of the simulator."""
        return self.expected[SHARES].mean_s / self.expected[self.allocate].mean_s

    @property
    def ratios(self) -> dict[str, float]:
        """Each job's time, proportional over the other."""
        shares, other = self.runs[SHARES].jct_s, self.runs[self.allocate].jct_s
        return {name: shares[name] / seconds for name, seconds in other.items()}

    @property
    def off(self) -> float:
        """Return by how much the worse of the two predicted means is wrong."""
        return max(abs(self.expected[name].mean_s / run.mean_s - 1) for name, run in self.runs.items())

    def checks(self) -> list[tuple[str, float, str, bool]]:
        """Return each limit: what, measured, limit, kept."""
        slowest = min(self.ratios.values())
        return [
            ("mean JCT, proportional over this", self.better, f">= {BETTER}", self.better >= BETTER),
            ("slowest job, proportional over this", slowest, f">= {SLOWEST}", slowest >= SLOWEST),
            ("simulator's mean JCT, off by at most", self.off, f"<= {OFF}", self.off <= OFF),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return everything."""
        return {
            "command": sys.argv, "allocate": self.allocate, "startup_s": dict(self.startup_s),
            "measured_s": {name: dict(run.jct_s) for name, run in self.runs.items()},
            "predicted_s": {name: dict(run.jct_s) for name, run in self.expected.items()},
            "checks": [{"what": what, "value": value, "limit": limit, "kept": kept}
                       for what, value, limit, kept in self.checks()],
        }  # fmt: skip


def table(found: Found) -> str:
    """Return the jobs' times, measured and predicted, and the limits."""
    names = [*found.runs]
    lines = [f"{'JCT in s (predicted)':24s}" + "".join(f"{name:>22s}" for name in names) + f"{'ratio':>8s}"]
    for job, ratio in found.ratios.items():
        cells = (f"{found.runs[name].jct_s[job]:.1f} ({found.expected[name].jct_s[job]:.1f})" for name in names)
        lines.append(f"{job:24s}" + "".join(f"{cell:>22s}" for cell in cells) + f"{ratio:>8.2f}")
    means = (f"{found.runs[name].mean_s:.1f} ({found.expected[name].mean_s:.1f})" for name in names)
    lines.append(f"{'mean':24s}" + "".join(f"{cell:>22s}" for cell in means) + f"{found.better:>8.2f}")
    lines.append(f"predicted ratio of the means: {found.expected_better:.2f}")
    for what, value, limit, kept in found.checks():
        lines.append(f"{what:40s}{value:8.3f}  {limit:8s} {'ok' if kept else 'MISSED'}")
    return "\n".join(lines)


def compare(cluster: Cluster, options: argparse.Namespace) -> Found:
    """Profile, calibrate, run both allocations, and predict them."""
    texts = [measure(cluster, model, options.point_s) for model in dict.fromkeys(JOBS.values())]
    by_model, library = kinds(texts, SIZE.cpus / CORES)
    cluster.put("/etc/cadenza/profiles/live_tuning.json", library)
    iterations = {model: max(SHORT, round(options.work_s / kind.best_s)) for model, kind in by_model.items()}
    short = {model: count // SHORT for model, count in iterations.items()}
    startup_s = start_up(play(cluster, SHARES, short), short, by_model)
    runs, expected = {}, {}
    for allocate in (SHARES, options.allocate):
        runs[allocate] = play(cluster, allocate, iterations)
        expected[allocate] = Run(predicted(JOBS, by_model, iterations, startup_s, allocate, SIZE))
    return Found(options.allocate, runs, expected, startup_s)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocate", default="cadenza", help="what to compare with proportional (default: cadenza)")
    parser.add_argument("--work-s", type=float, default=120, help="seconds of each job at its best (default: 120)")
    parser.add_argument("--point-s", type=float, default=20, help="most seconds for a point of a profile (default: 20)")
    parser.add_argument("--name", default="tuning", help="the cluster's name (default: tuning)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "live_tuning.json")
    return parser.parse_args()


def main() -> int:
    """Run the comparison and return its exit code."""
    options = arguments()
    cluster = Cluster(options.name, SIZE, 1, SETTINGS)
    try:
        prepare()
        cluster.start({})
        found = compare(cluster, options)
    except ClusterError as error:
        print(f"live_tuning: {error}", file=sys.stderr)
        return 1
    finally:
        cluster.down()
    print(f"{' '.join(sys.argv)}\n{table(found)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found.as_json(), indent=1) + "\n")
    return 0 if all(kept for *_, kept in found.checks()) else 1


if __name__ == "__main__":
    sys.exit(main())
