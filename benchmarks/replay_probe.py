#!/usr/bin/env python3
"""Print what the daemons of one container have used: JSON, by name the processes, CPU seconds and resident MB."""

from __future__ import annotations

import json
import os
from pathlib import Path

NAMES = (
    "slurmctld", "slurmdbd", "mariadbd", "gateway.worker", "cadenzad", "cadenza-agent", "slurmstepd", "slurmd",
    "sackd", "supervisord", "replay_submit", "replay_job",
)  # fmt: skip
"""The first of these that is in a process's command line is its name."""
MB = 1 << 20


def main() -> None:
    """Go over /proc once."""
    tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    found: dict[str, list[float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        name = next((name for name in NAMES if name in words), None)
        if name is None:
            continue
        entry = found.setdefault(name, [0, 0.0, 0.0])
        entry[0] += 1
        # utime, stime and those of children waited for; resident pages (proc(5))
        entry[1] += sum(map(int, fields[11:15])) / tick
        entry[2] += int(fields[21]) * page / MB
    print(json.dumps(found))


if __name__ == "__main__":
    main()
