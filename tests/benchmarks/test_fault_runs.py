"""The schedule of a fault run is its seed's alone, and its verdict names each rule that was broken."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import digest_job
import pytest
from digest_job import digest_after
from outages import CLOCK_STEPS, KINDS, LEAD_S, acts, outages, plan_outage, table, untold, unwell
from schedule import SLURMCTLD_SPACING_S, PlannedJob, plan
from verdict import Finding, Record, judge

JOB = PlannedJob("one", "alice", 1, 2, 40, "")
ON_NODE1 = {
    "JobId": "7", "JobName": "one", "JobState": "RUNNING", "Reason": "None", "Restarts": "0", "NodeList": "node1",
    "ReqNodeList": "", "Priority": "1", "StartTime": "", "gpus": {"node1": "gpu:a100:2(IDX:0-1)"},
}  # fmt: skip
NODES = [
    {"NodeName": name, "State": "IDLE", "Gres": "gpu:a100:4", "AllocTRES": "", "Reason": ""}
    for name in ("node1", "node1-l1")
]


def slurm(at_s: float, *jobs: dict[str, Any], nodes: list[dict[str, str]] = NODES) -> dict[str, Any]:
    return {"t": at_s, "up": True, "jobs": list(jobs), "nodes": nodes}


def host(
    at_s: float, gpus: dict[str, list[int]], frozen: tuple[int, ...] = (), **processes: list[int]
) -> dict[str, Any]:
    return {"t": at_s, "gpus": gpus, "frozen": list(frozen), "processes": processes}


def record(**changes: Any) -> Record:
    """Return a run in which one job ended well, with some of it changed."""
    sound: dict[str, Any] = {
        "jobs": {"one": JOB},
        "ids": {"one": 7},
        "cancelled": frozenset(),
        "results": {"one": {"digest": digest_after("one", 40), "ended_s": 90.0, "restart": 0}},
        "hosts": {"node1": [host(0.0, {}), host(10.0, {"0": [7], "1": [7]}), host(90.0, {})]},
        "slurm": [slurm(0.0), slurm(12.0, ON_NODE1), slurm(100.0)],
        "journal": [{"t": 100.0, "kind": "end", "target": "", "note": ""}],
        "leases": {"node1": []},
        "known": frozenset(),
        "factors": frozenset(),
    }
    return Record(**(sound | changes))


def test_equal_seeds_give_equal_schedules_and_slurmctld_is_spared() -> None:
    first = plan(3, 100, 2, 4, 2)
    assert first == plan(3, 100, 2, 4, 2)
    assert first != plan(4, 100, 2, 4, 2)
    kills = [event for event in first.events if event.kind == "kill"]
    assert len(kills) == 100
    slurmctld = [event.at_s for event in kills if event.target == "ctl:slurmctld"]
    assert len(slurmctld) > 2
    assert all(later - at_s >= SLURMCTLD_SPACING_S for at_s, later in itertools.pairwise(slurmctld))
    assert first.jobs == plan(3, 100, 2, 4, 2, victims=("agent",)).jobs


def test_a_sound_run_breaks_no_rule() -> None:
    assert judge(record()) == []


WAITS = [slurm(at_s, ON_NODE1 | {"JobState": "SUSPENDED"}) for at_s in range(40, 90, 2)]


@pytest.mark.parametrize(
    ("changes", "rule", "text"),
    [
        ({"results": {}}, "job lost", "one (job 7)"),
        ({"results": {"one": {"digest": "0", "ended_s": 1.0, "restart": 0}}}, "digest", "one"),
        ({"hosts": {"node1": [host(5.0, {"0": [7, 8]}), host(9.0, {})]}}, "GPU used by two", "GPU 0 of node1"),
        ({"hosts": {"node1": [host(0.0, {})]}, "slurm": [*WAITS, slurm(100.0)]}, "GPU idle", "GPU 0 of node1"),
        ({"slurm": [slurm(100.0, nodes=[NODES[0] | {"State": "IDLE+DRAIN"}])]}, "stuck", "node node1: IDLE+DRAIN"),
        ({"slurm": [slurm(0.0), slurm(100.0, nodes=NODES[:1])]}, "stuck", "node node1-l1 is gone"),
        ({"hosts": {"node1": [host(9.0, {}, (7,))]}}, "stuck", "job 7 is frozen on node1"),
        ({"leases": {"node1": [{"job": 7, "restart": 0}]}}, "books", "leases [(7, 0)]"),
        ({"known": frozenset({7})}, "books", "jobs of the service [7]"),
        ({"factors": frozenset({7})}, "factor", "SiteFactors of jobs [7]"),
        ({"factors": None}, "factor", "could not be read"),
        ({"hosts": {"node1": [host(9.0, {}, **{"7": [123]})]}}, "books", "processes of jobs [7]"),
    ],
)
def test_the_verdict_names_what_is_wrong(changes: dict[str, Any], rule: str, text: str) -> None:
    findings = judge(record(**changes))
    assert any(finding.rule == rule and text in finding.text for finding in findings), findings


def test_a_gpu_that_another_job_uses_is_not_idle() -> None:
    used = [host(0.0, {"0": [8], "1": [8], "2": [8], "3": [8]})]
    findings = judge(record(hosts={"node1": used}, slurm=[*WAITS, slurm(100.0)]))
    assert [finding for finding in findings if finding.rule == "GPU idle"] == []


def test_a_job_that_waits_for_host_memory_waits_for_no_gpu() -> None:
    def findings(reason: str) -> list[str]:
        waits = [sample | {"reasons": {"7": reason}} for sample in WAITS]
        found = judge(record(hosts={"node1": [host(0.0, {})]}, slurm=[*waits, slurm(100.0)]))
        return [finding.rule for finding in found]

    gets = "gets GPUs 0 to 1 of node1: level 1 of 3"
    assert "GPU idle" in findings(gets)
    no_memory = "node1: host memory: it asked for 600 MB, and the jobs here for 1500 MB of 1800 MB"
    assert "GPU idle" not in findings(f"{gets}; {no_memory}")


PENDING = ON_NODE1 | {"JobState": "PENDING", "Reason": "Resources", "NodeList": "", "gpus": {}}


def rules_of(*jobs: dict[str, Any], up: tuple[float, float] = (0.0, 100.0)) -> list[str]:
    """Return the findings about jobs that are so for 50 s, with a slurmctld that answers between two times."""
    seen = [slurm(at_s, *jobs) if up[0] <= at_s <= up[1] else {"t": at_s, "up": False} for at_s in range(40, 90, 2)]
    return [finding.rule for finding in judge(record(hosts={"node1": [host(0.0, {})]}, slurm=[*seen, slurm(100.0)]))]


@pytest.mark.parametrize("reason", ["JobHeldUser", "JobHeldAdmin"])
def test_a_held_job_is_a_finding_once_and_waits_for_no_gpu(reason: str) -> None:
    held = PENDING | {"Reason": reason, "Priority": "0"}
    assert rules_of(held) == ["held"]
    assert rules_of(held, up=(40.0, 64.0)) == [], "a slurmctld that is away releases nothing"


def test_the_first_pending_job_waits_for_gpus_of_the_hosts_that_it_may_use() -> None:
    assert set(rules_of(PENDING)) == {"GPU idle"}
    assert set(rules_of(PENDING | {"ReqNodeList": "node1"})) == {"GPU idle"}
    assert rules_of(PENDING | {"ReqNodeList": "node2"}) == []


# --- Outages -----------------------------------------------------------------------------------------------


def test_outages_are_one_of_each_kind_and_their_jobs_are_the_seeds_alone() -> None:
    every = outages()
    assert {outage.kind for outage in every} == set(KINDS)
    assert len({outage.name for outage in every}) == len(every)
    assert {outage.target for outage in every if outage.kind == "network"} == {"node1", "ctl"}
    assert [outage.name for outage in outages(["clock", "host"])] == [
        "host-node2-90s",
        "clock-node1-120s",
        "clock-ctl-120s",
    ]
    reached = {outage.kind for outage in every if "slurm" not in outage.away}
    assert [outage.away for outage in every if "agent" in outage.away] == ["node1:cadenza-agent"]
    assert reached == {kind for kind in KINDS if re.match("disk|saves|stop-slurmdbd|stop-cadenza", kind)}
    (away,) = outages(["slurmctld"], 20.0)
    assert away.length_s == 20.0
    first = plan_outage(3, away, 2, 4)
    assert first == plan_outage(3, away, 2, 4)
    assert first != plan_outage(4, away, 2, 4)
    assert first.kills_until_s == LEAD_S + 20.0
    assert {event.kind for event in first.events} <= {"submit", "cancel", "requeue", "move"}
    assert any(event.at_s < LEAD_S for event in first.events), "no job runs when the fault begins"


def test_a_clock_jumps_in_its_time_also_before_it_is_looked_at_what_is_told() -> None:
    (away,) = outages(["host"])
    assert acts(away) == [(54.0, "")]
    for outage in outages(["clock"]):
        assert [at_s for at_s, _ in acts(outage)] == [40.0, 72.0, 80.0]
        assert [step for _, step in acts(outage)] == [CLOCK_STEPS[outage.target][1], "", "+0"]


def test_a_gpu_is_not_idle_while_slurm_cannot_reach_its_host_nor_shortly_after() -> None:
    def findings(*journal: tuple[float, str, str]) -> list[str]:
        rows = [
            {"t": at_s, "kind": kind, "target": target, "note": ""}
            for at_s, kind, target in (*journal, (100.0, "end", ""))
        ]
        found = judge(record(hosts={"node1": [host(0.0, {})]}, slurm=[*WAITS, slurm(100.0)], journal=rows))
        return [finding.rule for finding in found]

    assert "GPU idle" in findings((10.0, "down", "node2:slurmd"))
    assert "GPU idle" not in findings((10.0, "down", "node1:slurmd"))
    assert "GPU idle" not in findings((10.0, "down", "ctl:slurmctld"), (50.0, "up", "ctl:slurmctld"))
    assert "GPU idle" in findings((1.0, "down", "node1:slurmd"), (3.0, "up", "node1:slurmd"))


def test_a_gpu_may_be_idle_for_as_long_as_the_plugin_waits_for_a_stopped_agent() -> None:
    def idle(until_s: int, *kinds: str) -> int:
        rows = [{"t": 10.0, "kind": kind, "target": "node1:cadenza-agent", "note": ""} for kind in kinds]
        waits = [sample for sample in WAITS if sample["t"] <= until_s]
        end = {"t": 100.0, "kind": "end", "target": "", "note": ""}
        found = judge(record(hosts={"node1": [host(0.0, {})]}, slurm=[*waits, slurm(100.0)], journal=[*rows, end]))
        return sum(finding.rule == "GPU idle" for finding in found)

    assert idle(78, "down") == 0
    assert idle(78, "down", "up") == idle(78) == 2
    assert idle(84, "down") == 2


def test_a_gpu_is_not_idle_while_slurm_has_its_host_down_nor_shortly_after() -> None:
    def findings(*down_s: int, lanes: tuple[int, ...] = (0, 1)) -> list[Finding]:
        away = [node | {"State": "DOWN+NOT_RESPONDING"} if at in lanes else node for at, node in enumerate(NODES)]
        waits = [sample | {"nodes": away} if sample["t"] in down_s else sample for sample in WAITS]
        found = judge(record(hosts={"node1": [host(0.0, {})]}, slurm=[*waits, slurm(100.0)]))
        return [finding for finding in found if finding.rule == "GPU idle"]

    assert findings(*range(40, 50)) == []
    assert len(findings(*range(40, 50), lanes=(1,))) == 2, "a lane of its host is in reach"
    assert len(findings()) == 2


def test_a_pending_job_of_two_hosts_waits_for_no_gpu_while_one_host_is_away() -> None:
    def findings(*journal: dict[str, Any]) -> list[Finding]:
        both = [*NODES, *(node | {"NodeName": node["NodeName"].replace("node1", "node2")} for node in NODES)]
        pending = ON_NODE1 | {"JobState": "PENDING", "Reason": "Resources", "NodeList": "", "gpus": {}}
        seen = [slurm(at_s, pending, nodes=both) for at_s in range(40, 90, 2)]
        found = record(
            jobs={"one": PlannedJob("one", "alice", 2, 2, 40, "")}, slurm=[*seen, slurm(100.0, nodes=both)],
            hosts={"node1": [host(0.0, {})], "node2": [host(0.0, {})]}, leases={},
            journal=[*journal, {"t": 100.0, "kind": "end", "target": "", "note": ""}],
        )  # fmt: skip
        return [finding for finding in judge(found) if finding.rule == "GPU idle"]

    assert len(findings()) == 8
    assert findings({"t": 10.0, "kind": "down", "target": "node1:slurmd", "note": ""}) == []


def test_an_outage_that_is_not_named_or_not_over_is_a_finding_and_a_row() -> None:
    (cut,) = outages(["host"])
    seen = {"well_s": 4.2, "settled_s": None, "ill": ["node2 DOWN"], "jobs": 9}
    assert list(untold(cut, "the agent of node2 is silent", 1.0)) == []
    found = [*untold(cut, "agents 2/2", 1.0), *unwell(cut, seen, 2.0)]
    assert [finding.rule for finding in found] == ["not told", "not over"]
    assert "node2 DOWN" in found[1].text
    assert table([(cut, seen, found)]).splitlines()[-1] == (
        "| host | node2 | 90 s | 4 s | never | 9 | 2: not over, not told |"
    )


def test_a_rank_ends_when_its_peer_is_dead_and_not_before(tmp_path: Path) -> None:
    """Slurm does not end it where slurmctld has forgotten the step."""
    steps = """
import pathlib, sys, digest_job
ranks = digest_job.Ranks(pathlib.Path(sys.argv[1]))
for step in (1, 2, 3):
    ranks.reach(step)
    print(step, flush=True)
    ranks.rank or sys.stdin.readline()
"""
    given = {"SLURM_JOB_ID": "7", "ATTEMPT": "1", "SLURM_STEP_NUM_TASKS": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", steps, str(tmp_path)],
            env=os.environ | given | {"SLURM_PROCID": str(rank), "PYTHONPATH": str(Path(digest_job.__file__).parent)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    first, second = ranks
    assert first.stdin
    for step in ("1\n", "2\n"):
        assert [one.stdout.readline() for one in ranks if one.stdout] == [step, step]
        if step == "1\n":
            print(file=first.stdin, flush=True)
    first.send_signal(signal.SIGKILL)
    output, error = second.communicate(timeout=20)
    first.communicate()
    assert (output, error, second.returncode) == ("", "rank 0 is dead\n", 1)
