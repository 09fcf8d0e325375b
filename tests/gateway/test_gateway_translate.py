"""From recorded answers of a real cluster to the model, and the forms that the recording lacks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_rig import RECORDING
from hypothesis import given
from hypothesis import strategies as st

from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Options
from cadenza.slurm_plugin.gateway.comment import BadOptions, opt_in_of
from cadenza.slurm_plugin.gateway.slurm_values import gpu_count, gpu_type, job_state
from cadenza.slurm_plugin.gateway.translate import job, nodes, snapshot, unmanageable_reason
from cadenza.slurm_plugin.gateway.worker import JOB_FIELDS

ANSWERS = [json.loads(line) for line in RECORDING.read_text().splitlines()]
SUBMITTED, CHANGED, REQUEUED, PLACED = (snapshot(answer) for answer in ANSWERS)
NOW_S = float(ANSWERS[0]["time_s"])


def find(cluster: ClusterSnapshot, number: int) -> Job:
    return next(found for found in cluster.jobs if found.key.id == number)


def raw_job(number: int = 32, **changes: object) -> dict[str, Any]:
    [record] = [record for record in ANSWERS[0]["jobs"] if record["id"] == number]
    return record | changes


def raw_node(name: str = "node1", **changes: object) -> dict[str, Any]:
    [record] = [record for record in ANSWERS[0]["nodes"] if record["name"] == name]
    return record | {"name": name} | changes


def test_lanes_of_a_host() -> None:
    lanes = [(node.name, node.host, node.lane, node.gpus, node.gpu_type) for node in SUBMITTED.nodes]
    assert lanes == [
        ("node1", "node1", 0, 4, "a100"),
        ("node1-l1", "node1", 1, 4, "a100"),
        ("node2", "node2", 0, 4, "a100"),
        ("node2-l1", "node2", 1, 4, "a100"),
    ]
    assert {node.partitions for node in SUBMITTED.nodes} == {("shared",)}
    assert all(node.up and not node.drained for node in SUBMITTED.nodes)


@pytest.mark.parametrize(
    ("number", "gpus", "cpus", "memory"),
    [
        (32, 2, 2, 1000),  # --gres=gpu:a100:2
        (33, 2, 2, 1000),  # --gpus=2
        (35, 2, 2, 1000),  # -N2 --gpus-per-node=1
        (37, 2, 6, 600),  # -n2 -c3 --gpus-per-task=1 --mem-per-cpu=100
        (38, 2, 6, 600),  # --gpus=2 --cpus-per-gpu=3 --mem-per-gpu=300
        (39, 2, 1, 100),  # --gpus-per-socket=1 --sockets-per-node=2
        (40, 1, 1, 32000),  # --mem=0, the whole node
        (43, 0, 1, 100),  # no GPU
    ],
)
def test_every_form_of_a_request(number: int, gpus: int, cpus: int, memory: int) -> None:
    found = find(SUBMITTED, number)
    assert (found.gpus, found.cpus, found.memory_mb) == (gpus, cpus, memory)


def test_a_running_job() -> None:
    found = find(SUBMITTED, 32)
    assert found.key == JobKey(32, 0)
    assert (found.user, found.account, found.partition, found.state) == ("alice", "research", "shared", "RUNNING")
    assert (found.nodes, found.num_nodes, found.state_reason, found.held) == (("node1",), 1, "", False)
    assert found.options == Options(share=True, max_gpus=4, model="res18")
    assert found.opted_in
    assert found.requeueable
    assert found.start_s is not None
    assert found.start_s >= found.submit_s


def test_a_suspended_job_keeps_its_gpus_and_memory_and_gives_its_cpus() -> None:
    found = find(CHANGED, 32)
    assert (found.state, found.gpus, found.nodes) == ("SUSPENDED", 2, ("node1",))
    before, after = SUBMITTED.nodes[0], CHANGED.nodes[0]
    assert (before.cpus_used, after.cpus_used) == (4, 2)
    assert (after.gpus_used, after.memory_used_mb) == (before.gpus_used, before.memory_used_mb) == (4, 2000)


def test_a_requeue_changes_the_key_at_once_and_the_state_later() -> None:
    assert find(SUBMITTED, 48).key == JobKey(48, 0)
    leaving, pending, placed = (find(cluster, 48) for cluster in (CHANGED, REQUEUED, PLACED))
    assert {leaving.key, pending.key, placed.key} == {JobKey(48, 1)}
    assert (leaving.state, leaving.held) == ("OTHER", False)
    assert (pending.state, pending.held, pending.nodes) == ("PENDING", True, ())
    assert pending.required_nodes == ("node2-l1",)
    assert (placed.state, placed.nodes, placed.cpus, placed.memory_mb) == ("RUNNING", ("node2",), 2, 300)


def test_a_drained_lane() -> None:
    drained = CHANGED.nodes[3]
    assert (drained.drained, drained.up) == (True, True)
    assert drained.drain_reason == "cadenza: observing only"
    assert PLACED.nodes[3].drain_reason == ""


@pytest.mark.parametrize(
    ("changes", "slurmctld_s", "at_restart"),
    [
        ({}, 950.0, True),
        ({}, 1050.0, True),
        ({}, 900.0, False),
        ({}, None, False),
        ({"slurmd_start_time": 1020}, None, True),
        ({"reason": "Prolog error on node1"}, 1000.0, True),
        ({"reason": "Not responding"}, 1000.0, False),
        ({"reason": "broken fan"}, 1000.0, False),
        ({"reason": None}, 1000.0, False),
        ({"reason_time": None}, 1000.0, False),
        ({"state": "IDLE"}, 1000.0, False),
    ],
)
def test_a_drain_is_slurms_own_at_a_restart_by_its_reason_and_time(
    changes: dict[str, Any], slurmctld_s: float | None, at_restart: bool
) -> None:
    drained = {"state": "IDLE+DRAIN", "reason": "Epilog error", "reason_time": 1000, "slurmd_start_time": None}
    [found] = nodes([raw_node(**(drained | changes))], slurmctld_s)
    assert found.drained_at_restart == at_restart


@pytest.mark.parametrize("slurmctld_s", [None, 900.0, 1000.0])
def test_a_drain_for_a_job_that_was_started_twice_is_slurms_own_at_any_time(slurmctld_s: float | None) -> None:
    drained = raw_node(state="IDLE+DRAIN", reason="Duplicate jobid", reason_time=1000, slurmd_start_time=None)
    assert nodes([drained], slurmctld_s)[0].drained_at_restart
    assert not nodes([drained | {"state": "IDLE"}], slurmctld_s)[0].drained_at_restart


def test_a_job_that_was_started_twice_when_its_node_answered_again_is_held_by_slurm() -> None:
    """Slurm gave the node up, requeued the job, and started it again beside its first start."""
    refused = raw_job(
        36, state="PENDING", priority=0, state_reason="launch failed requeued held", submit_time=int(NOW_S) - 5
    )
    twice = raw_node(state="IDLE+DRAIN", reason="Duplicate jobid", reason_time=int(NOW_S) - 6)

    def held(node: dict[str, Any]) -> bool:
        answer = {
            **ANSWERS[0],
            "time_s": NOW_S,
            "slurmctld_start_time": NOW_S - 4000,
            "jobs": [refused],
            "nodes": [node],
        }
        return snapshot(answer).jobs[0].held_at_restart

    assert held(twice)
    assert not held(twice | {"reason": "broken fan"})
    assert not held(twice | {"reason_time": int(NOW_S) - 600})


def test_a_node_tells_for_how_long_a_job_has_been_ending_there() -> None:
    """The longest of several counts; the expected end of a running job says nothing."""
    now_s = int(NOW_S)
    jobs = [
        raw_job(32, state="COMPLETING", end_time=now_s - 40, allocated_nodes=["node1", "node2"]),
        raw_job(33, state="COMPLETING", end_time=now_s - 4, allocated_nodes=["node1"]),
        raw_job(34, state="RUNNING", end_time=now_s - 90, allocated_nodes=["node1-l1"]),
        raw_job(36, state="COMPLETING", end_time=None, allocated_nodes=["node2-l1"]),
    ]
    seen = {node.name: node for node in snapshot({**ANSWERS[0], "time_s": now_s, "jobs": jobs}).nodes}
    assert {name: node.ending_s for name, node in seen.items()} == {
        "node1": 40.0,
        "node2": 40.0,
        "node1-l1": 0.0,
        "node2-l1": 0.0,
    }
    assert [name for name, node in seen.items() if node.takes_jobs] == ["node1-l1", "node2-l1"]
    assert seen["node1"].closed_reason == "has a job that has been ending for 40 s"
    assert "end_time" in JOB_FIELDS


@pytest.mark.parametrize(
    ("number", "opted", "why"),
    [
        (36, False, ""),  # plain text in the comment
        (42, False, ""),  # foreign JSON in the comment
        (44, False, "did you mean max_gpus?"),
        (45, True, "heterogeneous"),
        (47, False, "not UTF-8"),
    ],
)
def test_who_opted_in_and_who_is_left_alone(number: int, opted: bool, why: str) -> None:
    found = find(SUBMITTED, number)
    assert (found.options is not None) == opted
    assert why in found.unmanageable
    assert bool(why) == bool(found.unmanageable)
    assert not found.opted_in


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"is_cronjob": True}, "cron"),
        ({"resource_sharing": "NO"}, "--exclusive keeps"),
        ({"resource_sharing": "USER"}, "--exclusive=user"),
        ({"resource_sharing": "YES"}, ""),
        ({"partition": "a,b"}, "several partitions"),
        ({"allocated_tres": None, "requested_tres": None, "gres_per_node": {}}, "AccountingStorageTRES"),
    ],
)
def test_kinds_of_job_that_cannot_be_shared(changes: dict[str, object], why: str) -> None:
    reason = unmanageable_reason(raw_job(**changes))
    assert why in (reason or "")
    assert bool(why) == (reason is not None)


@pytest.mark.parametrize(
    ("changes", "slurmctld_s", "at_restart"),
    [
        ({}, 940.0, True),
        ({}, 900.0, False),
        ({}, None, False),
        ({"priority": 1}, 1000.0, False),
        ({"state_reason": "JobHeldAdmin"}, 1000.0, False),
        ({"state_reason": "job requeued in held state"}, 1000.0, False),
    ],
)
def test_a_job_that_slurm_held_as_slurmctld_restarted_is_told_by_reason_and_time(
    changes: dict[str, Any], slurmctld_s: float | None, at_restart: bool
) -> None:
    refused = {"state": "PENDING", "priority": 0, "state_reason": "launch failed requeued held", "submit_time": 1000}
    found = job(raw_job(**(refused | changes)), NOW_S, slurmctld_s)
    assert found is not None
    assert found.held_at_restart == at_restart


@pytest.mark.parametrize(
    ("changes", "slurmd_s", "lost"),
    [
        ({}, 1001, True),
        ({}, 999, False),
        ({}, 1095, False),
        ({}, None, False),
        ({"state_reason": "None"}, 1001, False),
        ({"state": "SUSPENDED"}, 1001, False),
    ],
)
def test_a_prolog_is_lost_once_its_slurmd_has_started_anew(
    changes: dict[str, Any], slurmd_s: int | None, lost: bool
) -> None:
    one = raw_job(state="RUNNING", state_reason="Prolog", start_time=1000, allocated_nodes=["node1", "node2"])
    nodes = [raw_node("node1", slurmd_start_time=900), raw_node("node2", slurmd_start_time=slurmd_s)]
    found = snapshot({"time_s": 1100.0, "jobs": [one | changes], "nodes": nodes})
    assert found.jobs[0].prolog_lost == lost


@pytest.mark.parametrize(
    ("changes", "slurmctld_s", "ended"),
    [
        ({}, 1000.9, True),
        ({}, 941.0, True),
        ({}, 939.0, False),
        ({}, 1002.0, False),
        ({}, None, False),
        ({"end_time": 930}, 900.0, False),
        ({"end_time": None}, 1000.0, False),
        ({"exit_code_signal": 9}, 1000.0, False),
        ({"exit_code_signal": None}, 1000.0, False),
        ({"state": "CANCELLED"}, 1000.0, False),
        ({"state": "COMPLETED"}, 1000.0, False),
        ({"is_requeueable": False}, 1000.0, False),
        ({"is_batch_job": False}, 1000.0, False),
    ],
)
def test_a_job_that_failed_by_sigterm_as_slurmctld_restarted_is_shown_as_ending(
    changes: dict[str, Any], slurmctld_s: float | None, ended: bool
) -> None:
    failed = {"state": "FAILED", "exit_code_signal": 15, "end_time": 1001, "is_requeueable": True, "is_batch_job": True}
    found = job(raw_job(**(failed | changes)), 1030.0, slurmctld_s)
    assert (found is not None) == ended
    assert found is None or (found.state, found.nodes, found.terminated_s) == ("OTHER", (), 1001.0)


def test_what_the_submit_plugin_found_is_passed_on() -> None:
    found = job(raw_job(comment='{"cadenza":{"v":1,"share":false,"why":"cron jobs are not shared"}}'), NOW_S)
    assert found is not None
    assert found.options == Options(share=False)
    assert found.unmanageable == "cron jobs are not shared"


@pytest.mark.parametrize(
    ("state", "meaning"),
    [
        ("PENDING", "PENDING"), ("SPECIAL_EXIT", "PENDING"), ("RUNNING", "RUNNING"), ("CONFIGURING", "RUNNING"),
        ("STOPPED", "RUNNING"), ("SUSPENDED", "SUSPENDED"), ("COMPLETING", "OTHER"), ("COMPLETED", None),
        ("CANCELLED", None), ("NODE_FAIL", None),
    ],
)  # fmt: skip
def test_states(state: str, meaning: str | None) -> None:
    assert job_state(state) == meaning
    assert (job(raw_job(state=state), NOW_S) is None) == (meaning is None)


@pytest.mark.parametrize("state", ["CONFIGURING", "POWER_UP_NODE", "RUNNING"])
def test_a_job_that_waits_for_its_nodes_to_come_up_is_starting(state: str) -> None:
    found = job(raw_job(state=state), NOW_S)
    assert found is not None
    assert found.starting == (state != "RUNNING")


@pytest.mark.parametrize(
    ("counts", "gpus", "kind"),
    [
        ({}, 0, ""),
        ({"gres/gpu": 4}, 4, ""),
        ({"gres/gpu": 4, "gres/gpu:a100": 4}, 4, "a100"),
        ({"gres/gpu:a100": 2, "gres/gpu:h100": 1}, 3, "a100"),
        ({"gpu:a100": 8}, 8, "a100"),
        ({"gres:gpu:a100": 2}, 2, "a100"),
        ({"gres/gpumem": 80000, "gres/shard": 4, "cpu": 2, "mem": 100}, 0, ""),
    ],
)
def test_gpus_among_counted_resources(counts: dict[str, int], gpus: int, kind: str) -> None:
    assert (gpu_count(counts), gpu_type(counts)) == (gpus, kind)


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({"gres_per_node": {"gres/gpu:a100": 2}, "num_nodes": 3}, 6),
        ({"tres_per_task": {"gres/gpu": 1}, "ntasks": 4}, 4),
        ({"tres_per_job": {"gres/gpu": 5}}, 5),
    ],
)
def test_requests_where_slurm_does_not_account_gpus(changes: dict[str, object], gpus: int) -> None:
    blank = {"gres_per_node": None, "requested_tres": {"cpu": 1}, "allocated_tres": None, "tres_per_task": {"cpu": 1}}
    found = job(raw_job(**{**blank, **changes}), NOW_S)
    assert found is not None
    assert found.gpus == gpus


@pytest.mark.parametrize(
    ("state", "up", "drained"),
    [
        ("IDLE", True, False), ("MIXED+PLANNED", True, False), ("ALLOCATED+DRAIN", True, True),
        ("IDLE+NOT_RESPONDING", False, False), ("DOWN", False, False), ("DOWN+DRAIN", False, True),
        ("UNKNOWN", False, False), ("IDLE+CLOUD+POWERED_DOWN", False, False),
    ],
)  # fmt: skip
def test_node_states(state: str, up: bool, drained: bool) -> None:
    [found] = nodes([raw_node(state=state)])
    assert (found.up, found.drained) == (up, drained)


def test_lanes_without_the_feature_are_known_by_name() -> None:
    bare = [raw_node(name, available_features=["a100"]) for name in ("node1", "node1-l1")]
    assert [(node.host, node.lane) for node in nodes(bare)] == [("node1", 0), ("node1", 1)]
    [odd] = nodes([raw_node("node1", available_features=[]) | {"name": "rack-l2", "hostname": "rack-l2"}])
    assert (odd.host, odd.lane) == ("rack-l2", 0)


def test_one_machine_that_plays_many_nodes() -> None:
    names = [("n1", "lane0"), ("n1-l1", "lane1"), ("n2", "lane0")]
    records = [
        raw_node("node1") | {"name": name, "hostname": "localhost", "available_features": [lane]}
        for name, lane in names
    ]
    assert [node.host for node in nodes(records)] == ["n1", "n1", "n2"]


def test_a_host_may_have_another_name_than_its_node() -> None:
    records = [
        raw_node("node1", hostname="gpu-17"),
        raw_node("node1-l1", hostname="gpu-17"),
        raw_node("node2", hostname="gpu-18"),
    ]
    assert [node.host for node in nodes(records)] == ["gpu-17", "gpu-17", "gpu-18"]


@given(st.permutations(range(len(ANSWERS[0]["jobs"]))), st.permutations(range(4)))
def test_the_order_of_an_answer_means_nothing(jobs: list[int], order: list[int]) -> None:
    answer = ANSWERS[0]
    shuffled = answer | {
        "jobs": [answer["jobs"][index] for index in jobs],
        "nodes": [answer["nodes"][index] for index in order],
    }
    assert snapshot(shuffled) == SUBMITTED


# --- The comment ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "comment",
    [
        None,
        "",
        "my words",
        "cadenza",
        "{broken cadenza",
        '["cadenza"]',
        '{"site":{"cadenza":1}}',
        "[" * 1000 + "cadenza",
    ],
)
def test_comments_that_do_not_speak_of_us(comment: str | None) -> None:
    assert opt_in_of(comment) is None


def test_a_comment_with_foreign_keys() -> None:
    wishes = {"v": 1, "share": False, "min_gpus": 1, "max_gpus": 4, "model": "m", "priority": -2}
    opt_in = opt_in_of(json.dumps({"APS": {"x": 1}, "cadenza": wishes}))
    assert opt_in is not None
    assert opt_in.options == Options(share=False, min_gpus=1, max_gpus=4, model="m", priority=-2)
    assert opt_in_of('{"cadenza":{}}') == (Options(), "")


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (True, "must be an object"),
        ({"v": 2}, "version 2"),
        ({"max_gpu": 2}, "did you mean max_gpus?"),
        ({"max_gpus": "4"}, '"max_gpus"'),
        ({"max_gpus": True}, "whole number"),
        ({"min_gpus": 0}, "from 1"),
        ({"share": 1}, "true or false"),
        ({"priority": 1.5}, "whole number"),
        ({"model": ""}, "a name"),
        ({"min_gpus": 4, "max_gpus": 2}, "min_gpus=4 is more than max_gpus=2"),
    ],
)
def test_wrong_options_are_not_half_understood(value: object, word: str) -> None:
    with pytest.raises(BadOptions) as refusal:
        opt_in_of(json.dumps({"cadenza": value}))
    assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("duration_s", "iterations") for value in (0, -(2**63), 2**31, 2**64, 10**400)),
        *((name, value) for name in ("min_gpus", "max_gpus") for value in (0, 65536, 2**63)),
        *(("priority", value) for value in (10**7, -(2**64))),
        *(("model", value) for value in ("a b", "m\n", "\u202e", "\x1b[2J", "m" * 65, "\ud800", ["m"], {"m": 1})),
        ("why", "\ud800"),
        ("\ud800", 1),
        ("v", 1.0),
        ("v", True),
    ],
)
def test_options_past_their_bounds_are_refused(name: str, value: object) -> None:
    with pytest.raises(BadOptions) as refusal:
        opt_in_of(json.dumps({"cadenza": {name: value}}))
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 250


def test_texts_of_slurm_are_one_printable_line() -> None:
    names = {"name": "a\x1b[2J\nb\u202e\ud800", "command": "c" * 9999, "user_name": "u\x00", "state_reason": "r\r"}
    found = job(raw_job(**names), NOW_S)
    assert found is not None
    texts = (found.name, found.command, found.user, found.state_reason)
    assert all(text.isprintable() for text in texts)
    assert [len(text) for text in texts] == [9, 4096, 2, 2]


SCALARS = st.none() | st.booleans() | st.integers() | st.text()
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(st.text() | JSON.map(json.dumps) | JSON.map(lambda value: json.dumps({"cadenza": value})))
def test_no_comment_breaks_a_read(comment: str) -> None:
    found = job(raw_job(comment=comment), NOW_S)
    assert found is not None
    assert found.options is None or '"cadenza"' in comment


# --- What policies need besides ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "ran"),
    [
        ({"start_time": 1000}, 60.0),
        ({"start_time": 1000, "suspend_time": 1030, "pre_suspension_time": 20}, 50.0),
        ({"state": "SUSPENDED", "start_time": 1000, "suspend_time": 1030, "pre_suspension_time": 30}, 30.0),
        ({"state": "PENDING", "start_time": 1000}, None),
        ({"start_time": None}, None),
    ],
)
def test_run_time_leaves_suspends_out(changes: dict[str, object], ran: float | None) -> None:
    found = job(raw_job(**changes), 1060.0)
    assert found is not None
    assert found.run_s == ran


def test_limit_command_and_tasks() -> None:
    found = job(raw_job(37, time_limit=90, command="/home/a/train.sh --lr 1"), NOW_S)
    assert found is not None
    assert (found.time_limit_s, found.command, found.tasks) == (5400.0, "/home/a/train.sh --lr 1", 2)
    assert find(SUBMITTED, 34).time_limit_s is None
    assert find(SUBMITTED, 34).command == ""  # recorded before commands were read


def test_a_user_says_whether_a_job_keeps_checkpoints() -> None:
    for text, said in (("", None), (',"checkpoints":true', True), (',"checkpoints":false', False)):
        opt_in = opt_in_of('{"cadenza":{"v":1,"share":true' + text + "}}")
        assert opt_in is not None
        assert opt_in.options.checkpoints is said
    with pytest.raises(BadOptions, match='"checkpoints" in the comment'):
        opt_in_of('{"cadenza":{"checkpoints":1}}')


def test_how_long_a_job_is_can_be_stated() -> None:
    opt_in = opt_in_of('{"cadenza":{"v":1,"share":true,"iterations":900,"duration_s":3600}}')
    assert opt_in is not None
    assert (opt_in.options.iterations, opt_in.options.duration_s) == (900, 3600)
    with pytest.raises(BadOptions, match="duration_s"):
        opt_in_of('{"cadenza":{"duration_s":"long"}}')


# --- Slurm's own queue ---------------------------------------------------------------------------------


def test_nodes_are_barred_to_every_job_with_gpus_that_waits() -> None:
    """Room may be made for a job that did not opt in, on nodes that Slurm would give it only."""
    apart = {"comment": "", "constraints": ["none-has-it"], "num_nodes": 1}
    waits = {"state": "PENDING", "allocated_tres": {}, "requested_tres": {"gres/gpu": 1}}
    names = {one["name"] for one in ANSWERS[0]["nodes"]}
    for facts, barred in (
        (waits, names),
        (waits | {"requested_tres": {}, "gres_per_node": {}, "tres_per_node": {}}, set()),
        ({"state": "RUNNING"}, set()),
    ):
        (found,) = snapshot(ANSWERS[0] | {"jobs": [raw_job(**apart | facts)]}).jobs
        assert found.options is None
        assert found.barred == barred


@pytest.mark.parametrize(
    ("state", "up", "asleep"),
    [
        ("IDLE+POWERED_DOWN", False, True),
        ("IDLE+CLOUD+POWERING_UP+NOT_RESPONDING", False, True),
        ("ALLOCATED+POWERING_UP", False, True),
        ("IDLE+POWERING_DOWN", False, True),
        ("DOWN+POWERED_DOWN", False, False),
        ("IDLE", True, False),
        ("IDLE+NOT_RESPONDING", False, False),
    ],
)
def test_a_node_that_is_powered_down_is_told_from_one_that_is_down(state: str, up: bool, asleep: bool) -> None:
    raw = ANSWERS[0]["nodes"][0] | {"state": state}
    found = nodes([raw])[0]
    assert (found.up, found.asleep) == (up, asleep)


def test_nodes_that_cadenza_host_empties_are_told_from_those_that_others_drain_or_reserve() -> None:
    at_s = ANSWERS[0]["time_s"] + 900
    marked, theirs, reserved, free = (ANSWERS[0]["nodes"][0] | {"name": name} for name in "abcd")
    marked |= {"state": "IDLE+DRAIN", "reason": "cadenza host: fan"}
    theirs |= {"state": "IDLE+DRAIN", "reason": "fan"}
    reservations = [
        {"name": "cadenza_c", "start_time": at_s, "nodes": ["a", "c"]},
        {"name": "course", "start_time": at_s, "nodes": ["d"]},
    ]
    raw = ANSWERS[0] | {"jobs": [], "nodes": [marked, theirs, reserved, free], "reservations": reservations}
    found = {node.name: node.empty_from_s for node in snapshot(raw).nodes}
    assert found == {"a": 0.0, "b": None, "c": at_s, "d": None}
