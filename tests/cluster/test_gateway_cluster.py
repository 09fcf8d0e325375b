"""The gateway's verbs on a real slurmctld, as the service's own unprivileged user."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cadenza.policies.core.actions import (
    DrainNode,
    MakeWay,
    OpenNode,
    Place,
    Release,
    Requeue,
    SetFactor,
    Suspend,
    Unsuspend,
    Yield,
)
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Node
from cadenza.slurm_plugin.gateway.translate import snapshot
from cadenza.slurm_plugin.gateway.verbs import NODES_S

from cluster import ENGINE, PYTHON, Shell, wait_for
from harness import Cluster

USER = "cadenza"
DRIVE = """
import json, sys, time
from cadenza.policies.core.actions import *
from cadenza.policies.core.model import *
from cadenza.slurm_plugin.gateway.source_gateway import *

def trouble(call):
    try:
        call()
    except Exception as error:
        return error

for line in sys.stdin:
    try:
        with automatic() as gateway:
            answer = 0, json.dumps(eval(json.loads(line))), ""
    except Exception as error:
        answer = 1, "", repr(error)
    print(json.dumps(answer), flush=True)
"""
DRIVERS: dict[str, Shell] = {}
"""Process of each user that evaluates expressions, each over a gateway of its own."""
LIBRARY = "/usr/lib/x86_64-linux-gnu/slurm-wlm/libslurmfull.so"
SOME_S = 2e9
APPLY = "[(outcome.ok, outcome.error) for outcome in map(gateway.apply, {actions})]"


def drive(cluster: Cluster, expression: str, user: str = USER) -> Any:
    """Evaluate an expression over ``gateway`` where pyslurm is."""
    words = (ENGINE, "exec", "--interactive", "--user", user, f"{cluster.name}-ctl", PYTHON, "-u", "-c", DRIVE)
    code, output, error = DRIVERS.setdefault(user, Shell(words)).ask(expression, 120)
    assert code == 0, error
    return json.loads(output)


def apply(cluster: Cluster, *actions: object, user: str = USER) -> list[tuple[bool, str]]:
    answers = drive(cluster, APPLY.format(actions=repr(list(actions))), user)
    return [(ok, error) for ok, error in answers]


def read(cluster: Cluster) -> ClusterSnapshot:
    return snapshot(drive(cluster, "gateway.read_raw()"))


def seen_by(cluster: Cluster, source: str) -> ClusterSnapshot:
    """Return what a source sees, at one time for all of them."""
    return snapshot(drive(cluster, f"over_{source}().read_raw()") | {"time_s": SOME_S})


def same(cluster: Cluster) -> ClusterSnapshot:
    """Return what both sources see; they are read again while Slurm changes something between the two."""
    seen: list[ClusterSnapshot] = []

    def agree() -> bool:
        seen[:] = [seen_by(cluster, source) for source in ("json", "pyslurm")]
        return seen[0] == seen[1]

    try:
        wait_for("the same from both sources", agree, 10)
    finally:
        assert seen[0] == seen[1]
    return seen[0]


def job(cluster: Cluster, number: int) -> Job:
    return next(found for found in read(cluster).jobs if found.key.id == number)


def node(cluster: Cluster, name: str) -> Node:
    return next(found for found in read(cluster).nodes if found.name == name)


@pytest.fixture(scope="module")
def without_service(running_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster without its service, which would have opinions of its own, and with its lanes open."""
    running_cluster.renew()
    running_cluster.service("ctl", "stop", "cadenzad")
    yield running_cluster
    while DRIVERS:
        DRIVERS.popitem()[1].close()
    running_cluster.reset()
    running_cluster.service("ctl", "start", "cadenzad")


@pytest.fixture
def alone(without_service: Cluster) -> Cluster:
    """The cluster without its service, and with an empty queue."""
    without_service.reset()
    wait_for("every lane open", without_service.ready, 60)
    return without_service


@pytest.fixture
def submit(alone: Cluster) -> Callable[..., int]:
    def sleeper(*options: str) -> int:
        return int(alone.sbatch("--mem=500", "--requeue", *options, command="sleep 300"))

    return sleeper


def started(cluster: Cluster, number: int, state: str = "RUNNING") -> JobKey:
    cluster.wait_state(number, state, timeout=30)
    return job(cluster, number).key


def test_suspend_and_resume(alone: Cluster, submit: Callable[..., int]) -> None:
    key = started(alone, submit("--gres=gpu:a100:2", "-c2"))
    assert apply(alone, Suspend(key, "t")) == [(True, "")]
    suspended = job(alone, key.id)
    assert (suspended.state, suspended.gpus, suspended.cpus) == ("SUSPENDED", 2, 2)
    assert suspended.nodes
    again, gone = apply(alone, Suspend(key, "t"), Suspend(JobKey(99999, 0), "t"))
    assert not again[0]
    assert "is SUSPENDED, not RUNNING" in again[1]
    assert "Invalid job id" in gone[1]
    assert apply(alone, Unsuspend(key, "t")) == [(True, "")]
    assert job(alone, key.id).state == "RUNNING"


def test_requeue_hold_place_and_the_next_incarnation(alone: Cluster, submit: Callable[..., int]) -> None:
    # Without the flag, job_submit.lua keeps a job of this partition on lane 0, and lane 1 would be a BadConstraint.
    first = started(alone, submit("--gpus=1", "-c2", "--cadenza"))
    assert apply(alone, Requeue(first, True, "t")) == [(True, "")]
    second = started(alone, first.id, "PENDING")
    assert second == JobKey(first.id, 1)
    assert job(alone, first.id).held
    stale = apply(alone, Release(first, "t"))[0]
    assert "has been requeued" in stale[1]
    place = Place(second, ("node2-l1",), "t", cpus_per_task=1, memory_per_node_mb=300)
    assert apply(alone, place) == [(True, "")]
    started(alone, first.id)
    placed = job(alone, first.id)
    assert (placed.nodes, placed.cpus, placed.memory_mb) == (("node2-l1",), 1, 300)
    assert apply(alone, Requeue(second, True, "t")) == [(True, "")]
    third = started(alone, first.id, "PENDING")
    assert job(alone, first.id).required_nodes == ("node2-l1",)
    assert apply(alone, Release(third, "t", unpin=True)) == [(True, "")]
    started(alone, first.id)
    assert job(alone, first.id).required_nodes == ()


@pytest.mark.parametrize("cpus", [1, 3])
@pytest.mark.parametrize("request_", ["--gpus=1 -c2", "--gres=gpu:1 -c2 -n2 -N1", "-N2 -n2 -c2 --gpus-per-node=1"])
def test_cpus_of_a_pending_job_go_up_and_down(
    alone: Cluster, submit: Callable[..., int], request_: str, cpus: int
) -> None:
    number = submit("--hold", *request_.split())
    tasks = job(alone, number).cpus // 2
    assert apply(alone, Place(JobKey(number, 0), (), "t", cpus_per_task=cpus)) == [(True, "")]
    started(alone, number)
    assert job(alone, number).cpus == cpus * tasks


def test_a_failed_change_releases_nothing(alone: Cluster, submit: Callable[..., int]) -> None:
    number = submit("--hold", "--gpus=1")
    ok, error = apply(alone, Place(JobKey(number, 0), ("nowhere",), "t"))[0]
    assert not ok
    assert "Invalid node name" in error
    assert job(alone, number).held


def test_an_action_costs_slurmctld_one_look_and_one_request(alone: Cluster, submit: Callable[..., int]) -> None:
    if "pyslurm" not in drive(alone, "gateway.greeting()"):
        pytest.skip("pyslurm is not built for this release")
    key, held = started(alone, submit("--gpus=1", "-c2")), submit("--hold", "--gpus=1", "-c2")
    alone.ctl("sdiag", "--reset")
    acts = Suspend(key, "t"), Unsuspend(key, "t"), Place(JobKey(held, 0), ("node2",), "t", cpus_per_task=3)
    assert apply(alone, *acts) == [(True, "")] * 3
    counts = re.findall(r"(REQUEST_\w+) +\( *\d+\) +count:(\d+)", alone.ctl("sdiag"))
    kinds = ("JOB_INFO_SINGLE", "FED_INFO", "JOB_STEP_INFO", "SUSPEND", "UPDATE_JOB")
    asked = {kind.removeprefix("REQUEST_"): int(count) for kind, count in counts}
    assert [asked.get(kind, 0) for kind in kinds] == [3, 0, 0, 2, 1]


def test_a_read_shows_the_nodes_as_its_jobs_use_them(alone: Cluster, submit: Callable[..., int]) -> None:
    """Nodes are read on need: a suspend, which gives the CPUs back, is such a need; a drain shows after a while."""
    key = started(alone, submit("--gpus=1", "-c2"))
    acts = None, Suspend(key, "t"), Unsuspend(key, "t")
    books = "sum(node.cpus_used for node in gateway.read().nodes)"
    assert drive(alone, f"[(gateway.apply(act).ok if act else True, {books}) for act in {acts!r}]") == [
        [True, 2],
        [True, 0],
        [True, 2],
    ]
    drain = "scontrol update NodeName=node2-l1 State=DRAIN Reason=fan"
    drained = "[node.name for node in gateway.read().nodes if node.drained]"
    steps = f"{drained}, __import__('os').system('{drain}'), time.sleep({NODES_S}), {drained}"
    try:
        assert drive(alone, f"[{steps}]", user="root") == [[], 0, None, ["node2-l1"]]
    finally:
        alone.ctl("scontrol", "update", "NodeName=node2-l1", "State=UNDRAIN")


def test_both_sources_see_the_same_while_slurms_commands_act(alone: Cluster, submit: Callable[..., int]) -> None:
    """The actions go by Slurm's commands, in one process; after each stage both sources are read."""
    if "pyslurm" not in drive(alone, "gateway.greeting()"):
        pytest.skip("pyslurm is not built for this release")
    keys = [started(alone, submit("--gres=gpu:1", "-c2", "--cadenza")) for _ in range(2)]
    array = submit("--array=1-3", "--gpus=1", "--hold", "--cadenza")
    typed = submit("--gpus=a100:1", "--hold", "--begin=now+600")
    two = submit("-N2", "--gres=gpu:1", "--hold", "--mem=300", "--cadenza")

    def act(*actions: object) -> ClusterSnapshot:
        with_json = APPLY.format(actions=repr(list(actions))).replace("gateway.", "over_json().")
        assert drive(alone, with_json) == [[True, ""]] * len(actions)
        return same(alone)

    try:
        act(Suspend(keys[0], "t"), Requeue(keys[1], True, "t"), DrainNode("node1-l1", "off"))
        alone.wait_state(keys[1].id, "PENDING", timeout=30)
        again, pair = JobKey(keys[1].id, 1), ("node1", "node2")
        one, many = Place(JobKey(array, 0), ("node2",), "t"), Place(JobKey(two, 0), pair, "t", memory_per_node_mb=200)
        places = (
            Place(again, ("node2-l1",), "t", cpus_per_task=1, elsewhere=True),
            one,
            many,
            Release(JobKey(typed, 0), "t"),
        )
        act(Unsuspend(keys[0], "t"), *places, OpenNode("node1-l1", "t"))
        for number in (again.id, two):
            alone.wait_state(number, "RUNNING", timeout=30)
        seen = act(Release(JobKey(array, 0), "t"))
    finally:
        apply(alone, OpenNode("node1-l1", "t"))
    jobs = {found.key: found for found in seen.jobs}
    assert (jobs[keys[0]].state, jobs[again].nodes, jobs[again].cpus) == ("RUNNING", ("node2-l1",), 1)
    assert (jobs[JobKey(two, 0)].nodes, jobs[JobKey(two, 0)].memory_mb, jobs[JobKey(typed, 0)].gpu_type) == (
        pair,
        400,
        "a100",
    )
    placed = [found for found in seen.jobs if found.required_nodes == ("node2",)]
    assert [(found.nodes, found.key.id == array) for found in placed] == [(("node2",), False)]


def test_slurms_messages_are_those_that_its_commands_are_understood_by(alone: Cluster) -> None:
    script = f"""
import ctypes, json
from cadenza.slurm_plugin.gateway.slurm_errno import _TEXTS
slurm = ctypes.CDLL({LIBRARY!r})
slurm.slurm_strerror.restype = ctypes.c_char_p
print(json.dumps([[text, slurm.slurm_strerror(errno).decode()] for text, errno in _TEXTS.items()]))
"""
    pairs = json.loads(alone.exec("ctl", PYTHON, "-c", script).stdout)
    others = {ours: slurms for ours, slurms in pairs if not slurms.startswith(ours)}
    assert others in ({}, {"Invalid job state": "Unknown error 2181"}), "the latter in 24.11"


def test_a_requeue_of_a_suspended_job_and_one_that_may_not(alone: Cluster, submit: Callable[..., int]) -> None:
    key = started(alone, submit("--gpus=1"))
    assert apply(alone, Suspend(key, "t"), Requeue(key, True, "t")) == [(True, ""), (True, "")]
    started(alone, key.id, "PENDING")
    fixed = int(alone.sbatch("--mem=500", "--no-requeue", "--gpus=1", command="sleep 300"))
    ok, error = apply(alone, Requeue(started(alone, fixed), True, "t"))[0]
    assert not ok
    assert "--no-requeue" in error


def test_lanes_are_drained_and_opened(alone: Cluster) -> None:
    lane = node(alone, "node2-l1")
    assert (lane.host, lane.lane, lane.gpus, lane.gpu_type) == ("node2", 1, 4, "a100")
    apply(alone, OpenNode("node2-l1", "t"))
    assert apply(alone, DrainNode("node2-l1", "observing only")) == [(True, "")]
    drained = node(alone, "node2-l1")
    assert (drained.drained, drained.drain_reason) == (True, "cadenza: observing only")
    assert "drained already" in apply(alone, DrainNode("node2-l1", "again"))[0][1]
    assert apply(alone, OpenNode("node2-l1", "t")) == [(True, "")]
    wait_for("node2-l1 open", lambda: node(alone, "node2-l1").up, 30)
    assert not node(alone, "node2-l1").drained


def test_the_drain_of_an_admin_stays(alone: Cluster) -> None:
    alone.ctl("scontrol", "update", "NodeName=node2-l1", "State=DRAIN", "Reason=bad fan")
    try:
        ok, error = apply(alone, OpenNode("node2-l1", "t"))[0]
        assert not ok
        assert "bad fan" in error
        assert node(alone, "node2-l1").drained
    finally:
        alone.ctl("scontrol", "update", "NodeName=node2-l1", "State=UNDRAIN")


def test_a_user_without_rights_gets_the_right_to_grant_in_the_error(alone: Cluster, submit: Callable[..., int]) -> None:
    number = submit("--hold", "--gpus=1")
    apply(alone, OpenNode("node1-l1", "t"))
    denied = apply(alone, Place(JobKey(number, 0), ("node1",), "t"), DrainNode("node1-l1", "t"), user="bob")
    assert [ok for ok, _ in denied] == [False, False]
    assert "AdminLevel=Operator" in denied[0][1]
    assert "AdminLevel=Administrator" in denied[1][1]


def test_a_comment_that_is_not_utf8_hides_nothing_else(alone: Cluster) -> None:
    options = "--parsable --hold --output=/dev/null --mem=100 --gpus=1"
    script = f"exec sbatch {options} --comment=\"$(printf 'x\\377')\" --wrap=true"
    number = int(alone.exec("ctl", "sh", "-c", script, user="alice").stdout)
    assert job(alone, number).unmanageable == "the comment is not UTF-8"


def test_slurm_answers_and_agents_actions_are_not_taken(alone: Cluster) -> None:
    assert drive(alone, "gateway.ping()")["responding"]
    assert "for the agents" in apply(alone, Yield(JobKey(1, 0), "t"))[0][1]


def test_without_slurmctld_the_error_says_so(alone: Cluster) -> None:
    alone.service("ctl", "stop", "slurmctld")
    try:
        assert drive(alone, "type(trouble(gateway.read)).__name__") == "SlurmUnavailable"
    finally:
        alone.service("ctl", "start", "slurmctld")
        wait_for("slurmctld", lambda: "UP" in alone.ctl("scontrol", "ping", check=False), 60)


@pytest.mark.parametrize("source", ["json", "pyslurm"])
def test_jobs_that_make_way_come_back_behind_the_job_that_they_make_way_for(
    alone: Cluster, submit: Callable[..., int], source: str
) -> None:
    """All by one requeue, an array's last task too, whose number is the array's own: its other tasks stay."""
    array = submit("--array=1-2", "--gres=gpu:2")
    plain = submit("--gres=gpu:4")
    second, whole = started(alone, array), started(alone, plain)
    (first,) = {one.key for one in read(alone).jobs if one.state == "RUNNING"} - {second, whole}
    wide = submit("--gres=gpu:4", "-N2")
    alone.wait_state(wide, "PENDING")
    seen = read(alone)
    assert seen.site.points > 0
    assert seen.site.tiers == {"shared": 1, "plain": 1}
    gone = JobKey(whole.id, 9)
    way = MakeWay((second, first, whole, gone), (-500, -500, -500, -500), seen.by_id[wide].key, "t")
    applied = f"[(o.ok, o.error) for o in [over_{source}().apply({way!r})]]"
    ((done, error),) = drive(alone, applied)
    assert not done
    assert f"job {whole.id} has been requeued: it is at restart 0; the others were requeued" in error
    alone.wait_state(wide, "RUNNING", timeout=30)
    after = read(alone)
    least = min(after.by_id[one.id].slurm_priority for one in (first, second, whole))
    assert {after.by_id[one.id].key.restart for one in (first, second, whole)} == {1}
    assert least == after.by_id[wide].slurm_priority - 500
    assert apply(alone, SetFactor(after.by_id[whole.id].key, 0, "t")) == [(True, "")]
    assert job(alone, whole.id).slurm_priority == least + 500
