"""Slurm's JSON as a source: the same records as from pyslurm, one command an action, refusals by name."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import BOTH, HERE
from hypothesis import given
from hypothesis import strategies as st

from cadenza.policies.core.actions import (
    DrainNode,
    MakeWay,
    OpenNode,
    Place,
    Release,
    Requeue,
    SetFactor,
    Size,
    Suspend,
    Unsuspend,
)
from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.policies.core.model import JobKey
from cadenza.sidecar import clock
from cadenza.slurm_plugin.errors import GatewayError, NotAuthorized, SlurmUnavailable, StaleState
from cadenza.slurm_plugin.gateway.slurm_gateway import answer_of
from cadenza.slurm_plugin.gateway.slurm_json import NotSlurms, left_out, read_jobs, read_nodes, read_reservations
from cadenza.slurm_plugin.gateway.slurm_values import hosts, job_gpus, node_state, wanted_type
from cadenza.slurm_plugin.gateway.source_gateway import SlurmGateway, automatic, over_json, over_text
from cadenza.slurm_plugin.gateway.translate import snapshot
from cadenza.slurm_plugin.gateway.verbs import FINISHED, NODES_S, RARE_S, TERMINATED

PYSLURM = json.loads((BOTH / "pyslurm.json").read_text())
JOBS = (BOTH / "jobs.json").read_bytes()
NODES = (BOTH / "nodes.json").read_bytes()
RESERVATIONS = (BOTH / "reservations.json").read_bytes()
BY_ID = {record["id"]: record for record in PYSLURM["jobs"]}
SHOWN = {job["job_id"]: job for job in json.loads(JOBS.decode("utf-8", "surrogateescape"))["jobs"]}
BY_NAME = {job["name"]: number for number, job in SHOWN.items()}


def shown(records: list[dict[str, Any]]) -> bytes:
    return json.dumps({"jobs": records}, ensure_ascii=False).encode("utf-8", "surrogateescape")


def answer(jobs: bytes, nodes: bytes = NODES) -> dict[str, Any]:
    """Return the answer of the JSON source for what Slurm's commands print."""
    records, refused = read_jobs(jobs)
    assert refused == []
    kept = [
        one for one in records if one["state"] not in FINISHED or (one["state"], one["exit_code_signal"]) == TERMINATED
    ]
    return PYSLURM | {"jobs": kept, "nodes": read_nodes(nodes)[0], "reservations": read_reservations(RESERVATIONS)[0]}


def number(value: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value}


# --- Both sources see the same --------------------------------------------------------------------------


def test_the_recorded_cluster_is_the_same_from_both_sources() -> None:
    both = snapshot(PYSLURM), snapshot(answer(JOBS))
    assert both[0].nodes == both[1].nodes
    assert both[0].jobs == both[1].jobs
    assert sum(1 for job in both[0].jobs if job.barred) > 3
    assert {job.state for job in both[0].jobs} >= {"PENDING", "RUNNING", "SUSPENDED", "OTHER"}
    assert len(SHOWN) > len(BY_ID) > 15, "finished jobs are in Slurm's JSON only"


@given(st.permutations(sorted(BY_ID)), st.integers(0, 30), st.floats(-1000, 1e7))
def test_any_part_of_it_at_any_time_is_the_same(order: list[int], count: int, later_s: float) -> None:
    now_s = {"time_s": PYSLURM["time_s"] + later_s}
    part = order[:count]
    pyslurm = snapshot(PYSLURM | now_s | {"jobs": [BY_ID[one] for one in part]})
    assert snapshot(answer(shown([SHOWN[one] for one in part])) | now_s) == pyslurm


MOMENT = st.one_of(st.just(0), st.integers(1, 2**31))
STATES = (
    ("RUNNING",), ("PENDING",), ("SUSPENDED",), ("RUNNING", "COMPLETING"), ("CANCELLED", "COMPLETING"),
    ("RUNNING", "CONFIGURING"), ("PENDING", "REQUEUE_HOLD"), ("RUNNING", "STOPPED"),
    ("PENDING", "REQUEUED", "COMPLETING"),
)  # fmt: skip
FLAG_OF = {"COMPLETING": 0, "CONFIGURING": 1, "REQUEUED": 2, "REQUEUE_HOLD": 3, "STOPPED": 4}


@given(
    st.sampled_from(sorted(BY_ID)), st.sampled_from(STATES), st.integers(0, 9), st.integers(0, 2**32 - 1),
    st.fixed_dictionaries(
        dict.fromkeys(("submit_time", "eligible_time", "start_time", "end_time", "suspend_time"), MOMENT)
    ),
    MOMENT, MOMENT,
)  # fmt: skip
def test_any_change_of_a_job_is_the_same(  # noqa: PLR0917
    job: int, states: tuple[str, ...], restart: int, priority: int, times: dict[str, int], before: int, limit: int
) -> None:
    """The state of pyslurm is the first of Slurm's flags, and its 0 is None."""
    pyslurm = BY_ID[job] | {name: value or None for name, value in times.items()}
    pyslurm |= {
        "state": min(states, key=lambda one: FLAG_OF.get(one, 9)),
        "requeue_count": restart,
        "priority": priority,
    }
    pyslurm |= {"pre_suspension_time": before or None, "time_limit": limit or None}
    text = SHOWN[job] | {name: number(value) for name, value in times.items()}
    text |= {"job_state": list(states), "restart_cnt": restart, "priority": number(priority)}
    text |= {"pre_sus_time": number(before), "time_limit": number(limit)}
    assert snapshot(answer(shown([text]))).jobs == snapshot(PYSLURM | {"jobs": [pyslurm]}).jobs


# --- One bad job costs itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"job_id": 0}, {"job_id": "x"}, {"job_state": []}, {"job_state": 1}, {"cpus": "many"}, {"cpus": number(-1)},
        {"start_time": number(10**30)}, {"nodes": "n[0-99999]"}, {"nodes": "n[a-b]"}, {"nodes": "n[1-9][1-9999]" * 3},
        {"name": [1]}, {"shared": ["x"] * 5000},
    ],
    ids=str,
)  # fmt: skip
def test_a_job_that_is_none_costs_itself_only(change: dict[str, Any]) -> None:
    first, *others = SHOWN.values()
    records, refused = read_jobs(shown([first | change, *others]))
    assert [record["id"] for record in records] == [other["job_id"] for other in others]
    assert len(refused) == 1


def plain(value: Any) -> Any:
    """Return an answer as data parsers up to v0.0.39 have it, and later ones with ``+complex``: numbers are plain."""
    if isinstance(value, dict) and value.keys() == {"set", "infinite", "number"}:
        return math.inf if value["infinite"] else value["number"] if value["set"] else None
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def wrapped(value: Any) -> Any:
    """Return an answer the plain numbers of which are as those that may be unset."""
    if isinstance(value, dict) and value.keys() != {"set", "infinite", "number"}:
        return {name: wrapped(one) for name, one in value.items()}
    if isinstance(value, list):
        return [wrapped(one) for one in value]
    return number(value) if isinstance(value, int) and not isinstance(value, bool) else value


def joined(value: Any) -> Any:
    """Return an answer with texts for lists of words."""
    if isinstance(value, dict):
        return {name: joined(one) for name, one in value.items()}
    if isinstance(value, list) and value and all(isinstance(one, str) and "," not in one for one in value):
        return ",".join(value)
    return [joined(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("form", [plain, wrapped, joined])
@pytest.mark.parametrize(("read", "text"), [(read_jobs, JOBS), (read_nodes, NODES), (read_reservations, RESERVATIONS)])
def test_an_answer_in_any_form_of_slurms_says_the_same(
    form: Callable[[Any], Any], read: Callable[[bytes], object], text: bytes
) -> None:
    values = form(json.loads(text.decode("utf-8", "surrogateescape")))
    other = json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogateescape")
    assert other != text
    assert read(other) == read(text)


@pytest.mark.parametrize("text", [b'"\\ud800"', b'"\x01"', b"NaN", b'["a", "\\udcff"]'])
def test_text_that_is_not_json_by_its_standard_costs_one_record_at_most(text: bytes) -> None:
    """Programs that copy Slurm's answers write half a character as such, and Slurm writes floats without a value."""
    first, second, *_ = SHOWN.values()
    mark = b'"comment": "@@"'
    odd = shown([first | {"comment": "@@", "extra": ""}, second]).replace(mark, b'"comment": ' + text)
    records, refused = read_jobs(odd)
    assert len(records) + len(refused) == 2
    assert records[-1]["id"] == second["job_id"]


def test_bytes_that_are_not_utf8_cost_their_text_only() -> None:
    (odd,) = (job for job in snapshot(answer(JOBS)).jobs if job.unmanageable == "the comment is not UTF-8")
    assert (odd.name, odd.gpus, odd.tasks) == ("", 1, 2)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"jobs":1}', b"slurm_load_jobs error", b'{"jobs":[' + b"[" * 10000])
def test_an_answer_that_is_none_is_an_error(text: bytes) -> None:
    with pytest.raises(NotSlurms):
        read_jobs(text)


@given(
    st.lists(st.text("n1x-", min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 999), st.integers(0, 99)
)
def test_ranges_of_nodes_are_what_they_stand_for(names: list[str], first: int, more: int) -> None:
    assert hosts(",".join(names)) == names
    numbers = [f"{at:03d}" for at in range(first, first + more + 1)]
    assert hosts(f"n[{first:03d}-{first + more:03d},7]x") == [*(f"n{at}x" for at in numbers), "n7x"]


@pytest.mark.parametrize("text", [",", "n[", "n]", "n[1-2", "n[[1]]", "n1,,n2"])
def test_a_text_that_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no (list|range) of nodes"):
        hosts(text)


# --- Verbs ----------------------------------------------------------------------------------------------

COMMANDS = """#!/bin/sh
name=$(basename "$0")
case "$name $*" in "scontrol --all show"*) echo "$*" >>{here}/asked ;; esac
case "$name $*" in
  "scontrol ping --json=list") echo data_parser/v0.0.42 ;;
  "scontrol --version") echo "slurm-wlm ${SLURM_RELEASE:-26.05.5}" ;;
  squeue*|"scontrol --all show node"*)
    if [ -e {here}/down ]; then cat {here}/down >&2; exit 1; fi
    case "$name" in squeue) cat "{here}/jobs.json" ;; *) cat {nodes} ;; esac ;;
  "scontrol --all show reservations"*) cat {reservations} ;;
  "scontrol show config") echo "BOOT_TIME               = 1795601167" ;;
  "scontrol --all --oneliner show partition"|"scontrol show assoc_mgr"*) ;;
  *)
    echo "$*" >>{here}/calls
    if [ -e {here}/refused ]; then cat {here}/refused >&2; exit 1; fi ;;
esac
"""
Calls = Callable[[], list[str]]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Slurm's commands that answer as recorded; return the calls that change something."""
    (tmp_path / "bin").mkdir()
    for name in ("squeue", "scontrol"):
        path = tmp_path / "bin" / name
        text = COMMANDS.replace("{here}", str(tmp_path)).replace("{nodes}", str(BOTH / "nodes.json"))
        path.write_text(text.replace("{reservations}", str(BOTH / "reservations.json")))
        path.chmod(0o755)
    (tmp_path / "jobs.json").write_bytes(JOBS)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    log = tmp_path / "calls"
    return lambda: log.read_text().splitlines() if log.exists() else []


def key(name: str) -> JobKey:
    job = SHOWN[BY_NAME[name]]
    return JobKey(job["job_id"], job["restart_cnt"])


TASK = next(job for job in SHOWN.values() if job["name"] == "arr" and job["job_state"] == ["RUNNING"])
REST = next(job for job in SHOWN.values() if job["array_task_string"])
ARRAY = REST["job_id"]
RUNS = {"job_state": ["RUNNING"]}


@pytest.mark.parametrize(
    ("action", "calls"),
    [
        (Suspend(key("two"), "r"), [f"suspend {key('two').id}"]),
        (Unsuspend(key("susp"), "r"), [f"resume {key('susp').id}"]),
        (Requeue(key("two"), hold=True, reason="r"), [f"requeuehold {key('two').id}"]),
        (Requeue(key("susp"), hold=False, reason="r"), [f"requeue {key('susp').id}"]),
        (Requeue(key("term"), hold=False, reason="r", repair=True), [f"requeue {key('term').id}"]),
        (Release(key("held"), "r"), [f"release {key('held').id}"]),
        (Release(key("later"), "r"), []),
        (Release(key("pin"), "r", unpin=True),
         [f"update JobId={key('pin').id} ReqNodeList=", f"release {key('pin').id}"]),
        (Size(key("held"), 3, 700, "r"), [f"update JobId={key('held').id} MinMemoryNode=700 CPUsPerTask=3 NumCPUs=3"]),
        (Place(key("held"), ("node2", "node1"), "r", cpus_per_task=2, memory_per_node_mb=300, elsewhere=True),
         [(f"update JobId={key('held').id} ReqNodeList=node2,node1 MinMemoryNode=300 CPUsPerTask=2 NumCPUs=2"
           " StartTime=now"), f"release {key('held').id}"]),
        (Suspend(JobKey(TASK["job_id"], 0), "r"), [f"suspend {ARRAY}_{TASK['array_task_id']['number']}"]),
        (SetFactor(key("later"), -300, "r"), [f"update JobId={key('later').id} SiteFactor=-300"]),
        (SetFactor(key("two"), 0, "r"), [f"update JobId={key('two').id} SiteFactor=0"]),
        (DrainNode("node1", "off"), ["update NodeName=node1 State=DRAIN Reason=cadenza: off"]),
        (OpenNode("node1-l1", "r"), ["update NodeName=node1-l1 State=UNDRAIN"]),
    ],
    ids=str,
)  # fmt: skip
def test_each_action_is_one_command_or_two(commands: Calls, action: Any, calls: list[str]) -> None:
    assert over_json().apply(action).error == ""
    assert commands() == calls


def test_jobs_make_way_by_one_requeue_after_their_factors(commands: Calls, tmp_path: Path) -> None:
    """The number of an array's last task is the array's own: scontrol would requeue every task by it."""
    last = TASK | {"job_id": ARRAY}
    (tmp_path / "jobs.json").write_bytes(shown([SHOWN[BY_NAME["two"]], last, SHOWN[BY_NAME["pin"]] | RUNS]))
    pin, two, task = key("pin"), key("two"), JobKey(ARRAY, 0)
    over_json().act(MakeWay((two, task, pin), (-500, -70, -500), JobKey(99, 0), "r"))
    name = f"{ARRAY}_{TASK['array_task_id']['number']}"
    assert commands() == [
        f"update JobId={two.id},{pin.id} SiteFactor=-500", f"update JobId={name} SiteFactor=-70",
        f"requeue {two.id},{pin.id},{name}",
    ]  # fmt: skip


def test_a_job_that_left_by_itself_makes_no_way_and_is_named(commands: Calls) -> None:
    gone, ended, two = JobKey(key("susp").id, 0), JobKey(999, 0), key("two")
    way = MakeWay((gone, ended, two), (-1, -1, -1), JobKey(99, 0), "r")
    with pytest.raises(StaleState, match=rf"job {gone.id} is SUSPENDED, not RUNNING; .*job 999; the others"):
        over_json().act(way)
    assert commands() == [f"update JobId={two.id} SiteFactor=-1", f"requeue {two.id}"]
    outcome = over_json().apply(MakeWay((gone, JobKey(two.id, 7)), (-1, -1), JobKey(99, 0), "r"))
    assert f"job {gone.id} is SUSPENDED" in outcome.error
    assert f"job {two.id} has been requeued" in outcome.error
    assert len(commands()) == 2, "nothing is left to requeue"


def test_a_refused_factor_stops_the_requeue(commands: Calls, tmp_path: Path) -> None:
    """Without its factor a job would come back before the one that it made way for."""
    (tmp_path / "refused").write_text("Access/permission denied for job 3")
    with pytest.raises(NotAuthorized):
        over_json().act(MakeWay((key("two"),), (-1,), JobKey(99, 0), "r"))
    assert len(commands()) == 1


@pytest.mark.parametrize(("delay_s", "restart", "starts"), [(121, 1, True), (121, 0, False), (3600, 1, False)])
def test_a_release_ends_the_delay_of_a_requeue_and_no_other(
    commands: Calls, tmp_path: Path, delay_s: int, restart: int, starts: bool
) -> None:
    """Slurm 24.11 keeps a requeued job from starting for two minutes; the owner's own time stays."""
    now_s = int(clock.now())
    times = {"submit_time": number(now_s), "eligible_time": number(now_s + delay_s)}
    (tmp_path / "jobs.json").write_bytes(shown([SHOWN[BY_NAME["held"]] | times | {"restart_cnt": restart}]))
    job = key("held").id
    over_json().act(Release(JobKey(job, restart), "r"))
    assert commands() == [*([f"update JobId={job} StartTime=now"] if starts else []), f"release {job}"]


def test_of_an_array_that_waits_one_task_is_placed_and_all_are_released(commands: Calls, tmp_path: Path) -> None:
    """By scontrol a change goes to all tasks under the number of an array, also those that run."""
    rest = REST | {"priority": number(0), "array_task_string": "3-5%2"}
    task = rest | {"job_id": 77, "array_task_string": "", "array_task_id": number(3)}
    (tmp_path / "jobs.json").write_bytes(shown([rest, task]))
    over_json().act(Place(JobKey(ARRAY, 0), ("node1",), "r"))
    assert commands() == [f"update JobId={ARRAY}_3 ReqNodeList=node1", f"release {ARRAY}_3"]
    (tmp_path / "jobs.json").write_bytes(shown([rest]))
    over_json().act(Release(JobKey(ARRAY, 0), "r"))
    over_json().act(SetFactor(JobKey(ARRAY, 0), 0, "r"))
    assert commands()[2:] == [f"release {ARRAY}", f"update JobId={ARRAY}_[3-5] SiteFactor=0"]


@pytest.mark.parametrize(
    ("action", "text", "kind", "word"),
    [
        (Suspend(key("two"), "r"), "Access/permission denied for job 3", NotAuthorized, "AdminLevel=Operator"),
        (DrainNode("node1", "r"), "slurm_update error: Invalid user id", NotAuthorized, "AdminLevel=Administrator"),
        (Suspend(key("two"), "r"), "Job is pending execution for job 5", StaleState, "next round"),
        (Requeue(key("two"), hold=True, reason="r"), "Requested operation is presently disabled for job 3",
         GatewayError, "--no-requeue"),
        (Suspend(key("two"), "r"), "Unable to contact slurm controller (connect failure)", SlurmUnavailable, "ping"),
        (Suspend(key("two"), "r"), "something new", GatewayError, "something new"),
        (Suspend(JobKey(999, 0), "r"), "", StaleState, "does not know job 999"),
        (DrainNode("nowhere", "r"), "", GatewayError, "does not know node nowhere"),
        (Suspend(key("susp"), "r"), "", StaleState, "is SUSPENDED, not RUNNING"),
        (Release(JobKey(key("requeue").id, 0), "r"), "", StaleState, "has been requeued"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_say_who_must_act(
    commands: Calls, tmp_path: Path, action: Any, text: str, kind: type[GatewayError], word: str
) -> None:
    if text:
        (tmp_path / "refused").write_text(text)
    with pytest.raises(kind, match=re.escape(word)):
        over_json().act(action)
    assert len(commands()) == bool(text)


def test_without_slurmctld_the_error_says_so(commands: Calls, tmp_path: Path) -> None:
    (tmp_path / "down").write_text("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(SlurmUnavailable, match="scontrol ping"):
        over_json().read()


def test_a_read_and_a_look_are_those_of_the_recording(commands: Calls) -> None:
    gateway = over_json()
    raw = gateway.read_raw()
    assert sorted(job["id"] for job in raw["jobs"]) == sorted(BY_ID)
    assert [node.drain_reason for node in gateway.read().nodes if node.drained] == [
        "cadenza: observing only",
        "bad fan",
    ]
    assert raw["slurmctld_start_time"] == 1795601167
    looked = gateway.look([key("susp").id, key("requeue").id, 999])
    assert {one: state.state for one, state in looked.items()} == {key("susp"): "SUSPENDED", key("requeue"): "PENDING"}


def test_nodes_and_reservations_are_read_on_need(
    commands: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes: when a job has come, gone or changed, after our changes, or every five seconds; both after errors.

    Reservations and nodes cost slurmctld three RPCs, and rounds are the largest part of its requests.
    """
    now_s = 1000.0
    monkeypatch.setattr(clock, "monotonic", lambda: now_s)
    gateway = over_json()

    def asked() -> list[str]:
        """Return what a read asks for, besides the jobs."""
        (tmp_path / "asked").write_text("")
        seen = gateway.read()
        assert len(seen.nodes) == len(PYSLURM["nodes"])
        return [line.split()[2] for line in (tmp_path / "asked").read_text().splitlines()]

    assert asked() == ["nodes", "reservations"]
    assert asked() == []
    suspended = [job | {"job_state": ["SUSPENDED"]} if job["name"] == "two" else job for job in SHOWN.values()]
    (tmp_path / "jobs.json").write_bytes(shown(suspended))
    assert asked() == ["nodes"]
    assert asked() == []
    gateway.act(DrainNode("node1", "off"))
    assert asked() == ["nodes"]
    now_s += NODES_S
    assert asked() == ["nodes"]
    now_s += RARE_S
    assert asked() == ["nodes", "reservations"]
    (tmp_path / "down").write_text("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(SlurmUnavailable):
        gateway.read()
    (tmp_path / "down").unlink()
    assert asked() == ["nodes", "reservations"]


def test_a_machine_without_slurms_commands_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentLacks, match="scontrol"):
        over_json().read()
    with pytest.raises(EnvironmentLacks, match="scontrol"):
        over_json().greeting()


# --- The source -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "trouble", "source", "reason"),
    [
        ("26.05.5", "", "pyslurm", ""),
        ("24.11.5", "", "json", "pyslurm 26.5.0 is not for Slurm 24.11.5"),
        ("26.05.5", "import", "json", "libslurmfull.so"),
        ("26.05.5", "exit", "json", "exit code 7"),
    ],
)
def test_pyslurm_is_the_source_where_it_is_built_for_this_slurm(  # noqa: PLR0917
    commands: Calls,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    trouble: str,
    source: str,
    reason: str,
) -> None:
    for name, value in {
        "PYTHONPATH": str(HERE / "fake_pyslurm"), "SLURM_RELEASE": release, "PYSLURM_TROUBLE": trouble,
        "PYSLURM_LOG": str(tmp_path / "calls"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with automatic() as gateway:
        greeting = gateway.greeting()
    assert isinstance(gateway, SlurmGateway)
    assert source in greeting
    assert reason in greeting.get("reason", "")


def test_no_setting_of_the_environment_selects_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users set SQUEUE_USERS in their profiles, and --all does not undo it."""
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\necho "of $SQUEUE_USERS$SLURM_CLUSTERS"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_USERS", "alice")
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    assert answer_of(("squeue", "--all"), 10.0) == "of \n"


# --- What one source tells and another does not -----------------------------------------------------------


def in_parser(version: str, *jobs: dict[str, Any]) -> bytes:
    return json.dumps({"jobs": jobs, "meta": {"plugin": {"data_parser": f"data_parser/{version}"}}}).encode()


def test_a_job_whose_requeue_is_expedited_is_pending_in_both_sources() -> None:
    """The flag hides the base state, and both sources took such a job for a finished one."""
    job = SHOWN[BY_NAME["later"]] | {"job_state": ["PENDING", "EXPEDITING"]}
    (seen,) = snapshot(answer(shown([job]))).jobs
    (other,) = snapshot(PYSLURM | {"jobs": [BY_ID[job["job_id"]] | {"state": "EXPEDITING"}]}).jobs
    assert seen.state == other.state == "PENDING"
    ends = job | {"job_state": ["PENDING", "COMPLETING", "EXPEDITING"]}
    assert [one.state for one in snapshot(answer(shown([ends]))).jobs] == ["OTHER"]


@pytest.mark.parametrize(
    ("version", "words", "sharing"),
    [
        ("v0.0.42", {"shared": ["user"]}, "USER"), ("v0.0.44", {"shared": []}, "OK"), ("v0.0.45", {"shared": []}, None),
        ("v0.0.46", {"shared": [], "exclusive": "NODE"}, "NO"), ("v0.0.46", {"exclusive": ["true"]}, "NO"),
        ("v0.0.46", {"shared": [], "exclusive": "NO", "oversubscribe": "YES"}, "YES"),
        ("v0.0.46", {"exclusive": "NO", "oversubscribe": "NO"}, "OK"), ("v0.0.46", {"exclusive": "mcs"}, "MCS"),
    ],
)  # fmt: skip
def test_how_a_job_shares_its_nodes_is_read_as_its_version_says_it(
    version: str, words: dict[str, Any], sharing: str | None
) -> None:
    job = {name: value for name, value in SHOWN[BY_NAME["two"]].items() if name != "shared"}
    (record,), _ = read_jobs(in_parser(version, job | words))
    assert record["resource_sharing"] == sharing


def test_where_the_json_does_not_tell_it_squeue_is_asked_once_for_jobs_that_opted_in(
    commands: Calls, tmp_path: Path
) -> None:
    two, plain = SHOWN[BY_NAME["two"]] | {"shared": []}, SHOWN[BY_NAME["pin"]] | {"shared": [], "comment": ""}
    number = two["job_id"]
    column = f'echo "$*" >>{tmp_path}/asked; echo "{number}   NODE"'
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(f'#!/bin/sh\ncase "$*" in *Format*) {column} ;; *) cat {tmp_path}/jobs.json ;; esac\n')
    (tmp_path / "jobs.json").write_bytes(in_parser("v0.0.45", two, plain))
    gateway = over_json()
    for _ in range(2):
        seen = {job.name: job for job in gateway.read().jobs}
        assert seen["two"].unmanageable.startswith("--exclusive keeps other jobs off")
    asked = [line for line in (tmp_path / "asked").read_text().splitlines() if "Format" in line]
    assert asked == [f"--all --states=all --noheader --jobs={number} --Format=JobID:24,Exclusive:24"]


REQUESTS = (
    ({"tres_alloc_str": "cpu=1,gres/gpu=3,gres/gpu:a100=3", "tres_per_job": "gres/gpu:a100:2"}, 3, "a100"),
    ({"gres_detail": ["gpu:h100:4(IDX:0-3)"], "tres_per_job": "gres/gpu:2"}, 4, ""),
    ({"gres_detail": ["gpu:(null):2(IDX:0,2)", "gpu:1(IDX:0)"]}, 3, ""),
    ({"tres_req_str": "cpu=1,gres/gpu=6", "tres_per_node": "gres/gpu:t4:1", "node_count": number(2)}, 6, "t4"),
    ({"tres_per_socket": "gres/gpu:a100:2", "sockets_per_node": number(2), "node_count": number(3)}, 12, "a100"),
    ({"tres_per_socket": "gres/gpu:2"}, 2, ""), ({"tres_per_task": "gres/gpu=1", "tasks": number(5)}, 5, ""),
    ({"tres_per_node": "gres/gpu:0"}, 0, ""), ({"tres_per_node": "gres/vgpu:8"}, 0, ""),
)  # fmt: skip


@pytest.mark.parametrize(("words", "gpus", "kind"), REQUESTS, ids=str)
def test_the_gpus_of_a_job_are_those_of_its_tres_else_those_that_it_has_else_its_request(
    words: dict[str, Any], gpus: int, kind: str
) -> None:
    """Without gres/gpu in AccountingStorageTRES there are no counts, and two readers once differed on the rest."""
    bare = {"job_id": 7, "job_state": ["RUNNING"]}
    (record,), _ = read_jobs(shown([bare | words]))
    assert (job_gpus(record), wanted_type(record)) == (gpus, kind)


def test_a_null_is_nothing_and_a_record_that_cannot_be_read_is_counted_by_its_reason() -> None:
    nulls = SHOWN[BY_NAME["two"]] | {"time_limit": None, "nodes": None, "gres_detail": None, "user_name": None}
    bad = [{"job_id": 5 + at, "job_state": 7} for at in range(7)]
    records, refused = read_jobs(shown([nulls, *bad, {"job_id": "x", "job_state": ["RUNNING"]}]))
    assert [(one["id"], one["time_limit"], one["allocated_nodes"]) for one in records] == [(nulls["job_id"], None, [])]
    text = left_out(refused, "jobs")
    assert text.startswith("8 jobs cannot be read: 7 with ")
    assert "(job 5, job 6, job 7, job 8, job 9 and 2 others); 1 with " in text


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ("IDLE+CLOUD", "up"), ("MIXED+CLOUD", "up"), ("ALLOCATED+PLANNED", "up"), ("IDLE+POWERED_DOWN", "asleep"),
        ("IDLE+CLOUD+POWERING_DOWN", "asleep"), ("MIXED+CLOUD+NOT_RESPONDING+POWERING_UP", "asleep"),
        ("IDLE+CLOUD+POWERED_DOWN+NOT_RESPONDING", "gone"), ("DOWN+CLOUD+POWERED_DOWN", "gone"), ("FUTURE", "gone"),
        ("IDLE+FAIL", "gone"), ("IDLE+REBOOT_ISSUED", "gone"), ("UNKNOWN", "gone"), ("IDLE+DRAIN", "up"),
    ],
)  # fmt: skip
def test_a_node_is_up_or_comes_when_it_is_asked_or_is_gone(state: str, found: str) -> None:
    assert node_state(state.split("+")) == found


def test_without_any_version_of_the_json_all_that_is_ours_can_be_released(commands: Calls, tmp_path: Path) -> None:
    """After an upgrade of Slurm to a release that offers none, nothing of ours may stay."""
    scontrol, squeue = tmp_path / "bin" / "scontrol", tmp_path / "bin" / "squeue"
    text = scontrol.read_text()
    scontrol.write_text(text.replace("data_parser/v0.0.42", "data_parser/v0.0.99"))
    rows = ((7, "SUSPENDED", 1, 5, 7, "N/A", ""), (8, "PENDING", 0, 0, 8, "N/A", "n[1-2]"),
            (9, "PENDING", 0, 0, 9, "3-5%2", ""), (10, "RUNNING", 0, 3, 9, "2", ""))  # fmt: skip
    widths = (16, 24, 16, 16, 16, 64, 4096)
    lines = ["".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    (tmp_path / "rows").write_text("\n".join(lines) + "\n")
    squeue.write_text(
        f'#!/bin/sh\ncase "$*" in *Format=JobId:16,State:24,*) cat {tmp_path}/rows ;; *) exit 1 ;; esac\n'
    )
    with pytest.raises(EnvironmentLacks, match=r"v0\.0\.99.*v0\.0\.46"):
        over_json().read()
    gateway = over_text()
    found = {job.key: (job.state, job.held, job.required_nodes) for job in gateway.read().jobs}
    assert found == {
        JobKey(7, 1): ("SUSPENDED", False, ()), JobKey(8, 0): ("PENDING", True, ("n1", "n2")),
        JobKey(9, 0): ("PENDING", True, ()), JobKey(10, 0): ("RUNNING", False, ()),
    }  # fmt: skip
    for action in (Unsuspend(JobKey(7, 1), "r"), Release(JobKey(8, 0), "r", unpin=True), Release(JobKey(9, 0), "r"),
                   SetFactor(JobKey(10, 0), 0, "r")):  # fmt: skip
        assert gateway.apply(action).error == ""
    assert commands() == [
        "resume 7", "update JobId=8 ReqNodeList=", "release 8", "release 9", "update JobId=9_2 SiteFactor=0",
    ]  # fmt: skip
    assert "is at restart 1" in gateway.apply(Unsuspend(JobKey(7, 0), "r")).error
