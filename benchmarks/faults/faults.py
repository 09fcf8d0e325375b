#!/usr/bin/env python3
"""Kill daemons and clients by a seeded schedule while jobs run on the container cluster, and judge what is left.

    benchmarks/faults/faults.py --seed 1 --kills 100 [--lanes 2 [--memory full]]
    benchmarks/faults/faults.py --outages [--only network,clock]

The rules: no job is lost, every digest is that of the same job alone, no GPU has two users (locks on files of the
host, looked at by root), no job is held for more than 30 s, none stays suspended or frozen, no GPU is idle for more
than 30 s while a job that could use it waits, Slurm, the service, the agents and the hosts have the same jobs, and no
SiteFactor is left on record of a job that is over. Exit code 1, with a timeline of all journals, where a rule is
broken.

With --outages, one fault at a time holds for its length on a fresh cluster, until all is well again: a network that is
cut, a host that is lost and comes back, a full disk, checkpoints that hang, a clock that is off, a daemon that is away
or stopped. The same rules hold, and `cadenza top`, `why` or `doctor` must name the fault in words.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "replay"))

import outages
from fault_run import FaultRun
from journals import timeline
from outage_run import OutageRun
from schedule import VICTIMS, Schedule, plan
from verdict import Finding, Record, judge, load

ROOT = Path(__file__).resolve().parents[2]
GPUS = 4
TIMELINES = 3
"""Findings that get a timeline of their own in the output; the files have everything."""


def table(record: Record, schedule: Schedule, findings: list[Finding], options: argparse.Namespace) -> str:
    """Return the run as a table in Markdown."""
    kinds = Counter(row["kind"] for row in record.journal)
    killed = Counter(
        row["target"].split(":")[1].split("-lane")[0]
        for row in record.journal
        if row["kind"] == "kill" and not row["note"].startswith(("was not", "no process"))
    )
    settle_s = next((row["t"] for row in record.journal if row["kind"] == "settle"), record.end_s)
    broken = Counter(finding.rule for finding in findings)
    rows = [
        ("seed, kills asked for", f"{options.seed}, {options.kills}"),
        ("hosts, GPUs", f"{options.hosts}, {options.hosts * GPUS}"),
        ("lanes", f"{options.lanes}, {options.memory} memory"),
        (
            "kills that met a process",
            f"{sum(killed.values())}: " + ", ".join(f"{k} {n}" for k, n in sorted(killed.items())),
        ),
        ("jobs", f"{len(schedule.jobs)}; {len(record.cancelled)} cancelled by their owner"),
        ("requeued, moved by hand", f"{kinds['requeue']}, {kinds['move']}"),
        ("times that jobs made way, jobs that left", f"{len(record.ways)}, {sum(record.ways)}"),
        ("submitted again, because Slurm had forgotten them", str(kinds["forgotten"])),
        ("jobs that ended with a result", str(len(record.results))),
        ("restarts of those", str(sum(found["restart"] for found in record.results.values()))),
        ("time of the kills, to settle", f"{schedule.kills_until_s:.0f} s, {record.end_s - settle_s:.0f} s"),
        *(
            (rule, str(broken[rule]))
            for rule in ("job lost", "digest", "GPU used by two", "GPU idle", "held", "stuck", "books", "factor")
        ),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"| {name:<{width}} | {value} |" for name, value in rows)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--victims", default=",".join(VICTIMS), help=f"some of {','.join(VICTIMS)}")
    parser.add_argument(
        "--memory", choices=("split", "full"), default="split", help="memory of each lane: a part of its host's, or all"
    )
    parser.add_argument("--lanes", type=int, default=1, help="lanes of each host (default: 1, as shipped)")
    parser.add_argument("--outages", action="store_true", help="one outage after the other instead of kills")
    parser.add_argument("--only", default=",".join(outages.KINDS), help=f"some of {','.join(outages.KINDS)}")
    parser.add_argument("--slurmctld-s", type=float, default=300.0, help="time that slurmctld is away, seconds")
    parser.add_argument("--name", default="cadenzafaults", help="name of the container cluster")
    parser.add_argument("--out", type=Path, help="folder for everything that was seen (default: build/faults/seed-N)")
    options = parser.parse_args()
    for name, known in (("victims", VICTIMS), ("only", outages.KINDS)):
        chosen = getattr(options, name).split(",")
        if unknown := sorted(set(chosen) - set(known)):
            parser.error(f"--{name}: unknown {', '.join(unknown)}")
        setattr(options, name, chosen)
    full = options.memory == "full"
    if full and (options.outages or options.lanes == 1):
        parser.error("--memory full goes with kills and --lanes 2, not with --outages")
    part = f"outages-{options.seed}" if options.outages else f"seed-{options.seed}{'-full' if full else ''}"
    options.out = (options.out or ROOT / "build" / "faults" / part).resolve()
    return options


def main() -> int:
    """Run the schedule and print the verdict; return the exit code."""
    options = arguments()
    if options.out.exists():
        options.out.rename(options.out.with_name(f"{options.out.name}.{int(time.time())}"))
    options.out.mkdir(parents=True)
    return play_outages(options) if options.outages else play_kills(options)


def play_kills(options: argparse.Namespace) -> int:
    """Play the kills of a seed and print the verdict; return the exit code."""
    schedule = plan(options.seed, options.kills, options.hosts, GPUS, options.lanes, options.victims)
    run = FaultRun(options.name, schedule, options.hosts, GPUS, options.lanes, options.out)
    run.full_memory = options.memory == "full"
    with run.cluster():
        run.play()
        run.collect()
    record = load(options.out, schedule.jobs, run.hosts)
    findings = judge(record)
    print(table(record, schedule, findings, options))
    show(findings, options.out)
    return 1 if findings else 0


def play_outages(options: argparse.Namespace) -> int:
    """Play each outage on a fresh cluster and print the verdicts; return the exit code."""
    rows: list[tuple[outages.Outage, dict[str, Any], list[Finding]]] = []
    for outage in outages.outages(options.only, options.slurmctld_s):
        folder = options.out / outage.name
        folder.mkdir()
        schedule = outages.plan_outage(options.seed, outage, options.hosts, GPUS)
        run = OutageRun(options.name, outage, schedule, (options.hosts, GPUS, options.lanes), folder)
        with run.cluster():
            run.play()
            run.collect()
        record = load(folder, schedule.jobs, run.hosts)
        seen = json.loads((folder / "outage.json").read_text())
        findings = judge(record)
        findings += outages.untold(outage, run.told, record.end_s)
        findings += outages.unwell(outage, seen, record.end_s)
        rows.append((outage, seen, findings))
        print(f"=== {outage.name}")
        show(findings, folder)
        print(outages.table(rows), flush=True)
    return 1 if any(findings for _, _, findings in rows) else 0


def show(findings: list[Finding], folder: Path) -> None:
    """Print the findings, and a timeline for the first ones of each rule."""
    for finding in findings:
        print(f"{finding.rule}: {finding.text}")
    shown: set[str] = set()
    for finding in findings:
        if finding.rule not in shown and len(shown) < TIMELINES:
            shown.add(finding.rule)
            lines = timeline(folder, finding.at_s)
            path = folder / f"timeline-{finding.rule.replace(' ', '-')}.txt"
            path.write_text("\n".join(lines) + "\n")
            print(f"--- the last 60 s before {finding.rule}: {finding.text} ({path})")
            print("\n".join(lines[-40:]))


if __name__ == "__main__":
    sys.exit(main())
