"""Slurm's JSON of several releases: the same jobs give the same records, in each release's own output.

The recordings are made by record_release.py, in v0.0.42 of the data parser. Slurm 25.05 and 25.11 are in no
distribution that the containers can use, and 26.11 is to come. On 26.05 one moment was recorded in v0.0.42, 43, 44 and
45: what is read of it is the same but for ``shared``, which 45 leaves empty. The fields of jobs, nodes and reservations
in Slurm's own src/plugins/data_parser are the same in each version for 25.05, 25.11 and 26.05, and in v0.0.46 of 26.11
(master of August 2026) as in v0.0.45. So the others are made by hand here, of the recording.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import HERE

from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey
from cadenza.slurm_plugin.gateway.slurm_json import read_jobs, read_nodes, read_reservations
from cadenza.slurm_plugin.gateway.translate import snapshot
from cadenza.slurm_plugin.gateway.verbs import FINISHED, TERMINATED

RELEASES = {path.stem.removeprefix("release-"): path for path in sorted((HERE / "data").glob("release-*.json"))}


@cache
def seen(path: Path) -> ClusterSnapshot:
    """Return the snapshot that the JSON source gives for a recording."""
    recording: dict[str, Any] = json.loads(path.read_text())

    def printed(kind: str) -> bytes:
        return json.dumps({kind: recording[kind]}, ensure_ascii=False).encode("utf-8", "surrogateescape")

    jobs, refused = read_jobs(printed("jobs"))
    nodes, odd = read_nodes(printed("nodes"))
    assert not refused + odd
    kept = [
        one for one in jobs if one["state"] not in FINISHED or (one["state"], one["exit_code_signal"]) == TERMINATED
    ]
    return snapshot({
        "schema": "cadenza.recording/1", "time_s": recording["time_s"], "slurmctld_start_time": None, "jobs": kept,
        "nodes": nodes, "reservations": read_reservations(printed("reservations"))[0],
    })  # fmt: skip


def timeless(job: Job) -> Job:
    """Return a job without its number, and of its times and its priority only whether it has them."""
    times = ("start_s", "run_s", "suspended_s", "eligible_s", "terminated_s")
    known = {name: None if getattr(job, name) is None else 0.0 for name in times}
    return replace(
        job, key=JobKey(1, job.key.restart), submit_s=0.0, slurm_priority=min(job.slurm_priority, 1), **known
    )


def named(name: str, release: str) -> Job:
    return next(job for job in seen(RELEASES[release]).jobs if job.name == name)


def test_the_oldest_and_the_newest_release_are_recorded() -> None:
    assert RELEASES.keys() >= {"24.11", "26.05"}


@pytest.mark.parametrize("release", RELEASES)
def test_the_same_jobs_and_nodes_are_the_same_in_each_release(release: str) -> None:
    first, other = (seen(RELEASES[one]) for one in ("26.05", release))
    assert sorted(map(timeless, other.jobs), key=repr) == sorted(map(timeless, first.jobs), key=repr)
    assert other.nodes == first.nodes


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_shows_what_was_asked_for(release: str) -> None:
    jobs = {job.name: job for job in seen(RELEASES[release]).jobs}
    sizes = {name: (jobs[name].gpus, jobs[name].cpus, jobs[name].memory_mb) for name in ("task", "pergpu", "percpu")}
    assert sizes == {
        "task": (4, 4, 200),
        "pergpu": (2, 4, 154),
        "percpu": (1, 6, 240),
    }
    assert {name: jobs[name].state for name in ("susp", "two", "requeue", "ends", "later")} == {
        "susp": "SUSPENDED",
        "two": "RUNNING",
        "requeue": "PENDING",
        "ends": "OTHER",
        "later": "PENDING",
    }
    assert (jobs["requeue"].key.restart, jobs["requeue"].held, jobs["later"].held) == (1, True, False)
    assert (jobs["two"].nodes, jobs["pin"].required_nodes) == (("node1", "node2"), ("node1-l1", "node2-l1"))
    assert (jobs["held"].gpu_type, jobs["limit"].time_limit_s) == ("a100", 2 * 86400.0 + 3 * 3600.0)
    assert jobs["excludes"].barred >= {"node1", "node2"}
    assert not jobs["pin"].requeueable
    assert jobs["excluser"].unmanageable == "--exclusive asks for whole nodes"
    assert jobs[""].unmanageable == "the comment is not UTF-8"
    drains = {node.name: node.drain_reason for node in seen(RELEASES[release]).nodes if node.drained}
    assert drains == {"node1-l1": "cadenza: observing only", "node2-l1": "bad fan"}


NEWEST = {"24.11": 42, "25.05": 43, "25.11": 44, "26.05": 45, "26.11": 46}
"""The newest version of the data parser in each release of Slurm."""
LAST_WITH_SHARED = 44
EXCLUSIVE = {"excl": "NO", "excluser": "USER", "over": "YES"}
"""Jobs that share their nodes in ways of their own, in pyslurm's words, as squeue's columns have it."""


@pytest.mark.parametrize("release", NEWEST)
def test_each_version_of_the_data_parser_tells_the_same(release: str) -> None:
    recording: dict[str, Any] = json.loads(RELEASES["26.05"].read_text())
    version = NEWEST[release]
    meta = {"plugin": {"data_parser": f"data_parser/v0.0.{version}"}}
    if version > LAST_WITH_SHARED:
        recording["jobs"] = [{**job, "shared": []} for job in recording["jobs"]]

    def printed(kind: str) -> bytes:
        return json.dumps({kind: recording[kind], "meta": meta}, ensure_ascii=False).encode("utf-8", "surrogateescape")

    jobs, refused = read_jobs(printed("jobs"))
    assert not refused
    if version > LAST_WITH_SHARED:
        assert {job["resource_sharing"] for job in jobs} == {None}
        jobs = [job | {"resource_sharing": EXCLUSIVE.get(job["name"], "OK")} for job in jobs]
    kept = [
        one for one in jobs if one["state"] not in FINISHED or (one["state"], one["exit_code_signal"]) == TERMINATED
    ]
    assert snapshot({
        "schema": "cadenza.recording/1", "time_s": recording["time_s"], "slurmctld_start_time": None, "jobs": kept,
        "nodes": read_nodes(printed("nodes"))[0], "reservations": read_reservations(printed("reservations"))[0],
    }) == seen(RELEASES["26.05"])  # fmt: skip
