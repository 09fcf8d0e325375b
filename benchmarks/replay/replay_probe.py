#!/usr/bin/env python3
"""Print what the daemons of one container have used, as JSON.

By name: the processes, CPU seconds, resident MB, proportional MB (PSS) and open files. The last two are 0 where the
caller may not read them: root of a container without CAP_SYS_PTRACE sees its own processes only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

NAMES = (
    "slurmctld", "slurmdbd", "mariadbd", "gateway.worker", "failover.watchdog", "bin/cadenzad", "bin/cadenza-agent",
    "slurmstepd", "slurmd", "sackd", "supervisord", "replay_submit", "replay_job",
)  # fmt: skip
"""The first of these that is in a process's command line names it, without what stands before a slash."""
MB = 1 << 20
PSS = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)


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
        entry = found.setdefault(name.rpartition("/")[2], [0, 0.0, 0.0, 0.0, 0])
        entry[0] += 1
        # utime, stime and those of children waited for; resident pages (proc(5))
        entry[1] += sum(map(int, fields[11:15])) / tick
        entry[2] += int(fields[21]) * page / MB
        with contextlib.suppress(OSError):
            entry[3] += int(PSS.search((folder / "smaps_rollup").read_text())[1]) / 1024  # type: ignore[index]
            entry[4] += len(list((folder / "fd").iterdir()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
