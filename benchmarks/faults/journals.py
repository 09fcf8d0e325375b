"""One timeline of all journals of a fault run: the daemons', the run's own and the watchers'."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

_TIME = re.compile(r"^\[?(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)[.,]?(\d{0,6})\]?\s*")
WIDTH = 400


def timeline(folder: Path, until_s: float, span_s: float = 60.0) -> list[str]:
    """Return the lines of all journals in ``folder`` within ``span_s`` before ``until_s``, in order of time."""
    rows = [*journal_rows(folder), *watcher_rows(folder)]
    for path in sorted((folder / "log").glob("*/*.log")):
        rows += log_rows(path)
    chosen = sorted(row for row in rows if until_s - span_s <= row[0] <= until_s)
    return [f"{_clock(at_s)} {source:<22} {text[:WIDTH]}" for at_s, source, text in chosen]


def log_rows(path: Path) -> Iterator[tuple[float, str, str]]:
    """Yield time, source and text of each line; a line without a time has that of the line before."""
    at_s, source = 0.0, f"{path.parent.name}/{path.stem}"
    with path.open(errors="replace") as file:
        for line in file:
            match = _TIME.match(line)
            if match:
                at_s = seconds(match)
            yield at_s, source, line[match.end() if match else 0 :].rstrip()


def seconds(match: re.Match[str]) -> float:
    """Return seconds since the epoch of a matched time; the containers go by UTC."""
    day, clock, fraction = match.groups()
    moment = datetime.fromisoformat(f"{day}T{clock}").replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def journal_rows(folder: Path) -> Iterator[tuple[float, str, str]]:
    """Yield the run's own events."""
    for row in json.loads((folder / "journal.json").read_text()):
        yield row["t"], f"*** {row['kind']}", f"{row['target']} {row['note']}"


def watcher_rows(folder: Path) -> Iterator[tuple[float, str, str]]:
    """Yield the changes that the watchers saw: users of GPUs, frozen jobs, states of jobs and nodes."""
    for path in sorted(folder.glob("*.jsonl")):
        before: dict[str, str] = {}
        for sample in samples(path):
            for name, value in _facts(sample).items():
                if before.get(name) != value:
                    yield sample["t"], f"seen on {path.stem}", f"{name}: {value}"
                    before[name] = value


def _facts(sample: dict) -> dict[str, str]:  # type: ignore[type-arg]
    found = {f"users of GPU {gpu}": str(jobs) for gpu, jobs in sample.get("gpus", {}).items()}
    found |= {"frozen": str(sample["frozen"])} if "frozen" in sample else {}
    for job in sample.get("jobs", ()):
        words = (job["JobState"], job["Reason"], job["NodeList"], f"restart {job['Restarts']}", *job["gpus"].values())
        found[f"job {job['JobId']} {job['JobName']}"] = " ".join(words)
    for node in sample.get("nodes", ()):
        found[f"node {node['NodeName']}"] = f"{node['State']} {node['Reason']}"
    return found


def samples(path: Path) -> Iterator[dict]:  # type: ignore[type-arg]
    """Yield a watcher's observations; a line that was cut off when its container stopped is left out."""
    with path.open(errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S.%f")[:-3]
