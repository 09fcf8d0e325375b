"""The line at the end of a job's output for ``--cadenza=summary``: waits, moves, what they took, and advice."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.session.arrival import say
from cadenza.sidecar.client.session.identity import number

if TYPE_CHECKING:
    from cadenza.sidecar.client.session.arrival import Arrival
    from cadenza.sidecar.client.session.identity import Identity

SUMMARY_ENV = "CADENZA_SUMMARY"
MIN_ADVICE_S = 600.0
LOOSE = 3.0
"""Part of its run time from which on a job's limit is too loose to be passed over; Slurm's backfill goes by limits."""
ROOM = 1.5
"""Limit that is advised, as a part of the run time."""
ROUND_S = 600


class Summary:
    """The waits of one start of a job, counted by its session; times in ns."""

    def __init__(self, arrival: Arrival) -> None:
        self.waits = 0
        """Times that this rank had no lease, and waited for it with its state in host memory."""
        self.away_ns = 0
        self._arrival = arrival
        self._began_ns = monotonic_ns()
        self._who: Identity | None = None
        self._pid = 0

    def begin(self, who: Identity, environ: Mapping[str, str]) -> None:
        """Have the line written at the end of this process, if the job wants one and this is its first rank."""
        if environ.get(SUMMARY_ENV) == "1" and who.rank == 0 and self._who is None:
            self._pid = os.getpid()
            atexit.register(self._end)
        self._who = who

    def waited(self, since_ns: int) -> None:
        """Count a wait that is over."""
        self.waits += 1
        self.away_ns += monotonic_ns() - since_ns

    def _end(self) -> None:
        if self._pid == os.getpid():  # not in a process that was forked
            say(self.text((monotonic_ns() - self._began_ns) / 1e9, os.environ))

    def text(self, run_s: float, environ: Mapping[str, str]) -> str:
        """Return the line for a run of this length."""
        who = self._who
        if who is None:
            return ""
        # 1. Waits and moves, and what they took.
        parts = [f"job {who.job} ends after {_time(run_s)}"]
        if self.waits:
            away_s = self.away_ns / 1e9
            parts.append(f"{_times(self.waits, 'wait')} for turns took {_time(away_s)}, {away_s / run_s:.0%} of it")
        if who.restart:
            back_s = self._arrival.back_s
            back = "" if back_s is None else f", the last time {_time(back_s)} after its checkpoint"
            parts.append(f"started again {_times(who.restart, 'time')}{back}")
        if len(parts) == 1:
            parts.append("never waited or moved for others")
        # 2. A limit that Slurm can plan with; an earlier start's time is not known here.
        begin_s, end_s = number(environ, "SLURM_JOB_START_TIME"), number(environ, "SLURM_JOB_END_TIME")
        if begin_s and end_s and not who.restart and run_s >= MIN_ADVICE_S and end_s - begin_s > LOOSE * run_s:
            minutes = -int(-ROOM * run_s // ROUND_S) * ROUND_S // 60
            parts.append(f"starts earlier next time with #SBATCH --time={minutes // 60}:{minutes % 60:02d}:00")
        return "; ".join((*parts, f"more: cadenza why {who.job}"))


def _times(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def _time(seconds: float) -> str:
    """Return a duration as text.

    >>> _time(12.34), _time(600), _time(7300)
    ('12 s', '10 min', '2 h 2 min')
    """
    if seconds < 120:  # noqa: PLR2004 (two minutes)
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"  # noqa: PLR2004
