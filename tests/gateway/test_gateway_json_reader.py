"""The process that reads Slurm's lists: what has not changed is neither decoded nor sent, and keeps its object."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import BOTH

from cadenza.slurm_plugin.errors import SlurmUnavailable
from cadenza.slurm_plugin.gateway import slurm_json
from cadenza.slurm_plugin.gateway.json_reader import Changes
from cadenza.slurm_plugin.gateway.source_gateway import SlurmGateway, over_json

SHOWN = json.loads((BOTH / "jobs.json").read_bytes().decode("utf-8", "surrogateescape"))["jobs"]
DOWN = "'slurm_load_jobs error: Unable to contact slurm controller (connect failure)'"
LIVE = [job for job in SHOWN if job["name"] in ("two", "held", "later", "pin", "susp")]


def listed(jobs: list[dict[str, Any]]) -> bytes:
    return json.dumps({"jobs": jobs}, ensure_ascii=False).encode("utf-8", "surrogateescape")


def unread(job: dict[str, Any], value: int) -> dict[str, Any]:
    """Return a job with a field that nothing reads, as Slurm's time of the last look at it."""
    return job | {"last_sched_evaluation": value}


def test_only_what_changed_is_decoded_and_only_what_is_read_of_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = slurm_json.decode_records

    def counted(raws: list[Any], *rest: Any) -> Any:
        decoded.append(len(raws))
        return decode(raws, *rest)

    monkeypatch.setattr(slurm_json, "decode_records", counted)
    lists = Changes("jobs")
    bad = {"job_id": "x", "job_state": ["RUNNING"]}
    first = lists.since_last(listed([*LIVE, bad]))
    names = [job["job_id"] for job in LIVE]
    assert (first["whole"], first["names"]) == (True, names)
    assert [one["id"] for one in first["changed"]] == names
    assert [name for name, _ in first["refused"]] == ["job x"]
    # 1. The same bytes: nothing is decoded but what could not be read.
    decoded.clear()
    again = lists.since_last(listed([*LIVE, bad]))
    assert (again["whole"], again["names"], again["changed"], len(again["refused"])) == (False, names, [], 1)
    assert sum(decoded) == 1
    # 2. Another value that nothing reads, another order, a job that is gone and one that changed.
    later = [unread(job, 7) for job in reversed(LIVE[1:])]
    later[0] = later[0] | {"name": "other"}
    told = lists.since_last(listed(later))
    assert told["names"] == [job["job_id"] for job in later]
    assert [one["name"] for one in told["changed"]] == ["other"]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmGateway]:
    (tmp_path / "jobs.json").write_bytes(listed(LIVE))
    nodes, none = BOTH / "nodes.json", BOTH / "reservations.json"
    texts = {
        "squeue": f"cat {tmp_path}/jobs.json; [ ! -e {tmp_path}/down ] || {{ echo {DOWN} >&2; exit 1; }}",
        "scontrol": f'case "$*" in *ping*) echo data_parser/v0.0.42 ;; *nodes*) cat {nodes} ;; '
        f"*reserv*) cat {none} ;; *config*) echo BOOT_TIME = 1795601167 ;; *) exit 1 ;; esac",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with over_json(apart=True) as gateway:
        yield gateway


def test_a_waiting_job_keeps_its_object_from_round_to_round_until_it_changes(
    served: SlurmGateway, tmp_path: Path
) -> None:
    with over_json() as here:
        before, alone = served.read(), here.read()
    assert [job for job in before.jobs if job.state != "RUNNING"] == [
        job for job in alone.jobs if job.state != "RUNNING"
    ]
    assert before.nodes == alone.nodes
    (tmp_path / "jobs.json").write_bytes(
        listed([unread(job, 8) | ({"job_state": ["PENDING"]} if job["name"] == "two" else {}) for job in LIVE])
    )
    after = {job.name: job for job in served.read().jobs}
    kept = {job.name for job in before.jobs if after[job.name] is job}
    assert kept >= {"later", "susp"}
    assert after["two"].state == "PENDING"
    assert "two" not in kept
    # A refusal passes through, and the process that is gone is replaced by one that tells all.
    (tmp_path / "down").touch()
    with pytest.raises(SlurmUnavailable, match="connect failure"):
        served.read()
    (tmp_path / "down").unlink()
    served._source._reader._process._discard()  # type: ignore[attr-defined]
    assert {job.name for job in served.read().jobs} == after.keys()


def test_the_time_that_squeue_computes_is_none_of_slurmctlds(served: SlurmGateway, tmp_path: Path) -> None:
    """Rounds are twenty times as far apart as an answer takes, and making the JSON of 60,000 jobs takes seconds."""
    squeue = tmp_path / "squeue"
    text = squeue.read_text()
    squeue.write_text(text.replace("cat ", "i=0; while [ $i -lt 40000 ]; do i=$((i+1)); done; cat ", 1))
    served.read()
    computed_s = served.answer_s
    squeue.write_text(text.replace("cat ", "sleep 0.4; cat ", 1))
    served.read()
    assert computed_s is not None
    assert served.answer_s is not None
    assert served.answer_s >= 0.4
    assert computed_s < served.answer_s
